"""What does not fit, what cannot be served now, and HTTP's own errors (A3, A9, A17)."""

import asyncio
import json
from typing import Any

import pytest

from decode_svc.app import build_app
from shared.config import DecodeConfig
from shared.ops.http import MAX_BODY_BYTES
from shared.protocol.local import PeerStatus
from tests.front.fakes import (
    CONTEXT,
    MODEL,
    FakeEngine,
    Http,
    decode_app,
    refused,
    registered,
    served,
    status,
)
from tests.front.test_refusals import refusal

COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hi"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}


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


async def test_no_prefill_will_come_names_every_peer(engine: FakeEngine, http: Http) -> None:
    engine.front.on_message(status(refused()))
    message = await unavailable(engine, http, "no_prefill")
    assert "tcp://127.0.0.1:8997 is refused (page_size: prefill has '32', decode has '16')" in message
    engine.front.on_message(status(registered(), refused()))
    assert (await http.post("/v1/completions", COMPLETION))[0] == 200


async def test_a_peer_that_may_still_come_is_the_engines_to_wait_for(engine: FakeEngine, http: Http) -> None:
    engine.front.on_message(status(refused(), PeerStatus("tcp://127.0.0.1:8996", "lost", registered().epoch)))
    assert (await http.post("/v1/completions", COMPLETION))[0] == 200


async def test_starting(tokenizer: Any) -> None:
    engine = FakeEngine()
    async with served(decode_app(engine, tokenizer)) as http:
        assert "starting" in await unavailable(engine, http, "starting")
        engine.ready()
        assert (await http.post("/v1/completions", COMPLETION))[0] == 200


async def test_no_prefill_configured(tokenizer: Any) -> None:
    engine = FakeEngine()
    engine.ready()
    app = build_app(DecodeConfig(model=MODEL), engine.front, tokenizer, engine.registry)
    async with served(app) as http:
        assert "is configured (--prefill" in await unavailable(engine, http, "no_prefill")


async def test_no_prefill_is_needed_where_decode_computes_itself(tokenizer: Any) -> None:
    engine = FakeEngine()
    engine.ready()
    app = build_app(DecodeConfig(model=MODEL, on_prefill_loss="local"), engine.front, tokenizer, engine.registry)
    async with served(app) as http:
        assert (await http.post("/v1/completions", COMPLETION))[0] == 200


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
