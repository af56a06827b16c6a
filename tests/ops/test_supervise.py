"""Fronts and engines that are killed, in every way, with real processes."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from shared.ops.supervise import EngineProcess, Exit, pick_start_method

ROOT = Path(__file__).parents[2]
METHODS = pytest.mark.parametrize("method", ["spawn", "fork"])


def gone(pid: int) -> bool:
    """Ended, and no zombie of ours; one that waits for init to reap it counts as ended."""
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE and process.ppid() != os.getpid()
    except psutil.NoSuchProcess:
        return True


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def front(role: str, method: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader, int]]:
    """The front process of ``front.py``, its output from the second line on, and its engine's pid."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.ops.front", role, method, cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(20):
        pid = int(await process.stdout.readline())
        try:
            yield process, process.stdout, pid
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await until(lambda: gone(pid))


async def test_a_clean_exit_and_an_exit_status_are_named() -> None:
    clean = EngineProcess.start(time.sleep, (0,))
    failed = EngineProcess.start(os._exit, (3,))
    assert str(await clean.died()) == "exit status 0"
    assert await failed.died() == Exit(3)
    assert await failed.died() == Exit(3)  # as often as asked
    assert gone(clean.pid)
    assert gone(failed.pid)


async def test_an_exception_in_the_engine_is_exit_status_1() -> None:
    process = EngineProcess.start(exec, ("raise SystemExit(1)",))
    assert await process.died() == Exit(1)


async def test_a_killed_engine_is_noticed_by_all_who_wait_and_reaped() -> None:
    process = EngineProcess.start(time.sleep, (60,))
    waiters = [asyncio.ensure_future(process.died()) for _ in range(3)]
    waiters[0].cancel()  # one that gives up takes nothing from the others
    await asyncio.sleep(0)
    os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(1):
        ends = await asyncio.gather(*waiters[1:])
    assert [str(end) for end in ends] == ["killed by SIGKILL"] * 2
    assert gone(process.pid)


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exit status 0"), (-15, "killed by SIGTERM"), (-40, "killed by signal 40")],
)
def test_an_exit_in_words(code: int, text: str) -> None:
    assert str(Exit(code)) == text


async def test_terminate_waits_for_an_engine_that_ends_by_itself() -> None:
    process = EngineProcess.start(os._exit, (5,))
    assert await process.terminate(grace_s=20) == Exit(5)


@pytest.mark.parametrize("watched", [True, False])
async def test_terminate_kills_after_the_grace_time(watched: bool) -> None:
    process = EngineProcess.start(time.sleep, (60,))
    waiter = asyncio.ensure_future(process.died() if watched else asyncio.sleep(0, Exit(-9)))
    await asyncio.sleep(0)
    assert await process.terminate(grace_s=0.01) == Exit(-signal.SIGKILL)
    assert await waiter == Exit(-9)
    assert gone(process.pid)


async def test_kill_is_idempotent_and_needs_no_loop_of_its_own() -> None:
    process = EngineProcess.start(time.sleep, (60,))
    await asyncio.to_thread(process.kill)
    process.kill()
    assert process.exit == Exit(-9)
    assert await process.died() == Exit(-9)


async def test_only_the_main_thread_may_start_an_engine() -> None:
    with pytest.raises(RuntimeError, match="main thread"):
        await asyncio.to_thread(EngineProcess.start, time.sleep, (60,))


@METHODS
async def test_the_engine_ignores_stop_signals_is_nice_and_waits_passively(method: str) -> None:
    async with front("describe", method) as (_, output, _pid):
        seen = sorted([(await output.readline()).decode().strip(), (await output.readline()).decode().strip()])
    assert seen == [f"{os.nice(0) + 10} True True 0 PASSIVE", "exit status 0"]


@METHODS
@pytest.mark.parametrize("role", ["hang", "frozen", "no kernel"])
async def test_an_engine_goes_with_its_killed_front(role: str, method: str) -> None:
    async with front(role, method) as (process, _, pid):
        if role == "frozen":
            await until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        process.kill()
        await process.wait()
        await until(lambda: gone(pid))


@METHODS
async def test_a_front_that_ends_by_itself_takes_its_engine_along(method: str) -> None:
    async with front("crash", method) as (process, _, pid):
        assert await process.wait() == 7  # and is not held up
        await until(lambda: gone(pid))


@METHODS
async def test_a_killed_engine_is_noticed_in_its_front(method: str) -> None:
    async with front("serve", method) as (process, output, pid):
        os.kill(pid, signal.SIGKILL)
        assert await output.readline() == b"killed by SIGKILL\n"
        assert await process.wait() == 0


@METHODS
async def test_a_stop_signal_for_the_engine_is_ignored_from_its_first_moment(method: str) -> None:
    async with front("serve", method) as (_, _output, pid):
        for _ in range(20):  # from before its first Python line on
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
            await asyncio.sleep(0.01)
        assert not gone(pid)


def test_fork_only_where_it_pays_and_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    assert pick_start_method() == "fork"
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert pick_start_method() == "spawn"
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.delitem(sys.modules, "torch")
    assert pick_start_method() == "spawn"
