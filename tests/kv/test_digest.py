"""The digest is of what the rows hold: not of where they lie, nor of who holds them."""

import numpy as np
import numpy.typing as npt
import pytest

from shared.kv.digest import MODULUS, digest
from shared.kv.layout import Buffer, Layout

LAYOUT = Layout(4, (Buffer("kv", 0, (3,), "uint8"), Buffer("kv", 5, (3,), "uint8"), Buffer("index", 5, (1,), "uint8")))
TOKENS = 14


class Memory:
    """``pages`` pages of noise, with one request's content in the chosen ones."""

    def __init__(self, seed: int, chosen: list[int]) -> None:
        noise, content = np.random.default_rng(seed), np.random.default_rng(0)
        self.chosen = np.array(chosen, np.int32)
        self.data = {}
        for b in LAYOUT.buffers:
            self.data[b.component, b.layer] = noise.integers(0, 256, (32, LAYOUT.item_bytes(b)), np.uint8)
            rows = content.integers(0, 256, (TOKENS, b.row_bytes), np.uint8)
            for token, row in enumerate(rows):
                page, offset = divmod(token, 4)
                start = offset * b.row_bytes
                self.data[b.component, b.layer][chosen[page], start : start + b.row_bytes] = row

    def read(self, component: str, layer: int, pages: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        content: npt.NDArray[np.uint8] = self.data[component, layer][pages]
        return content

    def digest(self, positions: list[int] | None = None) -> int:
        at = np.arange(4) if positions is None else np.array(positions, np.int64)
        return digest(LAYOUT, self.read, self.chosen[at], at, TOKENS)


def test_equal_content_in_other_pages_with_another_tail_is_equal() -> None:
    assert Memory(1, [3, 4, 5, 6]).digest() == Memory(2, [30, 9, 1, 17]).digest()


@pytest.mark.parametrize("split", [[[0, 2], [1, 3]], [[0, 1, 2, 3], []], [[3], [2], [1], [0]]])
def test_parts_of_ranks_add_up(split: list[list[int]]) -> None:
    memory = Memory(1, [3, 4, 5, 6])
    assert sum(memory.digest(part) for part in split) % MODULUS == memory.digest()


def test_every_byte_of_every_row_counts() -> None:
    memory = Memory(1, [3, 4, 5, 6])
    whole = memory.digest()
    for b in LAYOUT.buffers:
        for page in range(4):
            rows = min(4, TOKENS - 4 * page)
            for byte in range(LAYOUT.item_bytes(b)):
                content = memory.data[b.component, b.layer][memory.chosen[page]]
                content[byte] ^= 1
                assert (memory.digest() != whole) == (byte < rows * b.row_bytes)
                content[byte] ^= 1


def test_pages_and_layers_that_change_places_are_noticed() -> None:
    memory = Memory(1, [3, 4, 5, 6])
    swapped = Memory(1, [3, 4, 5, 6])
    swapped.chosen = swapped.chosen[[1, 0, 2, 3]]
    layers = Memory(1, [3, 4, 5, 6])
    layers.data["kv", 0], layers.data["kv", 5] = layers.data["kv", 5], layers.data["kv", 0]
    assert len({memory.digest(), swapped.digest(), layers.digest()}) == 3
