"""A fingerprint of what pages hold, the same on both sides whatever pages the rows lie in and however ranks share them.

Each (component, layer, position) is hashed by itself and the hashes are added up, so that ranks that hold different
positions can each compute their part. Only rows of the prompt count: what lies behind them in the last page may differ.
"""

import struct
from collections.abc import Callable
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from shared.kv.layout import Layout
from shared.kv.pages import Pages
from shared.kv.placement import Positions

MODULUS = 1 << 64

Read = Callable[[str, int, Pages], npt.NDArray[np.uint8]]
"""(component, layer, pages ``[n]``) → their bytes ``[n, item bytes]``."""


def digest(layout: Layout, read: Read, pages: Pages, positions: Positions, tokens: int) -> int:
    """Of the rows of tokens 0 … ``tokens`` - 1 that lie in ``pages`` ``[n]``, at page ``positions`` ``[n]`` of their
    request. In 0 … 2**64 - 1; parts of one request add up modulo 2**64."""
    total = 0
    for buffer in layout.buffers:
        content = read(buffer.component, buffer.layer, pages)
        for position, page in zip(positions.tolist(), content, strict=True):
            rows = min(layout.page_size, tokens - position * layout.page_size)
            where = struct.pack("<8sII", buffer.component.encode(), buffer.layer, position)
            hashed = blake2b(page[: max(0, rows) * buffer.row_bytes].data, digest_size=8, person=where).digest()
            total += int.from_bytes(hashed, "little")
    return total % MODULUS
