"""Signals (A30) and sudden death: every request has an ending, and the services say what is true."""

import asyncio
import shutil
import signal
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.pair import Client, Forks, Pair, Service, Side, start_pair

FLAGS = ("--max-model-len", "512", "--served-model-name", "tiny")
NOTICE_S = 2.0


async def running(client: Client, count: int, max_tokens: int = 450) -> list["asyncio.Task[tuple[int, Any]]"]:
    """Requests that are being decoded: each streamed its first token already."""
    first = asyncio.Event()
    seen = 0

    async def one(seed: int) -> tuple[int, Any]:
        nonlocal seen
        body = {"model": "tiny", "prompt": [65 + seed] * 30, "max_tokens": max_tokens, "seed": seed, "ignore_eos": True}
        last: dict[str, Any] = {}
        started = False
        async for event in client.stream("/v1/completions", body):
            if not started:
                started, seen = True, seen + 1
                if seen == count:
                    first.set()
            last = event
        return 200, last

    tasks = [asyncio.ensure_future(one(i)) for i in range(count)]
    await asyncio.wait_for(first.wait(), 20)
    return tasks


def assert_ended_with_error(results: list[Any]) -> None:
    """An explicit error each: as an event of the stream, or as the status before it. Never a plausible answer."""
    for status, body in results:
        assert status != 200 or "error" in body, body
        error = body["error"]
        assert error["message"]
        assert error["code"]
        assert error["retryable"] is True


@pytest.mark.parametrize("side", ["decode", "prefill"])
async def test_sigterm_ends_what_runs_explicitly_and_exits_zero(
    forks: Forks, tmp_path: Path, tiny: Path, side: Side
) -> None:
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, tiny, *FLAGS, "--drain-s", "0.5")
        tasks = await running(pair.client, 3)
        service = pair.decode if side == "decode" else pair.prefill
        service.process.terminate()
        if side == "decode":
            assert_ended_with_error(await asyncio.wait_for(asyncio.gather(*tasks), 5))
        else:  # their hand-overs are over: decode finishes them
            for status, last in await asyncio.wait_for(asyncio.gather(*tasks), 30):
                assert (status, last["choices"][0]["finish_reason"]) == (200, "length")
        assert await asyncio.to_thread(service.wait_exit) == 0
        assert "Traceback" not in service.log()


async def test_sigterm_lets_short_requests_finish(forks: Forks, tmp_path: Path, tiny: Path) -> None:
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, tiny, *FLAGS, "--drain-s", "8")
        tasks = await running(pair.client, 2, max_tokens=100)
        pair.decode.process.terminate()
        for status, last in await asyncio.wait_for(asyncio.gather(*tasks), 10):
            assert (status, last["choices"][0]["finish_reason"]) == (200, "length")
        assert await asyncio.to_thread(pair.decode.wait_exit) == 0


async def test_a30_a_second_signal_ends_what_runs_at_once_and_explicitly(
    forks: Forks, tmp_path: Path, tiny: Path
) -> None:
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, tiny, *FLAGS, "--drain-s", "60")
        tasks = await running(pair.client, 3)
        pair.decode.engine().suspend()  # they would end by themselves
        for _ in range(2):
            pair.decode.process.terminate()
            await asyncio.sleep(0.2)
        assert_ended_with_error(await asyncio.wait_for(asyncio.gather(*tasks), 5))
        assert await asyncio.to_thread(pair.decode.wait_exit, 5) == 0


async def test_a22_kill_of_the_decode_engine(forks: Forks, tmp_path: Path, tiny: Path) -> None:
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, tiny, *FLAGS)
        tasks = await running(pair.client, 3)
        killed_s = time.monotonic()
        pair.decode.engine().kill()
        assert_ended_with_error(await asyncio.wait_for(asyncio.gather(*tasks), NOTICE_S))
        status, body = await pair.client.get("/health")
        assert (status, time.monotonic() - killed_s < NOTICE_S) == (503, True)
        assert "SIGKILL" in body["reasons"][0]
        status, body = await pair.client.post("/v1/completions", {"model": "tiny", "prompt": "x"})
        assert (status, body["error"]["code"]) == (503, "engine_dead")
        await other_side_is_alive_and_balanced(pair, "prefill")


async def test_a_prefill_that_drains_costs_clients_a_retry_at_most(forks: Forks, tmp_path: Path, tiny: Path) -> None:
    """While it ends what it has, prompts that fit are refused as «not now», and decode is not ready."""
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, tiny, *FLAGS, prefill_flags=("--chunked-prefill-size", "16"))
        long = {"model": "tiny", "prompt": [1] * 240, "max_tokens": 5}
        waiting = [asyncio.ensure_future(pair.client.post("/v1/completions", long)) for _ in range(24)]
        await asyncio.sleep(0.1)
        pair.prefill.process.terminate()
        seen: set[int] = set()
        body = {"model": "tiny", "prompt": [2] * 5, "max_tokens": 2}
        while pair.prefill.process.exitcode is None:
            status, answer = await pair.client.post("/v1/completions", body)
            seen.add(status)
            assert status == 200 or (status, answer["error"]["retryable"]) == (503, True), answer
        for status, answer in await asyncio.gather(*waiting):
            assert status == 200 or answer["error"]["retryable"], answer
        assert pair.prefill.process.exitcode == 0
        assert (await pair.client.get("/ready"))[0] == 503
        assert (await pair.client.get("/health"))[0] == 200
        assert seen <= {200, 503}


async def test_a6_kill_of_the_prefill_engine(forks: Forks, tmp_path: Path, tiny: Path) -> None:
    """Requests that wait for it get an error within two seconds; those that run go on."""
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, tiny, *FLAGS)
        decoding = await running(pair.client, 2)
        engine = pair.prefill.engine()
        engine.send_signal(signal.SIGSTOP)  # so that the next ones are surely waiting when it dies
        body = {"model": "tiny", "prompt": [1] * 40, "max_tokens": 5}
        waiting = [asyncio.ensure_future(pair.client.post("/v1/completions", body)) for _ in range(4)]
        await asyncio.sleep(0.3)
        killed_s = time.monotonic()
        engine.kill()
        assert_ended_with_error(await asyncio.wait_for(asyncio.gather(*waiting), NOTICE_S))
        async with Client(pair.prefill.url) as prefill:
            status, health = await prefill.get("/health")
        assert (status, time.monotonic() - killed_s < NOTICE_S) == (503, True)
        assert "SIGKILL" in health["reasons"][0]
        assert (await pair.client.get("/health"))[0] == 200
        for status, last in await asyncio.gather(*decoding):
            assert (status, last["choices"][0]["finish_reason"]) == (200, "length")
        status, answer = await pair.client.post("/v1/completions", body)
        assert (status, answer["error"]["code"]) == (503, "no_prefill")
        await other_side_is_alive_and_balanced(pair, "decode")

        pair.prefill.kill()
        pair.prefill.flags += ["--control-port", pair.prefill.control.rsplit(":", 1)[1]]
        await asyncio.to_thread(lambda: pair.prefill.start().wait_ready())
        await pair.wait_registered()
        assert (await pair.client.post("/v1/completions", body))[0] == 200
        await pair.check_books()


async def test_a_dead_front_ends_its_engine(forks: Forks, tmp_path: Path, tiny: Path) -> None:
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, tiny, *FLAGS)
        for service in (pair.decode, pair.prefill):
            engine = service.engine()
            service.process.kill()
            engine.wait(timeout=3)


def private_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("handoff-*"))


async def test_what_killed_fronts_left_behind_is_removed_at_the_next_start(
    forks: Forks, tmp_path: Path, tiny: Path, pair: Pair
) -> None:
    """And nothing of a live one: the session's pair still answers."""
    flags = ["--model", str(tiny), "--port", "0", "--control-port", "0"]
    service = Service(forks, "prefill", flags, tmp_path / "p.log")
    left: list[Path] = []
    for _ in range(2):
        before = private_folders()
        service.start().wait_ready()
        left += private_folders() - before
        service.kill()
    assert len(left) == 2
    assert private_folders() & set(left) == {left[1]}
    shutil.rmtree(left[1])
    assert (await pair.client.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 2}))[0] == 200


async def other_side_is_alive_and_balanced(pair: Pair, side: Side) -> None:
    alive = Pair([], pair.decodes, []) if side == "decode" else Pair(pair.prefills, [], [])
    await alive.check_books()
    for service in [*alive.prefills, *alive.decodes]:
        assert service.process.exitcode is None


async def test_client_disconnect_frees_everything(pair: Pair) -> None:
    """In the queue, on prefill, while decoding."""
    body = {"model": "tiny", "prompt": [3] * 100, "max_tokens": 150, "ignore_eos": True}
    for delay_s in (0.0, 0.005, 0.01, 0.02, 0.05, 0.2):
        tasks = [asyncio.ensure_future(pair.client.post("/v1/completions", body)) for _ in range(4)]
        await asyncio.sleep(delay_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await pair.check_books()
    assert (await pair.client.post("/v1/completions", {**body, "max_tokens": 5}))[0] == 200
