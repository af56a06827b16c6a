"""Clients that never rest, and know what they must be told: the right text, or an explicit error."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.pair import Client


@dataclass(frozen=True)
class Case:
    """A request body, and the text it has on an idle pair."""

    body: dict[str, Any]
    text: str


async def cases(client: Client, model: str, count: int, *, longest: int = 120, max_tokens: int = 24) -> list[Case]:
    """Distinct greedy requests of growing length, each asked once by itself."""
    made = []
    for i in range(count):
        length = 1 + i * (longest - 1) // max(1, count - 1)
        body = {"model": model, "prompt": [i + 1] * length, "max_tokens": max_tokens, "temperature": 0}
        status, answer = await client.post("/v1/completions", body)
        assert status == 200, answer
        made.append(Case(body, answer["choices"][0]["text"]))
    return made


@dataclass
class Tally:
    """How the requests ended; wrong answers raise instead."""

    right: int = 0
    cancelled: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    unreached: int = 0
    """The service was not there, or its process died with the connection open."""


class Load:
    """``workers`` clients that ask one request after the other, streamed and not, until ``stop``; a share of them leave
    at a random moment. Every answer is checked."""

    def __init__(self, client: Client, known: list[Case], *, workers: int, leaving: float = 0.0, seed: int = 0) -> None:
        self.tally = Tally()
        self._client, self._known, self._leaving = client, known, leaving
        self._random = random.Random(seed)
        self._stopped = False
        self._tasks = [asyncio.ensure_future(self._work()) for _ in range(workers)]

    async def stop(self, timeout_s: float = 60.0) -> Tally:
        """Each open request still comes to its end. Raises what any client found wrong."""
        self._stopped = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), timeout_s)
        return self.tally

    async def _work(self) -> None:
        while not self._stopped:
            await self.one()

    async def one(self) -> None:
        case, streamed = self._random.choice(self._known), self._random.random() < 0.5
        asking = asyncio.ensure_future(self._streamed(case) if streamed else self._whole(case))
        if self._random.random() < self._leaving:
            await asyncio.wait([asking], timeout=self._random.expovariate(20))
            if not asking.done():
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                self.tally.cancelled += 1
                return
        try:
            await asking
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            self.tally.unreached += 1
            await asyncio.sleep(0.05)

    async def _whole(self, case: Case) -> None:
        status, answer = await self._client.post("/v1/completions", case.body)
        if status == 200:
            self._right(case, answer["choices"][0]["text"], answer["choices"][0]["finish_reason"])
        else:
            await self._wrong(status, answer)

    async def _streamed(self, case: Case) -> None:
        text, finish = "", None
        async with self._client.session.post(
            self._client.url + "/v1/completions", json={**case.body, "stream": True}
        ) as response:
            if response.status != 200:
                await self._wrong(response.status, await response.json())
                return
            async for event in self._client.events(response):
                if "error" in event:
                    assert finish is None, "an error after a finish reason"
                    await self._wrong(503, event)
                    return
                text += event["choices"][0]["text"]
                finish = event["choices"][0]["finish_reason"] or finish
        if finish is None:
            raise aiohttp.ClientPayloadError("the stream broke off")
        self._right(case, text, finish)

    def _right(self, case: Case, text: str, finish: str) -> None:
        assert text == case.text, f"{case.body['prompt'][:2]}…: {text!r} is not {case.text!r}"
        assert finish in ("stop", "length")
        self.tally.right += 1

    async def _wrong(self, status: int, answer: Any) -> None:
        error = answer["error"]
        assert status == 503, answer
        assert error["message"], answer
        assert error["retryable"] is True, answer
        self.tally.errors[error["code"]] += 1
        await asyncio.sleep(0.02)
