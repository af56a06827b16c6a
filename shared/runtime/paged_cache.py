"""A transformers ``Cache`` that keeps no rows of its own: it writes them into the pool's pages."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache

from shared.kv.layout import KV
from shared.kv.pool import KVPool

LayerCallback = Callable[[int], None]


class PagedCache(Cache):  # type: ignore[misc]  # transformers is Any here
    """``slots`` and ``on_layer`` are set anew for each forward, by the one thread that runs forwards."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(layers=[])
        self._rows = {b.layer: pool.pages(KV, b.layer).flatten(0, 1) for b in pool.layout.buffers if b.component == KV}
        """Per layer a view [num_pages · page_size, 2, kv heads, head dim]."""
        self.slots: torch.Tensor
        """int64 [tokens]: the row that each token of this forward is written to: page · page_size + offset."""
        self.on_layer: LayerCallback | None = None
        """Called with the layer once its rows are written: final on CPU, ordered by the current stream on CUDA."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V of shape [batch, kv heads, length, head dim]; they are returned as they are.

        NaN and infinity are stored as 0. A request that has them is lost either way, but its pages are used again, and
        NaN · 0 is NaN: through rows that attention masks out it would reach the next owner's answer.
        """
        rows = torch.stack((key_states.transpose(1, 2).flatten(0, 1), value_states.transpose(1, 2).flatten(0, 1)), 1)
        self._rows[layer_idx].index_copy_(0, self.slots, rows.nan_to_num_(0.0, 0.0, 0.0))
        if self.on_layer is not None:
            self.on_layer(layer_idx)
        return key_states, value_states
