"""What a front and its engine say to each other, over a socket that only they can reach.

The front owns HTTP, text and metrics and no tensor; the engine owns everything else. A front that is gone ends its
engine; an engine that is gone ends every request of its front.
"""

from typing import Literal, TypeAlias

import msgspec

from shared.ids import Epoch, RequestId
from shared.protocol.messages import Difference, PromptLogprobs, Sampling, Timings

FinishReason: TypeAlias = Literal["stop", "length"]

HEARTBEAT_S = 0.5
"""An engine sends its front a Status this often, whatever else it does."""


class LocalMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of the front ↔ engine messages."""


# front → engine


class Generate(LocalMessage, frozen=True):
    """A validated request. ``prompt`` is packed int32 token ids; ``max_tokens`` counts the first token too, and holds
    for each of the choices."""

    request: RequestId
    prompt: bytes
    max_tokens: int
    sampling: Sampling
    stop_token_ids: list[int]
    ignore_eos: bool
    choices: int = 1
    prompt_logprobs: int | None = None
    """Tell the prompt tokens' log-probabilities too, and so many of the likeliest in their places."""


class Cancel(LocalMessage, frozen=True):
    """The client is gone, or a choice's text met a stop string: the engine computes no more for this request, or for
    this one choice of it."""

    request: RequestId
    choice: int | None = None


class Stop(LocalMessage, frozen=True):
    """The operator's abort, on prefill: the attempts of this client request, or (None) all, end with an error."""

    request: RequestId | None


class Drain(LocalMessage, frozen=True):
    """Take nothing new; end what still runs after ``grace_s`` seconds with an explicit error; then say Drained."""

    grace_s: float


# engine → front


class ModelInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the front needs to validate a request before any work starts."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    page_size: int
    num_pages: int
    dtype: str
    kv_bytes_per_token: int
    eos_token_ids: list[int]


class Ready(LocalMessage, frozen=True):
    """The engine listens: its model is loaded and its memory registered."""

    epoch: Epoch
    control: str
    info: ModelInfo


class StartFailed(LocalMessage, frozen=True):
    """One clear line why the engine cannot run; the front prints it and exits with 2."""

    message: str


class Handover(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one request's hand-over went, as decode saw it; rides on the request's first output."""

    peer: str
    attempts: int
    bytes_sent: int
    commit_s: float
    """Prefill sent → committed, decode's clock."""
    timings: Timings
    slowest_rank: int = 0
    """The prefill rank that wrote longest, and how long (S63)."""
    slowest_write_s: float = 0.0


class EngineError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a request ended without a finish reason; becomes the HTTP error object."""

    message: str
    code: str
    http_status: int
    type: str
    retryable: bool


class Output(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of one request's answer. Each choice's last Output carries ``finish``; an ``error`` ends all of them."""

    request: RequestId
    tokens: list[int]
    logprobs: list[float]
    finish: FinishReason | None = None
    error: EngineError | None = None
    handover: Handover | None = None
    choice: int = 0
    prompt: PromptLogprobs | None = None
    """On a request's first output, where it was asked for."""
    top: list[list[tuple[int, float]]] = []
    """For each token the likeliest ones with their log-probabilities, where that was asked for."""


class Outputs(LocalMessage, frozen=True):
    """All outputs of one engine step, in one message."""

    items: list[Output]


class PeerStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One peer as the engine sees it now. ``max_prompt_tokens`` is 0 where it is not known."""

    address: str
    state: Literal["connecting", "registered", "draining", "refused", "lost"]
    epoch: Epoch
    max_prompt_tokens: int = 0
    differences: list[Difference] = []


class Status(LocalMessage, frozen=True):
    """The engine's heartbeat to its front, and its metrics: gauges as they are, counters as totals since the start,
    samples (for histograms) since the last Status. Names are those of ``shared/ops/metrics.py``."""

    steps: int
    busy: bool
    peers: list[PeerStatus]
    gauges: dict[str, float]
    counters: dict[str, float]
    samples: dict[str, list[float]]


class Drained(LocalMessage, frozen=True):
    """Every request has ended and no byte is in flight; the engine exits after it."""


ToEngine: TypeAlias = Generate | Cancel | Stop | Drain
ToFront: TypeAlias = Ready | StartFailed | Outputs | Status | Drained
