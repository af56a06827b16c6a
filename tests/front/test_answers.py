"""What goes back: OpenAI's objects, streams equal to whole answers, usage, stops, disconnects, failures in a stream."""

import asyncio
import re
import socket
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.ops.front import EngineFailure
from shared.ops.http import serve
from shared.protocol.local import EngineError, Generate
from tests.front.fakes import (
    CONTEXT,
    EOS,
    MODEL,
    FakeEngine,
    Http,
    byte_level_tokenizer,
    decode_app,
    handover,
    registered,
    served,
    status,
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


async def test_request_ids_are_echoed_and_never_used(engine: FakeEngine, http: Http) -> None:
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


# failures

FAILURE = EngineError("prefill is gone", "peer_lost", 503, "service_unavailable", True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_is_a_status(engine: FakeEngine, http: Http, stream: bool) -> None:
    engine.manual = True
    answering = asyncio.create_task(http.post(CHAT_PATH, CHAT | {"stream": stream}))
    engine.fail(await engine.generate(), FAILURE)
    error = {
        "message": "prefill is gone",
        "type": "service_unavailable",
        "param": None,
        "code": "peer_lost",
        "retryable": True,
    }
    assert await answering == (503, {"error": error})
    assert engine.metric('handoff_requests_total{outcome="failed"}') == 1
    assert engine.metric("handoff_prompt_tokens_total") == 0


async def test_a_failure_in_a_whole_answer_is_a_status(engine: FakeEngine, http: Http, tokenizer: Any) -> None:
    engine.manual = True
    answering = asyncio.create_task(http.post(COMPLETION_PATH, COMPLETION))
    message = await engine.generate()
    engine.say(message, tokenizer.encode("half"))
    engine.fail(message, FAILURE)
    code, body = await answering
    assert (code, body["error"]["code"]) == (503, "peer_lost")


async def test_the_engines_death_in_a_stream(engine: FakeEngine, http: Http, tokenizer: Any) -> None:
    """A22: an explicit error, never a finish reason."""
    engine.manual = True
    streams = [asyncio.create_task(http.events(CHAT_PATH, CHAT)) for _ in range(3)]
    while len(engine.generates) < 3:
        await asyncio.sleep(0.01)
    for message in engine.generates:
        engine.say(message, tokenizer.encode("half"))
    engine.front.engine_died("signal 9")
    for events in await asyncio.gather(*streams):
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["code"] == "engine_dead"
        assert events[-2]["error"]["retryable"] is True
        assert all(event["choices"][0]["finish_reason"] is None for event in events[:-2])
        assert joined([*events[:-2], "[DONE]"]) == "half"


# disconnects


async def gone(http: Http, path: str, body: dict[str, Any], engine: FakeEngine, first: list[int] | None) -> Generate:
    """A client that sends a request, reads what comes for ``first``, and closes its socket."""
    task = asyncio.create_task(http.session.post(path, json=body))
    message = await engine.generate()
    if first is None:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        engine.say(message, first)
        (await task).close()
    return message


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token(engine: FakeEngine, http: Http, stream: bool) -> None:
    engine.manual = True
    message = await gone(http, COMPLETION_PATH, COMPLETION | {"stream": stream}, engine, None)
    await cancelled(engine, message)
    assert engine.metric('handoff_requests_total{outcome="aborted"}') == 1
    assert engine.metric('handoff_http_requests_total{route="/v1/completions",status="closed"}') == 1


async def test_a_client_that_leaves_in_its_stream(engine: FakeEngine, http: Http, tokenizer: Any) -> None:
    engine.manual = True
    message = await gone(http, CHAT_PATH, CHAT | {"stream": True}, engine, tokenizer.encode("a"))
    await cancelled(engine, message)
    engine.manual = False
    assert (await http.post(COMPLETION_PATH, COMPLETION))[0] == 200
    assert engine.metric("handoff_requests_started_total") == 2


async def cancelled(engine: FakeEngine, message: Generate) -> None:
    async with asyncio.timeout(5):
        while not engine.cancels:
            await asyncio.sleep(0.01)
    assert [cancel.request for cancel in engine.cancels] == [message.request]


async def test_a_slow_reader_holds_no_text_in_memory(engine: FakeEngine, tokenizer: Any) -> None:
    """What a client does not read stays tokens in its queue: the writer waits for the socket."""
    engine.ready(context=1 << 20, num_pages=1 << 17)
    engine.front.on_message(status(registered()))
    engine.manual = True
    runner, port = await serve(decode_app(engine, tokenizer), "127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = b'{"prompt": [1], "max_tokens": 100000, "stream": true}'
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            client.sendall(head + body)
            message = await engine.generate()
            token = tokenizer.encode("x")
            for _ in range(100_000):
                engine.say(message, token)
            streams = engine.front._running.values()
            before = -1
            while (waiting := next(iter(streams))._queue.qsize()) != before:
                before = waiting
                await asyncio.sleep(0.3)
            assert waiting > 50_000
        await cancelled(engine, message)
    finally:
        await runner.cleanup()


# metrics and timings


async def test_the_hand_over_is_shown(engine: FakeEngine, http: Http, tokenizer: Any) -> None:
    engine.manual = True
    for sent in (4200, 0):
        engine.received.clear()
        posting = asyncio.create_task(http.session.post(COMPLETION_PATH, json=COMPLETION | {"stream": True}))
        message = await engine.generate()
        engine.say(message, tokenizer.encode("a"), handover=handover(sent))
        engine.say(message, tokenizer.encode("bc"), "length")
        async with await posting as response:
            timing = response.headers["Server-Timing"]
            await response.read()
        assert timing == (
            "queue;dur=1.000, prefill;dur=200.000, exposed;dur=4.000, commit;dur=250.000, "
            f'transfer;dur=50.000;desc="{sent} bytes"'
        )
    assert engine.metric("handoff_transfer_bytes_total") == 4200
    assert engine.metric("handoff_transfer_seconds_count") == 1
    assert engine.metric("handoff_transfer_exposed_seconds_sum") == pytest.approx(0.004)
    assert engine.metric("handoff_commit_seconds_count") == 2
    assert engine.metric("handoff_time_to_first_token_seconds_count") == 2
    assert engine.metric("handoff_inter_token_seconds_count") == 2
    assert engine.metric("handoff_prompt_tokens_total") == 4
    assert engine.metric("handoff_completion_tokens_total") == 6
    assert engine.metric('handoff_requests_total{outcome="finished"}') == 2
    assert engine.metric("handoff_requests_started_total") == 2


# serving


async def test_a_port_in_use_is_one_line(engine: FakeEngine, tokenizer: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            await serve(decode_app(engine, tokenizer), "127.0.0.1", port)


def test_an_engines_failure_keeps_its_words() -> None:
    failure = EngineFailure(FAILURE)
    assert (failure.message, failure.code, failure.http_status) == ("prefill is gone", "peer_lost", 503)
