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
_STRETCH = 4096


class PageAllocator:
    """``num_pages`` pages, padding included. Prefers contiguous runs: a run of pages is one block on the wire."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages (one is padding), got {num_pages}")
        self._state = np.full(num_pages, _FREE, np.uint8)
        self._state[0] = _HELD
        self._free = num_pages - 1
        self._quarantined = 0
        self._lowest = 1
        """No free page lies below it."""

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
        """``[count]`` ascending pages, or None where so many are not free (nothing changes then).

        The lowest run of ``count`` free pages if there is one, else the ``count`` lowest free pages (S50's rule).
        """
        if count > self._free:
            return None
        pages = self._find(count)
        self._state[pages] = _HELD
        self._free -= count
        if count and pages[0] == self._lowest:
            self._lowest = int(pages[-1]) + 1 if pages[-1] - pages[0] == count - 1 else self._lowest + 1
        return pages

    def _find(self, count: int) -> Pages:
        """Looks at a stretch of the pool first, then at ever longer ones: a run is mostly near (S63)."""
        length, end = max(_STRETCH, 2 * count), 0
        while end < len(self._state):
            end = min(len(self._state), self._lowest + length)
            free = np.flatnonzero(self._state[self._lowest : end] == _FREE) + self._lowest
            if count and len(free) >= count:
                in_a_row = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
                if in_a_row.size:
                    return free[in_a_row[0] :][:count].astype(np.int32)
            length *= 8
        return free[:count].astype(np.int32)

    def quarantine(self, pages: Pages) -> None:
        """Owned pages → owned and marked. Raises IntegrityError where one is free or marked already."""
        self._require(pages, self._state[pages] == _HELD, "quarantined")
        self._state[pages] = _QUARANTINED
        self._quarantined += len(pages)

    def release(self, pages: Pages) -> None:
        """Owned or quarantined pages → free. Raises IntegrityError on a double release."""
        states = self._state[pages]
        self._require(pages, states != _FREE, "released")
        self._quarantined -= int(np.count_nonzero(states == _QUARANTINED))
        self._state[pages] = _FREE
        self._free += len(pages)
        if len(pages):
            self._lowest = min(self._lowest, int(pages.min()))

    @staticmethod
    def _require(pages: Pages, legal: npt.NDArray[np.bool_], verb: str) -> None:
        distinct = bool((pages[1:] > pages[:-1]).all()) or len(np.unique(pages)) == len(pages)
        if not distinct or not legal.all() or not pages.all():
            wrong = pages[~legal | (pages == 0)]
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
