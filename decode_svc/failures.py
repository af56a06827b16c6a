"""How a hand-over that came to nothing is shown to the client: whose fault, and whether to try again."""

import numpy as np

from decode_svc.records import Lease
from shared.errors import HandoffError
from shared.protocol.local import EngineError, Generate
from shared.protocol.messages import AbortAck, Completed, Failed, GivenUp
from shared.transfer.plan import check_coverage

ABORTED = "aborted"
"""An operator's word: the client may ask again, decode does not."""


def failure_of(message: Failed | GivenUp | AbortAck) -> EngineError:
    """What prefill's answer means for the request. An AbortAck that nobody asked for: it had not heard from us."""
    match message:
        case AbortAck():
            return lost("the prefill service gave the request up")
        case Failed(code="capacity"):
            return EngineError(
                f"prefill: {message.reason}", "prefill_capacity_exceeded", 400, "invalid_request_error", False
            )
        case Failed() | GivenUp():
            status = 503 if message.retryable else 500
            return EngineError(f"prefill: {message.reason}", message.code, status, "prefill_failed", message.retryable)


def incomplete(wrong: str) -> EngineError:
    return EngineError(f"the hand-over was not complete: {wrong}", "incomplete_handover", 503, "prefill_failed", True)


def altered(told: int, found: int) -> EngineError:
    why = f"the digest of what landed is {found:016x}, of what was sent {told:016x}"
    return EngineError(why, "digest_mismatch", 503, "prefill_failed", True)


def lost(why: str) -> EngineError:
    return EngineError(why, "prefill_lost", 503, "service_unavailable", True)


def shown(error: HandoffError) -> EngineError:
    return EngineError(error.message, error.code, error.http_status, error.type, error.retryable)


def unproven(lease: Lease, spec: Generate, message: Completed, page_bytes: dict[str, int]) -> str | None:
    """What a completion lacks of what was asked for (S67); None: nothing."""
    if wrong := check_coverage(message.parts, np.arange(len(lease.pages)), page_bytes):
        return wrong
    if lease.digest and any(part.digest is None for part in message.parts):
        return "the digest that was asked for is missing"
    tokens, top = len(spec.prompt) // 4, spec.prompt_logprobs
    if top is not None and (message.prompt is None or not message.prompt.fits(tokens - 1, top)):
        return "the prompt's log-probabilities are missing or not as many as were asked for"
    return None
