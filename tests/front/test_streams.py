"""Streams that do not end well, clients that leave, and what is measured on the way."""

import asyncio
import socket
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.ops.http import serve
from shared.ops.stream import EngineFailure
from shared.protocol.local import EngineError, Generate
from tests.front.fakes import (
    MODEL,
    FakeEngine,
    Http,
    decode_app,
    handover,
    registered,
    status,
)
from tests.front.test_answers import joined

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 40}
HARD = "žluť 🫨 齉 👩‍🚀!"


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
