"""What decode knows of its requests and of the memory that was offered for them. Only ``intake.py`` changes these."""

from dataclasses import dataclass, field

from decode_svc.choices import PageNeed
from decode_svc.effects import Outcome
from shared.ids import Epoch, PeerAddress, RequestId, Room, Ticket
from shared.kv.pages import Pages
from shared.protocol.local import EngineError, Generate, Handover
from shared.protocol.machine import LeaseState, RequestState
from shared.protocol.messages import Completed, PromptLogprobs
from shared.protocol.scores import Scores


@dataclass
class Lease:
    """One attempt's landing pages and slot, and who may write to them."""

    room: Room
    ticket: Ticket
    request: RequestId | None
    """Whom it serves; None once it was given up."""
    peer: PeerAddress
    peer_epoch: Epoch
    registration: int
    pages: Pages
    slot: int | None
    sent_s: float
    tokens: int = 0
    """Rows that are to land."""
    digest: bool = False
    """Its content is compared before it is committed."""
    state: LeaseState = LeaseState.HELD
    completion: Completed | None = None
    """What its writer said, while the content is being compared."""
    reason: str = ""
    given_up_s: float = 0.0
    next_abort_s: float = 0.0
    sent_beat: int = 0
    """Number of the last heartbeat that was sent before its Prefill."""
    missed_beats: int = 0
    load_tokens: int = 0
    """What it still adds to its peer's outstanding tokens."""


@dataclass
class Request:
    """One client request. ``lease`` is its current attempt's; ``own_pages`` hold what decode itself computes."""

    spec: Generate
    room: Room
    need: PageNeed
    deadline_s: float
    state: RequestState = RequestState.WAITING
    lease: Lease | None = None
    own_pages: Pages | None = None
    attempts: int = 0
    avoid: PeerAddress | None = None
    patient_until_s: float = 0.0
    """Until then a peer that is not there may still come."""
    lost: EngineError | None = None
    """Why its last attempt came to nothing."""
    local: bool = False
    """Decode is to compute its prompt itself."""
    handover: Handover | None = None
    prompt: PromptLogprobs | None = None
    """Its tokens' log-probabilities, until they were shown."""
    scores: list[Scores] = field(default_factory=list)
    """The same in pieces, where decode computes the prompt itself."""
    ended_choices: int = 0

    @property
    def id(self) -> RequestId:
        return self.spec.request

    @property
    def prompt_tokens(self) -> int:
        return len(self.spec.prompt) // 4


@dataclass
class Counts:
    """Totals since the start, for the metrics; ``ended`` by outcome."""

    ended: dict[Outcome, int] = field(default_factory=lambda: {"finished": 0, "failed": 0, "cancelled": 0})
    started: int = 0
    retries: int = 0
    aborts: int = 0
    fences: int = 0
    bad_completions: int = 0
    digests: int = 0
    digest_mismatches: int = 0
    local_prefills: int = 0
