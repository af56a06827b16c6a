"""What decode knows of its requests and of the memory that was offered for them. Only ``intake.py`` changes these."""

from dataclasses import dataclass, field

from decode_svc.effects import Outcome
from shared.ids import Epoch, PeerAddress, RequestId, Room, Ticket
from shared.kv.pages import Pages
from shared.protocol.local import Generate, Handover
from shared.protocol.machine import LeaseState, RequestState


@dataclass
class Lease:
    """One attempt's landing pages and slot, and who may write to them."""

    room: Room
    ticket: Ticket
    peer: PeerAddress
    peer_epoch: Epoch
    registration: int
    pages: Pages
    slot: int | None
    sent_s: float
    state: LeaseState = LeaseState.HELD
    reason: str = ""
    next_abort_s: float = 0.0
    missed_beats: int = 0
    load_tokens: int = 0
    """What it still adds to its peer's outstanding tokens."""


@dataclass
class Request:
    """One client request. ``lease`` is its current attempt's; ``own_pages`` hold what decode itself will compute."""

    spec: Generate
    room: Room
    prompt_tokens: int
    deadline_s: float
    state: RequestState = RequestState.WAITING
    lease: Lease | None = None
    own_pages: Pages | None = None
    attempts: int = 0
    avoid: PeerAddress | None = None
    handover: Handover | None = None

    @property
    def id(self) -> RequestId:
        return self.spec.request


@dataclass
class Counts:
    """Totals since the start, for the metrics; ``ended`` by outcome."""

    ended: dict[Outcome, int] = field(default_factory=lambda: {"finished": 0, "failed": 0, "cancelled": 0})
    started: int = 0
    retries: int = 0
    aborts: int = 0
    fences: int = 0
    bad_completions: int = 0
