"""Whatever bytes come as a body, the reply is an answer or a refusal in OpenAI's shape, and the next one is served."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_svc.openai import ChatRequest, CompletionRequest
from decode_svc.tokenize import DetokenizeRequest, TokenizeRequest
from shared.ops.http import MAX_BODY_BYTES, AbortRequest
from tests.front.fakes import FakeEngine, Http, decode_app, served
from tests.front.test_openapi import AnsweringEngine, assert_error_object

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"prompt": "hi"}
PATHS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, CHAT),
    "/v1/completions": (CompletionRequest, COMPLETION),
    "/tokenize": (TokenizeRequest, COMPLETION),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
    "/abort_request": (AbortRequest, {"rid": "x"}),
}
FIELDS = [(path, field) for path, (kind, _) in PATHS.items() for field in kind.__struct_fields__]

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.sampled_from([0, 1, 263, 264, 2**31, 2**53 + 1, 10**400, -(10**400)])
    | st.floats()
    | st.sampled_from(["0", "false", "[DONE]", "\x00", "\ud800", "{{ 1 }}", "../..", "<eos>"])
    | st.text(st.characters(), max_size=8)
)
_KEYS = st.sampled_from(sorted({field for _, field in FIELDS} | {"role", "content", "type", "text"})) | st.text(
    max_size=4
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=4))


@pytest.fixture
async def engine() -> FakeEngine:
    return AnsweringEngine.paired()


@pytest.fixture
async def http(engine: FakeEngine, tokenizer: Any) -> AsyncIterator[Http]:
    engine.answer = tokenizer.encode("hello")
    async with served(decode_app(engine, tokenizer)) as http:
        yield http


async def ask(http: Http, path: str, body: bytes) -> None:
    async with asyncio.timeout(10), http.session.post(path, data=body) as response:
        text = await response.text()
    assert "Traceback" not in text
    if response.status != 200:
        assert_error_object(response.status, json.loads(text))


async def survives(http: Http, path: str, bodies: st.SearchStrategy[bytes], examples: int) -> None:
    """Hypothesis is synchronous, so it runs on a thread, and its requests on this loop."""
    loop = asyncio.get_running_loop()

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(body=bodies)
    def probe(body: bytes) -> None:
        asyncio.run_coroutine_threadsafe(ask(http, path, body), loop).result()

    await asyncio.to_thread(probe)
    code, answer = await http.post("/v1/completions", COMPLETION)
    assert (code, answer["choices"][0]["text"]) == (200, "hello")


def written(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize("path", PATHS)
async def test_any_json(http: Http, path: str) -> None:
    await survives(http, path, VALUES.map(written), 50)


@pytest.mark.parametrize("path", PATHS)
async def test_any_bytes(http: Http, path: str) -> None:
    whole = written(PATHS[path][1])
    broken = st.builds(
        lambda start, size, junk: whole[:start] + junk + whole[start + size :],
        st.integers(0, len(whole)),
        st.integers(0, 4),
        st.binary(max_size=4),
    )
    await survives(http, path, st.binary(max_size=64) | broken, 100)


@pytest.mark.parametrize(("path", "field"), FIELDS)
async def test_anything_in_each_field(http: Http, path: str, field: str) -> None:
    await survives(http, path, VALUES.map(lambda value: written(PATHS[path][1] | {field: value})), 15)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"content":['])
@pytest.mark.parametrize("path", PATHS)
async def test_deep_nesting(http: Http, path: str, opening: bytes) -> None:
    kind, valid = PATHS[path]
    for field in (*kind.__struct_fields__, "unknown"):
        code, answer = await http.post(path, written(valid)[:-1] + f', "{field}":'.encode() + opening * 20_000)
        assert_error_object(code, answer)
    assert (await http.post("/v1/completions", COMPLETION))[0] == 200


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_too_large_leaves_a_stream_alone(engine: FakeEngine, http: Http, path: str) -> None:
    engine.manual = True
    streaming = asyncio.create_task(http.events("/v1/completions", COMPLETION))
    message = await engine.generate()
    code, answer = await http.post(path, b" " * MAX_BODY_BYTES + written(PATHS[path][1]))
    assert (code, answer["error"]["code"]) == (413, "request_too_large")
    assert_error_object(code, answer)
    engine.say(message, engine.answer, "length")
    assert [event["choices"][0]["text"] for event in (await streaming)[:-1]] == ["hello", ""]
    assert len(engine.received) == 1
