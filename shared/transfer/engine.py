"""The contract of a transfer engine: one-sided writes into memory that another process has registered.

Both implementations (``mooncake_engine``, ``memory_engine``) pass the same contract tests. All calls are thread-safe
with respect to other engines; one engine is used by one thread at a time. Nothing here may be called on an event loop
except through an executor: ``wait`` and ``retire`` block.

Rules that callers rely on:
- ``wait`` returns only when every byte of the batch is visible to the target process.
- After ``TransferFailed`` bytes may still be read from the source and written to the target. ``retire`` of the sending
  engine ends the reading, so that the source's pages are free; bytes that have left it may lie in the receiver's socket
  buffers and land later. Only ``retire`` of the receiving engine ends that.
- ``retire`` of a *receiving* engine ends every write through its session, whoever sends it, and returns when no
  further byte can land.
"""

from dataclasses import dataclass
from typing import NewType, Protocol

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.int64]
Batch = NewType("Batch", int)


@dataclass(frozen=True)
class Blocks:
    """Byte ranges to copy: ``src[i] … src[i]+length[i]`` → ``dst[i] … dst[i]+length[i]``; arrays of shape [blocks]."""

    src: Addresses
    dst: Addresses
    length: Addresses

    @property
    def total_bytes(self) -> int:
        return int(self.length.sum())

    def __len__(self) -> int:
        return len(self.length)


class TransferEngine(Protocol):
    @property
    def session(self) -> str:
        """What a writer names to reach memory registered with this engine; never reused by a later engine."""
        ...

    def register(self, base: int, length_bytes: int) -> None:
        """Make ``base … base+length_bytes`` a legal source, and a legal target for those who know the session.

        Raises TransferFailed naming address, length and what the library said.
        """
        ...

    def contact(self, session: str) -> None:
        """Meet that session's host, so that a later ``submit`` has not to: writes nothing. Blocks for as long as the
        host stands still. Raises TransferFailed if it is not there, ValueError without a registered source."""
        ...

    def submit(self, session: str, blocks: Blocks) -> Batch:
        """Start writing; does not wait for the data. Waits for room while too many blocks are outstanding.

        Raises ValueError for empty blocks, unequal lengths or unregistered sources, TransferFailed if refused.
        """
        ...

    def wait(self, batch: Batch) -> None:
        """Block until the batch has ended, without spinning a core. Each batch is waited for exactly once.

        Raises TransferFailed (see above), ValueError for a batch that is unknown or was waited for already.
        """
        ...

    def interrupt(self) -> None:
        """From any thread: whatever waits, and every later ``contact``, ``submit`` and ``wait``, raises TransferFailed
        at once. What was submitted may go on until ``retire``."""
        ...

    def retire(self) -> None:
        """Unregister and destroy; idempotent. Takes up to about a second. No byte moves through it afterwards."""
        ...
