"""``n`` choices from one hand-over, lists of prompts, and the prompt's own log-probabilities, over the real pair."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.protocol.messages import Sampling
from shared.runtime.sampler import sample
from tests.e2e.conftest import PAGE_SIZE
from tests.e2e.test_equality import prompt_of
from tests.pair import Forks, Pair, start_pair
from tests.reference import Reference
from tests.tiny_models import EOS

SEED = 11


def sampled(reference: Reference, prompt: list[int], count: int, choice: int) -> list[int]:
    """What one process answers as this choice: each draw from the whole sequence's own forward."""
    tokens = list(prompt)
    with torch.inference_mode():
        while len(tokens) < len(prompt) + count and (len(tokens) == len(prompt) or tokens[-1] != EOS):
            logits = reference.model(input_ids=torch.tensor([tokens])).logits[:, -1]
            tokens.append(sample(logits, [Sampling(SEED)], [len(tokens)], [choice])[0].token)
    return tokens[len(prompt) :]


def asked(prompt: Any, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True, **more}


@pytest.mark.parametrize("length", [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 70])
async def test_each_choice_is_what_one_process_draws(pair: Pair, tiny_reference: Reference, length: int) -> None:
    """Four at once from one hand-over, each from its own copy of the last page, across a page's edge."""
    prompt = prompt_of(length, length)
    series = "handoff_transfer_bytes_total"
    before = await pair.client.metric(series)
    status, answer = await pair.client.post("/v1/completions", asked(prompt, 20, n=4, seed=SEED, temperature=1.0))
    assert status == 200, answer
    got = [choice["token_ids"] for choice in answer["choices"]]
    assert got == [sampled(tiny_reference, prompt, 20, choice) for choice in range(4)]
    assert len({tuple(tokens) for tokens in got}) == 4, "equal choices prove nothing"
    assert answer["usage"]["prompt_tokens"] == length
    await pair.check_books()
    once = await pair.client.metric(series) - before
    await pair.client.post("/v1/completions", asked(prompt, 20, n=1))
    await pair.check_books()
    assert await pair.client.metric(series) - before == 2 * once > 0


async def test_greedy_choices_beside_other_work(pair: Pair, tiny_reference: Reference) -> None:
    """Mixed batches: single requests and several choices, with rows that come and go at different times."""
    prompts = [prompt_of(10 + 7 * i, 50 + i) for i in range(6)]
    asks = [asked(p, 5 + 4 * i, n=1 + i % 3, temperature=0) for i, p in enumerate(prompts)]
    answers = await asyncio.gather(*(pair.client.post("/v1/completions", ask) for ask in asks))
    for (status, answer), prompt, ask in zip(answers, prompts, asks, strict=True):
        assert status == 200, answer
        expected = tiny_reference.tokens(prompt, ask["max_tokens"])
        assert [choice["token_ids"] for choice in answer["choices"]] == [expected] * ask["n"]
    await pair.check_books()


async def test_one_token_each(pair: Pair, tiny_reference: Reference) -> None:
    prompt = prompt_of(33, 9)
    _, answer = await pair.client.post("/v1/completions", asked(prompt, 1, n=3, seed=SEED))
    assert [c["token_ids"] for c in answer["choices"]] == [sampled(tiny_reference, prompt, 1, i) for i in range(3)]
    assert [c["finish_reason"] for c in answer["choices"]] == ["length"] * 3
    await pair.check_books()


async def test_streamed_choices_equal_the_whole_answer(pair: Pair) -> None:
    body = asked(prompt_of(40, 3), 12, n=3, seed=SEED) | {"return_token_ids": False}
    _, whole = await pair.client.post("/v1/completions", body)
    texts = {0: "", 1: "", 2: ""}
    async for event in pair.client.stream("/v1/completions", body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert [texts[i] for i in range(3)] == [choice["text"] for choice in whole["choices"]]
    await pair.check_books()


async def test_a_client_that_leaves_ends_all_choices_and_prompts(pair: Pair) -> None:
    for cut in range(6):
        body = asked([prompt_of(20, 1), prompt_of(50, 2)], 100, n=3, ignore_eos=True) | {"return_token_ids": False}
        events = pair.client.stream("/v1/completions", body)
        for _ in range(1 + 5 * cut):
            await anext(events)
        await events.aclose()  # type: ignore[attr-defined]
    await pair.check_books()


async def test_a_stop_string_in_one_choice(pair: Pair) -> None:
    """It ends there; the others go on as if nothing had been."""
    body = asked(prompt_of(30, 4), 24, n=3, seed=SEED, ignore_eos=True)
    _, free = await pair.client.post("/v1/completions", body)
    texts = [choice["text"] for choice in free["choices"]]
    stop = texts[1][3:6]
    assert stop not in texts[0]
    _, stopped = await pair.client.post("/v1/completions", body | {"stop": stop})
    assert [c["text"] for c in stopped["choices"]][:2] == [texts[0], texts[1][: texts[1].index(stop)]]
    assert [c["finish_reason"] for c in stopped["choices"]][:2] == ["length", "stop"]
    await pair.check_books()


async def test_a_list_of_prompts_is_each_of_them(pair: Pair, tiny_reference: Reference) -> None:
    prompts = [prompt_of(length, length) for length in (3, 64, 65, 120)]
    _, answer = await pair.client.post("/v1/completions", asked(prompts, 8, temperature=0))
    assert [c["token_ids"] for c in answer["choices"]] == [tiny_reference.tokens(p, 8) for p in prompts]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    await pair.check_books()


@pytest.mark.parametrize("length", [1, 2, 65, 140])
async def test_prompt_scores_are_the_models_own(pair: Pair, tiny_reference: Reference, length: int) -> None:
    """Chunks of 64 on prefill, one message to decode, as vLLM shows them and as an echo."""
    prompt = prompt_of(length, 7 * length)
    _, answer = await pair.client.post("/v1/completions", asked(prompt, 2, temperature=0, prompt_logprobs=2))
    shown = answer["choices"][0]["prompt_logprobs"]
    with torch.inference_mode():
        logprobs = tiny_reference.model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert shown[0] is None
    assert len(shown) == length
    for place, (token, entries) in enumerate(zip(prompt[1:], shown[1:], strict=True)):
        row = logprobs[place]
        assert entries[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=2e-4)
        assert entries[str(token)]["rank"] == int((row > row[token]).sum()) + 1
        assert {str(i) for i in row.topk(2).indices.tolist()} <= set(entries)
    assert answer["choices"][0]["token_ids"] == tiny_reference.tokens(prompt, 2)
    _, echoed = await pair.client.post("/v1/completions", asked(prompt, 2, temperature=0, echo=True, logprobs=0))
    told = echoed["choices"][0]["logprobs"]["token_logprobs"]
    assert told[1:length] == pytest.approx([float(logprobs[i, t]) for i, t in enumerate(prompt[1:])], abs=2e-4)
    await pair.check_books()


async def test_scores_and_choices_where_decode_computes_the_prompt(
    forks: Forks, tiny: Path, tiny_reference: Reference, tmp_path: Path
) -> None:
    prompt = prompt_of(90, 8)
    async with AsyncExitStack() as stack:
        flags = ("--page-size", str(PAGE_SIZE), "--chunked-prefill-size", "64", "--served-model-name", "tiny")
        pair = await start_pair(stack, forks, tmp_path, tiny, *flags, decode_flags=("--on-prefill-loss", "local"))
        far = await pair.client.post("/v1/completions", asked(prompt, 9, n=3, seed=SEED, prompt_logprobs=1))
        pair.prefill.kill()
        near = await pair.client.post("/v1/completions", asked(prompt, 9, n=3, seed=SEED, prompt_logprobs=1))
        assert (far[0], near[0]) == (200, 200), near
        tokens = [[choice["token_ids"] for choice in answer["choices"]] for _, answer in (far, near)]
        assert tokens[0] == tokens[1] == [sampled(tiny_reference, prompt, 9, choice) for choice in range(3)]
        scores = [answer["choices"][0]["prompt_logprobs"] for _, answer in (far, near)]
        ranks = [[{k: v["rank"] for k, v in place.items()} for place in of[1:]] for of in scores]
        assert ranks[0] == ranks[1]
        assert len(ranks[0]) == 89
