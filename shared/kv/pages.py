"""Who owns which page. Page 0 is padding (S1) and never given out.

Hand-over sentence: ``allocate`` gives pages to the caller alone; from then on exactly one lease or sender owns them
until it calls ``release`` once. ``quarantine`` marks owned pages that a foreign writer may still write to; they stay
owned, are counted and shown, and go back only by ``release``, which their owner calls on proof (S66).
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from shared.errors import IntegrityError

Pages = npt.NDArray[np.int32]

_FREE, _HELD, _QUARANTINED = 0, 1, 2


class PageAllocator:
    """``num_pages`` pages, padding included. Prefers contiguous runs: a run of pages is one block on the wire."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages (one is padding), got {num_pages}")
        self._state = np.full(num_pages, _FREE, np.uint8)
        self._state[0] = _HELD
        self._free = num_pages - 1
        self._quarantined = 0

    @property
    def usable_pages(self) -> int:
        return len(self._state) - 1

    @property
    def free_pages(self) -> int:
        return self._free

    @property
    def quarantined_pages(self) -> int:
        return self._quarantined

    def allocate(self, count: int) -> Pages | None:
        """``[count]`` pages, or None where so many are not free (nothing changes then).

        The lowest run of ``count`` free pages if there is one, else the ``count`` lowest free pages (S50's rule).
        """
        if count > self._free:
            return None
        free = np.flatnonzero(self._state == _FREE)
        start = 0
        if count:
            in_a_row = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
            start = int(in_a_row[0]) if in_a_row.size else 0
        pages = free[start : start + count].astype(np.int32)
        self._state[pages] = _HELD
        self._free -= count
        return pages

    def quarantine(self, pages: Pages) -> None:
        """Owned pages → owned and marked. Raises IntegrityError where one is free or marked already."""
        self._require(pages, (_HELD,), "quarantined")
        self._state[pages] = _QUARANTINED
        self._quarantined += len(pages)

    def release(self, pages: Pages) -> None:
        """Owned or quarantined pages → free. Raises IntegrityError on a double release."""
        self._require(pages, (_HELD, _QUARANTINED), "released")
        self._quarantined -= int((self._state[pages] == _QUARANTINED).sum())
        self._state[pages] = _FREE
        self._free += len(pages)

    def _require(self, pages: Pages, states: tuple[int, ...], verb: str) -> None:
        wrong = pages[~np.isin(self._state[pages], states) | (pages == 0)] if len(pages) else pages
        if len(wrong) or len(np.unique(pages)) != len(pages):
            raise IntegrityError(
                f"pages {wrong[:8].tolist()} of {pages[:8].tolist()}… cannot be {verb}: not owned, or twice"
            )

    def check_integrity(self, owned: Iterable[Pages], quarantined: Iterable[Pages] = ()) -> None:
        """Do these lists, together and disjoint, explain every page that is not free? Raises IntegrityError if not."""
        expected = np.full(len(self._state), _FREE, np.uint8)
        expected[0] = _HELD
        for lists, mark in ((owned, _HELD), (quarantined, _QUARANTINED)):
            for pages in lists:
                if (expected[pages] != _FREE).any():
                    raise IntegrityError(f"pages {pages[:8].tolist()}… have two owners")
                expected[pages] = mark
        if (wrong := np.flatnonzero(expected != self._state)).size:
            raise IntegrityError(
                f"{wrong.size} pages not as their owners say (0 free, 1 held, 2 quarantined), "
                f"the first {(first := wrong[:8]).tolist()}: "
                f"book {self._state[first].tolist()}, owners {expected[first].tolist()}"
            )
        if self._free != int((self._state == _FREE).sum()) or self._quarantined != int(
            (self._state == _QUARANTINED).sum()
        ):
            raise IntegrityError(
                f"counters say {self._free} free, {self._quarantined} quarantined; the pages say otherwise"
            )
