"""The running batch: who takes part in the next decode step, and what its samples mean. Pure.

Rows live in fixed arrays, compacted when a request leaves, so that a step hands slices to the model and builds nothing
per token. Pages were reserved at admission: a running request is never paused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shared.errors import IntegrityError
from shared.ids import RequestId
from shared.kv.layout import TopLogprobs
from shared.kv.pages import Pages
from shared.protocol.local import FinishReason, Generate
from shared.protocol.messages import Sampling, unpack_int32

Ids = npt.NDArray[np.int32]
RowId: TypeAlias = tuple[RequestId, int]
"""A request and its choice."""


@dataclass
class Row:
    """One running choice; ``produced`` counts sampled tokens, the first one included."""

    id: RowId
    sampling: Sampling
    stop_ids: frozenset[int]
    max_tokens: int
    tokens: Ids | None = None
    """Prompt and output so far, where the sampling needs them: [prompt + max_tokens]."""
    prompt_tokens: int = 0
    produced: int = 0
    copy: tuple[int, int] | None = None
    """(page, its copy) that the row's first step makes before anything else."""

    @property
    def history(self) -> tuple[Ids, Ids] | None:
        """(prompt, output): views."""
        if self.tokens is None:
            return None
        return self.tokens[: self.prompt_tokens], self.tokens[self.prompt_tokens : self.prompt_tokens + self.produced]


@dataclass(frozen=True)
class Plan:
    """The next step for ``rows``: each row's last token, its length with that token, and its page table."""

    rows: tuple[RowId, ...]
    tokens: npt.NDArray[np.int32]  # [rows]
    lengths: npt.NDArray[np.int32]  # [rows]
    page_table: npt.NDArray[np.int32]  # [rows, max_pages]; entries past a row's length are arbitrary (S58)
    sampling: list[Sampling]
    histories: list[tuple[Ids, Ids] | None]
    """Each row's prompt and output, where its sampling needs them; what is appended later lies outside."""
    copies: list[tuple[int, int]]
    """(page, its copy), to be made first."""


@dataclass(frozen=True)
class Step:
    """One choice's new token, and why it was the last, if it was."""

    request: RequestId
    choice: int
    token: int
    logprob: float
    top: TopLogprobs
    finish: FinishReason | None


class Scheduler:
    """At most ``max_rows`` choices of at most ``max_pages`` pages each."""

    def __init__(self, max_rows: int, max_pages: int, page_size: int, eos_token_ids: frozenset[int]) -> None:
        self._eos, self._page_size = eos_token_ids, page_size
        self._rows: list[Row] = []
        self._index: dict[RowId, int] = {}
        self._tokens = np.zeros(max_rows, np.int32)
        self._lengths = np.zeros(max_rows, np.int32)
        self._table = np.zeros((max_rows, max_pages), np.int32)
        self._max_rows = max_rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def free_rows(self) -> int:
        return self._max_rows - len(self._rows)

    def prebuilt(self, spec: Generate, token: int, logprob: float, top: TopLogprobs, pages: Pages) -> Step:
        """The step that takes prefill's first token for choice 0's. Unless that token ends it, the choice joins the
        batch with all its pages ``[pages]`` in position order. Raises IntegrityError where the batch is full."""
        row = self._row(spec, 0)
        step = self._advance(row, (token, logprob, top))
        if step.finish is None:
            self._join(row, token, row.prompt_tokens + 1, pages)
        return step

    def fork(self, spec: Generate, choice: int, pages: Pages, original: int) -> None:
        """Another choice joins the batch with its pages ``[pages]``. Its first step copies page ``original`` into its
        own at the last token's place, computes that token's row once more, and samples. Raises IntegrityError where
        the batch is full."""
        row = self._row(spec, choice)
        row.copy = original, int(pages[(row.prompt_tokens - 1) // self._page_size])
        self._join(row, int(unpack_int32(spec.prompt)[-1]), row.prompt_tokens, pages)

    def _row(self, spec: Generate, choice: int) -> Row:
        stop_ids = frozenset(spec.stop_token_ids) | (frozenset() if spec.ignore_eos else self._eos)
        row = Row((spec.request, choice), spec.sampling, stop_ids, spec.max_tokens, prompt_tokens=len(spec.prompt) // 4)
        if spec.sampling.needs_history:
            row.tokens = np.concatenate([unpack_int32(spec.prompt), np.zeros(spec.max_tokens, np.int32)])
        return row

    def _join(self, row: Row, token: int, length: int, pages: Pages) -> None:
        at = len(self._rows)
        if at == self._max_rows:
            raise IntegrityError(f"{at} requests run already")
        self._rows.append(row)
        self._index[row.id] = at
        self._tokens[at], self._lengths[at] = token, length
        self._table[at, : len(pages)] = pages

    def plan(self) -> Plan | None:
        """The next step, or None where nothing runs. The arrays are copies: rows may change while it runs."""
        count = len(self._rows)
        if not count:
            return None
        copies = [row.copy for row in self._rows if row.copy is not None]
        for row in self._rows if copies else ():
            row.copy = None
        return Plan(
            tuple(row.id for row in self._rows),
            self._tokens[:count].copy(),
            self._lengths[:count].copy(),
            self._table[:count].copy(),
            [row.sampling for row in self._rows],
            [row.history for row in self._rows],
            copies,
        )

    def apply(self, plan: Plan, samples: Sequence[tuple[int, float, TopLogprobs]]) -> list[Step]:
        """The results of that step, in its order. Finished requests have left; those that left meanwhile have none."""
        steps = []
        for row_id, sample in zip(plan.rows, samples, strict=True):
            at = self._index.get(row_id)
            if at is None:
                continue
            step = self._advance(self._rows[at], sample)
            self._tokens[at] = step.token
            self._lengths[at] += 1
            if step.finish is not None:
                self._leave(row_id)
            steps.append(step)
        return steps

    def leave(self, request: RequestId, choice: int | None = None) -> int:
        """Take a request out, or one choice of it; its pages are its owner's. → how many rows left."""
        mine = [row.id for row in self._rows if row.id[0] == request and choice in (None, row.id[1])]
        for row_id in mine:
            self._leave(row_id)
        return len(mine)

    def _leave(self, row_id: RowId) -> None:
        at = self._index.pop(row_id)
        last = self._rows.pop()
        if last.id != row_id:
            self._rows[at] = last
            self._index[last.id] = at
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
        return Step(*row.id, token, logprob, top, finish)
