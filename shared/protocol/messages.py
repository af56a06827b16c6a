"""What prefill and decode engines say to each other: one tagged union a direction. ``machine.py`` says when.

Every message names the epoch of its sender and the epoch it believes it speaks to, so that nothing meant for a dead
incarnation is ever acted on. Lists of ints travel as little-endian int32 bytes. Times travel as remaining
milliseconds, because clocks differ. Delivery may lose, delay, reorder and duplicate: Register, Completed, Failed,
GivenUp and Abort are re-sent until answered, and every handler is idempotent.

Bounds are part of the types: what is outside of them is malformed, and nothing else of this program sees it. A peer's
words end up in logs, in answers and in the front's status, so they are short.
"""

from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from shared.ids import AttemptKey, Epoch, PeerAddress, RequestId, Room, Ticket

PROTOCOL_VERSION = 3

Int32s = npt.NDArray[np.int32]

MAX_NAME, MAX_TEXT = 256, 2048
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Address = Annotated[PeerAddress, Meta(max_length=MAX_NAME)]
RoomId = Annotated[Room, Meta(ge=0, le=2**63 - 1)]
TicketId = Annotated[Ticket, Meta(ge=0, le=2**63 - 1)]
TopCount = Annotated[int, Meta(ge=0, le=20)]


def short(text: str) -> str:
    """No longer than a message may carry."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def pack_int32(values: npt.ArrayLike) -> bytes:
    """[n] ints → 4·n bytes. Raises OverflowError where a value does not fit."""
    array = np.asarray(values)
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise OverflowError("a value does not fit in an int32")
    return array.astype("<i4", copy=False).tobytes()


def unpack_int32(data: bytes) -> Int32s:
    """4·n bytes → read-only [n]. Raises ValueError where the length is not a multiple of 4."""
    return np.frombuffer(data, dtype="<i4")


def unpack_float32(data: bytes) -> npt.NDArray[np.float32]:
    """4·n bytes → read-only [n]. Raises ValueError where the length is not a multiple of 4."""
    return np.frombuffer(data, dtype="<f4")


def pack_int64(values: npt.ArrayLike) -> bytes:
    """[n] ints → 8·n bytes."""
    return np.asarray(values, dtype="<i8").tobytes()


def unpack_int64(data: bytes) -> npt.NDArray[np.int64]:
    """8·n bytes → read-only [n]. Raises ValueError where the length is not a multiple of 8."""
    return np.frombuffer(data, dtype="<i8")


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of the peer messages: the sender's epoch and the one it speaks to (0: not known yet)."""

    epoch: Epoch
    to_epoch: Epoch


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One registered buffer: ``items`` items of ``item_bytes`` from address ``base`` on.

    ``component`` is "kv", "meta" (the metadata slots; layer 0), or a state buffer's name; ``layer`` is the logical
    layer id, by which the two sides' buffers are matched (S13, S35).
    """

    component: str
    layer: int
    base: int
    item_bytes: int
    items: int


class Capacity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one prefill can take: the longest prompt in tokens, by context and by pages together."""

    max_prompt_tokens: int


class Difference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One field in which two sides do not match (S45); an absent value is shown as "(missing)"."""

    field: Name
    prefill: Text
    decode: Text

    def __str__(self) -> str:
        return f"{self.field}: prefill has {self.prefill!r}, decode has {self.decode!r}"


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one choice is sampled. ``seed`` is always set: randomness is a function of (seed, choice, position)."""

    seed: int
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=2)] = 1.0
    top_logprobs: TopCount = 0
    """So many of the likeliest tokens are told with each; at most 20."""
    logit_bias: list[tuple[int, Annotated[float, Meta(ge=-100, le=100)]]] = []
    banned: list[int] = []
    """Tokens that may not be drawn before position ``banned_before`` of the sequence (min_tokens)."""
    banned_before: int = 0

    @property
    def needs_history(self) -> bool:
        """Does the next token's distribution depend on those before it?"""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class PromptLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Log-probabilities of the prompt's tokens from its second on: their own as packed float32 [n] and their ranks (1:
    the likeliest) as packed int32 [n]; and of the ``top`` likeliest tokens in each place the ids as packed int32
    [n, top] and the log-probabilities as packed float32 [n, top]."""

    top: int
    own: bytes
    ranks: bytes
    top_ids: bytes
    top_values: bytes

    def fits(self, tokens: int, top: int) -> bool:
        """Is this the answer to such a question?"""
        sizes = len(self.own), len(self.ranks), len(self.top_ids), len(self.top_values)
        return self.top == top and sizes == (4 * tokens, 4 * tokens, 4 * tokens * top, 4 * tokens * top)


class Coverage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank wrote for one attempt (S67): absolute page positions as packed int32, bytes per component.

    ``digest`` is of those positions' content (``shared/kv/digest.py``), where decode asked for it; ``write_s`` is from
    the rank's first submit to its last byte.
    """

    rank: int
    positions: bytes
    bytes_by_component: dict[str, int]
    digest: int | None = None
    write_s: float = 0.0


def duration_s(start_s: float, end_s: float) -> float:
    """S34: from one stamp to another; 0 where either was never set (≤ 0)."""
    return end_s - start_s if start_s > 0 and end_s > 0 else 0.0


class Timings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the time went on prefill, in seconds: waiting, forwards, and from the forward's end to the last byte."""

    queue_s: float
    prefill_s: float
    exposed_s: float
    write_s: float
    """First submit to last byte; the divisor of goodput."""


# decode → prefill


class Addressed(Message, frozen=True):
    """``reply_to`` is the sender's control socket, so that a prefill that does not know it can say so.

    ``registration`` rises with each new receive session of one decode epoch; an older one is never written to again.
    """

    reply_to: Address
    registration: int


class Register(Addressed, frozen=True):
    """Decode offers its memory. Re-sent until Registered or Refused arrives."""

    session: Name
    """The receive engine that this prefill, and no other writer, is to write through."""
    fingerprint: Annotated[dict[Name, Text], Meta(max_length=64)]
    regions: list[Region]


class Prefill(Addressed, frozen=True):
    room: RoomId
    ticket: TicketId
    request: Annotated[RequestId, Meta(max_length=MAX_NAME)]
    """The client's request, for logs and for an operator who wants to stop it."""
    tokens: bytes
    dst_first_position: int
    """Page position of the first destination page; positions before it are decode's already (S7)."""
    dst_pages: bytes
    slot: int
    sampling: Sampling
    remaining_ms: int
    digest: bool
    """Compute the digest of what is written, and tell it with the completion."""
    prompt_logprobs: TopCount | None = None
    """Tell the prompt tokens' log-probabilities with the completion, and so many of the likeliest in their places."""


class Abort(Addressed, frozen=True):
    room: RoomId
    ticket: TicketId
    reason: Text


class Ack(Message, frozen=True):
    """Answers Completed and Failed; after it prefill may forget the attempt."""

    room: RoomId
    ticket: TicketId


# prefill → decode


class Registered(Message, frozen=True):
    registration: int
    capacity: Capacity


class Refused(Message, frozen=True):
    """The pair does not match, or (no differences) this prefill does not know the sender: register anew."""

    registration: int
    differences: Annotated[list[Difference], Meta(max_length=128)]


class Completed(Message, frozen=True):
    """All of the attempt's bytes are known to have landed, the metadata row included."""

    room: RoomId
    ticket: TicketId
    parts: list[Coverage]
    timings: Timings
    prompt: PromptLogprobs | None = None


class Failed(Message, frozen=True):
    """The attempt ended without a result, and this side writes for it no more. ``clean``: see AbortAck."""

    room: RoomId
    ticket: TicketId
    reason: Text
    code: Name
    retryable: bool
    clean: bool


class GivenUp(Message, frozen=True):
    """The attempt will bring no result, but its last forward or write has not ended. Re-sent until Abort, which is
    what answers it: the end of the writes comes as AbortAck."""

    room: RoomId
    ticket: TicketId
    reason: Text
    code: Name
    retryable: bool


class AbortAck(Message, frozen=True):
    """This side does not write for this attempt any more, nor ever will.

    ``clean``: no write through this registration's session has failed, so nothing of it can be under way either. A
    failed write's bytes may lie in the receiver's own socket buffers, where only the receiver can end them.
    """

    room: RoomId
    ticket: TicketId
    clean: bool


# both ways


class Heartbeat(Addressed, frozen=True):
    """Sent to each registered peer. ``active`` is the packed int64 tickets that the sender works on for the receiver.

    ``steps`` counts finished forwards, so that a long one is told from a stuck one; ``busy`` says one is running.
    ``number`` rises with each; ``heard`` is the newest number that came from the receiver: what was sent to it before
    that one has arrived, or never will.
    """

    number: int
    heard: int
    steps: int
    busy: bool
    active: bytes
    draining: bool = False
    """A prefill that takes no new prompts."""


ToPrefill: TypeAlias = Register | Prefill | Abort | Ack | Heartbeat
ToDecode: TypeAlias = Registered | Refused | Completed | Failed | GivenUp | AbortAck | Heartbeat


def key_to_prefill(message: Prefill | Abort | Ack) -> AttemptKey:
    return AttemptKey(message.epoch, message.room, message.ticket)


def key_to_decode(message: Completed | Failed | AbortAck) -> AttemptKey:
    return AttemptKey(message.to_epoch, message.room, message.ticket)
