"""What prefill knows of its attempts. Only ``handoff.py`` changes these."""

from dataclasses import dataclass, field

from prefill_svc.peers import DecodePeer
from prefill_svc.scheduler import Piece, Waiting
from shared.ids import AttemptKey
from shared.kv.pages import Pages
from shared.protocol import messages as m
from shared.protocol.machine import SenderState
from shared.protocol.scores import Scored, Scores


@dataclass
class Sender:
    """One attempt. Times are seconds of one monotonic clock; ``done`` counts computed tokens."""

    key: AttemptKey
    peer: DecodePeer
    spec: m.Prefill
    tokens: m.Int32s
    destination: m.Int32s
    arrived_s: float
    deadline_s: float
    layerwise: bool = False
    """Its chunks go layer by layer; decided with the first."""
    state: SenderState = SenderState.QUEUED
    done: int = 0
    pages: Pages | None = None
    slot: int | None = None
    started_s: float = 0.0
    computed_s: float = 0.0
    result: m.Completed | m.Failed | None = None
    given_up: m.GivenUp | None = None
    next_repeat_s: float = 0.0
    finish_by_s: float = float("inf")
    """When the rest has to have landed (S24)."""
    scores: list[Scores] = field(default_factory=list)
    """Of its prompt so far, where they are wanted."""

    def waiting(self) -> Waiting:
        return Waiting(self.key, self.done, len(self.tokens), self.spec.prompt_logprobs is not None)

    def score(self, piece: Piece) -> Scored | None:
        """What the piece's forward is to add to ``scores``."""
        if self.spec.prompt_logprobs is None:
            return None
        after = self.tokens[piece.start + 1 : piece.start + piece.length + 1]
        return Scored(after, self.spec.prompt_logprobs, self.scores)


@dataclass
class Counts:
    """Totals since the start, for the metrics."""

    accepted: int = 0
    ended: dict[str, int] = field(default_factory=lambda: {"finished": 0, "failed": 0, "aborted": 0})
    transfer_failures: int = 0
    refused_messages: int = 0
    whole_sends: int = 0
    stopped: int = 0
    """By an operator."""
    tokens: int = 0
    bytes_sent: int = 0
    """Of attempts that finished, counted from what was written (S32)."""
    finished: list[tuple[m.Timings, int]] = field(default_factory=list)
    """Timings and bytes of attempts that finished since the last look."""
