"""Every bad input is a reply in OpenAI's error shape, and the engine never hears of it (A3, A7, A8, A9, A17)."""

from typing import Any

import pytest

from decode_svc.openai import UNSUPPORTED
from tests.front.fakes import (
    MODEL,
    FakeEngine,
    Http,
    byte_level_tokenizer,
    decode_app,
    served,
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
    ("min_p", -0.1, "invalid_value"),
    ("min_p", 1.1, "invalid_value"),
    ("presence_penalty", 2.1, "invalid_value"),
    ("frequency_penalty", -2.1, "invalid_value"),
    ("frequency_penalty", "a lot", "invalid_type"),
    ("repetition_penalty", 0, "invalid_value"),
    ("repetition_penalty", 2.5, "invalid_value"),
    ("logit_bias", [1], "invalid_type"),
    ("logit_bias", {"a": 1}, "invalid_value"),
    ("logit_bias", {"-1": 1}, "invalid_value"),
    ("logit_bias", {"264": 1}, "invalid_token_id"),
    ("logit_bias", {"5": 101}, "invalid_value"),
    ("logit_bias", {str(i): 1 for i in range(1025)}, "invalid_value"),
    ("min_tokens", -1, "invalid_value"),
    ("min_tokens", 10**6, "invalid_value"),
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
    ([""], "invalid_value"),
    ([[]], "invalid_value"),
    (["a", ""], "invalid_value"),
    (["a", [1]], "invalid_value"),
    ([1, "a"], "invalid_value"),
    ([[1], 2], "invalid_value"),
    ([[1]] * 129, "invalid_value"),
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
    ("best_of", 3),
    ("response_format", {"type": "json_object"}),
    ("tools", [{"type": "function"}]),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "value"), OPTIONS)
async def test_options_that_would_change_the_answer(
    engine: FakeEngine, http: Http, path: str, name: str, value: Any
) -> None:
    await refusal(engine, http, path, PATHS[path] | {name: value}, 400, "unsupported_option", name)


async def test_a_chat_does_not_echo(engine: FakeEngine, http: Http) -> None:
    await refusal(engine, http, "/v1/chat/completions", CHAT | {"echo": True}, 400, "unsupported_option", "echo")
    assert (await http.post("/v1/chat/completions", CHAT | {"echo": False}))[0] == 200


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


@pytest.mark.parametrize(
    ("path", "field", "value", "code"),
    [
        ("/v1/completions", "logprobs", 21, "invalid_value"),
        ("/v1/completions", "logprobs", -1, "invalid_value"),
        ("/v1/completions", "logprobs", True, "invalid_type"),
        ("/v1/chat/completions", "logprobs", 3, "invalid_type"),
        ("/v1/chat/completions", "top_logprobs", 21, "invalid_value"),
        ("/v1/chat/completions", "top_logprobs", -1, "invalid_value"),
        ("/v1/chat/completions", "top_logprobs", 10**6, "invalid_value"),
        ("/v1/chat/completions", "top_logprobs", "5", "invalid_type"),
        ("/v1/chat/completions", "top_logprobs", 5, "invalid_value"),  # without logprobs
    ],
)
async def test_a7_logprobs_out_of_range(
    engine: FakeEngine, http: Http, path: str, field: str, value: Any, code: str
) -> None:
    await refusal(engine, http, path, PATHS[path] | {field: value}, 400, code, field)
