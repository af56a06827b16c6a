"""Every error says whose fault it is and whether the same request may succeed if it is sent again."""

from enum import Enum


class Blame(Enum):
    CLIENT = "client"
    OPERATOR = "operator"
    PEER = "peer"
    SELF = "self"


class HandoffError(Exception):
    """Base of all errors that this project raises on purpose.

    ``blame`` and ``retryable`` are facts about the error family; ``http_status`` and ``type`` are how an HTTP front
    shows it (OpenAI's error object); ``code`` is a stable word that a program can compare.
    """

    blame = Blame.SELF
    retryable = False
    http_status = 500
    type = "internal_error"
    code = "internal_error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code


class ConfigError(HandoffError):
    """The operator's flags, environment or file are wrong: one line, non-zero exit."""

    blame = Blame.OPERATOR
    code = "bad_config"


class RequestError(HandoffError):
    """The client's request can never succeed as it is. Raised before any work starts."""

    blame = Blame.CLIENT
    http_status = 400
    type = "invalid_request_error"
    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message, code=code)
        self.param = param
        self.http_status = status


class Unavailable(HandoffError):
    """Nothing is wrong with the request; this service cannot serve it now."""

    blame = Blame.PEER
    retryable = True
    http_status = 503
    type = "service_unavailable"
    code = "unavailable"


class MessageError(HandoffError):
    """Frames on a control socket that are no message of this protocol. Counted and dropped, never fatal."""

    blame = Blame.PEER
    code = "bad_message"


class PeerBusy(HandoffError):
    """The link's send buffer is full; nothing was sent."""

    blame = Blame.PEER
    retryable = True
    http_status = 503
    type = "service_unavailable"
    code = "peer_busy"


class PageCountMismatch(HandoffError):
    """S8: source and destination pages of a send differ in number; nothing was sent."""

    code = "page_count_mismatch"


class LayoutMismatch(HandoffError):
    """Two sides describe their buffers differently (S35, S45); nothing was sent."""

    blame = Blame.OPERATOR
    code = "layout_mismatch"


class DestinationRefused(HandoffError):
    """A destination range lies outside the regions that its owner registered; nothing was sent."""

    blame = Blame.PEER
    code = "destination_refused"


class TransferFailed(HandoffError):
    """A batch ended in failure. Bytes of it may still be landing until the sending engine is retired."""

    blame = Blame.PEER
    retryable = True
    http_status = 503
    type = "service_unavailable"
    code = "transfer_failed"


class EngineMissing(HandoffError):
    """The transfer library cannot be imported or lacks a call that we need; says what to install."""

    blame = Blame.OPERATOR
    code = "engine_missing"


class IntegrityError(HandoffError):
    """A ``check_integrity`` found books that do not balance. Always a defect of this project."""

    code = "integrity"


class StateError(HandoffError):
    """An event that its state's table does not list. Always a defect of this project."""

    code = "state"
