"""A transfer engine within one process, over real addresses: Mooncake's contract, and faults on demand.

By default a batch lands when it is submitted. Faults are planned on the network: a refused submit, a batch that fails
with bytes of it still to land, a batch that hangs. A stalled or failed batch's blocks land when a test says so
(``land``), as a real engine's do when a stopped peer goes on.
"""

import ctypes
import threading
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from shared.errors import TransferFailed
from shared.transfer.engine import Batch, Blocks

Fault = Literal["refuse", "fail", "hang"]


@dataclass
class _Move:
    """One submitted batch: blocks ``landed`` … are still to be copied."""

    sender: "MemoryEngine"
    session: str
    blocks: list[tuple[int, int, int]]
    landed: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    error: str | None = None


class MemoryNetwork:
    """Every engine of a test, by session. ``faults`` are taken by the next submits, one each, first come."""

    def __init__(self) -> None:
        self.faults: deque[Fault] = deque()
        self.engines: dict[str, MemoryEngine] = {}
        self.moves: list[_Move] = []
        """Batches with bytes still to land: failed ones and hanging ones."""
        self._lock = threading.Lock()
        self._sessions = count(1)

    def new_session(self) -> str:
        return f"memory:{next(self._sessions)}"

    def land(self, blocks: int | None = None) -> int:
        """The next so many blocks (None: all) of what is still to land reach memory, if both engines are there.
        Returns how many did. Hanging batches that are whole then end well."""
        done = 0
        with self._lock:
            for move in list(self.moves):
                while move.landed < len(move.blocks) and (blocks is None or done < blocks):
                    self._copy(move)
                    done += 1
                if move.landed == len(move.blocks):
                    self.moves.remove(move)
                    move.ended.set()
        return done

    def start(self, move: _Move) -> None:
        """Take a submitted batch. Raises TransferFailed where it is refused."""
        with self._lock:
            fault = self.faults.popleft() if self.faults else None
            if fault == "refuse":
                raise TransferFailed(f"refused a batch of {len(move.blocks)} blocks to {move.session}")
            if fault is not None:
                self._copy(move)  # the first block lands before anybody hears of a fault
                self.moves.append(move)
                if fault == "fail":
                    move.error = "failed on demand"
                    move.ended.set()
                return
            while move.landed < len(move.blocks) and move.error is None:
                self._copy(move)
            move.ended.set()

    def retire(self, engine: "MemoryEngine") -> None:
        """From here on nothing moves through it, in either direction; who waits for a batch hears that it failed."""
        with self._lock:
            self.engines.pop(engine.session, None)
            for move in [m for m in self.moves if engine.session in (m.session, m.sender.session)]:
                self.moves.remove(move)
                move.error = move.error or "an engine was retired"
                move.ended.set()

    def interrupt(self, engine: "MemoryEngine") -> None:
        """Who waits for a batch of its hears that it failed; the bytes may still land."""
        with self._lock:
            for move in [m for m in self.moves if m.sender is engine]:
                move.error = move.error or "interrupted"
                move.ended.set()

    def _copy(self, move: _Move) -> None:
        src, dst, length = move.blocks[move.landed]
        move.landed += 1
        target = self.engines.get(move.session)
        if target is None or not target.holds(dst, length):
            move.error = f"{move.session} has no {length} bytes at {dst:#x}"
        elif move.sender.session in self.engines:
            ctypes.memmove(dst, src, length)


class MemoryEngine:
    """One engine on a network. ``retire`` it, or it stays reachable."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.session = network.new_session()
        self._network = network
        self._regions: list[tuple[int, int]] = []
        self._moves: dict[Batch, _Move] = {}
        self._ids = count(1)
        self._interrupted = False
        network.engines[self.session] = self

    def holds(self, base: int, length_bytes: int) -> bool:
        return any(start <= base and base + length_bytes <= start + size for start, size in self._regions)

    def register(self, base: int, length_bytes: int) -> None:
        self._alive()
        if base <= 0 or length_bytes <= 0:
            raise ValueError(f"cannot register {length_bytes} bytes at {base:#x}")
        if any(base < start + size and start < base + length_bytes for start, size in self._regions):
            raise TransferFailed(f"cannot register {length_bytes} bytes at {base:#x}: they overlap a region")
        self._regions.append((base, length_bytes))

    def contact(self, session: str) -> None:
        self._alive()
        self._check_interrupted()
        if not self._regions:
            raise ValueError("no source is registered")
        if session not in self._network.engines:
            raise TransferFailed(f"{session} is not there")

    def submit(self, session: str, blocks: Blocks) -> Batch:
        self._alive()
        self._check_interrupted()
        if not len(blocks) or not len(blocks.src) == len(blocks.dst) == len(blocks.length):
            raise ValueError(f"{len(blocks.src)} sources, {len(blocks.dst)} targets, {len(blocks.length)} lengths")
        if blocks.length.min() <= 0:
            raise ValueError(f"a block of {blocks.length.min()} bytes")
        triples = list(zip(blocks.src.tolist(), blocks.dst.tolist(), blocks.length.tolist(), strict=True))
        for src, _, length in triples:
            if not self.holds(src, length):
                raise ValueError(f"source {src:#x} + {length} bytes is not registered")
        move = _Move(self, session, triples)
        self._network.start(move)
        batch = Batch(next(self._ids))
        self._moves[batch] = move
        return batch

    def wait(self, batch: Batch) -> None:
        move = self._moves.pop(batch, None)
        if move is None:
            raise ValueError(f"batch {batch} is unknown, or was waited for already")
        self._check_interrupted()
        move.ended.wait()
        if move.error is not None:
            raise TransferFailed(f"a batch of {len(move.blocks)} blocks failed: {move.error}")

    def interrupt(self) -> None:
        self._interrupted = True
        self._network.interrupt(self)

    def retire(self) -> None:
        self._network.retire(self)
        self._regions.clear()

    def _check_interrupted(self) -> None:
        if self._interrupted:
            raise TransferFailed(f"engine {self.session} was interrupted")

    def _alive(self) -> None:
        if self._network.engines.get(self.session) is not self:
            raise ValueError(f"engine {self.session} is retired")
