"""What a model's cache looks like in memory: named buffers, each one row per token and one item per page.

A buffer belongs to a component ("kv", later "index" and "draft") and a logical layer id; the two sides match their
buffers by (component, layer), never by position or count (S13, S35).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.errors import LayoutMismatch
from shared.protocol.messages import Region

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
KV = "kv"
META = "meta"

SOURCE_CONTRACT = 2
"""S45: bump whenever layout, placement, plan or the cache's rows change meaning; two builds pair only if equal."""

MAX_TOP_LOGPROBS = 20
META_ROW = np.dtype(
    [
        ("room", "<u8"),
        ("ticket", "<u8"),
        ("token", "<i4"),
        ("logprob", "<f4"),
        ("top", "<u8"),
        ("top_ids", "<i4", MAX_TOP_LOGPROBS),
        ("top_logprobs", "<f4", MAX_TOP_LOGPROBS),
        ("reserved", "<u8", 8),
    ]
)
"""One metadata slot: written by prefill through the data plane after all KV, read once by decode's prebuilt step."""


@dataclass(frozen=True)
class Buffer:
    """One layer's storage of one component: a tensor ``[pages, page_size, *row_shape]``."""

    component: str
    layer: int
    row_shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """All buffers of a model at one page size, in transfer order."""

    page_size: int
    buffers: tuple[Buffer, ...]

    def item_bytes(self, buffer: Buffer) -> int:
        """Bytes of one page of one buffer."""
        return buffer.row_bytes * self.page_size

    def page_bytes_by_component(self) -> dict[str, int]:
        """Σ item bytes over a component's layers: what one page position costs (S32, S67)."""
        totals: dict[str, int] = {}
        for buffer in self.buffers:
            totals[buffer.component] = totals.get(buffer.component, 0) + self.item_bytes(buffer)
        return totals

    @property
    def token_bytes(self) -> int:
        """Cache bytes per token over all buffers."""
        return sum(buffer.row_bytes for buffer in self.buffers)

    def pages_for(self, tokens: int) -> int:
        """ceil(tokens / page_size); the last page may be partly filled (S9)."""
        return -(-tokens // self.page_size)

    def fingerprint(self) -> dict[str, str]:
        """The layout's share of S45's fingerprint. Layer ids are listed, so that a missing layer has a name."""
        fields = {"page_size": str(self.page_size), "source_contract": str(SOURCE_CONTRACT)}
        for component in dict.fromkeys(b.component for b in self.buffers):
            mine = [b for b in self.buffers if b.component == component]
            fields[f"{component}_layers"] = ",".join(str(b.layer) for b in mine)
            fields[f"{component}_rows"] = ";".join(dict.fromkeys(f"{b.row_shape}:{b.dtype}" for b in mine))
        return fields


def check_regions(layout: Layout, regions: list[Region], meta_rows: int) -> None:
    """Are these regions what a peer of this layout must register? Raises LayoutMismatch naming the first difference."""
    wanted = [(b.component, b.layer, layout.item_bytes(b)) for b in layout.buffers] + [(META, 0, META_ROW.itemsize)]
    got = [(r.component, r.layer, r.item_bytes) for r in regions]
    if len(got) != len(wanted):
        raise LayoutMismatch(f"expected {len(wanted)} regions, got {len(got)}")
    for want, have in zip(wanted, got, strict=True):
        if want != have:
            raise LayoutMismatch(f"expected region (component, layer, item bytes) {want}, got {have}")
    if regions[-1].items < meta_rows:
        raise LayoutMismatch(f"expected at least {meta_rows} metadata rows, got {regions[-1].items}")


TopLogprobs = Sequence[tuple[int, float]]
"""Likeliest tokens with their log-probabilities, likeliest first; at most MAX_TOP_LOGPROBS."""


def meta_row(room: int, ticket: int, token: int, logprob: float, top: TopLogprobs = ()) -> npt.NDArray[np.void]:
    """One filled metadata row, shape [1]."""
    row = np.zeros(1, META_ROW)
    row["room"], row["ticket"], row["token"], row["logprob"], row["top"] = room, ticket, token, logprob, len(top)
    for i, (likely, value) in enumerate(top):
        row["top_ids"][0, i], row["top_logprobs"][0, i] = likely, value
    return row


def first_token(row: np.void) -> tuple[int, float, list[tuple[int, float]]]:
    """A row's token, its log-probability, and the likeliest tokens with theirs."""
    count = min(int(row["top"]), MAX_TOP_LOGPROBS)
    top = list(zip(row["top_ids"][:count].tolist(), row["top_logprobs"][:count].tolist(), strict=True))
    return int(row["token"]), float(row["logprob"]), top
