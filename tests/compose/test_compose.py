"""The pair in containers, under the tightest limits that a container may have: bursts, stops, dead and frozen engines.

Only what containers add: the same cases on bare processes are in tests/e2e.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.compose.stack import MODEL, PROBE_S, SIDES, Stack, run
from tests.e2e.test_endings import assert_ended_with_error
from tests.pair import Client, Side

pytestmark = pytest.mark.compose

STOP_S = 10.0
POLL_S = 0.05
LIMITS = """
import os, resource
status = dict(line.split(":", 1) for line in open("/proc/1/status"))
shm = os.statvfs("/dev/shm")
print(os.getuid(), int(status["CapBnd"], 16), int(status["CapEff"], 16))
print(*resource.getrlimit(resource.RLIMIT_MEMLOCK), shm.f_blocks * shm.f_frsize)
"""


def request(prompt: int | list[int], max_tokens: int, **options: Any) -> dict[str, Any]:
    """``prompt``: token ids, or how many."""
    ids = [1000 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    return {"model": MODEL, "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **options}


async def streamed(client: Client, body: dict[str, Any], first: "asyncio.Future[None] | None" = None) -> Any:
    """Status and last event; ``first`` is set at the first one."""
    last: Any = None
    async with client.session.post(client.url + "/v1/completions", json={**body, "stream": True}) as response:
        if response.status != 200:
            return response.status, await response.json()
        async for event in client.events(response):
            last = event
            if first is not None and not first.done():
                first.set_result(None)
    assert last is not None, "a stream without an event"
    return 200, last


def finished(result: Any) -> bool:
    status, last = result
    return bool(status == 200 and "error" not in last and last["choices"][0]["finish_reason"] == "length")


@asynccontextmanager
async def clients(pair: Stack) -> AsyncIterator[dict[Side, Client]]:
    async with Client(pair.urls["prefill"]) as prefill, Client(pair.urls["decode"]) as decode:
        yield {"prefill": prefill, "decode": decode}


async def health_of(client: Client) -> int:
    """0 where nobody answers any more."""
    try:
        return (await client.get("/health"))[0]
    except aiohttp.ClientConnectionError:
        return 0


async def poll_health(client: Client, statuses: list[int], longest_s: list[float]) -> None:
    while True:
        started_s = time.monotonic()
        statuses.append(await health_of(client))
        longest_s[0] = max(longest_s[0], time.monotonic() - started_s)
        await asyncio.sleep(POLL_S)


async def until_not_200(client: Client, limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while await health_of(client) == 200:
            await asyncio.sleep(POLL_S)


async def test_a29_without_any_privilege_the_pair_serves_a_burst_and_stays_healthy(pair: Stack) -> None:
    """uid 1000, no capability, 64 KiB of locked and 64 MB of shared memory: enough for TCP."""
    await pair.up()
    for side in SIDES:
        assert pair.inside(side, LIMITS).split() == ["1000", "0", "0", "65536", "65536", str(64 << 20)]
    async with clients(pair) as client:
        alone = [await client["decode"].post("/v1/completions", request(40, 12)) for _ in range(2)]
        assert [status for status, _ in alone] == [200, 200]
        texts = [answer["choices"][0]["text"] for _, answer in alone]
        assert texts[0] == texts[1] != ""

        statuses: dict[Side, list[int]] = {side: [] for side in SIDES}
        longest_s = [0.0]
        polls = [asyncio.ensure_future(poll_health(client[side], statuses[side], longest_s)) for side in SIDES]
        burst = [streamed(client["decode"], request([2000 + i] * 24, 8)) for i in range(32)]
        results = await asyncio.wait_for(asyncio.gather(*burst), 100)
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
    assert all(map(finished, results)), results
    for side in SIDES:
        assert len(statuses[side]) > 20
        assert set(statuses[side]) == {200}
        assert pair.health(side) == "healthy"
        assert pair.inspect(side)["RestartCount"] == 0
    assert longest_s[0] < 1.0


async def test_a_stop_of_the_idle_pair_is_clean(pair: Stack) -> None:
    await pair.up()
    started_s = time.monotonic()
    await pair.stop()
    assert time.monotonic() - started_s < STOP_S
    assert_clean_exit(pair, *SIDES)


def assert_clean_exit(pair: Stack, *sides: Side) -> None:
    for side in sides:
        assert pair.health(side) == "exit status 0"
        assert "Traceback" not in pair.log(side)


async def test_a30_stop_of_decode_with_streams_and_with_requests_that_wait_on_prefill(pair: Stack) -> None:
    """Prefill's engine is frozen, so that the three surely wait. Seven streams are too long to end in time."""
    await pair.up()
    async with clients(pair) as client:
        decode = client["decode"]
        firsts: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future() for _ in range(10)]
        bodies = [request([3000 + i] * 8, 450 if i < 7 else 24) for i in range(10)]
        tasks = [asyncio.ensure_future(streamed(decode, b, f)) for b, f in zip(bodies, firsts, strict=True)]
        await asyncio.wait_for(asyncio.gather(*firsts), 60)
        async with pair.frozen("prefill"):
            waiting = [decode.post("/v1/completions", request(400, 4)) for _ in range(3)]
            tasks += [asyncio.ensure_future(one) for one in waiting]
            await asyncio.sleep(0.5)
            stopping = asyncio.ensure_future(pair.stop("decode"))
            await assert_draining(decode)
            results = await asyncio.wait_for(asyncio.gather(*tasks), STOP_S)
            await stopping
        assert_ended_with_error([*results[:7], *results[10:]])
        assert_ended_with_error([result for result in results[7:10] if not finished(result)])
        assert_clean_exit(pair, "decode")
        await until_at_rest(client["prefill"])
    assert "Traceback" not in pair.log("prefill")


async def assert_draining(decode: Client) -> None:
    """Not ready at once (compose itself takes a second or two), and new work is refused."""
    async with asyncio.timeout(4):
        while (await decode.get("/ready"))[0] == 200:
            await asyncio.sleep(POLL_S)
    status, answer = await decode.post("/v1/completions", request(8, 2))
    assert (status, answer["error"]["retryable"]) == (503, True)


async def until_at_rest(prefill: Client) -> None:
    """It was told that decode is gone, or noticed: every page is free again, and no peer is left."""
    async with asyncio.timeout(20):
        while True:
            free, usable = [await prefill.metric(f"handoff_pages_{name}") for name in ("free", "usable")]
            if free == usable and await prefill.metric('handoff_peers{state="registered"}') == 0:
                return
            await asyncio.sleep(0.2)


async def test_a30_stop_of_prefill_in_mid_transfer(pair: Stack) -> None:
    """Decode's engine is frozen while rows are on their way to it, so that they stay on their way."""
    await pair.up()
    async with clients(pair) as client:
        prefill = client["prefill"]
        names = [f"handoff_{name}_total" for name in ("attempts_started", "layer_submits", "transfer_bytes")]
        started, submits, sent = [await prefill.metric(name) for name in names]
        bodies = [request([4000 + i] * 500, 8) for i in range(4)]  # one forward of seconds
        asked = [asyncio.ensure_future(client["decode"].post("/v1/completions", body)) for body in bodies]
        await until_above(prefill, names[0], started)
        async with pair.frozen("decode"):
            await until_above(prefill, names[1], submits)
            assert await prefill.metric(names[2]) == sent
            await pair.stop("prefill")
            assert_clean_exit(pair, "prefill")
        assert_ended_with_error(await asyncio.wait_for(asyncio.gather(*asked), 30))
        await pair.until_health("decode", "healthy", 30)
        assert (await client["decode"].get("/ready"))[0] == 503
    assert "Traceback" not in pair.log("decode")


async def until_above(client: Client, series: str, value: float) -> None:
    async with asyncio.timeout(30):
        while await client.metric(series) <= value:
            await asyncio.sleep(0.02)


async def test_a22_a_dead_and_a_frozen_engine_turn_their_containers_unhealthy(pair: Stack) -> None:
    await pair.up()
    async with clients(pair) as client:
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running = asyncio.ensure_future(streamed(client["decode"], request(8, 450), first))
        await asyncio.wait_for(first, 30)
        await pair.signal_engine("decode", "SIGKILL")
        await until_not_200(client["decode"], 2 * PROBE_S)
        assert_ended_with_error([await asyncio.wait_for(running, 2 * PROBE_S)])
        async with pair.frozen("prefill"):
            await until_not_200(client["prefill"], 2 * PROBE_S)
            for side in SIDES:
                await pair.until_health(side, "unhealthy", 30)
        await pair.until_health("prefill", "healthy", 30)
    await asyncio.to_thread(pair.compose, "kill")


@pytest.mark.parametrize("file", ["compose.yaml", "compose.hostnet.yaml", "compose.gpu.yaml"])
def test_every_file_is_one_that_compose_takes(file: str) -> None:
    Stack(f"compose/{file}").compose("config", "--quiet")


def test_the_image_has_neither_tests_nor_history(image: str) -> None:
    code = "import pathlib, importlib.util as u; print(u.find_spec('tests'), *pathlib.Path('/').rglob('.git'))"
    assert run("docker", "run", "--rm", "--network", "none", "--entrypoint", "python", image, "-c", code) == "None\n"
