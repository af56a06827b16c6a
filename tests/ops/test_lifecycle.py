import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from shared.errors import ConfigError, EngineMissing, StateError, Unavailable
from shared.ops.lifecycle import main_guard, run_service


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Nothing that a test installed is left behind."""
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    yield
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


class Service:
    """A service that notes what happens to it."""

    def __init__(self, start: Any = None, drain: Any = None) -> None:
        self.seen: list[str] = []
        self._start, self._drain = start, drain

    async def _step(self, name: str, work: Any) -> None:
        self.seen.append(name)
        try:
            if work is not None:
                await work()
            self.seen.append(f"{name} done")
        except asyncio.CancelledError:
            self.seen.append(f"{name} cancelled")
            raise

    async def run(self, limit_s: float = 20.0) -> int:
        async with asyncio.timeout(10):
            return await run_service(
                lambda: self._step("start", self._start), lambda: self._step("drain", self._drain), limit_s=limit_s
            )


async def forever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_drains(number: signal.Signals) -> None:
    async def start() -> None:
        asyncio.get_running_loop().call_later(0.01, send, number)

    service = Service(start)
    assert await service.run() == 0
    assert service.seen == ["start", "start done", "drain", "drain done"]


async def test_a_signal_while_it_starts_ends_the_start() -> None:
    async def start() -> None:
        send(signal.SIGTERM)
        await forever()

    service = Service(start)
    assert await service.run() == 0
    assert service.seen == ["start", "start cancelled", "drain", "drain done"]


async def test_the_drain_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    async def start() -> None:
        send(signal.SIGTERM)

    service = Service(start, forever)
    assert await service.run(limit_s=0.02) == 0
    assert service.seen[-2:] == ["drain", "drain cancelled"]
    assert "stopped before everything had ended" in caplog.messages


async def test_a_second_signal_ends_the_drain_at_once() -> None:
    async def start() -> None:
        send(signal.SIGTERM)

    async def drain() -> None:
        send(signal.SIGINT)
        await forever()

    service = Service(start, drain)
    assert await service.run() == 0
    assert service.seen[-2:] == ["drain", "drain cancelled"]


async def test_a_failed_start_is_cleaned_up_and_told() -> None:
    async def start() -> None:
        raise ConfigError("port 1 is in use")

    async def drain() -> None:
        raise RuntimeError("this too")

    for broken in (None, drain):
        service = Service(start, broken)
        with pytest.raises(ConfigError, match="port 1 is in use"):
            await service.run()
        assert service.seen[:2] == ["start", "drain"]


async def test_a_failed_drain_is_told() -> None:
    async def start() -> None:
        send(signal.SIGTERM)

    async def drain() -> None:
        raise RuntimeError("stuck")

    with pytest.raises(RuntimeError, match="stuck"):
        await Service(start, drain).run()


@pytest.mark.parametrize("error", [ConfigError("no\n  such model"), EngineMissing("no\n  such model")])
def test_the_operators_mistake_is_one_line_and_status_2(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise error

    assert main_guard("prefill-svc", main) == 2
    assert capsys.readouterr() == ("", "prefill-svc: error: no such model\n")


def test_defects_keep_their_traceback() -> None:
    def main() -> int:
        raise StateError("x")

    with pytest.raises(StateError):
        main_guard("prefill-svc", main)


def test_what_may_be_over_at_the_next_start_is_one_line_and_1(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise Unavailable("the engine died while it started: killed by SIGKILL")

    assert main_guard("decode-svc", main) == 1
    assert capsys.readouterr().err == "decode-svc: error: the engine died while it started: killed by SIGKILL\n"


def test_the_status_is_passed_on() -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert main_guard("x", lambda: 0) == 0
    assert main_guard("x", lambda: 3) == 3
    assert main_guard("x", interrupted) == 130
