"""What goes back: OpenAI's objects, streams equal to whole answers, usage, stops, disconnects, failures in a stream."""

import asyncio
import re
from typing import Any

import pytest

from tests.front.fakes import (
    CONTEXT,
    EOS,
    MODEL,
    FakeEngine,
    Http,
    byte_level_tokenizer,
    decode_app,
    handover,
    served,
)

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 40}
HARD = "žluť 🫨 齉 👩‍🚀!"


def joined(events: list[Any]) -> str:
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


# objects


async def test_a_completion(engine: FakeEngine, http: Http) -> None:
    code, body = await http.post(COMPLETION_PATH, COMPLETION)
    assert code == 200
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", body.pop("id"))
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8},
    }


async def test_a_chat(engine: FakeEngine, http: Http, tokenizer: Any) -> None:
    code, body = await http.post(CHAT_PATH, CHAT)
    assert code == 200
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", body.pop("id"))
    assert isinstance(body.pop("created"), int)
    prompt = tokenizer.encode("<user>hi<assistant>")
    assert engine.prompt() == prompt
    message = {"role": "assistant", "content": "hello", "refusal": None}
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": 6, "total_tokens": len(prompt) + 6},
    }


async def test_a_completion_stream(engine: FakeEngine, http: Http) -> None:
    engine.tokens_per_output = 3
    *chunks, done = await http.events(COMPLETION_PATH, COMPLETION)
    assert done == "[DONE]"
    assert len({chunk.pop("id") for chunk in chunks}) == len({chunk.pop("created") for chunk in chunks}) == 1
    frame = {"object": "text_completion", "model": MODEL}
    rest = {"index": 0, "logprobs": None}
    assert chunks == [
        {**frame, "choices": [{**rest, "text": "hel", "finish_reason": None}]},
        {**frame, "choices": [{**rest, "text": "lo", "finish_reason": None}]},
        {**frame, "choices": [{**rest, "text": "", "finish_reason": "stop"}]},
    ]


async def test_a_chat_stream_with_usage(engine: FakeEngine, http: Http) -> None:
    engine.tokens_per_output = 5
    body = CHAT | {"stream_options": {"include_usage": True}}
    *chunks, done = await http.events(CHAT_PATH, body)
    assert done == "[DONE]"
    for chunk in chunks:
        assert chunk.pop("id").startswith("chatcmpl-")
        assert chunk.pop("created") > 0
    frame = {"object": "chat.completion.chunk", "model": MODEL}
    rest = {"index": 0, "logprobs": None}
    opening = {"role": "assistant", "content": ""}
    assert chunks == [
        {**frame, "choices": [{**rest, "delta": opening, "finish_reason": None}], "usage": None},
        {**frame, "choices": [{**rest, "delta": {"content": "hello"}, "finish_reason": None}], "usage": None},
        {**frame, "choices": [{**rest, "delta": {}, "finish_reason": "stop"}], "usage": None},
        {**frame, "choices": [], "usage": {"prompt_tokens": 19, "completion_tokens": 6, "total_tokens": 25}},
    ]


async def test_token_ids_come_where_they_are_asked_for(engine: FakeEngine, http: Http) -> None:
    for path, body in ((COMPLETION_PATH, COMPLETION), (CHAT_PATH, CHAT)):
        _, whole = await http.post(path, body | {"return_token_ids": True})
        assert whole["choices"][0]["token_ids"] == [*engine.answer, EOS]
        _, whole = await http.post(path, body | {"return_token_ids": True, "stop": "ll"})
        assert whole["choices"][0]["token_ids"] == engine.answer[:4]


async def test_models(http: Http) -> None:
    code, body = await http.get("/v1/models")
    card = body["data"][0]
    assert code == 200
    assert body["object"] == "list"
    assert isinstance(card.pop("created"), int)
    assert body["data"] == [
        {
            "id": MODEL,
            "object": "model",
            "owned_by": "sglang",
            "root": "folder/tiny",
            "parent": None,
            "max_model_len": CONTEXT,
        }
    ]


# what the engine is told


async def test_options_reach_the_engine(engine: FakeEngine, http: Http) -> None:
    options = {"temperature": 0, "top_p": 0.5, "top_k": 7, "seed": -(2**63), "stop_token_ids": [9], "ignore_eos": True}
    await http.post(COMPLETION_PATH, {"prompt": [5, 6], "max_tokens": 3, "user": "me", **options})
    sent = engine.generates[-1]
    assert engine.prompt() == [5, 6]
    assert (sent.max_tokens, sent.stop_token_ids, sent.ignore_eos) == (3, [9], True)
    sampling = sent.sampling
    assert (sampling.seed, sampling.temperature, sampling.top_p, sampling.top_k) == (-(2**63), 0.0, 0.5, 7)


async def test_defaults(engine: FakeEngine, http: Http) -> None:
    nothing = dict.fromkeys(("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "user"))
    await http.post(COMPLETION_PATH, {"prompt": "hi", **nothing})
    await http.post(COMPLETION_PATH, {"prompt": [1] * 60})
    await http.post(CHAT_PATH, CHAT)
    await http.post(CHAT_PATH, CHAT | {"max_completion_tokens": 7, "top_k": 0, "stop": []})
    first, second, chat, limited = engine.generates
    assert [m.max_tokens for m in (first, second, chat, limited)] == [16, 4, CONTEXT - 19, 7]
    for message in (first, limited):
        sampling = message.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, -1)
        assert 0 <= sampling.seed < 2**63
        assert (message.stop_token_ids, message.ignore_eos) == ([], False)
    assert first.sampling.seed != second.sampling.seed


async def test_a_top_k_above_the_vocabulary_is_the_vocabulary(engine: FakeEngine, http: Http) -> None:
    assert (await http.post(COMPLETION_PATH, COMPLETION | {"top_k": 10**30}))[0] == 200
    assert engine.generates[-1].sampling.top_k == 264


async def test_text_parts_and_whitespace(engine: FakeEngine, http: Http, tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await http.post(CHAT_PATH, {"messages": [{"role": "user", "content": parts, "name": "me"}]})
    assert engine.prompt() == tokenizer.encode("<user>a\nb<assistant>")
    assert (await http.post(COMPLETION_PATH, {"prompt": "\n"}))[0] == 200


async def test_special_tokens_are_added_to_plain_prompts_only(engine: FakeEngine) -> None:
    """A chat template writes its own."""
    async with served(decode_app(engine, byte_level_tokenizer(bos=True))) as http:
        await http.post(COMPLETION_PATH, {"prompt": "hi"})
        assert engine.prompt() == [EOS, *byte_level_tokenizer().encode("hi")]
        await http.post(CHAT_PATH, CHAT)
        assert engine.prompt() == byte_level_tokenizer().encode("<user>hi<assistant>")


async def test_a20_request_ids_are_echoed_and_never_used(engine: FakeEngine, http: Http) -> None:
    for theirs in ("mine", "mine"):
        async with http.session.post(COMPLETION_PATH, json=COMPLETION, headers={"X-Request-Id": theirs}) as response:
            assert response.headers["X-Request-Id"] == "mine"
            body = await response.json()
        assert body["id"] == f"cmpl-{engine.generates[-1].request}"
    assert len({message.request for message in engine.generates}) == 2
    async with http.session.post(COMPLETION_PATH, json=COMPLETION, headers={"X-Request-Id": "x" * 300}) as response:
        assert response.headers["X-Request-Id"] == engine.generates[-1].request
    async with http.session.get("/health", headers={"X-Request-Id": "žluť"}) as response:
        assert response.headers["X-Request-Id"].isascii()
    async with http.session.get("/nowhere") as response:
        assert re.fullmatch(r"[0-9a-f]{32}", response.headers["X-Request-Id"])


# streamed = whole


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize(
    ("text", "options"),
    [
        (HARD, {}),
        (HARD, {"max_tokens": 9}),  # inside 🫨
        (HARD, {"max_tokens": 1}),
        ("one two three four five", {"stop": "three four"}),
        ("one two three fourth", {"stop": ["three four!", "zzz"]}),
        ("one three fou", {"stop": "three four"}),
        ("three four", {"stop": "t"}),
    ],
)
async def test_streamed_equals_whole(
    engine: FakeEngine, http: Http, tokenizer: Any, text: str, options: dict[str, Any], size: int
) -> None:
    engine.answer, engine.tokens_per_output = tokenizer.encode(text), size
    usage = {"stream_options": {"include_usage": True}}
    for path, base in ((COMPLETION_PATH, COMPLETION), (CHAT_PATH, CHAT)):
        _, whole = await http.post(path, base | options)
        events = await http.events(path, base | options | usage)
        choice = whole["choices"][0]
        assert joined(events) == (choice["text"] if "text" in choice else choice["message"]["content"])
        assert events[-2]["usage"] == whole["usage"]
        assert events[-3]["choices"][0]["finish_reason"] == choice["finish_reason"]
        assert sum(bool(e["choices"]) and bool(e["choices"][0]["finish_reason"]) for e in events[:-1]) == 1


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_max_tokens_is_exact(engine: FakeEngine, http: Http, limit: int) -> None:
    """A14"""
    _, body = await http.post(COMPLETION_PATH, COMPLETION | {"max_tokens": limit})
    assert body["choices"][0]["text"] == "hello"[:limit]
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == limit


async def test_a_stop_string_cancels_the_engine(engine: FakeEngine, http: Http, tokenizer: Any) -> None:
    engine.manual = True
    answering = asyncio.create_task(http.post(COMPLETION_PATH, COMPLETION | {"stop": ["END"]}))
    message = await engine.generate()
    engine.say(message, tokenizer.encode("one E"))
    engine.say(message, tokenizer.encode("ND two"))
    _, body = await answering
    assert body["choices"][0] == {"index": 0, "text": "one ", "logprobs": None, "finish_reason": "stop"}
    assert body["usage"]["completion_tokens"] == 7
    assert [cancel.request for cancel in engine.cancels] == [message.request]
    assert engine.metric('handoff_requests_total{outcome="finished"}') == 1
    assert engine.metric("handoff_completion_tokens_total") == 7


async def test_a_first_token_that_ends_the_answer(engine: FakeEngine, http: Http, tokenizer: Any) -> None:
    """A15"""
    engine.answer = []
    _, body = await http.post(COMPLETION_PATH, COMPLETION)
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("", "stop")
    *chunks, _ = await http.events(CHAT_PATH, CHAT)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {}]


async def test_pieces_arrive_as_they_are_made(engine: FakeEngine, http: Http, tokenizer: Any) -> None:
    engine.manual = True
    async with asyncio.TaskGroup() as tasks:
        posting = tasks.create_task(http.session.post(COMPLETION_PATH, json=COMPLETION | {"stream": True}))
        message = await engine.generate()
        engine.say(message, tokenizer.encode("a"), handover=handover())
        async with await posting as response:
            for text in "abc":
                event = await asyncio.wait_for(response.content.readuntil(b"\n\n"), 5)
                assert f'"text":"{text}"'.encode() in event
                engine.say(message, tokenizer.encode(chr(ord(text) + 1)), None if text < "c" else "length")
            assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_sampling_options_reach_the_engine(engine: FakeEngine, http: Http) -> None:
    body = {
        "prompt": [1, 2, 3], "max_tokens": 9, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "repetition_penalty": 1.5, "logit_bias": {"7": -3.5}, "min_tokens": 4, "stop_token_ids": [9], "seed": 1,
    }  # fmt: skip
    assert (await http.post("/v1/completions", body))[0] == 200
    sampling = engine.generates[-1].sampling
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.5, [(7, -3.5)])
    assert (sampling.banned, sampling.banned_before) == ([9, EOS], 7)
    assert (await http.post("/v1/completions", {**body, "ignore_eos": True}))[0] == 200
    assert engine.generates[-1].sampling.banned == [9]
