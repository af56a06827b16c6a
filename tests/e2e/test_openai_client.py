"""The official Python client against a real pair: what it sends is taken, what comes back it can read."""

from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI

from tests.pair import Pair

PROMPT = "The quick brown fox"


@pytest.fixture
async def official(pair: Pair) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{pair.client.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_models(official: AsyncOpenAI) -> None:
    assert [model.id async for model in official.models.list()] == ["tiny"]
    assert (await official.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        await official.models.retrieve("other")
    assert caught.value.code == "model_not_found"


async def test_a_completion_streamed_and_whole(official: AsyncOpenAI) -> None:
    whole = await official.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, temperature=0)
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 9
    stream = await official.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, temperature=0, stream=True)
    pieces = [chunk.choices[0] async for chunk in stream]
    assert "".join(piece.text for piece in pieces) == whole.choices[0].text
    assert pieces[-1].finish_reason == whole.choices[0].finish_reason in ("stop", "length")


async def test_a_chat_with_choices_and_logprobs(official: AsyncOpenAI) -> None:
    answer = await official.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": PROMPT}],
        max_completion_tokens=5,
        n=3,
        seed=7,
        logprobs=True,
        top_logprobs=2,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.message.role == "assistant"
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        for token in choice.logprobs.content:
            assert token.logprob <= 0
            assert len(token.top_logprobs) == 2


async def test_a_streamed_chat_with_usage(official: AsyncOpenAI) -> None:
    stream = await official.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "s"}, {"role": "user", "content": PROMPT}],
        max_tokens=6,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens > 0
    assert usage.completion_tokens <= 12


async def test_lists_of_prompts_and_echo(official: AsyncOpenAI) -> None:
    answer = await official.completions.create(
        model="tiny", prompt=["one", "two"], max_tokens=3, n=2, echo=True, logprobs=1
    )
    assert [choice.text[:3] for choice in answer.choices] == ["one", "one", "two", "two"]
    assert all(choice.logprobs is not None for choice in answer.choices)


async def test_errors_are_the_clients_own_kinds(official: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await official.completions.create(model="other", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError) as caught:
        await official.completions.create(model="tiny", prompt=[1] * 4000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as refused:
        await official.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    assert (refused.value.code, refused.value.param) == ("unsupported_option", "tools")


async def test_leaving_a_stream_ends_its_work(pair: Pair, official: AsyncOpenAI) -> None:
    stream = await official.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    await stream.close()
    await pair.check_books()
