"""Every bad input is a reply in OpenAI's error shape, and the engine never hears of it (A3, A7, A8, A9, A17)."""

import asyncio
import gzip
import json
import logging
from typing import Any

import pytest

from decode_svc.app import build_app
from decode_svc.openai import UNSUPPORTED
from shared.config import DecodeConfig
from shared.ops.http import MAX_BODY_BYTES
from shared.protocol.local import PeerStatus
from tests.front.fakes import (
    CONTEXT,
    MODEL,
    FakeEngine,
    Http,
    byte_level_tokenizer,
    decode_app,
    refused,
    registered,
    served,
    status,
)

COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hi"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}


async def refusal(
    engine: FakeEngine,
    http: Http,
    path: str,
    body: Any,
    status: int,
    code: str,
    param: str | None = None,
    **options: Any,
) -> str:
    """Post, check the error object, that nothing was sent, and that a plain request is served after; → message."""
    got, answer = await http.post(path, body, **options)
    error = answer["error"]
    assert set(answer) == {"error"}
    assert set(error) == {"message", "type", "param", "code", "retryable"}
    assert (got, error["code"], error["param"]) == (status, code, param), error
    assert error["type"] == ("invalid_request_error" if status < 500 else "service_unavailable")
    assert engine.received == []
    assert isinstance(error["message"], str)
    if status < 500:
        assert (await http.post("/v1/completions", COMPLETION))[0] == 200
    return str(error["message"])


MALFORMED = {
    "empty": b"",
    "cut": b'{"model": "tiny", "prompt": "hi',
    "not json": b"hello",
    "trailing": b'{"prompt": "hi"} x',
    "nan": b'{"prompt": "hi", "temperature": NaN}',
    "not utf-8": b'{"user": "\xff\xfe"}',
    "raw surrogate": b'{"user": "\xed\xa0\x80"}',
    "deep": b'{"prompt":' + b"[" * 100_000,
    "deep in what is ignored": b'{"x":' + b'{"a":' * 100_000,
    "deep in an option": b'{"tools":' + b"[" * 100_000,
    "high surrogate": rb'{"prompt": "a\ud800"}',
    "low surrogate": rb'{"prompt": "a\udc00 and more"}',
    "surrogate and letter": rb'{"prompt": "a\ud800\u0041 and more"}',
    "surrogate in stop": rb'{"prompt": "a", "stop": ["\uD83D"]}',
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_bodies(engine: FakeEngine, http: Http, path: str, name: str) -> None:
    message = await refusal(engine, http, path, MALFORMED[name], 400, "invalid_json")
    assert ("surrogate" in message) == (r"\ud" in MALFORMED[name].decode("latin-1").lower())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [b'[{"prompt": "hi"}]', b'"prompt"', b"null", b"5"])
async def test_bodies_that_are_no_object(engine: FakeEngine, http: Http, path: str, body: bytes) -> None:
    assert "Expected `object`" in await refusal(engine, http, path, body, 400, "invalid_type")


async def test_infinity(engine: FakeEngine, http: Http) -> None:
    body = b'{"prompt": "hi", "temperature": 1e999}'
    await refusal(engine, http, "/v1/completions", body, 400, "invalid_type", "temperature")


WRONG: list[tuple[str, Any, str]] = [
    ("model", 5, "invalid_type"),
    ("max_tokens", "5", "invalid_type"),
    ("max_tokens", 5.0, "invalid_type"),
    ("max_tokens", True, "invalid_type"),
    ("max_tokens", 0, "invalid_value"),
    ("max_tokens", -1, "invalid_value"),
    ("temperature", "hot", "invalid_type"),
    ("temperature", True, "invalid_type"),
    ("temperature", -0.1, "invalid_value"),
    ("temperature", 2.1, "invalid_value"),
    ("top_p", 0, "invalid_value"),
    ("top_p", 1.01, "invalid_value"),
    ("top_p", [1], "invalid_type"),
    ("top_k", -2, "invalid_value"),
    ("top_k", 1.5, "invalid_type"),
    ("seed", 2**63, "invalid_value"),
    ("seed", -(2**63) - 1, "invalid_value"),
    ("seed", 10**40, "invalid_value"),
    ("seed", "x", "invalid_type"),
    ("stop", 5, "invalid_type"),
    ("stop", "", "invalid_value"),
    ("stop", ["a", ""], "invalid_value"),
    ("stop", ["a"] * 17, "invalid_value"),
    ("stop", "a" * 1025, "invalid_value"),
    ("stop_token_ids", 5, "invalid_type"),
    ("stop_token_ids", [264], "invalid_token_id"),
    ("stop_token_ids", [-1], "invalid_token_id"),
    ("stop_token_ids", [1] * 257, "invalid_value"),
    ("ignore_eos", 1, "invalid_type"),
    ("stream", "yes", "invalid_type"),
    ("stream_options", {"include_usage": True}, "invalid_value"),
    ("user", 5, "invalid_type"),
    ("return_token_ids", 1, "invalid_type"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("field", "value", "code"), WRONG)
async def test_wrong_values(engine: FakeEngine, http: Http, path: str, field: str, value: Any, code: str) -> None:
    message = await refusal(engine, http, path, PATHS[path] | {field: value}, 400, code, field)
    assert field in message


async def test_nested_fields_are_named(engine: FakeEngine, http: Http) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "stop[1]": COMPLETION | {"stop": ["a", 5]},
        "stop_token_ids[0]": COMPLETION | {"stop_token_ids": [True]},
        "stream_options.include_usage": COMPLETION | {"stream": True, "stream_options": {"include_usage": 1}},
        "prompt[1]": COMPLETION | {"prompt": [1, True]},
    }
    for param, body in bodies.items():
        engine.received.clear()
        await refusal(engine, http, "/v1/completions", body, 400, "invalid_type", param)


PROMPTS: list[tuple[Any, str]] = [
    ("", "invalid_value"),
    ([], "invalid_value"),
    (None, "invalid_type"),
    (5, "invalid_type"),
    ({}, "invalid_type"),
    ([1, 2.5], "invalid_type"),
    ([""], "unsupported_option"),
    ([[]], "unsupported_option"),
    (["a", "b"], "unsupported_option"),
    ([[1, 2]], "unsupported_option"),
    ([1, "a"], "unsupported_option"),
    ([1, 264], "invalid_token_id"),
    ([-1], "invalid_token_id"),
    ([2**70], "invalid_token_id"),
]


@pytest.mark.parametrize(("prompt", "code"), PROMPTS)
async def test_prompts(engine: FakeEngine, http: Http, prompt: Any, code: str) -> None:
    param = "prompt[1]" if prompt == [1, 2.5] else "prompt"
    await refusal(engine, http, "/v1/completions", COMPLETION | {"prompt": prompt}, 400, code, param)


async def test_an_empty_prompt_where_the_tokenizer_adds_a_token(engine: FakeEngine) -> None:
    async with served(decode_app(engine, byte_level_tokenizer(bos=True))) as http:
        await refusal(engine, http, "/v1/completions", COMPLETION | {"prompt": ""}, 400, "invalid_value", "prompt")


async def test_missing_prompt_and_messages(engine: FakeEngine, http: Http) -> None:
    await refusal(engine, http, "/v1/completions", {"model": MODEL}, 400, "invalid_type", "prompt")
    engine.received.clear()
    await refusal(engine, http, "/v1/chat/completions", {"model": MODEL}, 400, "invalid_type", "messages")


MESSAGES: list[tuple[Any, str, str]] = [
    ([], "invalid_value", "messages"),
    ("hi", "invalid_type", "messages"),
    (["hi"], "invalid_type", "messages[0]"),
    ([{"role": "user"}], "invalid_type", "messages[0].content"),
    ([{"content": "hi"}], "invalid_type", "messages[0].role"),
    ([{"role": "user", "content": None}], "invalid_type", "messages[0].content"),
    ([{"role": "user", "content": 5}], "invalid_type", "messages[0].content"),
    ([{"role": 5, "content": "hi"}], "invalid_type", "messages[0].role"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "unsupported_option", "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "invalid_value", "messages[0].content[0].text"),
    ([{"role": "user", "content": "a", "tool_calls": [{}]}], "unsupported_option", "messages[0].tool_calls"),
    ([{"role": "user", "content": "a", "tool_call_id": "x"}], "unsupported_option", "messages[0].tool_call_id"),
    ([{"role": "king", "content": "hi"}], "chat_template_error", "messages"),
]


@pytest.mark.parametrize(("messages", "code", "param"), MESSAGES)
async def test_messages(engine: FakeEngine, http: Http, messages: Any, code: str, param: str) -> None:
    message = await refusal(engine, http, "/v1/chat/completions", CHAT | {"messages": messages}, 400, code, param)
    assert code != "chat_template_error" or "unknown role king" in message


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", UNSUPPORTED)
async def test_unsupported_options_are_refused_by_name_and_their_defaults_taken(
    engine: FakeEngine, http: Http, path: str, name: str
) -> None:
    message = await refusal(engine, http, path, PATHS[path] | {name: "changes it"}, 400, "unsupported_option", name)
    assert name in message
    for neutral in (None, *UNSUPPORTED[name]):
        assert (await http.post(path, PATHS[path] | {name: neutral}))[0] == 200, neutral


OPTIONS: list[tuple[str, Any]] = [
    ("n", 2),
    ("n", True),
    ("logprobs", True),
    ("logprobs", 0),
    ("top_logprobs", 5),
    ("top_logprobs", -1),
    ("top_logprobs", 10**6),
    ("echo", True),
    ("best_of", 3),
    ("logit_bias", {"50": 1}),
    ("presence_penalty", 0.5),
    ("frequency_penalty", -0.5),
    ("response_format", {"type": "json_object"}),
    ("tools", [{"type": "function"}]),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "value"), OPTIONS)
async def test_options_that_would_change_the_answer(
    engine: FakeEngine, http: Http, path: str, name: str, value: Any
) -> None:
    await refusal(engine, http, path, PATHS[path] | {name: value}, 400, "unsupported_option", name)


async def test_token_ids_of_a_stream_are_refused(engine: FakeEngine, http: Http) -> None:
    body = COMPLETION | {"stream": True, "return_token_ids": True}
    await refusal(engine, http, "/v1/completions", body, 400, "invalid_value", "return_token_ids")


async def test_unknown_fields_are_ignored(http: Http) -> None:
    body = COMPLETION | {"bootstrap_port": None, "rid": "x", "priority": 1, "metadata": {"a": [1]}}
    assert (await http.post("/v1/completions", body))[0] == 200


@pytest.mark.parametrize("path", PATHS)
async def test_unknown_model(engine: FakeEngine, http: Http, path: str) -> None:
    message = await refusal(engine, http, path, PATHS[path] | {"model": "gpt-9"}, 404, "model_not_found", "model")
    assert "'gpt-9'" in message
    assert "'tiny'" in message


async def test_both_limits_of_a_chat(engine: FakeEngine, http: Http) -> None:
    path = "/v1/chat/completions"
    both = {"max_tokens": 3, "max_completion_tokens": 4}
    await refusal(engine, http, path, CHAT | both, 400, "invalid_value", "max_tokens")
    engine.received.clear()
    body = CHAT | {"max_completion_tokens": 0}
    await refusal(engine, http, path, body, 400, "invalid_value", "max_completion_tokens")
    assert (await http.post(path, CHAT | {"max_tokens": 3, "max_completion_tokens": 3}))[0] == 200


# lengths


@pytest.mark.parametrize("stream", [False, True])
async def test_context(engine: FakeEngine, http: Http, stream: bool) -> None:
    body = COMPLETION | {"prompt": [1] * 60, "max_tokens": 5, "stream": stream}
    message = await refusal(engine, http, "/v1/completions", body, 400, "context_length_exceeded", "max_tokens")
    assert all(number in message for number in ("64", "65", "60", "5"))
    engine.received.clear()
    body = {"prompt": [1] * CONTEXT, "stream": stream}
    message = await refusal(engine, http, "/v1/completions", body, 400, "context_length_exceeded", "prompt")
    assert "64" in message
    assert "65" in message
    engine.received.clear()
    body = {"messages": [{"role": "user", "content": "x" * 80}], "stream": stream}
    await refusal(engine, http, "/v1/chat/completions", body, 400, "context_length_exceeded", "messages")


async def test_the_largest_request_that_fits(engine: FakeEngine, http: Http) -> None:
    assert (await http.post("/v1/completions", {"prompt": [1] * 63, "max_tokens": 1}))[0] == 200
    assert (await http.post("/v1/completions", {"prompt": [1] * 4, "max_tokens": 60}))[0] == 200
    assert [generate.max_tokens for generate in engine.generates] == [1, 60]


async def test_a_huge_text_is_refused_without_tokenizing(engine: FakeEngine, http: Http) -> None:
    body = {"prompt": "x" * (8 << 20)}
    message = await refusal(engine, http, "/v1/completions", body, 400, "context_length_exceeded", "prompt")
    assert "8388608 characters" in message


async def test_the_pool_bounds_the_context(engine: FakeEngine, http: Http) -> None:
    engine.ready(num_pages=3)  # one of them padding: 32 tokens
    body = {"prompt": [1] * 30, "max_tokens": 3}
    got, answer = await http.post("/v1/completions", body)
    assert (got, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "32" in answer["error"]["message"]
    assert (await http.post("/v1/completions", {"prompt": [1] * 30, "max_tokens": 2}))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_prefills_capacity(engine: FakeEngine, http: Http, stream: bool) -> None:
    engine.front.on_message(status(registered("a", 10), registered("b", 20), refused()))
    for excess in (1, 20):
        engine.received.clear()
        body = {"prompt": [1] * (20 + excess), "max_tokens": 1, "stream": stream}
        message = await refusal(engine, http, "/v1/completions", body, 400, "prefill_capacity_exceeded", "prompt")
        assert "20" in message
        assert str(20 + excess) in message
    assert (await http.post("/v1/completions", {"prompt": [1] * 20, "max_tokens": 1}))[0] == 200
    engine.front.on_message(status(registered("a", 10), registered("b", 0)))  # b has not said
    assert (await http.post("/v1/completions", {"prompt": [1] * 30, "max_tokens": 1}))[0] == 200


# not now


async def unavailable(engine: FakeEngine, http: Http, code: str) -> str:
    async with http.session.post("/v1/completions", json=COMPLETION) as response:
        assert response.headers["Retry-After"] == "1"
    return await refusal(engine, http, "/v1/completions", COMPLETION, 503, code)


async def test_no_prefill_names_every_peer(engine: FakeEngine, http: Http) -> None:
    lost = PeerStatus("tcp://127.0.0.1:8996", "lost", registered().epoch)
    engine.front.on_message(status(refused(), lost))
    message = await unavailable(engine, http, "no_prefill")
    assert "tcp://127.0.0.1:8997 is refused (page_size: prefill has '32', decode has '16')" in message
    assert "tcp://127.0.0.1:8996 is lost" in message
    engine.front.on_message(status(registered(), lost))
    assert (await http.post("/v1/completions", COMPLETION))[0] == 200


async def test_no_prefill_before_the_first_word_of_the_engine(tokenizer: Any) -> None:
    engine = FakeEngine()
    async with served(decode_app(engine, tokenizer)) as http:
        assert "starting" in await unavailable(engine, http, "starting")
        engine.ready()
        assert "127.0.0.1:8998" in await unavailable(engine, http, "no_prefill")


async def test_no_prefill_configured(tokenizer: Any) -> None:
    engine = FakeEngine()
    engine.ready()
    app = build_app(DecodeConfig(model=MODEL), engine.front, tokenizer, engine.registry)
    async with served(app) as http:
        assert "none is configured" in await unavailable(engine, http, "no_prefill")


async def test_bad_requests_are_400_whatever_the_state(engine: FakeEngine, http: Http) -> None:
    engine.front.on_message(status())
    got, body = await http.post("/v1/completions", {"prompt": [1] * CONTEXT})
    assert (got, body["error"]["code"]) == (400, "context_length_exceeded")
    engine.front.engine_died("signal 9")
    got, body = await http.post("/v1/completions", {"prompt": ""})
    assert (got, body["error"]["code"]) == (400, "invalid_value")


async def test_a_dead_and_a_draining_engine(engine: FakeEngine, http: Http) -> None:
    engine.front.drain(1.0)
    engine.received.clear()
    await unavailable(engine, http, "shutting_down")
    assert (await http.get("/health"))[0] == 200
    engine.front.engine_died("signal 9")
    assert "signal 9" in await unavailable(engine, http, "engine_dead")
    assert (await http.get("/health")) == (503, {"status": "unhealthy", "reasons": ["engine dead: signal 9"]})


# HTTP


async def test_routes_methods_and_sizes(engine: FakeEngine, http: Http) -> None:
    got, body = await http.get("/v1/nothing")
    assert (got, body["error"]["code"]) == (404, "not_found")
    async with http.session.get("/v1/completions") as response:
        body = await response.json()
        assert (response.status, body["error"]["code"]) == (405, "method_not_allowed")
        assert response.headers["Allow"] == "POST"
    big = json.dumps({"prompt": "x" * MAX_BODY_BYTES}).encode()
    got, body = await http.post("/v1/completions", big)
    assert (got, body["error"]["code"]) == (413, "request_too_large")
    assert str(MAX_BODY_BYTES) in body["error"]["message"]
    assert engine.received == []
    assert engine.metric('handoff_http_requests_total{route="other",status="4xx"}') == 1
    assert engine.metric('handoff_http_requests_total{route="/v1/completions",status="4xx"}') == 2


async def test_broken_encodings(engine: FakeEngine, http: Http, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"Content-Encoding": "gzip"}
    await refusal(engine, http, "/v1/completions", b"no gzip", 400, "invalid_body", headers=headers)
    engine.received.clear()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    packed = gzip.compress(json.dumps(COMPLETION).encode())
    assert (await http.post("/v1/completions", packed, headers=headers))[0] == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "no type"])
async def test_no_content_type_is_demanded(http: Http, content_type: str) -> None:
    headers = {"Content-Type": content_type}
    assert (await http.post("/v1/completions", COMPLETION, headers=headers))[0] == 200


async def test_a_defect_is_a_500_that_says_nothing_inside(engine: FakeEngine, http: Http) -> None:
    engine.refusal = ZeroDivisionError("inside")
    got, body = await http.post("/v1/completions", COMPLETION)
    assert (got, body["error"]["code"]) == (500, "internal_error")
    assert "inside" not in body["error"]["message"]


async def test_a_burst_of_bad_requests_leaves_a_stream_alone(engine: FakeEngine, http: Http) -> None:
    engine.manual = True
    streaming = asyncio.create_task(http.events("/v1/completions", COMPLETION))
    message = await engine.generate()
    for body in ({"top_logprobs": 10**6}, {"prompt": ""}, {"prompt": [10**9]}):
        assert (await http.post("/v1/completions", COMPLETION | body))[0] == 400
    engine.say(message, engine.answer, "length")
    assert [event["choices"][0]["text"] for event in (await streaming)[:-1]] == ["hello", ""]
