"""How a hand-over that came to nothing is shown to the client: whose fault, and whether to try again."""

from shared.errors import HandoffError
from shared.protocol.local import EngineError
from shared.protocol.messages import AbortAck, Failed


def failure_of(message: Failed | AbortAck) -> EngineError:
    """What prefill's answer means for the request. An AbortAck that nobody asked for: it had not heard from us."""
    if isinstance(message, AbortAck):
        return lost("the prefill service gave the request up")
    status = 503 if message.retryable else 500
    return EngineError(f"prefill: {message.reason}", message.code, status, "prefill_failed", message.retryable)


def incomplete(wrong: str) -> EngineError:
    return EngineError(f"the hand-over was not complete: {wrong}", "incomplete_handover", 503, "prefill_failed", True)


def lost(why: str) -> EngineError:
    return EngineError(why, "prefill_lost", 503, "service_unavailable", True)


def shown(error: HandoffError) -> EngineError:
    return EngineError(error.message, error.code, error.http_status, error.type, error.retryable)
