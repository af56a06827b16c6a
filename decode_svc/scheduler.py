"""The running batch: who takes part in the next decode step, and what its samples mean. Pure.

Rows live in fixed arrays, compacted when a request leaves, so that a step hands slices to the model and builds nothing
per token. Pages were reserved at admission: a running request is never paused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.errors import IntegrityError
from shared.ids import RequestId
from shared.kv.layout import TopLogprobs
from shared.kv.pages import Pages
from shared.protocol.local import FinishReason, Generate
from shared.protocol.messages import Sampling, unpack_int32

Ids = npt.NDArray[np.int32]


@dataclass
class Row:
    """One running request; ``produced`` counts sampled tokens, the first one (prefill's) included."""

    request: RequestId
    sampling: Sampling
    stop_ids: frozenset[int]
    max_tokens: int
    tokens: Ids | None = None
    """Prompt and output so far, where the sampling needs them: [prompt + max_tokens]."""
    prompt_tokens: int = 0
    produced: int = 0

    @property
    def history(self) -> tuple[Ids, Ids] | None:
        """(prompt, output): views."""
        if self.tokens is None:
            return None
        return self.tokens[: self.prompt_tokens], self.tokens[self.prompt_tokens : self.prompt_tokens + self.produced]


@dataclass(frozen=True)
class Plan:
    """The next step for ``rows``: each row's last token, its length with that token, and its page table."""

    rows: tuple[RequestId, ...]
    tokens: npt.NDArray[np.int32]  # [rows]
    lengths: npt.NDArray[np.int32]  # [rows]
    page_table: npt.NDArray[np.int32]  # [rows, max_pages]; entries past a row's length are arbitrary (S58)
    sampling: list[Sampling]
    histories: list[tuple[Ids, Ids] | None]
    """Each row's prompt and output, where its sampling needs them; what is appended later lies outside."""


@dataclass(frozen=True)
class Step:
    """One request's new token, and why it was the last, if it was."""

    request: RequestId
    token: int
    logprob: float
    top: TopLogprobs
    finish: FinishReason | None


class Scheduler:
    """At most ``max_rows`` requests of at most ``max_pages`` pages each."""

    def __init__(self, max_rows: int, max_pages: int, eos_token_ids: frozenset[int]) -> None:
        self._eos = eos_token_ids
        self._rows: list[Row] = []
        self._index: dict[RequestId, int] = {}
        self._tokens = np.zeros(max_rows, np.int32)
        self._lengths = np.zeros(max_rows, np.int32)
        self._table = np.zeros((max_rows, max_pages), np.int32)
        self._max_rows = max_rows

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._index

    def prebuilt(self, spec: Generate, token: int, logprob: float, top: TopLogprobs, pages: Pages) -> Step:
        """The step that takes prefill's first token for its result. Unless that token ends the request, it joins the
        batch with all its pages ``[pages]`` in position order. Raises IntegrityError where the batch is full."""
        stop_ids = frozenset(spec.stop_token_ids) | (frozenset() if spec.ignore_eos else self._eos)
        row = Row(spec.request, spec.sampling, stop_ids, spec.max_tokens, prompt_tokens=len(spec.prompt) // 4)
        if spec.sampling.needs_history:
            row.tokens = np.concatenate([unpack_int32(spec.prompt), np.zeros(spec.max_tokens, np.int32)])
        step = self._advance(row, (token, logprob, top))
        if step.finish is None:
            at = len(self._rows)
            if at == self._max_rows:
                raise IntegrityError(f"{at} requests run already")
            self._rows.append(row)
            self._index[row.request] = at
            self._tokens[at], self._lengths[at] = token, len(spec.prompt) // 4 + 1
            self._table[at, : len(pages)] = pages
        return step

    def plan(self) -> Plan | None:
        """The next step, or None where nothing runs. The arrays are copies: rows may change while it runs."""
        count = len(self._rows)
        if not count:
            return None
        return Plan(
            tuple(row.request for row in self._rows),
            self._tokens[:count].copy(),
            self._lengths[:count].copy(),
            self._table[:count].copy(),
            [row.sampling for row in self._rows],
            [row.history for row in self._rows],
        )

    def apply(self, plan: Plan, samples: Sequence[tuple[int, float, TopLogprobs]]) -> list[Step]:
        """The results of that step, in its order. Finished requests have left; those that left meanwhile have none."""
        steps = []
        for request, sample in zip(plan.rows, samples, strict=True):
            at = self._index.get(request)
            if at is None:
                continue
            step = self._advance(self._rows[at], sample)
            self._tokens[at] = step.token
            self._lengths[at] += 1
            if step.finish is not None:
                self.leave(request)
            steps.append(step)
        return steps

    def leave(self, request: RequestId) -> None:
        """Take a request out; its pages are its owner's. Unknown: nothing."""
        at = self._index.pop(request, None)
        if at is None:
            return
        last = self._rows.pop()
        if last.request != request:
            self._rows[at] = last
            self._index[last.request] = at
            end = len(self._rows)
            self._tokens[at], self._lengths[at] = self._tokens[end], self._lengths[end]
            self._table[at] = self._table[end]

    @staticmethod
    def _advance(row: Row, sample: tuple[int, float, TopLogprobs]) -> Step:
        token, logprob, top = sample
        if row.tokens is not None:
            row.tokens[row.prompt_tokens + row.produced] = token
        row.produced += 1
        finish: FinishReason | None = None
        if token in row.stop_ids:
            finish = "stop"
        elif row.produced >= row.max_tokens:
            finish = "length"
        return Step(row.request, token, logprob, top, finish)
