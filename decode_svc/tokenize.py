"""vLLM's /tokenize and /detokenize, and one model by its name: what needs the front and no answer of the engine."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec
from aiohttp import web

from decode_svc.openai import UNSUPPORTED, ChatMessage, ChatRequest, Checked, bad, check_tokens
from shared.ops.front import EngineClient
from shared.ops.http import json_response

T = TypeVar("T")

_TEMPLATE_OPTIONS = ("tools", "documents", "continue_final_message", "chat_template", "chat_template_kwargs")


R = TypeVar("R", bound=Checked)


class Front(Protocol):
    """What these routes share with the answering ones: DecodeFront."""

    def know(self, model: str | None) -> None: ...
    def admit(self, model: str | None) -> int: ...
    def card(self) -> dict[str, Any]: ...
    def encode(self, text: str, add_special_tokens: bool, field: str, context: int) -> list[int]: ...
    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str: ...
    async def parse(self, request: web.Request, kind: type[R]) -> R: ...
    def on_text_thread(self, work: Callable[[], T]) -> Awaitable[T]: ...


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Exactly one of prompt and messages. Null is the same as absent."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {name: UNSUPPORTED[name] for name in _TEMPLATE_OPTIONS}
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    """By default as generating does: a prompt has them, the text of a chat template brings its own."""
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise bad("prompt", "expected exactly one of prompt and messages")
        if self.messages is not None:
            ChatRequest(messages=self.messages).check()
        elif self.add_generation_prompt is not None:
            raise bad("add_generation_prompt", "only allowed with messages")

    @property
    def field(self) -> str:
        return "prompt" if self.messages is None else "messages"


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    model: str | None = None
    tokens: list[int]

    def check(self) -> None:
        """Nothing holds for any model."""


class Tokens(msgspec.Struct):
    """``token_strs``: as the vocabulary writes them, or null where not asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(msgspec.Struct):
    prompt: str


def add_routes(app: web.Application, front: Front, engine: EngineClient, tokenizer: Any) -> None:
    """/tokenize, /detokenize, /v1/models/{id}. ``tokenizer``: see TextCodec."""

    async def tokenize(request: web.Request) -> web.Response:
        body = await front.parse(request, TokenizeRequest)
        context = front.admit(body.model)
        max_model_len = front.card()["max_model_len"]

        def work() -> Tokens:
            text, special = body.prompt or "", body.add_special_tokens
            if body.messages is not None:
                turns = ChatRequest(messages=body.messages).conversation()
                text = front.render(turns, body.add_generation_prompt is not False)
            ids = front.encode(text, body.messages is None if special is None else special, body.field, context)
            strings = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
            return Tokens(len(ids), max_model_len, ids, strings)

        return json_response(await front.on_text_thread(work))

    async def detokenize(request: web.Request) -> web.Response:
        body = await front.parse(request, DetokenizeRequest)
        front.admit(body.model)
        vocab_size = engine.require().vocab_size

        def work() -> Text:
            check_tokens(body.tokens, "tokens", vocab_size)
            return Text(tokenizer.backend_tokenizer.decode(body.tokens, skip_special_tokens=False))

        return json_response(await front.on_text_thread(work))

    async def model(request: web.Request) -> web.Response:
        front.know(request.match_info["model"])
        return json_response(front.card())

    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    app.router.add_get("/v1/models/{model:.+}", model)
