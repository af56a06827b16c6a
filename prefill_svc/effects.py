"""What prefill's pure decisions ask their shell to do, in the order given."""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import msgspec

from shared.ids import AttemptKey, Epoch, PeerAddress
from shared.kv.pages import Pages
from shared.kv.placement import Positions
from shared.transfer.engine import Blocks
from shared.transfer.plan import Pairing, Runs


class SenderId(NamedTuple):
    """One sending worker: one decode incarnation's memory behind one receive session."""

    decode_epoch: Epoch
    registration: int


@dataclass(frozen=True)
class Send:
    """One message to a decode's control socket; may be lost."""

    address: PeerAddress
    message: msgspec.Struct


@dataclass(frozen=True)
class OpenSender:
    """Make a worker with a sending engine of its own for this session, make first contact, then call ``met``."""

    sender: SenderId
    session: str


@dataclass(frozen=True)
class CloseSender:
    """No attempt uses this worker any more: retire its engine."""

    sender: SenderId


class Digest(NamedTuple):
    """What to digest: source ``pages`` ``[n]`` at ``positions`` ``[n]``, rows of the first ``tokens`` tokens."""

    pages: Pages
    positions: Positions
    tokens: int


@dataclass(frozen=True)
class Write:
    """Write the batches one after the other, then call ``written`` or ``write_failed``."""

    sender: SenderId
    key: AttemptKey
    batches: list[Blocks]
    digest: Digest | None


@dataclass(frozen=True)
class Stream:
    """Write this chunk's layers as they end in the forward that is about to start; ``chunk`` is its first token."""

    sender: SenderId
    key: AttemptKey
    chunk: int
    pairing: Pairing
    runs: Runs


@dataclass(frozen=True)
class Sweep:
    """The chunk's forward has ended: write those of its layers that were not announced."""

    sender: SenderId
    key: AttemptKey
    chunk: int


@dataclass(frozen=True)
class Finish:
    """As Sweep for the last chunk; when everything has landed write the row, then call ``written`` or
    ``write_failed``."""

    sender: SenderId
    key: AttemptKey
    chunk: int
    row: Blocks
    digest: Digest | None


@dataclass(frozen=True)
class Halt:
    """Submit nothing more for this attempt."""

    key: AttemptKey


@dataclass(frozen=True)
class Drop:
    """Wait for what was submitted for this attempt, then call ``written`` or ``write_failed``."""

    sender: SenderId
    key: AttemptKey


@dataclass(frozen=True)
class Interrupt:
    """The worker's peer is lost: what it waits for is to fail now, not after the library's own time-out."""

    sender: SenderId


@dataclass(frozen=True)
class Drain:
    """Retire the worker's engine (a fresh one is made at the next write), then call ``drained``."""

    sender: SenderId
    key: AttemptKey


Effect: TypeAlias = Send | OpenSender | CloseSender | Write | Stream | Sweep | Finish | Halt | Drop | Interrupt | Drain
