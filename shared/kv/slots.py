"""Metadata slots (S41): a fixed number of rows, handed out in the order they came back, freed exactly once.

Hand-over sentence: ``take`` gives a slot to the caller alone until it calls ``free`` once. On decode the owner is the
lease until the prebuilt step has consumed the row (S42); on prefill it is the sender while its row is being written.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

from shared.errors import IntegrityError
from shared.kv.layout import META, META_ROW
from shared.protocol.messages import Region


class SlotPool:
    """``count`` rows of ``META_ROW``; the storage is one array that both the transfer engine and readers see."""

    def __init__(self, count: int) -> None:
        self.rows: npt.NDArray[np.void] = np.zeros(count, META_ROW)
        self._free = deque(range(count))
        self._taken: set[int] = set()

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """The slot that has been free the longest, zeroed; None where all are taken."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._taken.add(slot)
        self.rows[slot] = 0
        return slot

    def free(self, slot: int) -> None:
        """Raises IntegrityError where the slot is free already."""
        if slot not in self._taken:
            raise IntegrityError(f"slot {slot} freed twice")
        self._taken.remove(slot)
        self._free.append(slot)

    def region(self) -> Region:
        return Region(META, 0, self.rows.ctypes.data, META_ROW.itemsize, len(self.rows))

    def check_integrity(self, owned: set[int]) -> None:
        """Do the owners hold exactly the slots that are not free? Raises IntegrityError if not."""
        if owned != self._taken or len(self._free) + len(self._taken) != len(self.rows):
            raise IntegrityError(f"owners hold slots {sorted(owned)}, the pool gave out {sorted(self._taken)}")
