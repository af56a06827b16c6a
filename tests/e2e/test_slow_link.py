"""Failures in the middle of a transfer, on a cable slow enough to meet it there (A1, A6)."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.netns import Cable, cable
from tests.pair import Client, Forks, Pair, Service
from tests.tiny_models import save_tiny_llama

PROMPT = 600
LONG = 300
"""Tokens of an answer that takes a second, and with its prompt nearly all of a small pool."""
RATE = "24mbit"
"""A hand-over of 600 tokens is 4.9 MB here, and takes a second and a half."""


@dataclass
class Far:
    """A pair with a cable between: prefill's end is 0, decode's 1."""

    pair: Pair
    cable: Cable
    prefill: Client

    async def in_transfer(self, since: int, least: int = 600_000) -> None:
        """So many bytes have crossed since then."""
        end_s = time.monotonic() + 20
        while self.cable.sent_bytes() - since < least:
            assert time.monotonic() < end_s
            await asyncio.sleep(0.02)


@pytest.fixture
async def far(forks: Forks, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Far]:
    """``request.param``: flags of decode."""
    model = save_tiny_llama(
        tmp_path / "wide", head_dim=128, num_key_value_heads=4, num_attention_heads=4, max_position_embeddings=2048
    )
    flags = ["--model", str(model), "--dtype", "float32", "--threads", "1", "--port", "8000", "--control-port", "8999"]
    flags += ["--served-model-name", "m", "--max-model-len", "900", "--max-num-seqs", "16"]
    async with AsyncExitStack() as stack:
        wire = stack.enter_context(cable())
        (one, here), (two, there) = wire.hosts
        prefill = Service(forks, "prefill", [*flags, "--host", here], tmp_path / "prefill.log", one)
        more = ["--host", there, "--prefill", f"{here}:8999", *request.param]
        decode = Service(forks, "decode", [*flags, *more], tmp_path / "decode.log", two)
        for service in (prefill, decode):
            stack.callback(service.kill)
            service.start()
        clients = []
        for service in (prefill, decode):
            await asyncio.to_thread(service.wait_ready)
            clients.append(await stack.enter_async_context(Client(service.url, service.namespace)))
        pair = Pair([prefill], [decode], [clients[1]])
        await pair.wait_registered()
        wire.limit(RATE)
        yield Far(pair, wire, clients[0])


def body_of(seed: int, max_tokens: int) -> dict[str, Any]:
    """No two rows of its cache are alike, so that any that is another's, or out of place, shows in the text."""
    prompt = random.Random(seed).choices(range(256), k=PROMPT)
    return {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def ask(client: Client, seed: int, *, stream: bool = False, max_tokens: int = 5) -> tuple[int, Any]:
    """The answer's text, or the error that came instead, also in the middle of a stream."""
    body = body_of(seed, max_tokens)
    if not stream:
        return await client.post("/v1/completions", body)
    async with client.session.post(client.url + "/v1/completions", json={**body, "stream": True}) as response:
        if response.status != 200:
            return response.status, await response.json()
        last: dict[str, Any] = {}
        async for event in client.events(response):
            last = event
        return (503 if "error" in last else 200), last


@pytest.mark.parametrize("far", [("--num-pages", "60")], indirect=True)
async def test_a1_pages_of_a_client_that_left_in_mid_transfer_are_not_the_next_ones(far: Far) -> None:
    """The pool holds one of the two requests at a time."""
    client = far.pair.client
    alone = (await ask(client, 2))[1]["choices"][0]["text"]
    since = far.cable.sent_bytes()
    leaving = asyncio.ensure_future(ask(client, 1, stream=True))
    await far.in_transfer(since)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    following = asyncio.ensure_future(ask(client, 2))
    quarantined = 0.0
    while not following.done():
        quarantined = max(quarantined, await client.metric("handoff_pages_quarantined"))
        await asyncio.sleep(0.05)
    status, answer = await following
    assert (status, answer["choices"][0]["text"]) == (200, alone)
    assert quarantined == 38
    assert await client.metric("handoff_fences_total") == 0  # the writer's word was proof enough
    await far.pair.check_books()


@pytest.mark.parametrize("far", [("--num-pages", "60", "--on-prefill-loss", "local")], indirect=True)
async def test_a1_a_writer_that_froze_in_mid_transfer_does_not_reach_the_next_owner(far: Far) -> None:
    """Which decode computes itself, in the same pages: no later transfer hides what the writer still had to write."""
    client = far.pair.client
    alone = (await ask(client, 2, max_tokens=LONG))[1]["choices"][0]["text"]
    since = far.cable.sent_bytes()
    leaving = asyncio.ensure_future(ask(client, 1, stream=True))
    await far.in_transfer(since)
    engine = far.pair.prefill.engine()
    engine.suspend()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    far.cable.limit("1gbit")
    answer = client.stream("/v1/completions", body_of(2, LONG))  # waits for the pages: the fence must free them
    events = [await anext(answer)]
    engine.resume()
    events += [event async for event in answer]
    assert "".join(event["choices"][0]["text"] for event in events) == alone
    await far.pair.wait_registered()
    assert (await ask(client, 2, max_tokens=LONG))[1]["choices"][0]["text"] == alone
    await far.pair.check_books()
    for series in ("handoff_fences_total", "handoff_local_prefills_total"):
        assert await client.metric(series) == 1, series


@pytest.mark.parametrize("far", [()], indirect=True)
@pytest.mark.parametrize("absent_s", [0.0, pytest.param(20.0, marks=pytest.mark.soak)])
async def test_a6_prefill_dies_with_eight_transfers_under_way(far: Far, absent_s: float) -> None:
    client, prefill = far.pair.client, far.pair.prefill
    alone = (await ask(client, 2))[1]["choices"][0]["text"]
    since = far.cable.sent_bytes()
    waiting = [asyncio.ensure_future(ask(client, i + 1, stream=i < 4)) for i in range(8)]
    await far.in_transfer(since)
    killed_s = time.monotonic()
    prefill.kill()
    for status, body in await asyncio.wait_for(asyncio.gather(*waiting), 5):
        assert status == 503, body
        assert body["error"]["retryable"] is True
        assert body["error"]["message"]
    assert time.monotonic() - killed_s < 5
    assert (await client.get("/health"))[0] == 200
    await Pair([], far.pair.decodes, [client]).check_books()  # although nobody answers the aborts: by the fence
    end_s = time.monotonic() + absent_s
    while time.monotonic() < end_s:
        status, body = await ask(client, 2)
        assert (status, body["error"]["code"], body["error"]["retryable"]) == (503, "no_prefill", True)
    await asyncio.to_thread(lambda: prefill.start().wait_ready())
    status, answer = await ask(client, 2)
    assert (status, answer["choices"][0]["text"]) == (200, alone)
    await far.pair.check_books()
