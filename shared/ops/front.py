"""A front's client of its engine: requests, their endings, and whether the engine lives. Runs on the front's loop."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from shared.errors import ConfigError, HandoffError, StateError, Unavailable
from shared.ids import RequestId
from shared.ops.metrics import Registry
from shared.ops.stream import RequestStream
from shared.protocol.local import (
    HEARTBEAT_S,
    Cancel,
    Drain,
    Drained,
    EngineError,
    Generate,
    ModelInfo,
    Output,
    Outputs,
    Ready,
    StartFailed,
    Status,
    Stop,
    ToEngine,
    ToFront,
)

log = logging.getLogger(__name__)

TICK_S = HEARTBEAT_S / 2
SILENT_S = 3 * HEARTBEAT_S
"""An engine that has said nothing for so long is unhealthy. Its loop never blocks, so a busy one still speaks."""
GIVE_UP_S = 10 * HEARTBEAT_S
"""A silent engine's requests end with an error after so long; longer than SILENT_S, since this cannot be taken back."""
STEP_LIMIT_S = 120.0
"""An engine that speaks but ends no forward for so long is stuck in it."""
STALLED_S = 2 * HEARTBEAT_S
"""A front whose own tick came so late was itself stopped, and gives its engine another SILENT_S before it judges."""


class Health(NamedTuple):
    ok: bool
    reasons: list[str]


class EngineClient:
    """The front's side of the engine: what it said last, whether it lives, and the requests that it works on.

    ``send`` queues one message and never blocks; it may raise PeerBusy. What the engine says goes into ``on_message``;
    whoever watches its process calls ``engine_died``. ``clock`` gives monotonic seconds.
    """

    def __init__(
        self,
        send: Callable[[ToEngine], None],
        registry: Registry,
        clock: Callable[[], float] = time.monotonic,
        step_limit_s: float = STEP_LIMIT_S,
    ) -> None:
        self.ready: Ready | None = None
        self.status: Status | None = None
        self.draining = False
        self.drained = asyncio.Event()
        """Set by Drained, and by the engine's death: nothing runs any more."""
        self.clock = clock
        self._send, self._registry = send, registry
        self._started = asyncio.Event()
        self._start_failure = ""
        self._death = ""
        self._heard_s = self._ticked_s = self._progress_s = clock()
        self._step_limit_s = step_limit_s
        self._next_output: asyncio.Future[None] | None = None
        self._running: dict[RequestId, RequestStream] = {}
        self._unsent_cancels: list[Cancel] = []

    # the engine's side

    def on_message(self, message: ToFront) -> None:
        if self._death:
            return
        self._heard_s = self.clock()
        match message:
            case Outputs(items=items):
                if self._next_output is not None and not self._next_output.done():
                    self._next_output.set_result(None)
                for output in items:
                    self._deliver(output)
            case Status():
                if self.status is None or not message.busy or message.steps != self.status.steps:
                    self._progress_s = self._heard_s
                self.status = message
                self._registry.apply(message)
            case Ready():
                self.ready = message
                self._started.set()
            case StartFailed(message=reason):
                self._start_failure = reason
                self._started.set()
            case Drained():
                self.drained.set()

    def engine_died(self, reason: str) -> None:
        """Every running request ends at once, and none is taken any more. The first reason stays."""
        if self._death:
            return
        self._death = reason
        self._end_all(EngineError(f"the engine died: {reason}", "engine_dead", 503, "service_unavailable", True))
        self._started.set()
        self.drained.set()

    def stopped(self) -> None:
        """The operator does not wait any longer: every running request ends at once."""
        self._end_all(EngineError("the service was stopped", "shutting_down", 503, "service_unavailable", True))
        self.engine_died("the service was stopped at once")

    # the service's life

    async def started(self) -> Ready:
        """Wait for the engine. Raises ConfigError with its own line if it cannot run, Unavailable if it died."""
        await self._started.wait()
        if self._start_failure:
            raise ConfigError(self._start_failure)
        if self.ready is None:
            raise Unavailable(f"the engine died while it started: {self._death}", code="engine_dead")
        return self.ready

    def drain(self, grace_s: float) -> None:
        """Refuse new requests from now on; ``drained`` is set when the running ones have ended. Idempotent."""
        if self.draining:
            return
        self.draining = True
        if not self._death:
            try:
                self._send(Drain(grace_s))
            except HandoffError as error:
                log.warning("the engine cannot be told to drain: %s", error)

    def tick(self, now_s: float) -> None:
        """Every TICK_S: give up a silent engine's requests, and send what could not be sent before."""
        self._rearm(now_s)
        self._ticked_s = now_s
        unsent, self._unsent_cancels = self._unsent_cancels, []
        for cancel in unsent:
            self._cancel(cancel)
        silent_s = now_s - self._heard_s
        if self.ready is not None and silent_s > GIVE_UP_S and self._running:
            log.warning("engine silent for %.1f s: ending its %d requests", silent_s, len(self._running))
            abandoned = list(self._running)
            message = f"the engine has said nothing for {silent_s:.1f} s"
            self._end_all(EngineError(message, "engine_silent", 503, "service_unavailable", True))
            for request in abandoned:
                self._cancel(Cancel(request))

    async def watch(self, _app: object = None) -> AsyncGenerator[None]:
        """Ticks from the first step of this generator to the second: an aiohttp ``cleanup_ctx``."""

        async def ticks() -> None:
            while True:
                try:
                    self.tick(self.clock())
                except Exception:  # without ticks /health would stay green for ever
                    log.warning("tick failed", exc_info=True)
                await asyncio.sleep(TICK_S)

        task = asyncio.create_task(ticks())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    def health(self, now_s: float) -> Health:
        """Liveness, answered at once: red while starting, dead, or silent; green when merely busy or draining."""
        if self._death:
            return Health(False, [f"engine dead: {self._death}"])
        if self._start_failure:
            return Health(False, [f"engine cannot start: {self._start_failure}"])
        if self.ready is None:
            return Health(False, ["starting"])
        self._rearm(now_s)
        silent_s = now_s - self._heard_s
        if silent_s > SILENT_S:
            return Health(False, [f"engine silent for {silent_s:.1f} s"])
        stuck_s = now_s - self._progress_s
        if self.status is not None and self.status.busy and stuck_s > self._step_limit_s:
            return Health(False, [f"no forward has ended for {stuck_s:.1f} s"])
        return Health(True, [])

    def readiness(self, now_s: float, objections: Callable[[Status], list[str]]) -> Health:
        """Should new requests come here? Alive, not draining, and nothing that ``objections`` finds in the status."""
        alive = self.health(now_s)
        reasons = list(alive.reasons)
        if self.draining:
            reasons.append("draining")
        if alive.ok and self.status is None:
            reasons.append("starting")
        elif alive.ok and self.status is not None:
            reasons += objections(self.status)
        return Health(not reasons, reasons)

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._running)

    @property
    def computing(self) -> bool:
        """Were requests in the batch at the last heartbeat? They may have ended since."""
        return self.status is not None and self.status.gauges.get("handoff_running_requests", 0) > 0

    async def next_output(self) -> None:
        """Wait until the engine has sent any request's output."""
        if self._next_output is None or self._next_output.done():
            self._next_output = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next_output)

    # requests

    def require(self) -> ModelInfo:
        """The engine takes requests; raises Unavailable where it does not."""
        if self._death:
            raise Unavailable(f"the engine died: {self._death}", code="engine_dead")
        if self.draining:
            raise Unavailable("the service is shutting down", code="shutting_down")
        if self.ready is None:
            raise Unavailable("the engine is starting", code="starting")
        return self.ready.info

    @contextmanager
    def generate(self, *messages: Generate, client_id: str = "") -> Iterator[RequestStream]:
        """Give the engine requests for as long as the block runs; leaving before their endings cancels them, once.

        ``client_id`` is the client's own name for them, which others may use too. Raises Unavailable, or what ``send``
        raises; then the engine works on none of them.
        """
        self.require()
        if running := [message.request for message in messages if message.request in self._running]:
            raise StateError(f"request {running[0]} is running already")
        stream = RequestStream(messages, client_id, self._stopped)
        self._registry.count("handoff_requests_started_total", len(messages))
        try:
            for message in messages:
                try:
                    self._send(message)
                except BaseException:
                    stream.outcomes[message.request] = "failed"
                    raise
                self._running[message.request] = stream
            yield stream
        finally:
            for request, outcome in stream.outcomes.items():
                if self._running.pop(request, None) is not None:
                    self._cancel(Cancel(request))
                self._registry.count(f"handoff_requests_total{{outcome={outcome}}}")

    def abort(self, name: str | None) -> int:
        """An operator ends running requests: those of this answer's id, those whose client gave it this name, or all
        (None). Returns how many there were."""
        named = [
            r
            for r, stream in self._running.items()
            if name is None or name == stream.client_id or _bare(name) == r.partition(".")[0]
        ]
        error = EngineError("aborted by an operator", "aborted", 503, "service_unavailable", True)
        for request in named:
            self._deliver(Output(request, [], [], error=error))
            self._cancel(Cancel(request))
        return len(named)

    def stop(self, name: str | None) -> None:
        """For a prefill's engine: end the attempts of this request, or all (None). Raises Unavailable, PeerBusy."""
        self.require()
        self._send(Stop(None if name is None else RequestId(_bare(name))))

    def _deliver(self, output: Output) -> None:
        stream = self._running.get(output.request)
        if stream is not None and stream.put(output):  # else it was cancelled while this was on its way
            del self._running[output.request]

    def _stopped(self, cancel: Cancel) -> None:
        if cancel.choice is None:
            self._running.pop(cancel.request, None)
        self._cancel(cancel)

    def _end_all(self, error: EngineError) -> None:
        for request in list(self._running):
            self._deliver(Output(request, [], [], error=error))

    def _cancel(self, cancel: Cancel) -> None:
        if self._death:
            return
        try:
            self._send(cancel)
        except HandoffError as error:
            log.warning("a cancel waits: %s", error, extra={"request": cancel.request})
            self._unsent_cancels.append(cancel)

    def _rearm(self, now_s: float) -> None:
        """Our own loop did not run, so the engine's messages may lie unread."""
        if now_s - self._ticked_s > STALLED_S:
            self._heard_s = max(self._heard_s, now_s)
            self._ticked_s = now_s


def _bare(name: str) -> str:
    """An answer's id is its first request's with a prefix; its other requests add a number."""
    return name.rpartition("-")[2] or name
