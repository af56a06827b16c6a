"""Where a page lives: the arithmetic of logical pages, ranks and positions (S1–S3, S5, S7, S10). Pure.

``ranks`` is N, the number of prefill context-parallel ranks. Pages are int32 arrays; positions count from a request's
first page.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]
Positions = npt.NDArray[np.int64]


def owner(page: int, ranks: int) -> tuple[int, int]:
    """S1: logical page → (rank, physical page in that rank's pool). A bijection that depends on the page id alone."""
    return page % ranks, page // ranks


def physical_slot(slot: int, ranks: int, page_size: int) -> tuple[int, int]:
    """S2: token slot → (rank, slot in that rank's pool)."""
    page, offset = divmod(slot, page_size)
    rank, physical = owner(page, ranks)
    return rank, physical * page_size + offset


def capacity_pages(pages_per_rank: int, ranks: int) -> int:
    """S3: what the scheduler may hand out: N × the pages of one rank."""
    return pages_per_rank * ranks


def owned(pages: Pages, chunk_page_start: int, rank: int, ranks: int) -> tuple[Pages, Positions]:
    """S5: a chunk's logical pages ``[pages]`` in order → (physical pages that ``rank`` owns, their absolute positions),
    same order, equal lengths, perhaps empty."""
    if ranks == 1:
        return pages, np.arange(chunk_page_start, chunk_page_start + len(pages))
    mine = np.flatnonzero(pages % ranks == rank)
    return (pages[mine] // ranks).astype(np.int32), mine + chunk_page_start


def share(pages: Pages, rank: int, ranks: int) -> tuple[Pages, Positions]:
    """S6: where every rank holds all of a request's pages ``[pages]``, → (those that ``rank`` sends, their positions):
    ranges of the positions, the first ``len mod ranks`` of them one longer. The pages' values play no part."""
    size, longer = divmod(len(pages), ranks)
    first = rank * size + min(rank, longer)
    end = first + size + (rank < longer)
    return pages[first:end], np.arange(first, end)


class SendRange(NamedTuple):
    """Tokens ``start`` … ``end`` are sent now; the next range starts at ``end``."""

    start: int
    end: int


def send_range(start_send_idx: int, end: int, last: bool, page_size: int) -> SendRange:
    """S10: unless it is the last, a chunk is sent up to a page boundary, and the rest rides with the next one."""
    return SendRange(start_send_idx, end if last else max(start_send_idx, end // page_size * page_size))


def destinations(dst_pages: Pages, dst_first_position: int, positions: Positions) -> Pages:
    """S7: the page at position p goes to ``dst[p]``, whatever chunk it is in. ``dst_pages`` ``[n]`` are the pages from
    ``dst_first_position`` on. Raises ValueError for a position before it (decode's own page) or past the end."""
    index = positions - dst_first_position
    if index.size and (index.min() < 0 or index.max() >= len(dst_pages)):
        raise ValueError(
            f"positions {positions.min()} … {positions.max()} are not all in the destination's "
            f"{dst_first_position} … {dst_first_position + len(dst_pages) - 1}"
        )
    return dst_pages[index]
