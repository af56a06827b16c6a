"""What users and probes feel of the fronts: /health during bursts, cost of a streamed token, idle and slow clients,
start to ready."""

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from shared.runtime.source import DEFAULT_MODEL
from tests.pair import Client, Forks, Pair, start_pair
from tests.tiny_models import save_tiny_llama

PROBE_S = 0.02
BURSTS = (64, 256)
BURST_LIMIT_S = 45.0
IDLE = 500


def request(prompt: int, answer: int, seed: int = 0) -> dict[str, Any]:
    ids = np.random.default_rng(seed).integers(1, 250, prompt).tolist()
    return {"model": "m", "prompt": ids, "max_tokens": answer, "temperature": 0, "ignore_eos": True}


async def probe(url: str, found: list[float], wrong: list[int]) -> None:
    """A request each 20 ms on a connection of its own, whatever the last one does; ms each."""

    async def one(client: Client) -> None:
        started_s = time.monotonic()
        status = (await client.get("/health"))[0]
        found.append(1e3 * (time.monotonic() - started_s))
        if status != 200:
            wrong.append(status)

    async with Client(url) as client, asyncio.TaskGroup() as group:
        try:
            while True:
                group.create_task(one(client))
                await asyncio.sleep(PROBE_S)
        except asyncio.CancelledError:
            pass


async def burst(pair: Pair, count: int) -> list[dict[str, Any]]:
    """Streams of 128 tokens in and 16 out, until they have ended or the limit is over."""
    found: dict[str, list[float]] = {"prefill": [], "decode": []}
    wrong: list[int] = []
    urls = {"prefill": pair.prefill.url, "decode": pair.decode.url}
    probes = [asyncio.ensure_future(probe(urls[side], found[side], wrong)) for side in found]

    async def stream(i: int) -> None:
        async for _ in pair.client.stream("/v1/completions", request(128, 16, i)):
            pass

    tasks = [asyncio.ensure_future(stream(i)) for i in range(count)]
    done, rest = await asyncio.wait(tasks, timeout=BURST_LIMIT_S)
    for task in (*rest, *probes):
        task.cancel()
    await asyncio.gather(*rest, *probes, return_exceptions=True)
    await pair.check_books(30)
    return [
        {
            "burst": count,
            "service": side,
            "probes": len(times),
            "p50_ms": round(statistics.median(times), 2),
            "p99_ms": round(float(np.percentile(times, 99)), 2),
            "max_ms": round(max(times), 1),
            "not_200": len(wrong),
            "ended_in_time": len(done),
        }
        for side, times in found.items()
    ]


async def gaps_ms(pair: Pair, streams: int = 4) -> list[float]:
    """Between the tokens of some streams."""

    async def one(i: int) -> list[float]:
        times = []
        async for event in pair.client.stream("/v1/completions", request(16, 200, i)):
            if event["choices"][0]["text"]:
                times.append(time.monotonic())
        return [1e3 * (b - a) for a, b in itertools.pairwise(times)]

    return [gap for of in await asyncio.gather(*(one(i) for i in range(streams))) for gap in of]


@asynccontextmanager
async def crowd(pair: Pair) -> AsyncIterator[None]:
    """500 clients that wait with an open stream, and one that has asked for much and reads nothing."""
    async with AsyncExitStack() as stack:
        host, port = pair.decode.url.removeprefix("http://").split(":")
        for i in range(IDLE + 1):
            _, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
            stack.callback(writer.close)
            if i == IDLE:  # its answer is more than the sockets hold
                body = '{"model":"m","prompt":[1],"max_tokens":240,"ignore_eos":true,"stream":true,"logprobs":20,"n":1}'
                writer.transport.pause_reading()  # type: ignore[attr-defined]
            else:
                body = ""
            length = len(body) if body else 100  # the idle ones never send theirs
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
            writer.write((head + body).encode())
        await asyncio.sleep(0.5)
        yield


def _gaps(name: str, gaps: list[float]) -> dict[str, Any]:
    return {
        "clients beside": name,
        "p50_ms": round(statistics.median(gaps), 2),
        "p99_ms": round(float(np.percentile(gaps, 99)), 2),
    }


async def run(folder: Path, threads: int) -> dict[str, Any]:
    result: dict[str, Any] = {"health": []}
    forks = Forks()
    async with AsyncExitStack() as stack:
        flags = ("--served-model-name", "m", "--max-model-len", "512", "--threads", str(threads))
        started_s = time.monotonic()
        pair = await start_pair(stack, forks, folder, DEFAULT_MODEL, *flags)
        result["start_to_ready_s"] = round(time.monotonic() - started_s, 1)
        for count in BURSTS:
            result["health"] += await burst(pair, count)
    async with AsyncExitStack() as stack:
        tiny = folder / "small"
        tiny.mkdir()
        few = ("--served-model-name", "m", "--max-model-len", "256")
        pair = await start_pair(stack, forks, tiny, save_tiny_llama(tiny / "model"), *few)
        front = psutil.Process(pair.decode.process.pid)
        await gaps_ms(pair)
        before, tokens = front.cpu_times(), await pair.client.metric("handoff_completion_tokens_total")
        alone: list[float] = []
        crowded: list[float] = []
        for _ in range(3):
            alone += await gaps_ms(pair)
        after = front.cpu_times()
        tokens = await pair.client.metric("handoff_completion_tokens_total") - tokens
        used_s = after.user + after.system - before.user - before.system
        result["front_us_per_token"] = round(1e6 * used_s / tokens)
        for _ in range(3):
            async with crowd(pair):
                crowded += await gaps_ms(pair)
        result["gaps"] = [_gaps("none", alone), _gaps(f"{IDLE} idle, one that does not read", crowded)]
    return result
