"""The OpenAPI document of decode's front. Request bodies come from the structs that read them; answers are written
here, and a test holds them against what the front sends."""

import importlib.metadata
from typing import Any, Literal, NamedTuple

import msgspec
from aiohttp import web

from decode_svc.openai import ChatRequest, CompletionRequest
from decode_svc.tokenize import DetokenizeRequest, Text, TokenizeRequest, Tokens
from shared.ops.http import AbortRequest
from shared.protocol.local import FinishReason


class Error(msgspec.Struct):
    """retryable: the same request may succeed if it is sent again."""

    message: str
    type: str
    param: str | None
    code: str
    retryable: bool


class ErrorAnswer(msgspec.Struct):
    error: Error


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Answer(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    usage: Usage


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


class Choice(msgspec.Struct, kw_only=True):
    index: int
    finish_reason: FinishReason
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None


class AssistantMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Choice, kw_only=True):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatAnswer(Answer, kw_only=True):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionLogprobs(msgspec.Struct):
    """Null: an echoed prompt's first token, before which is nothing."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Choice, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None


class CompletionAnswer(Answer, kw_only=True):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ModelCard(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


class Verdict(msgspec.Struct):
    """The status of the response is the answer; these are the reasons."""

    status: str
    reasons: list[str]


class Aborted(msgspec.Struct):
    """How many requests were running under that name."""

    aborted: int


_EVENTS = "with stream: events whose data is a chunk, or the error object where it breaks off, and at last [DONE]"
STREAM = {"text/event-stream": {"schema": {"description": _EVENTS}}}
METRICS = {"text/plain": {"schema": {"type": "string"}}}
DOCUMENT = {"application/json": {"schema": {"type": "object"}}}

REASONS = {
    200: "the answer",
    400: "the request can never succeed as it is",
    404: "no such model",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body is compressed",
    500: "a defect of the service, or a hand-over that cannot succeed",
    503: "not now",
}
BODY = (400, 408, 413, 415, 500)
GENERATING = (400, 404, 408, 413, 415, 500, 503)


class Operation(NamedTuple):
    """``answer``: the struct of a 200. ``media``: its other content types. ``refusal``: what a 503 may hold."""

    method: str
    path: str
    summary: str
    answer: type | None
    body: type | None = None
    errors: tuple[int, ...] = ()
    media: dict[str, Any] | None = None
    refusal: tuple[type, ...] = (ErrorAnswer,)


OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a chat", ChatAnswer, ChatRequest, GENERATING, STREAM),
    Operation("post", "/v1/completions", "Go on", CompletionAnswer, CompletionRequest, GENERATING, STREAM),
    Operation("get", "/v1/models", "The model, as a list", ModelList, errors=(503,)),
    Operation("get", "/v1/models/{model}", "The model by its name", ModelCard, errors=(404, 503)),
    Operation("post", "/tokenize", "Text or messages → tokens", Tokens, TokenizeRequest, GENERATING),
    Operation("post", "/detokenize", "Tokens → text", Text, DetokenizeRequest, GENERATING),
    Operation("get", "/health", "Does the engine live?", Verdict, errors=(503,), refusal=(Verdict,)),
    Operation("get", "/ready", "Should requests come here?", Verdict, errors=(503,), refusal=(Verdict,)),
    Operation(
        "get", "/health_generate", "Does a token come out?", Verdict, errors=(503,), refusal=(Verdict, ErrorAnswer)
    ),
    Operation("get", "/metrics", "Prometheus' text format", None, media=METRICS),
    Operation("post", "/abort_request", "End one running request, or all", Aborted, AbortRequest, BODY),
    Operation("get", "/openapi.json", "This document", None, media=DOCUMENT),
)


def document() -> dict[str, Any]:
    """OpenAPI 3.1. Options that are refused by name are not in it."""
    types = list(dict.fromkeys(t for o in OPERATIONS for t in (o.answer, o.body, *o.refusal) if t is not None))
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    known = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, known)
    info = {"title": "Handoff, decode service", "version": importlib.metadata.version("handoff")}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


def _described(operation: Operation, known: dict[type, dict[str, Any]]) -> dict[str, Any]:
    def response(status: int, *kinds: type) -> dict[str, Any]:
        schema = known[kinds[0]] if len(kinds) == 1 else {"anyOf": [known[kind] for kind in kinds]}
        return {"description": REASONS[status], "content": {"application/json": {"schema": schema}}}

    good: dict[str, Any] = response(200, operation.answer) if operation.answer else {"description": REASONS[200]}
    good["content"] = {**good.get("content", {}), **(operation.media or {})}
    refused = {
        str(status): response(status, *(operation.refusal if status == 503 else (ErrorAnswer,)))
        for status in operation.errors
    }
    described: dict[str, Any] = {"summary": operation.summary, "responses": {"200": good, **refused}}
    if operation.body:
        content = {"application/json": {"schema": known[operation.body]}}
        described["requestBody"] = {"required": True, "content": content}
    if "{model}" in operation.path:
        name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        described["parameters"] = [name]
    return described


def add_routes(app: web.Application) -> None:
    """/openapi.json"""
    body = msgspec.json.encode(document())

    async def openapi(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    app.router.add_get("/openapi.json", openapi)
