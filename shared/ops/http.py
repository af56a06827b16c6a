"""What both HTTP fronts share: OpenAI's error object, /health, /metrics, request ids, and serving an app."""

import asyncio
import logging
import os
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from shared.errors import ConfigError, HandoffError, RequestError
from shared.limited_log import RateLimitedLog
from shared.ops.front import EngineClient, Health
from shared.ops.metrics import ROUTES, Registry
from shared.ops.stream import EngineFailure
from shared.protocol.local import Status

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
BODY_LIMIT_S = 30.0
IDLE_CONNECTION_S = 75.0
REFUSAL_LOG_S = 10.0
"""At most one line for each reason in this time: while a service is down every request is refused for it."""
_REQUEST_ID = web.RequestKey("request_id", str)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def request_id(request: web.Request) -> str:
    """Our own name for this HTTP request; never the client's X-Request-Id, which two clients may share."""
    return request[_REQUEST_ID]


def client_id(request: web.Request) -> str:
    """The client's X-Request-Id where it can be shown, else an empty string."""
    theirs = request.headers.get("X-Request-Id", "")
    return theirs if len(theirs) <= 256 and theirs.isascii() and theirs.isprintable() else ""


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True):
    """As SGLang's: one request by its id, or all."""

    rid: str = ""
    abort_all: bool = False


async def read_body(request: web.Request) -> bytes:
    """Raises RequestError where it does not arrive in time: a client that sends none would be waited for for ever."""
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            return await request.read()
    except TimeoutError as error:
        problem = f"the body did not arrive within {BODY_LIMIT_S:g} s"
        raise RequestError(problem, code="request_timeout", status=408) from error


async def abort_target(request: web.Request) -> str | None:
    """The body's request id, or None for all. Raises RequestError where it is not exactly one of the two."""
    try:
        body = msgspec.json.decode(await read_body(request), type=AbortRequest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is no abort request: {error}", code="invalid_body") from error
    if bool(body.rid) == body.abort_all:
        raise RequestError("expected either rid or abort_all: true", param="rid", code="invalid_value")
    return body.rid or None


def error_object(error: HandoffError) -> dict[str, Any]:
    """OpenAI's error object, and whether the same request may succeed if it is sent again."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": getattr(error, "param", None),
            "code": error.code,
            "retryable": error.retryable,
        }
    }


def json_response(data: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(data), status=status, headers=headers, content_type="application/json", charset="utf-8"
    )


def verdict_response(verdict: Health, otherwise: str) -> web.Response:
    """200 or 503, with the reasons; routers look at the status alone."""
    body = {"status": "ok" if verdict.ok else otherwise, "reasons": verdict.reasons}
    return json_response(body, 200 if verdict.ok else 503)


def overload(status: Status, max_waiting: int) -> list[str]:
    """An objection where too many requests wait."""
    waiting = int(status.gauges.get("handoff_waiting_requests", 0))
    return [f"overloaded: {waiting} requests wait"] if max_waiting and waiting >= max_waiting else []


def error_response(error: HandoffError) -> web.Response:
    headers = {"Retry-After": "1"} if error.retryable else None
    return json_response(error_object(error), error.http_status, headers)


def base_app(engine: EngineClient, registry: Registry, objections: Callable[[Status], list[str]]) -> web.Application:
    """/health, /ready and /metrics; every error in OpenAI's shape; each response counted and given an X-Request-Id.

    ``objections`` finds in an engine's status what speaks against new requests, besides what every service has.
    """

    limited = RateLimitedLog(log, REFUSAL_LOG_S)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[_REQUEST_ID] = uuid.uuid4().hex
        status = "closed"
        try:
            response = await _answered(request, handler, limited)
            status = f"{response.status // 100}xx"
            about = {"request": request_id(request)}
            log.debug("%s %r → %d", request.method, request.path, response.status, extra=about)
            return response
        finally:
            registry.count(f"handoff_http_requests_total{{route={_route(request)},status={status}}}")

    async def name_response(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["X-Request-Id"] = client_id(request) or request.get(_REQUEST_ID) or uuid.uuid4().hex

    async def health(_request: web.Request) -> web.Response:
        return verdict_response(engine.health(engine.clock()), "unhealthy")

    async def ready(_request: web.Request) -> web.Response:
        return verdict_response(engine.readiness(engine.clock(), objections), "not ready")

    async def metrics(_request: web.Request) -> web.Response:
        registry.gauge("handoff_engine_up", engine.health(engine.clock()).ok)
        return web.Response(
            body=registry.render(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    app = web.Application(middlewares=[guard], client_max_size=MAX_BODY_BYTES)
    app.on_response_prepare.append(name_response)
    app.cleanup_ctx.append(engine.watch)
    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)
    app.router.add_get("/metrics", metrics)
    return app


def _route(request: web.Request) -> str:
    return request.path if request.path in ROUTES else "other"


async def _answered(request: web.Request, handler: Handler, limited: RateLimitedLog) -> web.StreamResponse:
    """The handler's response, or its error as one. Cancellation (the client is gone) passes through."""
    about = {"request": request_id(request)}
    try:
        if request.headers.get("Content-Encoding", "identity") != "identity":
            # a few kilobytes of it may be gigabytes, and unpacking them would hold up every stream
            raise RequestError(
                "a compressed body is not taken; send it as it is", code="unsupported_encoding", status=415
            )
        return await handler(request)
    except HandoffError as error:
        if isinstance(error, RequestError | EngineFailure):  # the engine has said so itself
            log.debug("%s %r refused: %s", request.method, request.path, error.message, extra=about)
        else:
            limited.warning(error.code, "%s %r refused: %s", request.method, request.path, error.message, extra=about)
        return error_response(error)
    except web.RequestPayloadError as error:
        request.content.feed_eof()  # or aiohttp meets the same error again, as its own, when it discards the rest
        response = error_response(RequestError(f"the body cannot be read: {error}", code="invalid_body"))
        response.force_close()
        return response
    except web.HTTPException as error:
        codes = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
        code = codes.get(error.status, "http_error")
        messages = {
            404: f"no such path: {request.path!r}",
            405: f"{request.method} is not allowed on {request.path!r}",
            413: f"the body is larger than {MAX_BODY_BYTES} bytes",
        }
        message = messages.get(error.status, error.reason)
        response = error_response(RequestError(message, code=code, status=error.status))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except Exception:
        log.warning("%s %r failed", request.method, request.path, exc_info=True, extra=about)
        return error_response(HandoffError("internal error; the service's log says more"))


class _ServerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's words on what is no HTTP: a line at a limited rate instead of a traceback each."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._limited = RateLimitedLog(logger, REFUSAL_LOG_S)

    def exception(self, msg: object, *args: object, exc_info: Any = None, **_: Any) -> None:
        text = str(msg) % args if args else str(msg)
        self._limited.warning(type(exc_info).__name__, "%s: %s", text, exc_info)


async def serve(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Listen; returns the runner, whose ``cleanup`` stops it, and the port. Raises ConfigError if it cannot be bound.

    ``handler_cancellation`` is what turns a client's disconnect into a Cancel.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=1.0,
        keepalive_timeout=IDLE_CONNECTION_S,
        auto_decompress=False,
        logger=_ServerLog(log),
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error
    bound: int = runner.addresses[0][1]
    return runner, bound
