"""What decode's pure decisions ask their shell to do, in the order given."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from shared.ids import PeerAddress, RequestId, Room, Ticket
from shared.kv.pages import Pages
from shared.protocol.local import Output

Outcome: TypeAlias = Literal["finished", "failed", "cancelled"]


@dataclass(frozen=True)
class Send:
    """One message to a prefill's control socket; may be lost."""

    address: PeerAddress
    message: msgspec.Struct


@dataclass(frozen=True)
class OpenSession:
    """Make a receive engine for this prefill alone, register the pool with it, then call ``session_ready``."""

    address: PeerAddress
    registration: int


@dataclass(frozen=True)
class Fence:
    """Retire that receive engine; when no byte can land through it any more, call ``fenced``."""

    address: PeerAddress
    registration: int
    reason: str


@dataclass(frozen=True)
class Up:
    """Worth a line: this peer is registered, after ``away_s`` without it."""

    address: PeerAddress
    away_s: float


@dataclass(frozen=True)
class Verify:
    """Compute the digest of what landed in these pages ``[n]``, the first at position 0; then call ``verified``."""

    ticket: Ticket
    pages: Pages
    tokens: int


@dataclass(frozen=True)
class Compute:
    """No prefill will: compute the prompt here, in the request's own pages, then call ``computed``."""

    request: RequestId


@dataclass(frozen=True)
class Prebuild:
    """The request's cache and metadata row are committed: run its prebuilt step."""

    request: RequestId


@dataclass(frozen=True)
class Ended:
    """The request's one ending; ``output`` goes to the client, where there still is one."""

    request: RequestId
    outcome: Outcome
    output: Output | None
    room: Room


Effect: TypeAlias = Send | OpenSession | Fence | Up | Verify | Compute | Prebuild | Ended
