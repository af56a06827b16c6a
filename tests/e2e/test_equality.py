"""What the pair answers is what transformers answers: greedy, float32, text and token ids."""

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.conftest import PAGE_SIZE
from tests.pair import Client, Forks, Pair, start_pair
from tests.reference import Reference
from tests.tiny_models import EOS, save_tiny_llama

CHUNK = 64
MAX_LEN = 256


def prompt_of(length: int, seed: int, vocab: int = 256) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocab) for _ in range(length)]


async def complete(client: Client, model: str, prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    status, answer = await client.post("/v1/completions", {**body, **more})
    assert status == 200, answer
    choice: dict[str, Any] = {**answer["choices"][0], "usage": answer["usage"]}
    return choice


async def check(client: Client, model: str, reference: Reference, prompt: list[int], max_tokens: int) -> None:
    got = await complete(client, model, prompt, max_tokens)
    expected = reference.tokens(prompt, max_tokens)
    assert got["token_ids"] == expected
    assert got["text"] == reference.text(expected)
    assert got["finish_reason"] == ("length" if len(expected) == max_tokens else "stop")
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(expected)}
    assert {k: got["usage"][k] for k in usage} == usage


LENGTHS = [
    *(1, 2, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 2 * PAGE_SIZE, 3 * PAGE_SIZE - 1),
    *(CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 5, 3 * CHUNK + PAGE_SIZE + 3, MAX_LEN - 13, MAX_LEN - 12),
]


@pytest.mark.parametrize("length", LENGTHS)
async def test_any_length_equals_transformers(pair: Pair, tiny_reference: Reference, length: int) -> None:
    """Up to and including the longest prompt that the context leaves room for."""
    await check(pair.client, "tiny", tiny_reference, prompt_of(length, length), 12)
    await pair.check_books()


async def test_the_longest_prompt_with_one_token(pair: Pair, tiny_reference: Reference) -> None:
    await check(pair.client, "tiny", tiny_reference, prompt_of(MAX_LEN - 1, 5), 1)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("length", [PAGE_SIZE - 1, PAGE_SIZE, 70])
async def test_a14_max_tokens_counts_the_first_token(
    pair: Pair, tiny_reference: Reference, length: int, max_tokens: int
) -> None:
    await check(pair.client, "tiny", tiny_reference, prompt_of(length, 100 + length), max_tokens)


async def test_eight_at_once_of_mixed_length(pair: Pair, tiny_reference: Reference) -> None:
    """They share packed prefills and decode steps, and join and leave at different times."""
    work = [(prompt_of(n, 1000 + n), 4 + 5 * i) for i, n in enumerate([1, 15, 16, 17, 63, 100, 130, 190])]
    await asyncio.gather(*(check(pair.client, "tiny", tiny_reference, p, n) for p, n in work))
    await pair.check_books()


async def test_the_second_pass_equals_the_first(pair: Pair) -> None:
    """Reused pages carry nothing over."""
    prompts = [prompt_of(n, 7 * n) for n in (5, 40, 90, 150)]
    passes = [await asyncio.gather(*(complete(pair.client, "tiny", p, 20) for p in prompts * 2)) for _ in range(3)]
    tokens = [[answer["token_ids"] for answer in one] for one in passes]
    assert tokens[0] == tokens[1] == tokens[2]


async def test_a15_first_token_is_end_of_text(forks: Forks, tmp_path: Path) -> None:
    """Empty text, reason stop, pages back on both sides, and no decode step."""
    plain = Reference(save_tiny_llama(tmp_path / "plain"))
    prompt = prompt_of(20, 3)
    first = plain.tokens(prompt, 1)[0]
    model = save_tiny_llama(tmp_path / "ends", eos_token_ids=(first,))
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, model, "--max-model-len", "128", "--served-model-name", "m")
        got = await complete(pair.client, "m", prompt, 10)
        assert (got["text"], got["finish_reason"], got["token_ids"]) == ("", "stop", [first])
        assert got["usage"]["completion_tokens"] == 1
        assert (await complete(pair.client, "m", prompt, 3, ignore_eos=True))["finish_reason"] == "length"
        await pair.check_books()
        steps = await pair.client.metric("handoff_steps_total")
        assert steps == 2  # both of the request that ignored it


async def test_stop_string_across_the_hand_over_boundary(pair: Pair, tiny_reference: Reference) -> None:
    """It begins in the token that prefill sampled and ends in the first one of decode."""
    for seed in range(200, 260):
        prompt = prompt_of(24, seed)
        first, second = (tiny_reference.text([t]) for t in tiny_reference.tokens(prompt, 2))
        if first.isascii() and second.isascii() and first and second:
            break
    else:
        raise AssertionError("no prompt starts with two ASCII tokens")
    got = await complete(pair.client, "tiny", prompt, 10, stop=[first + second])
    assert (got["text"], got["finish_reason"], got["usage"]["completion_tokens"]) == ("", "stop", 2)
    got = await complete(pair.client, "tiny", prompt, 10, stop=first)
    assert (got["text"], got["finish_reason"], got["usage"]["completion_tokens"]) == ("", "stop", 1)
    near = await complete(pair.client, "tiny", prompt, 2, stop=[first + second + "never"])
    assert (near["text"], near["finish_reason"]) == (first + second, "length")
    await pair.check_books()


@pytest.mark.parametrize("seed", range(8))
async def test_streamed_deltas_joined_are_the_whole_text(pair: Pair, seed: int) -> None:
    """The tiny vocabulary is bytes, so characters are split over tokens all the time, also at the hand-over."""
    body = {"model": "tiny", "prompt": prompt_of(10 + seed, seed), "max_tokens": 40, "temperature": 1.0, "seed": seed}
    status, whole = await pair.client.post("/v1/completions", body)
    assert status == 200
    events = [event async for event in pair.client.stream("/v1/completions", body)]
    assert "".join(e["choices"][0]["text"] for e in events) == whole["choices"][0]["text"]
    assert [e["choices"][0]["finish_reason"] for e in events][-1] == whole["choices"][0]["finish_reason"]
    assert sum(e["choices"][0]["finish_reason"] is not None for e in events) == 1


async def test_sampling_is_a_function_of_the_seed_alone(pair: Pair) -> None:
    """Whatever else runs, on either side of the hand-over."""
    body = {"model": "tiny", "prompt": prompt_of(30, 1), "max_tokens": 16, "temperature": 0.9, "seed": 42, "top_p": 0.9}
    alone = await pair.client.post("/v1/completions", body)
    others = [{**body, "seed": i, "prompt": prompt_of(20 + i, i)} for i in range(6)]
    crowd = await asyncio.gather(*(pair.client.post("/v1/completions", b) for b in [*others[:3], body, *others[3:]]))
    assert crowd[3][1]["choices"][0]["text"] == alone[1]["choices"][0]["text"]
    assert len({answer["choices"][0]["text"] for _, answer in crowd}) == 7


@pytest.mark.parametrize("penalty", [1.3, 0.8])
async def test_repetition_penalty_equals_transformers(pair: Pair, tiny_reference: Reference, penalty: float) -> None:
    """From prefill's token on, over prompt and answer."""
    prompt = prompt_of(70, 3)
    got = await complete(pair.client, "tiny", prompt, 40, repetition_penalty=penalty)
    assert got["token_ids"] == tiny_reference.tokens(prompt, 40, repetition_penalty=penalty)
    assert got["token_ids"] != tiny_reference.tokens(prompt, 40)


async def test_bias_and_bans_hold_on_both_sides_of_the_hand_over(pair: Pair) -> None:
    prompt = prompt_of(20, 4)
    got = await complete(pair.client, "tiny", prompt, 6, logit_bias={"65": 100})
    assert got["token_ids"] == [65] * 6
    forced = {"logit_bias": {str(EOS): 100}}
    assert (await complete(pair.client, "tiny", prompt, 6, **forced))["token_ids"] == [EOS]
    got = await complete(pair.client, "tiny", prompt, 6, min_tokens=3, **forced)
    assert (len(got["token_ids"]), got["token_ids"][-1], got["finish_reason"]) == (4, EOS, "stop")
    assert EOS not in got["token_ids"][:3]


async def test_penalties_change_a_sampled_answer_and_stay_reproducible(pair: Pair) -> None:
    body = {"temperature": 1.0, "seed": 5, "presence_penalty": 1.5, "frequency_penalty": 1.0, "min_p": 0.02}
    first = await complete(pair.client, "tiny", prompt_of(30, 5), 30, **body)
    again = await complete(pair.client, "tiny", prompt_of(30, 5), 30, **body)
    plain = await complete(pair.client, "tiny", prompt_of(30, 5), 30, temperature=1.0, seed=5)
    assert first["token_ids"] == again["token_ids"] != plain["token_ids"]


async def test_logprobs_are_the_models_own_on_both_sides_of_the_hand_over(
    pair: Pair, tiny_reference: Reference
) -> None:
    """Also the likeliest tokens of the first one, which cross in the metadata row."""
    prompt = prompt_of(40, 6)
    status, answer = await pair.client.post(
        "/v1/completions",
        {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 5,
            "temperature": 0,
            "logprobs": 20,
            "return_token_ids": True,
        },
    )
    assert status == 200
    choice = answer["choices"][0]
    with torch.inference_mode():
        ids = torch.tensor([prompt + choice["token_ids"]])
        logprobs = tiny_reference.model(ids).logits[0].log_softmax(-1)
    for i, token in enumerate(choice["token_ids"]):
        row = logprobs[len(prompt) - 1 + i]
        assert choice["logprobs"]["token_logprobs"][i] == pytest.approx(float(row[token]), abs=1e-4)
        shown = sorted(choice["logprobs"]["top_logprobs"][i].values(), reverse=True)
        assert shown[0] == pytest.approx(float(row.max()), abs=1e-4)
        assert len(shown) > 1
