"""Layer-wise against whole send: what is left to wait for when the forward has ended. Real prefill services of both
kinds run side by side and take turns; the receiving side is memory without a model. The slow link joins two network
namespaces."""

import asyncio
import contextlib
import multiprocessing
import statistics
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from shared.config import PrefillConfig
from shared.kv.layout import Buffer, Layout
from shared.kv.placement import owned
from shared.protocol.messages import Sampling, Timings
from shared.transfer.layers import Context, LayerGroups, Outgoing, Step
from shared.transfer.plan import pair_regions, runs_of
from tests import netns
from tests.fake_decode import FakeDecode
from tests.netns import cable
from tests.pair import Forks, Service

MODEL, DTYPE, LAYERS, PAGE_SIZE, TOKENS, PAGES = "smollm2-135m-instruct", "float32", 30, 16, 512, 1024
LAYOUT = Layout(PAGE_SIZE, tuple(Buffer("kv", layer, (2, 3, 64), DTYPE) for layer in range(LAYERS)))
CASES = {
    "one prompt": (1, False),
    "one prompt, fragmented": (1, True),
    "eight prompts at once": (8, False),
}
WAYS = ("layerwise", "no-layerwise")


def _drive(pipe: Connection, namespace: str, host: str, prefills: list[str]) -> None:
    """The receiving machine: for each job (service, prompts at once, fragmented) the timings of its hand-overs."""
    netns.enter(namespace)
    asyncio.run(_receive(pipe, host, prefills))


async def _receive(pipe: Connection, host: str, prefills: list[str]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        decodes = [await stack.enter_async_context(FakeDecode(address, LAYOUT, PAGES, host)) for address in prefills]
        pipe.send("ready")
        loop = asyncio.get_running_loop()
        while (job := await loop.run_in_executor(None, pipe.recv)) is not None:
            which, count, fragmented = job
            pages = np.arange(1, PAGES, 2 if fragmented else 1)
            need = TOKENS // PAGE_SIZE
            done = await asyncio.gather(
                *(
                    decodes[which].prefill(
                        [(7 * i + j) % 1000 for j in range(TOKENS)],
                        pages[i * need : (i + 1) * need].tolist(), slot=i, digest=False,
                    )
                    for i in range(count)
                )
            )  # fmt: skip
            pipe.send([(d.timings, sum(d.parts[0].bytes_by_component.values())) for d in done])


def _ms(values: list[float]) -> float:
    return round(1e3 * statistics.median(values), 2)


def link(rate: str, chunk: int, rounds: int, threads: int, folder: Path) -> list[dict[str, Any]]:
    """One row a case and way; ``rate`` "" is loopback."""
    flags = ["--model", MODEL, "--dtype", DTYPE, "--threads", str(threads), "--port", "8000", "--max-num-seqs", "8"]
    flags += ["--max-model-len", "640", "--chunked-prefill-size", str(chunk)]
    found: dict[tuple[str, str], list[tuple[Timings, int]]] = {}
    with ExitStack() as stack:
        wire = stack.enter_context(cable()) if rate else None
        (near, here), (far, there) = wire.hosts if wire else (("", "127.0.0.1"), ("", "127.0.0.1"))
        services = []
        for i, way in enumerate(WAYS):
            own = ["--port", str(8100 + i) if rate else "0", "--control-port", str(9100 + i) if rate else "0"]
            service = Service(
                Forks(),
                "prefill",
                [*flags, *own, "--host", here, f"--{way}"],
                folder / f"{way}-{rate}-{chunk}.log",
                near,
            )
            stack.callback(service.kill)
            services.append(service.start())
        for service in services:
            service.wait_ready()
        mine, theirs = multiprocessing.Pipe()
        arguments = (theirs, far, there, [service.control for service in services])
        receiver = multiprocessing.get_context("spawn").Process(target=_drive, args=arguments, daemon=True)
        receiver.start()
        stack.callback(receiver.kill)
        assert mine.recv() == "ready"
        if wire is not None:
            wire.limit(rate)
        for round_ in range(rounds + 1):
            for case, (count, fragmented) in CASES.items():
                for which, way in enumerate(WAYS):
                    mine.send((which, count, fragmented))
                    got = mine.recv()
                    if round_:  # the first warms up
                        found.setdefault((case, way), []).extend(got)
        mine.send(None)
        receiver.join(10)
    rows = []
    for case in CASES:
        for way in WAYS:
            timings = [t for t, _ in found[case, way]]
            rows.append(
                {
                    "link": rate or "loopback",
                    "chunk": chunk,
                    "case": case,
                    "way": "by layer" if way == "layerwise" else "whole",
                    "n": len(timings),
                    "mb": round(found[case, way][0][1] / 1e6, 1),
                    "exposed_ms_p50": _ms([t.exposed_s for t in timings]),
                    "exposed_ms_max": round(1e3 * max(t.exposed_s for t in timings), 2),
                    "forward_ms_p50": _ms([t.prefill_s for t in timings]),
                }
            )
    return rows


def callback(threads: int) -> dict[str, Any]:
    """Time inside the layers' callback, of a forward of 512 tokens with eight contexts in its step."""
    from shared.ops.setup import load_runtime
    from shared.runtime.runner import PrefillBatch

    config = PrefillConfig(model=MODEL, dtype=DTYPE, threads=threads, max_model_len=640, max_num_seqs=2)
    runtime = load_runtime(config)
    regions = runtime.pool.regions()
    pages = np.arange(1, 1 + TOKENS // PAGE_SIZE, dtype=np.int32)
    queue: SimpleQueue[Any] = SimpleQueue()
    contexts = [Context(Outgoing(), pair_regions(regions, regions), runs_of(pages, pages), queue.put) for _ in range(8)]
    groups = LayerGroups(range(LAYERS), 8)
    batch = PrefillBatch(np.arange(TOKENS, dtype=np.int32), [TOKENS], [0], [pages], [Sampling(seed=1)])
    shares, submits = [], 0
    for _ in range(4):
        step, inside = Step(groups, runtime.pool.record, contexts), 0.0

        def on_layer(layer: int, step: Step = step) -> None:
            nonlocal inside
            started_s = time.perf_counter()
            step.layer_end(layer)
            inside += time.perf_counter() - started_s

        started_s = time.perf_counter()
        runtime.runner.prefill(batch, on_layer)
        shares.append(inside / (time.perf_counter() - started_s))
        submits = step.submits
    return {"callback_percent_of_forward": round(100 * statistics.median(shares), 4), "submits_per_forward": submits}


def filters() -> dict[str, Any]:
    """The owner filter on 1024 pages and 8 ranks, against working out every page's owner and place first."""
    pages = np.random.default_rng(1).permutation(8192)[:1024].astype(np.int32)

    def two_step() -> None:
        rank, physical = np.divmod(pages, 8)[::-1]
        positions = np.arange(len(pages))
        keep = np.isin(rank, [3])
        physical[keep], positions[keep]

    def micros(work: Any) -> float:
        times = []
        for _ in range(300):
            started_s = time.perf_counter()
            work()
            times.append(time.perf_counter() - started_s)
        return 1e6 * statistics.median(times)

    ours, theirs = micros(lambda: owned(pages, 0, 3, 8)), micros(two_step)
    return {"owner_filter_us": round(ours, 1), "two_step_us": round(theirs, 1), "ratio": round(theirs / ours, 2)}


def run(rounds: int, threads: int, folder: Path) -> dict[str, Any]:
    rows = []
    for rate in ("", "1gbit"):
        for chunk in (2048, 128):
            rows += link(rate, chunk, rounds, threads, folder)
    return {"links": rows, "callback": callback(threads), "filters": filters()}
