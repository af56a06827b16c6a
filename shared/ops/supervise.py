"""One engine process and its front: each learns at once that the other is gone.

The engine ignores SIGINT and SIGTERM, since its front tells it when to end; it runs at nice +10, so that a busy engine
never starves the front; and it does not outlive its front, however that ends.
"""

import asyncio
import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.context import ForkProcess, SpawnProcess
from typing import Any, Literal

StartMethod = Literal["spawn", "fork"]

ENGINE_NICE = 10
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Exit:
    """How a process ended: its exit status, or minus the number of the signal that killed it."""

    code: int

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit status {self.code}"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"killed by signal {-self.code}"


def pick_start_method() -> StartMethod:
    """Fork where this process has torch loaded already, and no thread that could hold a lock; else spawn."""
    return "fork" if "torch" in sys.modules and threading.active_count() == 1 else "spawn"


class EngineProcess:
    """The front's handle. Made by ``start``; reaped by ``died``, ``terminate`` or ``kill``, and killed at exit."""

    def __init__(self, process: SpawnProcess | ForkProcess) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self.exit: Exit | None = None
        self._process = process
        self._watched: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        atexit.register(self.kill)  # multiprocessing's own exit hook would wait for it forever

    @classmethod
    def start(
        cls, target: Callable[..., object], args: tuple[Any, ...] = (), *, method: StartMethod = "spawn"
    ) -> "EngineProcess":
        """Run ``target(*args)`` in a new process; both must be picklable for "spawn".

        For "fork" before this process has an event loop or a thread. Main thread only: Linux ends the engine when the
        *thread* that started it ends. Raises RuntimeError elsewhere.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("an engine must be started from the main thread")
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported
        if method == "spawn":
            resource_tracker.ensure_running()  # its start would unblock the signals below
        make = ForkProcess if method == "fork" else SpawnProcess
        process = make(target=_run, args=(target, args, os.getpid()), name="engine")
        # Blocked until the engine ignores them: a Ctrl-C while it imports must reach the front alone, and not be lost.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return cls(process)

    async def died(self) -> Exit:
        """Wait for the end, however it comes. May be awaited by many, on one event loop."""
        if self.exit is None:
            if self._watched is None:
                loop = asyncio.get_running_loop()
                self._watched = loop, loop.create_future()
                loop.add_reader(self._process.sentinel, self._reap)
            await asyncio.shield(self._watched[1])
        assert self.exit is not None
        return self.exit

    async def terminate(self, grace_s: float) -> Exit:
        """Wait for an engine that was told to end; kill it after ``grace_s``."""
        try:
            async with asyncio.timeout(grace_s):
                return await self.died()
        except TimeoutError:
            self.kill()
        return await self.died()

    def kill(self) -> None:
        """End and reap it now; idempotent. Blocks for as long as the kernel needs."""
        if self.exit is None:
            self._process.kill()
            self._reap()

    def _reap(self) -> None:
        if self._watched is not None and not self._watched[0].is_closed():
            loop, ended = self._watched
            loop.remove_reader(self._process.sentinel)
            loop.call_soon(ended.set_result, None)
        self._process.join()
        assert self._process.exitcode is not None
        self.exit = Exit(self._process.exitcode)
        self._process.close()
        atexit.unregister(self.kill)


def _run(target: Callable[..., object], args: tuple[Any, ...], front_pid: int) -> None:
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    _die_with_front(front_pid)
    os.nice(ENGINE_NICE)
    target(*args)


def _die_with_front(front_pid: int) -> None:
    """Two ways: the kernel's kill works while this process is stopped or deep in a library, but only on Linux; the
    thread sees the end of the front's pipe."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != front_pid:  # it ended before the kernel was asked
            os._exit(1)
    front = multiprocessing.parent_process()
    assert front is not None

    def wait() -> None:
        front.join()
        os._exit(1)

    threading.Thread(target=wait, name="front-watch", daemon=True).start()
