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
    cuts = np.flatnonzero((np.diff(source) != 1) | (np.diff(destination) != 1)) + 1
    starts = np.concatenate(([0], cuts))
    length = np.diff(np.concatenate((starts, [len(source)])))
    return Runs(source[starts].astype(np.int64), destination[starts].astype(np.int64), length)


def blocks_for(runs: Runs, source: Sequence[Region], destination: Sequence[Region]) -> Blocks:
    """S13: the runs on every source region, layer after layer: ``[regions · runs]`` blocks.

    A source region is matched to the destination region of the same component and layer, so a sender may pass only
    the layers that it holds or that are due. Raises LayoutMismatch where there is no such region or its items have
    another size, DestinationRefused where a run leaves a region.
    """
    by_layer = {(r.component, r.layer): r for r in destination}
    src_span, dst_span = _span(runs.src, runs.length), _span(runs.dst, runs.length)
    pairs = []
    for src in source:
        dst = by_layer.get((src.component, src.layer))
        if dst is None or dst.item_bytes != src.item_bytes:
            got = "nothing" if dst is None else f"items of {dst.item_bytes} bytes"
            raise LayoutMismatch(
                f"{src.component} layer {src.layer}: expected items of {src.item_bytes} bytes, destination has {got}"
            )
        _check_bounds("source", src, src_span)
        _check_bounds("destination", dst, dst_span)
        pairs.append((src.base, dst.base, src.item_bytes))
    bases = np.array(pairs, np.int64).reshape(-1, 3)
    item = bases[:, 2:]
    return Blocks(
        (bases[:, :1] + runs.src * item).ravel(),
        (bases[:, 1:2] + runs.dst * item).ravel(),
        (runs.length * item).ravel(),
    )


def row_block(source: Region, src_row: int, destination: Region, dst_row: int) -> Blocks:
    """One metadata row, as a batch of its own."""
    run = Runs(np.array([src_row]), np.array([dst_row]), np.array([1]))
    return blocks_for(run, [source], [destination])


def _span(first: npt.NDArray[np.int64], length: npt.NDArray[np.int64]) -> tuple[int, int]:
    """(smallest item, one past the largest)."""
    return (int(first.min()), int((first + length).max())) if len(first) else (0, 0)


def _check_bounds(side: str, region: Region, span: tuple[int, int]) -> None:
    if span[0] < 0 or span[1] > region.items:
        raise DestinationRefused(
            f"{side} {region.component} layer {region.layer} has items 0 … {region.items - 1}, "
            f"asked for {span[0]} … {span[1] - 1}"
        )
    if not 0 < region.base < _MAX_ADDRESS - region.items * region.item_bytes:
        raise DestinationRefused(
            f"{side} {region.component} layer {region.layer}: {region.items} items of {region.item_bytes} bytes from "
            f"{region.base:#x} on are no range of addresses"
        )


def coverage(rank: int, positions: npt.ArrayLike, regions: Sequence[Region], digest: int | None = None) -> Coverage:
    """S67: what a rank says that it has written: ``[n]`` absolute positions, on each of the regions that it sent."""
    count = len(np.asarray(positions))
    sent: dict[str, int] = {}
    for region in regions:
        sent[region.component] = sent.get(region.component, 0) + count * region.item_bytes
    return Coverage(rank, pack_int32(positions), sent, digest)


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
