"""A peer that lies, repeats itself, or offers memory that is not there (A4, A18, A21): real services, with a man in the
middle of their control channel."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.ids import Epoch, PeerAddress, RequestId, Room, Ticket
from shared.protocol import messages as m
from tests.control_proxy import ControlProxy, unchanged
from tests.load import Case, Load, cases
from tests.pair import Client, Forks, Pair, Service

COMMON = ["--dtype", "float32", "--threads", "1", "--port", "0", "--control-port", "0", "--served-model-name", "m"]
DEAD = "127.0.0.1:1"


@dataclass
class Scene:
    """One prefill; ``pair``'s decode reaches it through the proxy, ``well`` directly."""

    proxy: ControlProxy
    pair: Pair
    well: Pair
    prefill: Client
    known: list[Case]

    async def check_books(self) -> None:
        await self.pair.check_books()
        await self.well.check_books()


@pytest.fixture
async def scene(forks: Forks, tmp_path: Path, tiny: Path) -> AsyncIterator[Scene]:
    flags = ["--model", str(tiny), *COMMON, "--max-model-len", "256"]
    async with AsyncExitStack() as stack:

        async def service(side: Any, name: str, *more: str) -> tuple[Service, Client]:
            one = Service(forks, side, [*flags, *more], tmp_path / f"{name}.log").start()
            stack.callback(one.kill)
            await asyncio.to_thread(one.wait_ready)
            return one, await stack.enter_async_context(Client(one.url))

        proxy = await stack.enter_async_context(ControlProxy())
        prefill, client = await service("prefill", "prefill")
        proxy.connect(prefill.control)
        decode, one = await service("decode", "decode", "--prefill", proxy.address)
        other, two = await service("decode", "well", "--prefill", prefill.control)
        pair, well = Pair([prefill], [decode], [one]), Pair([prefill], [other], [two])
        await pair.wait_registered()
        await well.wait_registered()
        yield Scene(proxy, pair, well, client, await cases(two, "m", 6))


def with_session(session: str, times: int) -> Any:
    """The next so many registrations offer a session that is not there."""
    left = times

    def change(message: m.ToPrefill) -> list[msgspec.Struct]:
        nonlocal left
        if isinstance(message, m.Register) and left:
            left -= 1
            return [msgspec.structs.replace(message, session=session)]
        return [message]

    return change


async def register_anew(scene: Scene) -> None:
    """Prefill is restarted in decode's eyes: its heartbeats are answered with a refusal."""
    registered = next(x for x in scene.proxy.seen if isinstance(x, m.Register))
    reply = registered.reply_to
    replaced = m.Register(
        registered.epoch, Epoch(0), reply, 10**6, "nowhere:1", {"page_size": "other"}, registered.regions
    )
    await scene.proxy.send([replaced])  # a refused registration still replaces the present one


async def test_a4_a18_one_failed_transfer_is_retried_and_condemns_nobody(scene: Scene) -> None:
    scene.proxy.change = with_session(DEAD, 1)
    load = Load(scene.well.client, scene.known, workers=3)
    await register_anew(scene)
    await asyncio.sleep(1.5)
    for case in scene.known:
        status, answer = await scene.pair.client.post("/v1/completions", case.body)
        assert (status, answer.get("choices", [answer])[0].get("text")) == (200, case.text)
    assert await scene.prefill.metric("handoff_transfer_failures_total") >= 1
    tally = await load.stop()
    assert not tally.errors, tally
    assert tally.right > 3
    failures = [x for x in scene.pair.prefill.log().splitlines() if "WARNING" in x and "room" in x and "attempt" in x]
    assert len(failures) == 1, failures
    assert DEAD in failures[0]
    await scene.check_books()


async def test_a4_a_session_that_is_never_there_fails_each_request_in_time(scene: Scene) -> None:
    scene.proxy.change = with_session(DEAD, 10**9)
    await register_anew(scene)
    await asyncio.sleep(1.5)
    for case in scene.known[:3]:
        status, answer = await asyncio.wait_for(scene.pair.client.post("/v1/completions", case.body), 15)
        assert (status, answer["error"]["retryable"]) == (503, True), answer
        for client in (scene.pair.client, scene.prefill):
            assert (await client.get("/health"))[0] == 200
        status, answer = await scene.well.client.post("/v1/completions", case.body)
        assert (status, answer["choices"][0]["text"]) == (200, case.text)
    scene.proxy.change = unchanged
    for case in scene.known[:3]:
        status, answer = await asyncio.wait_for(scene.pair.client.post("/v1/completions", case.body), 15)
        assert (status, answer.get("choices", [answer])[0].get("text")) == (200, case.text)
    await scene.check_books()


async def test_a21_repeated_prefills_run_once(scene: Scene) -> None:
    """Each twice at once, and again when it is long over."""
    over: list[m.Prefill] = []

    def thrice(message: m.ToPrefill) -> list[msgspec.Struct]:
        if not isinstance(message, m.Prefill):
            return [message]
        over.append(message)
        return [message, message]

    scene.proxy.change = thrice
    load = Load(scene.pair.client, scene.known, workers=4, leaving=0.3)
    await asyncio.sleep(1.0)
    tally = await load.stop()
    assert tally.right > 3
    assert not tally.errors, tally
    await scene.check_books()
    accepted = await scene.prefill.metric("handoff_attempts_started_total")
    await scene.proxy.send(list(over))
    await scene.check_books()
    status, answer = await scene.pair.client.post("/v1/completions", scene.known[0].body)
    assert (status, answer["choices"][0]["text"]) == (200, scene.known[0].text)
    await scene.check_books()
    assert await scene.prefill.metric("handoff_attempts_started_total") == accepted + 1


async def test_a21_a_hundred_thousand_rooms_that_nobody_owns_leave_memory_flat(scene: Scene) -> None:
    engine = scene.pair.prefill.engine()
    nobody = PeerAddress("tcp://127.0.0.1:9")
    register = next(x for x in scene.proxy.seen if isinstance(x, m.Register))
    tokens = m.pack_int32([1] * 40)

    def rooms(count: int, start: int) -> list[msgspec.Struct]:
        made: list[msgspec.Struct] = []
        for i in range(start, start + count):
            room, ticket = Room(i), Ticket(i)
            made.append(
                m.Prefill(
                    Epoch(3), Epoch(2), nobody, 1, room, ticket, RequestId("x"), tokens, 0, tokens[:12], 0,
                    m.Sampling(seed=1), 1000, False,
                )
            )  # fmt: skip
            # of the registered decode's own epoch, but for attempts that it never made
            made.append(m.Abort(register.epoch, Epoch(2), register.reply_to, 1, room, ticket, "x"))
        return made

    await scene.proxy.send(rooms(5_000, 0))
    await asyncio.sleep(1)
    before = engine.memory_info().rss
    for start in range(5_000, 55_000, 5_000):
        await scene.proxy.send(rooms(5_000, start))
    for case in scene.known:
        status, answer = await scene.pair.client.post("/v1/completions", case.body)
        assert (status, answer["choices"][0]["text"]) == (200, case.text)
    await scene.check_books()
    assert engine.memory_info().rss - before < 16 << 20
