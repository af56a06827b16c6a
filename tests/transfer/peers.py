"""Other processes for tests of the real engine: one that can be written to, one that writes."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from shared.errors import TransferFailed
from shared.transfer.mooncake_engine import MooncakeEngine
from tests.transfer.test_contract import blocks, memory

START_S = 30


def receive(pipe: Connection, size: int) -> None:
    """Offers ``size`` bytes, and tells (session, address); ends with the pipe."""
    target = memory(size)
    engine = MooncakeEngine("127.0.0.1")
    engine.register(target.ctypes.data, size)
    pipe.send((engine.session, target.ctypes.data))
    with suppress(EOFError):
        pipe.recv()


def write_for_ever(pipe: Connection, session: str, target_base: int, size: int, value: int) -> None:
    """Writes ``value`` to the same memory over and over, whatever becomes of it; tells how often it landed."""
    source = np.full(size, value, np.uint8)
    engine = MooncakeEngine("127.0.0.1")
    engine.register(source.ctypes.data, size)
    pipe.send("ready")
    end_s = time.monotonic() + 30
    landed = 0
    while time.monotonic() < end_s and not pipe.poll():
        try:
            engine.wait(engine.submit(session, blocks(source, target_base, [(0, 0, size)])))
            landed += 1
        except TransferFailed:
            time.sleep(0.01)
    pipe.send(landed)


class Peer:
    """One such process. ``pause`` and ``go_on`` are SIGSTOP and SIGCONT."""

    def __init__(self, target: Any, *args: Any) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self.process = spawn.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()

    def hear(self) -> Any:
        assert self.pipe.poll(START_S)
        return self.pipe.recv()

    def pause(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)


@contextmanager
def peer(target: Any, *args: Any) -> Iterator[Peer]:
    one = Peer(target, *args)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.join()
