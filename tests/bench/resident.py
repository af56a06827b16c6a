"""Does memory stay flat? Thousands of requests, a part of them left by their clients, on a tiny model."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil

from tests.load import Load, cases
from tests.pair import Forks, start_pair
from tests.tiny_models import save_tiny_llama

WARM_UP, REQUESTS, AT_ONCE = 500, 2000, 16


async def run(folder: Path) -> list[dict[str, Any]]:
    model = save_tiny_llama(folder / "tiny")
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, Forks(), folder, model, "--served-model-name", "m", "--max-model-len", "256")
        known = await cases(pair.client, "m", 24, longest=200, max_tokens=16)
        load = Load(pair.client, known, workers=0, leaving=0.2)
        limit = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            async with limit:
                await load.one()

        processes = {
            f"{service.side} {what}": process
            for service in (pair.prefill, pair.decode)
            for what, process in (("front", psutil.Process(service.process.pid)), ("engine", service.engine()))
        }
        await asyncio.gather(*(one() for _ in range(WARM_UP)))
        before = {name: process.memory_info().rss for name, process in processes.items()}
        await asyncio.gather(*(one() for _ in range(REQUESTS)))
        await pair.check_books()
        return [
            {
                "process": name,
                "rss_mb": round(process.memory_info().rss / 1e6, 1),
                "grown_mb": round((process.memory_info().rss - before[name]) / 1e6, 2),
            }
            for name, process in processes.items()
        ]
