"""The pair over HTTP against the same mix of forwards in one process, under the same threads and wait policy."""

import asyncio
import itertools
import re
import statistics
import time
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from shared.config import PrefillConfig
from tests.pair import Forks, Pair, start_pair

PROMPT, ANSWER = 512, 64
MAX_LEN, CHUNK, ROWS, PAGE_SIZE = 640, 2048, 8, 16
MODEL = "smollm2-135m-instruct"
Times = list[list[float]]
"""For each request: when it was asked, then when each token came (monotonic seconds, one clock for all processes)."""


def bare_process(pipe: Connection, dtype: str, threads: int) -> None:
    """One engine without services: packed prefills and batched decode steps, first come, first served."""
    from shared.kv.pages import PageAllocator
    from shared.ops.setup import load_runtime
    from shared.protocol.messages import Sampling
    from shared.runtime.runner import DecodeBatch, PrefillBatch

    config = PrefillConfig(model=MODEL, dtype=dtype, threads=threads, max_model_len=MAX_LEN, max_num_seqs=ROWS)
    runtime = load_runtime(config)
    greedy = Sampling(seed=0, temperature=0.0)
    pages = PageAllocator(runtime.info.num_pages)
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        prompts, answer, concurrency = job
        asked: list[tuple[Any, list[float]]] = [(p, [time.monotonic()]) for p in prompts[:concurrency]]
        later = list(prompts[concurrency:])
        running: list[dict[str, Any]] = []
        done: Times = []
        while asked or running:
            chunk = [asked.pop(0) for _ in range(min(len(asked), CHUNK // PROMPT))]
            if chunk:
                lengths = [len(p) for p, _ in chunk]
                tables = [t for n in lengths if (t := pages.allocate(-(-(n + answer) // PAGE_SIZE))) is not None]
                tokens = np.concatenate([p for p, _ in chunk])
                batch = PrefillBatch(tokens, lengths, [0] * len(chunk), tables, [greedy] * len(chunk))
                for (prompt, times), table, sample in zip(chunk, tables, runtime.runner.prefill(batch), strict=True):
                    times.append(time.monotonic())
                    assert sample is not None
                    running.append({"token": sample.token, "length": len(prompt) + 1, "table": table, "times": times})
            if running:
                width = max(len(row["table"]) for row in running)
                table = np.stack([np.pad(row["table"], (0, width - len(row["table"]))) for row in running])
                step = DecodeBatch(
                    np.array([row["token"] for row in running], np.int32),
                    np.array([row["length"] for row in running], np.int32),
                    table,
                    [greedy] * len(running),
                    [0] * len(running),
                )
                for row, sample in zip(running, runtime.runner.decode(step), strict=True):
                    row["token"], row["length"] = sample.token, row["length"] + 1
                    row["times"].append(time.monotonic())
                for row in [r for r in running if len(r["times"]) == answer + 1]:
                    running.remove(row)
                    pages.release(row["table"])
                    done.append(row["times"])
                    if later:
                        asked.append((later.pop(0), [time.monotonic()]))
        pipe.send(done)


class Bare:
    def __init__(self, forks: Forks, dtype: str, threads: int) -> None:
        self._pipe, theirs = forks.context.Pipe()
        self._process = forks.context.Process(target=bare_process, args=(theirs, dtype, threads), daemon=True)
        self._process.start()
        assert self._pipe.recv() == "ready"

    async def run(self, prompts: list[Any], concurrency: int) -> Times:
        self._pipe.send((prompts, ANSWER, concurrency))
        times: Times = await asyncio.to_thread(self._pipe.recv)
        return times

    def close(self) -> None:
        self._process.kill()
        self._process.join()


async def run_pair(pair: Pair, prompts: list[Any], concurrency: int) -> Times:
    waiting = list(prompts)
    done: Times = []

    async def client() -> None:
        while waiting:
            body = {
                "model": MODEL,
                "prompt": waiting.pop(0).tolist(),
                "max_tokens": ANSWER,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            times = [time.monotonic()]
            async for event in pair.client.stream("/v1/completions", body):
                if event["choices"][0]["text"]:
                    times.append(time.monotonic())
            done.append(times)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return done


def figures(times: Times, requests: int) -> dict[str, float]:
    """Tokens are counted as asked for: a character that spans several comes as one event."""
    assert len(times) == requests
    wall_s = max(t[-1] for t in times) - min(t[0] for t in times)
    gaps = [b - a for t in times for a, b in itertools.pairwise(t[1:])]
    first = [t[1] - t[0] for t in times]
    return {
        "tok_s": requests * ANSWER / wall_s,
        "ttft_p50_ms": 1e3 * statistics.median(first),
        "ttft_max_ms": 1e3 * max(first),
        "tpot_p50_ms": 1e3 * statistics.median((t[-1] - t[1]) / (ANSWER - 1) for t in times),
        "itl_p99_ms": 1e3 * float(np.percentile(gaps, 99)),
    }


def _prompts(count: int, seed: int) -> list[Any]:
    draw = np.random.default_rng(seed)
    return [draw.integers(1000, 40_000, PROMPT).astype(np.int32) for _ in range(count)]


async def handovers(pair: Pair, count: int) -> dict[str, float]:
    """End of the forward → last byte, and → committed on decode, one 512-token prompt at a time, from the response's
    Server-Timing. The second includes the request message's way to prefill, so it is an upper bound."""
    found: dict[str, list[float]] = {"exposed_ms": [], "committed_ms": []}
    for prompt in _prompts(count, 7):
        body = {"model": MODEL, "prompt": prompt.tolist(), "max_tokens": 2, "temperature": 0}
        async with pair.client.session.post(pair.client.url + "/v1/completions", json=body) as response:
            ms = {k: float(v) for k, v in re.findall(r"(\w+);dur=([\d.]+)", response.headers["Server-Timing"])}
        found["exposed_ms"].append(ms["exposed"])
        found["committed_ms"].append(ms["commit"] - ms["queue"] - ms["prefill"])
    return {
        f"{name}_p{percent}": round(float(np.percentile(values, percent)), 2)
        for name, values in found.items()
        for percent in (50, 95)
    }


async def run(dtype: str, threads: int, counts: dict[int, int], rounds: int, folder: Path) -> dict[str, Any]:
    """``counts``: requests at each concurrency."""
    forks = Forks()
    async with AsyncExitStack() as stack:
        bare = Bare(forks, dtype, threads)
        stack.callback(bare.close)
        flags = (
            "--max-model-len",
            str(MAX_LEN),
            "--max-num-seqs",
            str(ROWS),
            "--dtype",
            dtype,
            "--threads",
            str(threads),
        )
        pair = await start_pair(stack, forks, folder, MODEL, *flags)
        await bare.run(_prompts(1, 1), 1)
        await run_pair(pair, _prompts(1, 1), 1)
        result: dict[str, Any] = {"dtype": dtype, "handover": await handovers(pair, 3 if dtype == "bfloat16" else 12)}
        for concurrency, count in counts.items():
            sides: dict[str, list[dict[str, float]]] = {"pair": [], "bare": []}
            for turn in range(rounds):
                prompts = _prompts(count, 100 + turn)
                sides["bare"].append(figures(await bare.run(prompts, concurrency), count))
                sides["pair"].append(figures(await run_pair(pair, prompts, concurrency), count))
            medians = {
                side: {name: round(statistics.median(f[name] for f in runs), 1) for name in runs[0]}
                for side, runs in sides.items()
            }
            ratios = [a["tok_s"] / b["tok_s"] for a, b in zip(sides["pair"], sides["bare"], strict=True)]
            ttft = [a["ttft_p50_ms"] / b["ttft_p50_ms"] for a, b in zip(sides["pair"], sides["bare"], strict=True)]
            result[f"c{concurrency}"] = {
                **medians,
                "requests": count,
                "tok_s_ratio": round(statistics.median(ratios), 3),
                "ttft_ratio": round(statistics.median(ttft), 3),
            }
        return result
