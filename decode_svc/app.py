"""Decode's HTTP front: OpenAI's endpoints. Every refusal comes before the engine hears of the request."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from decode_svc import openapi, status, tokenize
from decode_svc.admission import answer_length, check_scores, check_size, generate_message
from decode_svc.answers import Answer, Job, Piece
from decode_svc.openai import (
    COMPLETION_DEFAULT_TOKENS,
    ChatRequest,
    Checked,
    CommonRequest,
    CompletionRequest,
    check_tokens,
    parse,
)
from decode_svc.shapes import ChatShape, CompletionShape
from decode_svc.status import Entry, Recent
from decode_svc.text import Stops, TextCodec
from shared.config import DecodeConfig
from shared.errors import RequestError, Unavailable
from shared.ids import RequestId
from shared.ops.front import EngineClient, Health
from shared.ops.http import (
    abort_target,
    base_app,
    client_id,
    error_object,
    json_response,
    overload,
    read_body,
    request_id,
    verdict_response,
)
from shared.ops.metrics import Registry
from shared.ops.stream import EngineFailure
from shared.protocol.local import HEARTBEAT_S, Generate, Handover, ModelInfo, Status
from shared.protocol.messages import Sampling, pack_int32

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", bound=Checked)

PROBE_LIMIT_S = 10.0
LARGE_BODY_BYTES = 256 << 10
"""From here on a body is parsed on the text thread."""


def build_app(config: DecodeConfig, engine: EngineClient, tokenizer: Any, registry: Registry) -> web.Application:
    """OpenAI's routes, vLLM's /tokenize and /detokenize, health, metrics, the operator's abort, and the status page.
    ``tokenizer``: see TextCodec."""
    front = DecodeFront(config, engine, TextCodec(tokenizer), registry)
    app = base_app(engine, registry, front.objections)
    app.router.add_post("/v1/chat/completions", front.chat)
    app.router.add_post("/v1/completions", front.completion)
    app.router.add_get("/v1/models", front.models)
    app.router.add_post("/abort_request", front.abort)
    app.router.add_get("/health_generate", front.health_generate)
    tokenize.add_routes(app, front, engine, tokenizer)
    openapi.add_routes(app)
    status.add_routes(app, engine, front.recent, config, front.objections)
    app.cleanup_ctx.append(front.text_thread)
    return app


class DecodeFront:
    """The handlers."""

    def __init__(self, config: DecodeConfig, engine: EngineClient, codec: TextCodec, registry: Registry) -> None:
        self._config, self._engine, self._codec, self._registry = config, engine, codec, registry
        self._model = config.served_model_name or config.model
        self._created = int(time.time())
        self._executor: ThreadPoolExecutor | None = None
        self.recent = Recent(engine.clock)

    async def text_thread(self, _app: object = None) -> AsyncGenerator[None]:
        """An aiohttp ``cleanup_ctx``: one thread for templates and tokenizing, so that no text stalls the streams."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="text")
        yield
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def models(self, _request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self.card()]})

    def card(self) -> dict[str, Any]:
        """The served model. Raises Unavailable while the engine starts."""
        ready = self._engine.ready
        if ready is None:
            raise Unavailable("the engine is starting", code="starting")
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "sglang",  # routers know the protocol by this word
            "root": self._config.model,
            "parent": None,
            "max_model_len": ready.info.max_model_len,
        }

    def objections(self, status: Status) -> list[str]:
        """What speaks against sending requests here (S62)."""
        reasons = overload(status, self._config.max_waiting)
        registered = any(peer.state == "registered" for peer in status.peers)
        if not registered and self._config.on_prefill_loss != "local":
            reasons.append(f"no prefill service is {'registered' if self._config.prefill else 'configured'}")
        return reasons

    async def health_generate(self, request: web.Request) -> web.Response:
        """S62: does a token still come out? With work running the next output answers, with work only waiting the
        engine's heartbeat; only an idle engine is given a request, and nothing is queued behind a burst."""
        info, engine = self._engine.require(), self._engine
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                while engine.running and engine.computing and engine.health(engine.clock()).ok:
                    with suppress(TimeoutError):  # then look again: what it waits for may have ended meanwhile
                        await asyncio.wait_for(engine.next_output(), HEARTBEAT_S)
                        return verdict_response(Health(True, []), "unhealthy")
                if engine.health(engine.clock()).ok and not engine.running:
                    sampling = Sampling(seed=0, temperature=0.0)
                    prompt = pack_int32([info.vocab_size - 1])
                    probe = Generate(RequestId(request_id(request)), prompt, 1, sampling, [], True)
                    with engine.generate(probe) as stream:
                        await anext(stream)
        except TimeoutError:
            return verdict_response(Health(False, [f"no token within {PROBE_LIMIT_S:g} s"]), "unhealthy")
        return verdict_response(engine.health(engine.clock()), "unhealthy")

    async def abort(self, request: web.Request) -> web.Response:
        return json_response({"aborted": self._engine.abort(await abort_target(request))})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        arrived_s = self._engine.clock()
        body = await self.parse(request, ChatRequest)
        context = self.admit(body.model)

        def tokens() -> list[int]:
            text = self.render(body.conversation(), True)
            return self.encode(text, False, "messages", context)

        ids = await self.on_text_thread(tokens)
        shape = ChatShape(f"chatcmpl-{request_id(request)}", *self._frame(body))
        return await self._answer(
            request, body, shape, self._messages(request, body, [ids], "messages", None), arrived_s
        )

    async def completion(self, request: web.Request) -> web.StreamResponse:
        arrived_s = self._engine.clock()
        body = await self.parse(request, CompletionRequest)
        context = self.admit(body.model)
        prompts = body.prompts()

        def tokens() -> list[list[int]]:
            return [self.encode(p, True, "prompt", context) if isinstance(p, str) else p for p in prompts]

        texts = any(isinstance(prompt, str) for prompt in prompts)
        messages = self._messages(
            request,
            body,
            await self.on_text_thread(tokens) if texts else tokens(),
            "prompt",
            COMPLETION_DEFAULT_TOKENS,
        )
        echoes = [p if isinstance(p, str) else self._codec.decode(p) for p in prompts] if body.echo else None
        shape = CompletionShape(f"cmpl-{request_id(request)}", *self._frame(body))
        return await self._answer(request, body, shape, messages, arrived_s, echoes)

    # before the engine

    async def parse(self, request: web.Request, kind: type[R]) -> R:
        body = await read_body(request)
        if len(body) < LARGE_BODY_BYTES:
            return parse(body, kind)
        return await self.on_text_thread(lambda: parse(body, kind))

    def know(self, model: str | None) -> None:
        """Raises RequestError where that model is not the served one; none is meant to be that one."""
        if model not in (None, self._model):
            raise RequestError(
                f"model {model!r} does not exist; this service has {self._model!r}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def admit(self, model: str | None) -> int:
        """The model is ours and the engine runs → the context in tokens."""
        self.know(model)
        return _context(self._engine.require())

    def _frame(self, body: CommonRequest) -> tuple[str, int, bool, bool]:
        """Model, time, and what the answer is to carry besides its text."""
        return self._model, int(time.time()), body.include_usage, bool(body.return_token_ids)

    async def on_text_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        return self._codec.render(messages, add_generation_prompt)

    def encode(self, text: str, add_special_tokens: bool, field: str, context: int) -> list[int]:
        if len(text) > context * self._codec.longest_token:  # or one huge text would occupy the thread for a minute
            message = f"{field}: {len(text)} characters are more than the context of {context} tokens can hold"
            raise RequestError(message, param=field, code="context_length_exceeded")
        return self._codec.encode(text, add_special_tokens)

    def _messages(
        self,
        request: web.Request,
        body: CommonRequest,
        prompts: Sequence[Sequence[int]],
        field: str,
        default_tokens: int | None,
    ) -> list[Generate]:
        """What the engine gets, one request a prompt, if each fits here and in a prefill that is there now."""
        info, name = self._engine.require(), request_id(request)
        messages = []
        check_scores(body, sum(map(len, prompts)))
        for index, ids in enumerate(prompts):
            where = f"{field}[{index}]" if len(prompts) > 1 else field
            if not ids:
                raise RequestError(f"{where}: no tokens in it", param=where, code="invalid_value")
            max_tokens = answer_length(len(ids), body.max_tokens, default_tokens, _context(info), where)
            check_tokens(ids, where, info.vocab_size)
            check_size(body, len(ids), max_tokens, info)
            own_id = RequestId(f"{name}.{index}" if index else name)
            messages.append(generate_message(body, own_id, ids, max_tokens, info))
        capacity = _prefill_capacity(self._engine.status, self._config)
        longest = max(map(len, prompts))
        if capacity and longest > capacity:
            problem = f"{field}: {longest} tokens; the largest prefill service takes {capacity}"
            raise RequestError(problem, param=field, code="prefill_capacity_exceeded")
        return messages

    # through the engine

    async def _answer(
        self,
        request: web.Request,
        body: CommonRequest,
        shape: CompletionShape,
        messages: Sequence[Generate],
        arrived_s: float,
        echoes: Sequence[str] | None = None,
    ) -> web.StreamResponse:
        stops, logged = Stops(body.stops, body.min_tokens or 0), body.logprob_count is not None
        job = Job(messages, stops, logged, body.prompt_logprobs, arrived_s, echoes)
        with (
            self._engine.generate(*messages, client_id=client_id(request)) as stream,
            self.recent.follow(shape.id, job, stream) as entry,
        ):
            answer = Answer(job, stream, self._codec, self._registry, self._engine.clock, self.on_text_thread)
            piece = await answer.next()  # a failure before the first token is still an HTTP status
            entry.first(answer)
            headers = _timing_headers(answer.handover)
            if body.stream:
                return await _streamed(request, shape, answer, piece, headers, entry)
            while piece is not None:
                piece.choice.pieces.append(piece.text)
                piece = await answer.next()
            finished = [choice.finished() for choice in answer.choices]
            return json_response(shape.whole(finished, answer.usage()), headers=headers)


async def _streamed(
    request: web.Request,
    shape: CompletionShape,
    answer: Answer,
    piece: Piece | None,
    headers: dict[str, str],
    entry: Entry,
) -> web.StreamResponse:
    """Server-sent events. Once the head is out, a failure is an error event: never a finish reason."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers})
    try:
        await response.prepare(request)
        for choice in answer.choices:
            for chunk in shape.opening(choice.index):
                await response.write(_event(chunk))
        try:
            while piece is not None:
                choice = piece.choice
                if piece.text:
                    await response.write(_event(shape.piece(choice.index, piece.text, choice.logprobs())))
                if piece.finish is not None:
                    await response.write(_event(shape.ending(choice.index, piece.finish, choice.logprobs())))
                piece = await answer.next()
            if shape.with_usage:
                await response.write(_event(shape.total(answer.usage())))
        except EngineFailure as error:
            entry.failed(error)
            log.debug("failed in its stream: %s", error.message, extra={"request": request_id(request)})
            await response.write(_event(error_object(error)))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    except ConnectionResetError:
        log.debug("the client is gone", extra={"request": request_id(request)})
    return response


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _timing_headers(handover: Handover | None) -> dict[str, str]:
    """The hand-over as a standard Server-Timing header, in milliseconds."""
    if handover is None:
        return {}
    timings = handover.timings
    parts = {"queue": timings.queue_s, "prefill": timings.prefill_s, "exposed": timings.exposed_s}
    shown = [f"{name};dur={1e3 * seconds:.3f}" for name, seconds in {**parts, "commit": handover.commit_s}.items()]
    shown.append(f'transfer;dur={1e3 * handover.slowest_write_s:.3f};desc="{handover.bytes_sent} bytes"')
    return {"Server-Timing": ", ".join(shown)}


def _context(info: ModelInfo) -> int:
    """Tokens of prompt and answer together: the model's limit, or what all pages but the padding page hold."""
    return min(info.max_model_len, (info.num_pages - 1) * info.page_size)


def _prefill_capacity(status: Status | None, config: DecodeConfig) -> int:
    """The longest prompt that some registered prefill takes; 0: not known. Raises Unavailable where none can come; a
    peer that may still answer is the engine's to wait for."""
    peers = status.peers if status is not None else []
    limits = [peer.max_prompt_tokens for peer in peers if peer.state == "registered"]
    if limits:
        return max(limits) if all(limits) else 0
    if config.on_prefill_loss == "local":
        return 0
    if not config.prefill:
        raise Unavailable("no prefill service is configured (--prefill HOST:CONTROL_PORT)", code="no_prefill")
    if peers and all(peer.state == "refused" for peer in peers):
        shown = [f"{peer.address} is refused ({'; '.join(map(str, peer.differences))})" for peer in peers]
        raise Unavailable(f"no prefill service: {', '.join(shown)}", code="no_prefill")
    return 0
