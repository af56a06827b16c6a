"""What lands in decode's memory, byte for byte: layer-wise and whole send of the same prompts, from another process,
over Mooncake (S10, S14, S18, S25)."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import numpy as np
import pytest

from shared.kv.layout import Buffer, Layout
from tests.fake_decode import FakeDecode
from tests.pair import Client, Forks, Service
from tests.tiny_models import save_tiny_llama

LAYERS, PAGE_SIZE, PAGES = 11, 16, 64
LAYOUT = Layout(PAGE_SIZE, tuple(Buffer("kv", layer, (2, 2, 16), "float32") for layer in range(LAYERS)))


@dataclass
class Two:
    """The same model behind both ways of sending."""

    by_layer: FakeDecode
    whole: FakeDecode
    prefills: list[Client]


@pytest.fixture(scope="module")
async def two(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Two]:
    """Groups of three layers, chunks of 64 tokens."""
    folder = tmp_path_factory.mktemp("pools")
    model = save_tiny_llama(folder / "deep", layers=LAYERS)
    flags = ["--model", str(model), "--dtype", "float32", "--threads", "1", "--port", "0", "--control-port", "0"]
    flags += ["--max-model-len", "512", "--chunked-prefill-size", "64", "--transfer-layer-group", "3"]
    async with AsyncExitStack() as stack:
        decodes, clients = [], []
        for way in ("--layerwise", "--no-layerwise"):
            service = Service(forks, "prefill", [*flags, way], folder / f"prefill{way}.log").start()
            stack.callback(service.kill)
            await asyncio.to_thread(service.wait_ready)
            decodes.append(await stack.enter_async_context(FakeDecode(service.control, LAYOUT, PAGES)))
            clients.append(await stack.enter_async_context(Client(service.url)))
        yield Two(decodes[0], decodes[1], clients)


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(length)]


def landing(length: int, seed: int, fragmented: bool) -> list[int]:
    count = -(-length // PAGE_SIZE)
    return random.Random(seed).sample(range(1, PAGES), count) if fragmented else list(range(5, 5 + count))


@pytest.mark.parametrize("fragmented", [False, True])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 128, 130, 200])
async def test_s14_s25_both_ways_write_the_same_bytes_to_the_same_places_and_nowhere_else(
    two: Two, length: int, fragmented: bool
) -> None:
    """Tails, whole pages, several chunks, and last chunks of one token."""
    tokens, pages = prompt(length, length), landing(length, length, fragmented)
    answers = []
    for decode in (two.by_layer, two.whole):
        decode.memory[:] = 0
        done = await decode.prefill(tokens, pages, slot=3)
        assert done.parts[0].digest == decode.digest_of(tokens, pages)
        assert (decode.rows[3]["room"], decode.rows[3]["ticket"]) == (done.room, done.ticket)
        answers.append((done.parts[0].bytes_by_component, int(decode.rows[3]["token"])))
    assert answers[0] == answers[1]
    assert np.array_equal(two.by_layer.memory, two.whole.memory)
    untouched = np.setdiff1d(np.arange(PAGES), pages)
    assert not two.by_layer.memory[:, untouched].any()
    assert all(two.by_layer.memory[:, page].any() for page in pages)


async def test_s18_mixed_requests_in_packed_batches_and_while_other_forwards_run(two: Two) -> None:
    """Many at once, of all lengths, registered at any moment of the others' forwards: each lands as it was computed."""
    decode = two.by_layer
    decode.memory[:] = 0
    draw = random.Random(5)
    free = list(range(1, PAGES))
    draw.shuffle(free)
    jobs = []
    for slot, length in enumerate([1, 40, 5, 64, 100, 16, 130, 33, 17, 90]):
        pages = [free.pop() for _ in range(-(-length // PAGE_SIZE))]
        jobs.append((prompt(length, 100 + slot), pages, slot))

    async def one(tokens: list[int], pages: list[int], slot: int) -> int | None:
        await asyncio.sleep(draw.uniform(0, 0.05))
        done = await decode.prefill(tokens, pages, slot)
        assert done.parts[0].digest == decode.digest_of(tokens, pages)
        assert decode.rows[slot]["ticket"] == done.ticket
        return done.parts[0].digest

    told = await asyncio.gather(*(one(*job) for job in jobs))
    assert [decode.digest_of(tokens, pages) for tokens, pages, _ in jobs] == told  # nobody wrote over another's later
    assert not decode.memory[:, [0, *free]].any()


async def test_s23_submits_are_counted_by_group(two: Two) -> None:
    by_layer, whole = two.prefills
    await asyncio.sleep(1.0)  # a heartbeat's worth of counters
    before = await by_layer.metric("handoff_layer_submits_total")
    await two.by_layer.prefill(prompt(150, 1), landing(150, 1, True), slot=1)
    await asyncio.sleep(1.0)
    assert await by_layer.metric("handoff_layer_submits_total") - before == 3 * 4  # chunks · groups
    assert await by_layer.metric("handoff_whole_sends_total") == 0
    assert await whole.metric("handoff_layer_submits_total") == 0
    assert await whole.metric("handoff_whole_sends_total") > 0
