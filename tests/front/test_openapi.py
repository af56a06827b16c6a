"""The document says what the front does: whatever it allows or forbids gets an answer that it describes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import requests
import schemathesis
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from decode_svc import openapi
from decode_svc.openai import ChatRequest, CompletionRequest
from shared.protocol.local import FinishReason, Generate
from tests.front.fakes import MODEL, FakeEngine, Http, decode_app, registered, served, status

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"prompt": "hi"}
PAGES = ("/", "/status.json")
"""What people look at."""
EXAMPLES = 12
SLOW = list(HealthCheck)
"""The document's strategies filter much and draw slowly."""


class AnsweringEngine(FakeEngine):
    """Answers every choice."""

    def say(self, message: Generate, tokens: list[int], finish: FinishReason | None = None, **fields: Any) -> None:
        for choice in range(message.choices):
            super().say(message, tokens, finish, choice=choice, **fields)

    @classmethod
    def paired(cls) -> FakeEngine:
        engine = cls()
        engine.ready()
        engine.front.on_message(status(registered()))
        return engine


@pytest.fixture
async def engine() -> FakeEngine:
    return AnsweringEngine.paired()


@pytest.fixture
def app(engine: FakeEngine, tokenizer: Any) -> web.Application:
    engine.answer = tokenizer.encode("hello")
    return decode_app(engine, tokenizer)


@pytest.fixture
async def http(app: web.Application) -> AsyncIterator[Http]:
    async with served(app) as http:
        yield http


def closed_document() -> dict[str, Any]:
    """With nothing allowed in an answer that the document does not have."""
    document = openapi.document()
    for name, schema in document["components"]["schemas"].items():
        if hasattr(openapi, name) and not name.endswith("Request"):
            schema["additionalProperties"] = False
    return document


async def test_it_is_served_and_has_every_route(app: web.Application, http: Http) -> None:
    code, document = await http.get("/openapi.json")
    assert (code, document) == (200, msgspec.to_builtins(openapi.document()))
    documented = {(method, path) for path, methods in document["paths"].items() for method in methods}
    routes = {(route.method.lower(), getattr(route.resource, "canonical", "")) for route in app.router.routes()}
    assert documented == {(method, path) for method, path in routes if method != "head" and path not in PAGES}


def test_it_follows_the_structs() -> None:
    schemas = openapi.document()["components"]["schemas"]
    for kind in (ChatRequest, CompletionRequest):
        assert set(schemas[kind.__name__]["properties"]) == set(kind.__struct_fields__)
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    assert "#/components/schemas/ChatMessage" in str(schemas["ChatRequest"]["properties"]["messages"])


def assert_error_object(status: int, body: Any) -> None:
    """A refusal that names no defect."""
    assert 400 <= status < 500
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code", "retryable"}
    assert (body["error"]["type"], body["error"]["retryable"]) == ("invalid_request_error", False)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["allowed", "forbidden"])
@pytest.mark.parametrize("path", [operation.path for operation in openapi.OPERATIONS if operation.body])
async def test_every_answer_is_described(http: Http, path: str, mode: GenerationMode) -> None:
    base_url = f"http://127.0.0.1:{http.port}"
    operation = schemathesis.openapi.from_dict(closed_document())[path]["post"]

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=SLOW)
    @given(case=operation.as_strategy(mode))
    def probe(case: Case[Any]) -> None:
        response = case.call(base_url=base_url, session=session, timeout=10)
        # what the structs cannot say (a range, "one of two") is refused too
        case.validate_response(response, excluded_checks=[positive_data_acceptance])
        assert "Traceback" not in response.text
        if response.status_code != 200:
            assert_error_object(response.status_code, response.json())

    with requests.Session() as session:
        await asyncio.to_thread(probe)
    assert (await http.post("/v1/completions", COMPLETION))[0] == 200


ANSWERS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("post", "/v1/chat/completions", CHAT),
    ("post", "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
    ("post", "/v1/chat/completions", CHAT | {"stream": True}),
    ("post", "/v1/completions", COMPLETION),
    ("post", "/v1/completions", COMPLETION | {"logprobs": 2, "return_token_ids": True}),
    ("post", "/v1/completions", COMPLETION | {"stream": True}),
    ("post", "/tokenize", COMPLETION),
    ("post", "/tokenize", CHAT | {"return_token_strs": True}),
    ("post", "/detokenize", {"tokens": [1, 2]}),
    ("post", "/abort_request", {"abort_all": True}),
    ("get", "/v1/models", None),
    ("get", "/v1/models/{model}", None),
    ("get", "/health", None),
    ("get", "/ready", None),
    ("get", "/health_generate", None),
    ("get", "/metrics", None),
    ("get", "/openapi.json", None),
]


@pytest.mark.parametrize("alive", [True, False], ids=["alive", "dead"])
@pytest.mark.parametrize(("method", "path", "body"), ANSWERS)
async def test_answers_have_what_the_document_says_and_nothing_else(
    engine: FakeEngine, http: Http, method: str, path: str, body: dict[str, Any] | None, alive: bool
) -> None:
    if not alive:
        engine.front.engine_died("signal 9")
    operation = schemathesis.openapi.from_dict(closed_document())[path][method]
    options: dict[str, Any] = {"body": body, "media_type": "application/json"} if body else {}
    case = operation.Case(path_parameters={"model": MODEL}, **options)
    response = await asyncio.to_thread(case.call, f"http://127.0.0.1:{http.port}", timeout=10)
    operation.validate_response(response)
    assert str(response.status_code) in openapi.document()["paths"][path][method]["responses"]
    assert alive <= (response.status_code == 200)
