"""Log-probabilities in OpenAI's two shapes, streamed and not, with characters that are split over tokens."""

import json
from typing import Any

import pytest

from shared.protocol.local import Output, Outputs
from tests.front.fakes import FakeEngine, Http

A, EURO = 65, "€".encode()


def say(engine: FakeEngine, tokens: list[int], finish: Any = None) -> None:
    """Each token with a log-probability of its own, and two likeliest ones."""
    generate = engine.generates[-1]
    logprobs = [-token / 100 for token in tokens]
    top = [[(token, -0.1), (66, -0.2)] for token in tokens]
    engine.front.on_message(Outputs([Output(generate.request, tokens, logprobs, finish, top=top)]))


def byte_tokens(tokenizer: Any, data: bytes) -> list[int]:
    from decode_svc.text import TextCodec

    of = TextCodec(tokenizer).token_bytes
    return [next(i for i in range(256) if of(i) == bytes([byte])) for byte in data]


async def asked(engine: FakeEngine, http: Http, path: str, body: dict[str, Any], tokens: list[int]) -> Any:
    import asyncio

    engine.manual = True
    known = len(engine.generates)
    task = asyncio.ensure_future(http.session.post(path, json=body))
    while len(engine.generates) == known:
        engine.arrived.clear()
        await engine.arrived.wait()
    for token in tokens[:-1]:
        say(engine, [token])
    say(engine, tokens[-1:], "length")
    async with await task as response:
        assert response.status == 200, await response.text()
        return await response.text()


@pytest.mark.parametrize("count", [0, 2])
async def test_completion(engine: FakeEngine, http: Http, tokenizer: Any, count: int) -> None:
    tokens = [*byte_tokens(tokenizer, b"A"), *byte_tokens(tokenizer, EURO)]
    body = {"prompt": [1, 2], "max_tokens": 4, "logprobs": count}
    answer = json.loads(await asked(engine, http, "/v1/completions", body, tokens))
    assert engine.generates[-1].sampling.top_logprobs == count
    shown = answer["choices"][0]["logprobs"]
    assert answer["choices"][0]["text"] == "A€"
    assert shown["tokens"] == ["A", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert shown["token_logprobs"] == [-token / 100 for token in tokens]
    assert shown["text_offset"] == [0, 1, 2, 3]
    assert shown["top_logprobs"][0] != {}


async def test_chat_gives_the_bytes_of_a_split_character(engine: FakeEngine, http: Http, tokenizer: Any) -> None:
    tokens = byte_tokens(tokenizer, EURO)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    answer = json.loads(await asked(engine, http, "/v1/chat/completions", body, tokens))
    content = answer["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]) == EURO
    assert [entry["logprob"] for entry in content] == [-token / 100 for token in tokens]
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
    assert answer["choices"][0]["message"]["content"] == "€"


async def test_streamed_chunks_carry_those_of_their_tokens_once_each(
    engine: FakeEngine, http: Http, tokenizer: Any
) -> None:
    tokens = [*byte_tokens(tokenizer, b"A"), *byte_tokens(tokenizer, EURO)]
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "logprobs": True, "stream": True}
    text = await asked(engine, http, "/v1/chat/completions", body, tokens)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    shown = [event["choices"][0]["logprobs"] for event in events]
    entries = [entry for logprobs in shown if logprobs for entry in logprobs["content"]]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == b"A" + EURO


async def test_not_asked_for_is_null(engine: FakeEngine, http: Http, tokenizer: Any) -> None:
    body = {"prompt": [1], "max_tokens": 1}
    answer = json.loads(await asked(engine, http, "/v1/completions", body, byte_tokens(tokenizer, b"A")))
    assert answer["choices"][0]["logprobs"] is None
