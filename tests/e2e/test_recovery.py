"""What users and operators see when hand-overs do not go as they should (A2, A5, A6, A19, A25, A31, A32)."""

import asyncio
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from shared.kv.layout import META_ROW
from tests.e2e.test_equality import check, prompt_of
from tests.e2e.test_kill_and_freeze import REGISTERED, noticed, restart, until
from tests.load import Load, cases
from tests.pair import Client, Forks, Pair, Service, Side, start_pair
from tests.reference import Reference

FLAGS = ("--served-model-name", "m", "--max-model-len", "256", "--chunked-prefill-size", "64")


async def ask(client: Client, prompt: list[int], max_tokens: int = 8, **more: Any) -> tuple[int, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
    return await client.post("/v1/completions", body)


# without a prefill


async def test_decode_computes_prompts_itself_where_no_prefill_ever_was(
    forks: Forks, tmp_path: Path, tiny: Path, tiny_reference: Reference
) -> None:
    async with AsyncExitStack() as stack:
        flags = ["--model", str(tiny), "--dtype", "float32", "--threads", "1", "--port", "0", "--control-port", "0"]
        flags += [*FLAGS, "--prefill", "127.0.0.1:1", "--on-prefill-loss", "local", "--max-num-seqs", "3"]
        decode = Service(forks, "decode", flags, tmp_path / "d.log").start()
        stack.callback(decode.kill)
        decode.wait_ready()
        client = await stack.enter_async_context(Client(decode.url))
        lengths = (1, 15, 64, 65, 200, 244)
        await asyncio.gather(*(check(client, "m", tiny_reference, prompt_of(n, n), 12) for n in lengths))
        await Pair([], [decode], [client]).check_books()
        assert await client.metric("handoff_local_prefills_total") == len(lengths)


async def test_a6_with_local_prefill_the_loss_of_the_prefill_loses_no_request(
    forks: Forks, tmp_path: Path, tiny: Path
) -> None:
    async with AsyncExitStack() as stack:
        pair = await start_pair(
            stack, forks, tmp_path, tiny, *FLAGS, decode_flags=("--on-prefill-loss", "local", "--max-num-seqs", "4")
        )
        known = await cases(pair.client, "m", 8)
        load = Load(pair.client, known, workers=6, leaving=0.2)
        await asyncio.sleep(0.3)
        pair.prefill.engine().kill()
        await noticed(pair.client, 2.0)
        await asyncio.sleep(1.5)
        tally = await load.stop()
        assert not tally.errors, tally
        await Pair([], pair.decodes, pair.clients).check_books()
        assert await pair.client.metric("handoff_local_prefills_total") > 0


# the content, compared


async def test_s67_digests_of_every_hand_over_are_equal(
    forks: Forks, tmp_path: Path, tiny: Path, tiny_reference: Reference
) -> None:
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, tiny, *FLAGS, decode_flags=("--digest-every", "1"))
        for length in (1, 16, 17, 130, 244):
            await check(pair.client, "m", tiny_reference, prompt_of(length, length), 12)
        await pair.check_books()
        assert await pair.client.metric('handoff_digests_total{outcome="equal"}') == 5
        assert await pair.client.metric('handoff_digests_total{outcome="different"}') == 0


# limits


async def test_a2_requests_that_wait_beyond_their_limit_are_told_and_counted(
    forks: Forks, tmp_path: Path, tiny: Path
) -> None:
    """Decode's pool holds one request at a time, and each takes a good part of the limit."""
    async with AsyncExitStack() as stack:
        decode_flags = ("--num-pages", "17", "--request-timeout-s", "1")
        pair = await start_pair(stack, forks, tmp_path, tiny, *FLAGS, decode_flags=decode_flags)
        started_s = time.monotonic()
        answers = await asyncio.gather(*(ask(pair.client, [1] * 10, 246, ignore_eos=True) for _ in range(16)))
        assert answers[0][0] == 200
        late = [answer["error"] for status, answer in answers if status != 200]
        assert late
        assert {(error["code"], error["retryable"]) for error in late} == {("timeout", True)}
        assert len({a["choices"][0]["text"] for status, a in answers if status == 200}) == 1
        assert await pair.client.metric('handoff_requests_total{outcome="failed"}') == len(late)
        assert time.monotonic() - started_s < 10
        await pair.check_books()


# the operator's abort


async def test_a5_all_attempts_aborted_on_prefill_end_their_clients_at_once(
    forks: Forks, tmp_path: Path, tiny: Path
) -> None:
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, tiny, *FLAGS, "--chunked-prefill-size", "16")
        prefill = await stack.enter_async_context(Client(pair.prefill.url))
        alone = await ask(pair.client, [7] * 200)
        accepted = await prefill.metric("handoff_attempts_started_total")
        waiting = [asyncio.ensure_future(ask(pair.client, [i + 1] * 240)) for i in range(20)]

        async def arrived() -> bool:
            return await prefill.metric("handoff_attempts_started_total") > accepted

        await until(arrived, 5, "the first prompt's arrival")
        started_s = time.monotonic()
        assert (await prefill.post("/abort_request", {"abort_all": True}))[0] == 202
        aborted = 0
        while any(not task.done() for task in waiting):
            await prefill.post("/abort_request", {"abort_all": True})  # those that come later, too
            await asyncio.sleep(0.05)
            assert time.monotonic() - started_s < 2
        for status, answer in await asyncio.gather(*waiting):
            aborted += status == 503
            if status == 503:
                assert (answer["error"]["code"], answer["error"]["retryable"]) == ("aborted", True)
        assert aborted >= 10
        assert (await ask(pair.client, [7] * 200))[1]["choices"] == alone[1]["choices"]
        await pair.check_books()
        assert await prefill.metric("handoff_stopped_total") >= aborted


# restarts


@pytest.mark.parametrize("side", ["decode", "prefill"])
@pytest.mark.parametrize("times", [4, pytest.param(10, marks=pytest.mark.soak)])
async def test_a19_the_first_request_after_each_restart_succeeds(
    forks: Forks, tmp_path: Path, tiny: Path, side: Side, times: int
) -> None:
    """With the other side busy, on the same address, without a pause."""
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, tiny, *FLAGS)
        victim = pair.decode if side == "decode" else pair.prefill
        victim.flags += ["--port", victim.url.rsplit(":", 1)[1], "--control-port", victim.control.rsplit(":", 1)[1]]
        known = await cases(pair.client, "m", 4)
        load = Load(pair.client, known, workers=4)
        for _ in range(times):
            await asyncio.sleep(0.2)
            await asyncio.to_thread(restart, victim)
            status, answer = await pair.client.post("/v1/completions", known[1].body)
            assert (status, answer.get("choices", [answer])[0].get("text")) == (200, known[1].text)
        await load.stop()
        await pair.wait_registered()
        await pair.check_books()


async def test_a6_decode_says_that_it_has_no_prefill_and_works_when_it_is_back(
    forks: Forks, tmp_path: Path, tiny: Path
) -> None:
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, tiny, *FLAGS)
        pair.prefill.flags += ["--control-port", pair.prefill.control.rsplit(":", 1)[1]]
        pair.prefill.kill()
        await noticed(pair.client, 2.0)
        for _ in range(3):
            status, answer = await ask(pair.client, [1] * 9)
            assert (status, answer["error"]["code"]) == (503, "no_prefill")
            assert f"tcp://{pair.prefill.control} is connecting" in answer["error"]["message"]
            assert (await pair.client.get("/health"))[0] == 200
        await asyncio.to_thread(lambda: pair.prefill.start().wait_ready())
        assert (await ask(pair.client, [1] * 9))[0] == 200
        await pair.check_books()


# a peer that stands still


@pytest.mark.parametrize(("requests", "seconds"), [(300, 6.0), pytest.param(2000, 30.0, marks=pytest.mark.soak)])
async def test_a25_a_frozen_prefill_and_a_flood_of_requests_and_cancels(
    forks: Forks, tmp_path: Path, tiny: Path, requests: int, seconds: float
) -> None:
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, tiny, *FLAGS)
        known = await cases(pair.client, "m", 6)
        probe = await stack.enter_async_context(Client(pair.decode.url))  # not behind the others' connections
        engine = pair.decode.engine()
        frozen = pair.prefill.engine()
        before = engine.memory_info().rss
        frozen.send_signal(signal.SIGSTOP)
        frozen_s = time.monotonic()
        load = Load(pair.client, known, workers=0)
        pending: set[asyncio.Task[None]] = set()
        slowest_s = 0.0
        for i in range(requests):
            pending.add(asyncio.ensure_future(load.one()))
            if i % 3 == 0:
                next(iter(pending)).cancel()  # its client leaves
            await asyncio.sleep(seconds / requests)
            if i % 10 == 0:
                asked_s = time.monotonic()
                assert (await probe.get("/health"))[0] == 200
                slowest_s = max(slowest_s, time.monotonic() - asked_s)
        await asyncio.sleep(max(0.0, seconds - (time.monotonic() - frozen_s)))
        frozen.send_signal(signal.SIGCONT)
        done = await asyncio.wait_for(asyncio.gather(*pending, return_exceptions=True), 30)
        assert {type(x) for x in done} <= {type(None), asyncio.CancelledError}, done
        assert slowest_s < 1.0
        await pair.wait_registered()
        status, answer = await pair.client.post("/v1/completions", known[0].body)
        assert (status, answer["choices"][0]["text"]) == (200, known[0].text)
        await pair.check_books()
        assert engine.memory_info().rss - before < 64 << 20


# what is counted, what is written


async def test_a31_s32_s33_figures_are_of_what_happened(forks: Forks, tmp_path: Path, tiny: Path) -> None:
    """Twice the same prompt, one in four chunks, one that is aborted before any transfer."""
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, tiny, *FLAGS)
        prefill = await stack.enter_async_context(Client(pair.prefill.url))
        for prompt in ([1] * 40, [1] * 40, [2] * 240):
            assert (await ask(pair.client, prompt))[0] == 200
        frozen = pair.prefill.engine()
        frozen.send_signal(signal.SIGSTOP)
        leaving = asyncio.ensure_future(ask(pair.client, [3] * 200))
        await asyncio.sleep(0.1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await asyncio.sleep(0.1)
        frozen.send_signal(signal.SIGCONT)
        await pair.check_books()
        _, info = await prefill.get("/server_info")
        page_bytes = info["capacity"]["kv_bytes_per_token"] * 16
        pages = 3 + 3 + 15
        assert await prefill.metric("handoff_transfer_bytes_total") == pages * page_bytes + 3 * META_ROW.itemsize
        assert await prefill.metric("handoff_transfer_size_bytes_count") == 3
        assert await pair.client.metric("handoff_transfer_bytes_total") == pages * page_bytes
        ended = {
            o: await prefill.metric(f'handoff_attempts_total{{outcome="{o}"}}')
            for o in ("finished", "failed", "aborted")
        }
        assert sum(ended.values()) == await prefill.metric("handoff_attempts_started_total")
        assert (ended["finished"], ended["failed"]) == (3, 0)
        for client in (prefill, pair.client):
            _, text = await client.get("/metrics")
            for line in text.splitlines():
                if not line.startswith("#"):
                    value = float(line.rsplit(" ", 1)[1])
                    assert value >= 0, line
                    if "_seconds_sum" in line:
                        assert value < 600, line  # no stamp of an epoch among durations


@pytest.mark.parametrize("absent_s", [6.0, pytest.param(600.0, marks=pytest.mark.soak)])
async def test_a32_s28_an_absent_prefill_costs_few_lines_and_no_cpu_and_success_none(
    forks: Forks, tmp_path: Path, tiny: Path, absent_s: float
) -> None:
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, tiny, *FLAGS)
        pair.prefill.flags += ["--control-port", pair.prefill.control.rsplit(":", 1)[1]]
        pair.prefill.kill()
        await noticed(pair.client, 2.0)
        lines_before, cpu_before = len(pair.decode.log().splitlines()), pair.decode.engine().cpu_times()
        end_s = time.monotonic() + absent_s
        asked = 0
        while time.monotonic() < end_s:
            status, _ = await ask(pair.client, [1] * 5)
            assert status == 503
            asked += 1
        cpu = pair.decode.engine().cpu_times()
        used_s = cpu.user + cpu.system - cpu_before.user - cpu_before.system
        assert used_s < 0.15 * absent_s
        lines = pair.decode.log().splitlines()[lines_before:]
        assert 1 <= len(lines) <= 2 * asked + 2, lines
        assert len(lines) <= 2 + 2 * absent_s, lines[:10]
        await asyncio.to_thread(lambda: pair.prefill.start().wait_ready())
        await pair.wait_registered()
        back = [line for line in pair.decode.log().splitlines() if "is registered, after" in line]
        assert len(back) == 2  # at the start, and now
        known = await cases(pair.client, "m", 4)
        await pair.check_books()
        before = [len(s.log().splitlines()) for s in (pair.prefill, pair.decode)]
        load = Load(pair.client, known, workers=8)
        while load.tally.right < 300:
            await asyncio.sleep(0.05)
        await load.stop()
        after = [len(s.log().splitlines()) for s in (pair.prefill, pair.decode)]
        assert after == before, pair.decode.log()[-2000:]
        assert await pair.client.metric(REGISTERED) == 1


# everything comes back


@pytest.mark.parametrize("requests", [1000])
async def test_a16_a_thousand_requests_half_of_them_cancelled_leave_no_trace(
    forks: Forks, tmp_path: Path, tiny: Path, requests: int
) -> None:
    """Pages, slots, leases, tasks and sockets of both sides are exactly what they were. Clients leave at any moment: in
    the queue, between chunks, in the transfer, while decoding."""
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, tiny, *FLAGS, "--num-pages", "80")
        known = await cases(pair.client, "m", 24, longest=200, max_tokens=32)
        clients = [pair.client, await stack.enter_async_context(Client(pair.prefill.url))]
        await pair.check_books()
        before = await footprint(pair, clients)
        load = Load(pair.client, known, workers=0, leaving=0.55)
        limit = asyncio.Semaphore(16)

        async def one() -> None:
            async with limit:
                await load.one()

        await asyncio.gather(*(one() for _ in range(requests)))
        tally = load.tally
        assert tally.right + tally.cancelled == requests, tally
        assert tally.cancelled > requests // 3
        await pair.check_books()

        async def as_before() -> bool:
            return await footprint(pair, clients) == before

        try:
            await until(as_before, 10, "coming to rest")
        except AssertionError:
            assert await footprint(pair, clients) == before
        status, answer = await pair.client.post("/v1/completions", known[3].body)
        assert (status, answer["choices"][0]["text"]) == (200, known[3].text)


async def footprint(pair: Pair, clients: list[Client]) -> dict[str, Any]:
    """What each engine and front holds."""
    held: dict[str, Any] = {}
    for client, service in zip(clients, (pair.decode, pair.prefill), strict=True):
        names = ["handoff_pages_free", "handoff_tasks", "handoff_running_requests", "handoff_waiting_requests"]
        names += ["handoff_slots_free", "handoff_leases"] if service.side == "decode" else []
        held |= {f"{service.side} {name}": await client.metric(name) for name in names}
        engine = service.engine()
        held[f"{service.side} sockets"] = len(engine.net_connections("inet"))
        held[f"{service.side} files"] = engine.num_fds()
        held[f"{service.side} threads"] = engine.num_threads()
    return held
