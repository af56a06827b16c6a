"""From page lists to byte ranges, and what was sent to what was asked for. Pure; loops over layers and ranks only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.errors import DestinationRefused, LayoutMismatch, PageCountMismatch
from shared.protocol.messages import Coverage, Region, pack_int32, unpack_int32
from shared.transfer.engine import Blocks

Pages = npt.NDArray[np.int32]

_SHOWN = 8
_FIRST = np.zeros(1, np.int64)
_MAX_ADDRESS = 1 << 63


@dataclass(frozen=True)
class Runs:
    """Maximal stretches in which source and destination both rise by one: arrays of shape ``[runs]``."""

    src: npt.NDArray[np.int64]
    dst: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]


def check_page_count(room: int, rank: int, source: Pages, destination: Pages) -> None:
    """S8: as many source as destination pages, or nothing is sent. Raises PageCountMismatch."""
    if len(source) != len(destination):
        raise PageCountMismatch(
            f"room {room} rank {rank}: {len(source)} source pages for {len(destination)} destination pages; "
            f"source {summary(source)}, destination {summary(destination)}"
        )


def summary(pages: Pages) -> str:
    """A page list in one short line: its length and at most eight ids at each end."""
    if len(pages) <= 2 * _SHOWN:
        return f"{len(pages)}:{pages.tolist()}"
    head, tail = pages[:_SHOWN].tolist(), pages[-_SHOWN:].tolist()
    return f"{len(pages)}:[{', '.join(map(str, head))} … {', '.join(map(str, tail))}]"


def runs_of(source: Pages, destination: Pages) -> Runs:
    """S12: cut both lists wherever either does not rise by one. Raises ValueError for unequal lengths."""
    if len(source) != len(destination):
        raise ValueError(f"{len(source)} source pages, {len(destination)} destination pages")
    if not len(source):
        empty = np.zeros(0, np.int64)
        return Runs(empty, empty, empty)
    broken = (source[1:] - source[:-1] != 1) | (destination[1:] - destination[:-1] != 1)
    starts = np.concatenate((_FIRST, broken.nonzero()[0] + 1))
    length = np.empty_like(starts)
    length[:-1], length[-1] = starts[1:] - starts[:-1], len(source) - starts[-1]
    return Runs(source[starts].astype(np.int64), destination[starts].astype(np.int64), length)


@dataclass(frozen=True)
class Pairing:
    """Regions of two sides matched by component and layer: ``bases`` is [regions, 3], source base, destination base and
    item bytes of each; the items are what the smallest region on each side has."""

    bases: npt.NDArray[np.int64]
    src_items: int
    dst_items: int

    def check(self, runs: Runs) -> Runs:
        """Once a chunk: the same runs. Raises DestinationRefused where one leaves a region."""
        for side, items, first in (("source", self.src_items, runs.src), ("destination", self.dst_items, runs.dst)):
            if len(first) and (first.min() < 0 or (first + runs.length).max() > items):
                raise DestinationRefused(
                    f"the {side} has items 0 … {items - 1}, asked for {first.min()} … {(first + runs.length).max() - 1}"
                )
        return runs

    def blocks(self, runs: Runs, regions: slice | npt.NDArray[np.intp] = slice(None)) -> Blocks:
        """S13: the runs, which ``check`` has seen, on these regions, one region after the other: ``[regions · runs]``
        blocks."""
        bases = self.bases[regions]
        item = bases[:, 2:]
        return Blocks(
            (bases[:, :1] + runs.src * item).ravel(),
            (bases[:, 1:2] + runs.dst * item).ravel(),
            (runs.length * item).ravel(),
        )


def pair_regions(source: Sequence[Region], destination: Sequence[Region]) -> Pairing:
    """A source region is matched to the destination region of the same component and layer, so a sender may pass only
    the layers that it holds. Raises LayoutMismatch where there is no such region or its items have another size,
    DestinationRefused for one that is no range of addresses."""
    by_layer = {(r.component, r.layer): r for r in destination}
    bases = []
    for src in source:
        dst = by_layer.get((src.component, src.layer))
        if dst is None or dst.item_bytes != src.item_bytes:
            got = "nothing" if dst is None else f"items of {dst.item_bytes} bytes"
            raise LayoutMismatch(
                f"{src.component} layer {src.layer}: expected items of {src.item_bytes} bytes, destination has {got}"
            )
        for side, region in (("source", src), ("destination", dst)):
            _check_range(side, region)
        bases.append((src.base, dst.base, src.item_bytes))
    wanted = {(r.component, r.layer) for r in source}
    return Pairing(
        np.array(bases, np.int64).reshape(-1, 3),
        min((r.items for r in source), default=0),
        min((r.items for key, r in by_layer.items() if key in wanted), default=0),
    )


def blocks_for(runs: Runs, source: Sequence[Region], destination: Sequence[Region]) -> Blocks:
    """The runs on all of these regions, once; see ``pair_regions`` and ``Pairing.blocks``."""
    pairing = pair_regions(source, destination)
    return pairing.blocks(pairing.check(runs))


def one_item(source: int, destination: int) -> Runs:
    """A run of its own, such as a metadata row."""
    return Runs(np.array([source]), np.array([destination]), np.array([1]))


def _check_range(side: str, region: Region) -> None:
    if not 0 < region.base < _MAX_ADDRESS - region.items * region.item_bytes:
        raise DestinationRefused(
            f"{side} {region.component} layer {region.layer}: {region.items} items of {region.item_bytes} bytes from "
            f"{region.base:#x} on are no range of addresses"
        )


def coverage(
    rank: int, positions: npt.ArrayLike, regions: Sequence[Region], digest: int | None = None, write_s: float = 0.0
) -> Coverage:
    """S67: what a rank says that it has written: ``[n]`` absolute positions, on each of the regions that it sent."""
    count = len(np.asarray(positions))
    sent: dict[str, int] = {}
    for region in regions:
        sent[region.component] = sent.get(region.component, 0) + count * region.item_bytes
    return Coverage(rank, pack_int32(positions), sent, digest, write_s)


def check_coverage(
    parts: Sequence[Coverage], asked: npt.NDArray[np.int64], page_bytes: dict[str, int], ranks: int = 1
) -> str | None:
    """S67: do these parts prove exactly the asked positions ``[n]``, every layer of each? None, or what is wrong.

    ``page_bytes`` is Σ item bytes per component: positions alone would not see a missing layer.
    """
    if sorted(part.rank for part in parts) != list(range(ranks)):
        return f"expected one part from each of {ranks} ranks, got ranks {[part.rank for part in parts]}"
    for part in parts:
        if len(part.positions) % 4:
            return f"rank {part.rank} sent {len(part.positions)} bytes of positions"
        count = len(part.positions) // 4
        wanted = {name: count * size for name, size in page_bytes.items()}
        if part.bytes_by_component != wanted:
            return f"rank {part.rank} wrote {part.bytes_by_component} bytes for {count} positions, expected {wanted}"
    covered = np.sort(np.concatenate([unpack_int32(part.positions) for part in parts]))
    if not np.array_equal(covered, np.sort(asked)):
        return f"positions {summary(covered)} are covered, expected {summary(asked.astype(np.int32))}"
    return None
