"""The one attention function that models run with. What a forward looks like is told by a view that rides in the
model's keyword arguments: ``PackedPrefill`` or ``BatchedDecode``, made once per forward and used by every layer.

Pages are gathered whole (``index_select`` on the page axis), which costs a fifth of a gather by row, into one work
space that all layers share.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from shared.kv.layout import KV
from shared.kv.pool import KVPool

ATTENTION = "handoff_paged"


class View(Protocol):
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """query [batch, heads, length, dim], fresh key and value [batch, kv heads, length, dim] → [batch, length,
        heads, dim]. The fresh rows are in the pool already."""
        ...


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    paged: View,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature; ``paged`` is the model's extra keyword argument."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    return paged.attend(layer, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, paged_attention)


class PageReader:
    """Copies pages of the pool into a work space that grows to what was needed at most and is then reused."""

    def __init__(self, pool: KVPool) -> None:
        self._layers = {b.layer: pool.pages(KV, b.layer) for b in pool.layout.buffers if b.component == KV}
        any_layer = next(iter(self._layers.values()))
        self.page_size: int = any_layer.shape[1]
        self.dtype, self.device = any_layer.dtype, any_layer.device
        self._space = any_layer.new_empty((0, *any_layer.shape[1:]))

    def read(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """int64 [n] pages → their rows [n · page_size, 2, kv heads, dim], valid until the next call."""
        if len(self._space) < len(pages):
            self._space = self._space.new_empty((len(pages), *self._space.shape[1:]))
        gathered = torch.index_select(self._layers[layer], 0, pages, out=self._space[: len(pages)])
        return gathered.flatten(0, 1)

    def blocked(self, blocked: npt.NDArray[np.bool_]) -> torch.Tensor:
        """→ what to add to the scores, in the model's dtype: −∞ where ``blocked``, else 0; same shape."""
        mask = torch.zeros(blocked.shape, dtype=self.dtype)
        return mask.masked_fill_(torch.from_numpy(blocked), float("-inf")).to(self.device)


@dataclass(frozen=True)
class Segment:
    """One sequence's chunk inside a packed batch: tokens ``begin … end`` of the batch, and what lies before them."""

    begin: int
    end: int
    pages: torch.Tensor | None
    """int64, the pages of past and chunk together; None where the chunk is the sequence's first."""
    total: int
    """Past and chunk, in tokens."""
    mask: torch.Tensor | None
    """[chunk, total]; None without a past."""


class PackedPrefill:
    """Chunks of several sequences, one after the other in a batch of one row."""

    def __init__(
        self, reader: PageReader, q_lens: list[int], starts: list[int], pages: list[npt.NDArray[np.int32]]
    ) -> None:
        """``q_lens``, ``starts``: tokens of each chunk and before it; ``pages``: what each sequence owns, in order."""
        self._reader = reader
        self._segments: list[Segment] = []
        begin = 0
        for length, start, owned in zip(q_lens, starts, pages, strict=True):
            self._segments.append(self._segment(begin, length, start, owned))
            begin += length

    def _segment(self, begin: int, length: int, start: int, owned: npt.NDArray[np.int32]) -> Segment:
        total = start + length
        if start == 0:
            return Segment(begin, begin + length, None, total, None)
        used = owned[: -(-total // self._reader.page_size)].astype(np.int64)
        later = np.arange(total) > np.arange(start, total)[:, None]
        return Segment(
            begin, begin + length, torch.from_numpy(used).to(self._reader.device), total, self._reader.blocked(later)
        )

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        parts = [self._attend_one(segment, layer, query, key, value, scaling) for segment in self._segments]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 2)).transpose(1, 2)

    def _attend_one(
        self, s: Segment, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        query = query[:, :, s.begin : s.end]
        if s.pages is None:
            key, value = key[:, :, s.begin : s.end], value[:, :, s.begin : s.end]
        else:
            rows = self._reader.read(layer, s.pages)[: s.total]
            key, value = rows[None, :, 0].transpose(1, 2), rows[None, :, 1].transpose(1, 2)
        return scaled_dot_product_attention(
            query, key, value, attn_mask=s.mask, is_causal=s.mask is None, scale=scaling, enable_gqa=True
        )


class BatchedDecode:
    """One token of each of several sequences, as a rectangle as wide as the longest of them needs."""

    def __init__(self, reader: PageReader, page_table: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]) -> None:
        """``page_table`` [batch, ≥ pages needed], ``lengths`` [batch], both counting the new token.

        Table entries past a row's length may hold anything (S58): they are replaced by the row's own first page, so
        that no other sequence's page is read.
        """
        self._reader = reader
        needed = -(-lengths // reader.page_size)
        width = int(needed.max())
        table = np.where(np.arange(width) < needed[:, None], page_table[:, :width], page_table[:, :1])
        self._pages = torch.from_numpy(table.reshape(-1).astype(np.int64)).to(reader.device)
        self._mask = reader.blocked(np.arange(width * reader.page_size) >= lengths[:, None])[:, None, None]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        batch, heads, _, dim = query.shape
        rows = self._reader.read(layer, self._pages)
        rows = rows.view(batch, -1, *rows.shape[1:])
        kv_heads = rows.shape[3]
        # The heads that share a K/V head become the query length: no copy of K/V per head, and many times the speed
        # of `enable_gqa` in bfloat16 on CPU.
        attended = scaled_dot_product_attention(
            query.view(batch, kv_heads, heads // kv_heads, dim),
            rows[:, :, 0].transpose(1, 2),
            rows[:, :, 1].transpose(1, 2),
            attn_mask=self._mask,
            scale=scaling,
        )
        return attended.reshape(batch, 1, heads, dim)
