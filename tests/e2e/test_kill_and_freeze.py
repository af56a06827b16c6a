"""SIGKILL and SIGSTOP of either engine under load, again and again: no wrong answer, no hang, books balance, and the
other side needs no restart (A1, A6, A18, A19)."""

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.load import Load, cases
from tests.pair import Client, Forks, Pair, Service, Side, start_pair

FLAGS = ("--served-model-name", "m", "--max-model-len", "256", "--chunked-prefill-size", "64")
KILL_NOTICED_S, FREEZE_NOTICED_S = 2.0, 5.0
REGISTERED = 'handoff_peers{state="registered"}'


async def until(condition: Callable[[], Awaitable[bool]], limit_s: float, what: str) -> float:
    """The seconds until it holds."""
    start_s = time.monotonic()
    while not await condition():
        assert time.monotonic() - start_s < limit_s, f"{what} took more than {limit_s} s"
        await asyncio.sleep(0.05)
    return time.monotonic() - start_s


async def noticed(by: Client, limit_s: float) -> None:
    """The other side has no registered peer any more."""

    async def gone() -> bool:
        return await by.metric(REGISTERED) == 0

    await until(gone, limit_s, "noticing the loss")


async def canary(pair: Pair) -> None:
    """The first request after both sides are there again."""
    body = {"model": "m", "prompt": [9] * 20, "max_tokens": 5, "temperature": 0}
    status, answer = await pair.client.post("/v1/completions", body)
    assert status == 200, answer


def restart(service: Service) -> None:
    service.kill()
    service.start().wait_ready()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=pytest.mark.soak)])
async def test_kill_and_freeze_under_load(forks: Forks, tmp_path: Path, tiny: Path, side: Side, rounds: int) -> None:
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, tiny, *FLAGS)
        known = await cases(pair.client, "m", 12)
        victim, other = (pair.prefill, pair.decode) if side == "prefill" else (pair.decode, pair.prefill)
        port, control = victim.url.rsplit(":", 1)[1], victim.control.rsplit(":", 1)[1]
        victim.flags += ["--port", port, "--control-port", control]
        watcher = await stack.enter_async_context(Client(other.url))
        survivor = other.engine().pid
        draw = random.Random(rounds)
        load = Load(pair.client, known, workers=8, leaving=0.3)
        for _ in range(rounds):
            await asyncio.sleep(draw.uniform(0.1, 0.7))
            victim.engine().kill()
            await noticed(watcher, KILL_NOTICED_S)
            await asyncio.to_thread(restart, victim)
            await canary(pair)
            await pair.wait_registered()

            await asyncio.sleep(draw.uniform(0.1, 0.7))
            frozen = victim.engine()
            frozen.send_signal(signal.SIGSTOP)
            await noticed(watcher, FREEZE_NOTICED_S)
            await asyncio.sleep(draw.uniform(0, 0.5))
            frozen.send_signal(signal.SIGCONT)
            await pair.wait_registered()
            await canary(pair)
        tally = await load.stop()
        await pair.check_books()
        assert other.engine().pid == survivor
        assert tally.right > 20 * rounds, tally
        assert tally.errors or tally.unreached, tally
        for service in (*pair.prefills, *pair.decodes):
            assert "Traceback" not in service.log(), service.log()[-3000:]


async def test_a_frozen_decode_delays_no_other(forks: Forks, tmp_path: Path, tiny: Path) -> None:
    """Frozen at its first contact: its prompt is being computed, and its memory was never written to."""
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, tiny, *FLAGS, decodes=2)
        ill, well = pair.clients
        known = await cases(well, "m", 6)
        prompts = [
            asyncio.ensure_future(ill.post("/v1/completions", {**known[-1].body, "prompt": [3] * 230}))
            for _ in range(8)
        ]
        prefill = await stack.enter_async_context(Client(pair.prefill.url))

        async def arrived() -> bool:
            return await prefill.metric("handoff_attempts_started_total") > len(known)

        await until(arrived, 5, "the first prompt's arrival")
        pair.decode.engine().send_signal(signal.SIGSTOP)
        for case in known * 3:
            status, answer = await asyncio.wait_for(well.post("/v1/completions", case.body), 3)
            assert (status, answer["choices"][0]["text"]) == (200, case.text)
        pair.decode.engine().send_signal(signal.SIGCONT)
        for status, answer in await asyncio.gather(*prompts):
            assert status == 200 or answer["error"]["retryable"], answer
        await pair.wait_registered()
        await pair.check_books()


async def test_a_frozen_decode_that_has_filled_prefills_queue_delays_no_other(
    forks: Forks, tmp_path: Path, tiny: Path
) -> None:
    """Its prompts alone would take all of prefill's pages, and keep them until it is given up."""
    async with AsyncExitStack() as stack:
        flags = (*FLAGS[:4], "--chunked-prefill-size", "16")
        pair = await start_pair(stack, forks, tmp_path, tiny, *flags, decodes=2)
        ill, well = pair.clients
        known = await cases(well, "m", 6)
        for pause_s in (0.03, 0.08, 0.2):
            body = {**known[-1].body, "prompt": [3] * 250, "max_tokens": 2}
            prompts = [asyncio.ensure_future(ill.post("/v1/completions", body)) for _ in range(16)]
            await asyncio.sleep(pause_s)
            pair.decode.engine().send_signal(signal.SIGSTOP)
            for case in known * 3:
                status, answer = await asyncio.wait_for(well.post("/v1/completions", case.body), 2.5)
                assert (status, answer["choices"][0]["text"]) == (200, case.text)
            await asyncio.sleep(4)  # it is lost by now, and its pages are free although it stands still
            prefill = await stack.enter_async_context(Client(pair.prefill.url))
            assert await prefill.metric("handoff_pages_free") == await prefill.metric("handoff_pages_usable")
            pair.decode.engine().send_signal(signal.SIGCONT)
            for status, answer in await asyncio.gather(*prompts):
                assert status == 200 or answer["error"]["retryable"], answer
            await pair.wait_registered()
        await pair.check_books()
