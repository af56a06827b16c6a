"""The default model at its real vocabulary, with text: what the pair answers is what transformers answers."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from shared.runtime.source import DEFAULT_MODEL, resolve_model
from tests.e2e.test_equality import check
from tests.pair import Forks, Pair, start_pair
from tests.reference import Reference

TEXTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "žluťoučký kůň 🫨 says:",
    "1, 2, 3, 4, 5,",
    "The quick brown fox jumps over the lazy dog. " * 12,
]


@pytest.fixture(scope="module")
async def smol(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        flags = ("--max-model-len", "256", "--page-size", "16", "--chunked-prefill-size", "64", "--max-num-seqs", "8")
        yield await start_pair(stack, forks, tmp_path_factory.mktemp("smol"), DEFAULT_MODEL, *flags)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(resolve_model(DEFAULT_MODEL))


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
async def test_text_equals_transformers(smol: Pair, reference: Reference, text: str) -> None:
    await check(smol.client, DEFAULT_MODEL, reference, reference.tokenizer(text).input_ids, 10)


async def test_eight_texts_at_once(smol: Pair, reference: Reference) -> None:
    prompts = [reference.tokenizer(t).input_ids for t in [*TEXTS, "Hello", "A"]]
    await asyncio.gather(*(check(smol.client, DEFAULT_MODEL, reference, p, 6) for p in prompts))
    await smol.check_books()


async def test_chat_streams_what_it_answers(smol: Pair, reference: Reference) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": DEFAULT_MODEL, "messages": messages, "max_tokens": 12, "temperature": 0}
    status, whole = await smol.client.post("/v1/chat/completions", body)
    assert status == 200
    prompt = reference.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    expected = reference.text(reference.tokens(prompt["input_ids"], 12))
    assert whole["choices"][0]["message"]["content"] == expected
    assert whole["usage"]["prompt_tokens"] == len(prompt["input_ids"])
    deltas = [e["choices"][0]["delta"] async for e in smol.client.stream("/v1/chat/completions", body)]
    assert "".join(d.get("content") or "" for d in deltas) == expected


@pytest.mark.soak
async def test_a2_a_prompt_that_waits_behind_a_full_pool(forks: Forks, tmp_path: Path, reference: Reference) -> None:
    """Its limit is 2 s, and one long answer keeps the pool full for ten or more: an explicit error, counted; the same
    prompt is answered rightly as soon as there is room, and the long answer is not disturbed."""
    prompt = reference.tokenizer("The capital of France is").input_ids
    body = {"model": DEFAULT_MODEL, "prompt": prompt, "temperature": 0, "return_token_ids": True}
    async with AsyncExitStack() as stack:
        flags = ("--max-model-len", "256")
        decode = ("--request-timeout-s", "2", "--num-pages", "17")
        pair = await start_pair(stack, forks, tmp_path, DEFAULT_MODEL, *flags, decode_flags=decode)
        started_s = time.monotonic()
        ask = {**body, "max_tokens": 250, "ignore_eos": True}
        long = asyncio.ensure_future(pair.client.post("/v1/completions", ask))
        while await pair.client.metric("handoff_running_requests") == 0:
            await asyncio.sleep(0.05)
        late = 0
        while not long.done():
            asked_s = time.monotonic()
            status, answer = await pair.client.post("/v1/completions", {**body, "max_tokens": 8})
            if status != 200:
                late += 1
                assert (status, answer["error"]["code"], answer["error"]["retryable"]) == (503, "timeout", True)
                assert 1.5 < time.monotonic() - asked_s < 4
        assert time.monotonic() - started_s > 10
        assert late >= 3
        status, answer = await long
        assert (status, answer["usage"]["completion_tokens"]) == (200, 250)
        assert answer["choices"][0]["token_ids"][:30] == reference.tokens(prompt, 30)
        await check(pair.client, DEFAULT_MODEL, reference, prompt, 8)
        assert await pair.client.metric('handoff_requests_total{outcome="failed"}') == late
        await pair.check_books()
