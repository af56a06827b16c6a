"""Busy is not dead (A23): probes are answered within a second while everything is full."""

import asyncio
import io
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.pair import Client, Forks, start_pair

PROBE_S = 0.25


async def probe(client: Client, seen: list[int]) -> None:
    """Each probe within a second, or this fails."""
    while True:
        seen.append((await asyncio.wait_for(client.get("/health"), 1.0))[0])
        await asyncio.sleep(PROBE_S)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a23_64_prompts_near_the_limit_and_a_huge_body(
    forks: Forks, tmp_path: Path, tiny: Path, streamed: bool
) -> None:
    async with AsyncExitStack() as stack:
        flags = ("--served-model-name", "m", "--max-model-len", "512", "--chunked-prefill-size", "256")
        pair = await start_pair(stack, forks, tmp_path, tiny, *flags)
        prefill = await stack.enter_async_context(Client(pair.prefill.url))
        seen: dict[str, list[int]] = {"decode": [], "prefill": []}
        probes = [
            asyncio.ensure_future(probe(pair.client, seen["decode"])),
            asyncio.ensure_future(probe(prefill, seen["prefill"])),
        ]

        async def one(i: int) -> bool:
            body = {"model": "m", "prompt": [i + 1] * 500, "max_tokens": 12, "temperature": 0}
            if not streamed:
                return (await pair.client.post("/v1/completions", body))[0] == 200
            events = [event async for event in pair.client.stream("/v1/completions", body)]
            return events[-1]["choices"][0]["finish_reason"] is not None

        async def huge() -> int:
            body = b'{"model": "m", "prompt": "' + b"x" * (20 << 20) + b'"}'
            async with pair.client.session.post(pair.client.url + "/v1/completions", data=io.BytesIO(body)) as response:
                assert (await response.json())["error"]["type"] == "invalid_request_error"
                return response.status

        burst = asyncio.gather(*(one(i) for i in range(64)))
        assert [await huge() for _ in range(3)] == [413] * 3
        assert all(await burst)
        for task in probes:
            assert not task.done(), task
            task.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        assert {status for side in seen.values() for status in side} == {200}
        assert all(len(side) >= 4 for side in seen.values()), seen
        await pair.check_books()
