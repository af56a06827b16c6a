"""The decode engine's async shell: it owns the pools, the model and the receive sessions, and carries out what
``intake.py`` and ``scheduler.py`` decide."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

from decode_svc.effects import Effect, Ended, Fence, OpenSession, Prebuild, Send
from decode_svc.intake import Intake
from decode_svc.peers import PeerBook
from decode_svc.scheduler import Plan, Scheduler
from shared.config import DecodeConfig
from shared.errors import HandoffError, TransferFailed, Unavailable
from shared.ids import PeerAddress, RequestId, new_epoch
from shared.kv.pages import PageAllocator
from shared.kv.slots import SlotPool
from shared.limited_log import RateLimitedLog
from shared.ops.host import Host, advertised_host
from shared.ops.metrics import Meter
from shared.ops.setup import LoadedRuntime, load_runtime
from shared.protocol import messages as m
from shared.protocol.codec import Codec
from shared.protocol.local import (
    HEARTBEAT_S,
    Cancel,
    Drain,
    Drained,
    Generate,
    Output,
    Outputs,
    Ready,
    Status,
    ToEngine,
)
from shared.protocol.machine import RequestState
from shared.runtime.runner import DecodeBatch
from shared.transfer.engine import TransferEngine
from shared.transfer.mooncake_engine import MooncakeEngine
from shared.transfer.sender import open_engine

log = logging.getLogger(__name__)
REFUSAL_LOG_S = 60.0
TICK_S = 0.25


class DecodeEngine:
    """One decode rank. ``start`` loads and listens; then steps run whenever a request is in the batch."""

    def __init__(self, config: DecodeConfig, host: Host) -> None:
        self._config, self._host = config, host
        self._epoch = new_epoch()
        self._meter = Meter("decode")
        self._limited = RateLimitedLog(log, REFUSAL_LOG_S)
        self._sessions: dict[tuple[PeerAddress, int], TransferEngine] = {}
        self._wake = asyncio.Event()
        self._running: Plan | None = None
        self._leaving: set[RequestId] = set()
        """Ended while a step computes them: their pages go back when it has ended."""
        self._landed: deque[RequestId] = deque()
        self._outputs: list[Output] = []
        self._draining = False
        self._stepping = True
        self._steps_done = 0
        self._runtime: LoadedRuntime
        self._intake: Intake
        self._scheduler: Scheduler
        self._advertise = ""

    async def start(self) -> None:
        """Load, allocate, bind, announce. Raises ConfigError, EngineMissing."""
        config, host = self._config, self._host
        self._advertise = advertised_host(
            config.advertise_host, config.host, [p.rsplit(":", 1)[0] for p in config.prefill]
        )
        MooncakeEngine.require()
        runtime = self._runtime = await host.compute(load_runtime, config)
        info = runtime.info
        slots = SlotPool(info.max_num_seqs)
        control = await host.open_control(
            f"tcp://{config.host}:{config.control_port}",
            Codec[m.ToDecode](m.ToDecode),
            self._on_control,
            self._on_disconnect,
        )
        reply_to = PeerAddress(f"tcp://{self._advertise}:{control.rsplit(':', 1)[1]}")
        peers = PeerBook(
            [PeerAddress(f"tcp://{p}") for p in config.prefill],
            epoch=self._epoch,
            reply_to=reply_to,
            fingerprint=runtime.fingerprint,
            regions=[*runtime.pool.regions(), slots.region()],
        )
        self._intake = Intake(
            epoch=self._epoch,
            reply_to=reply_to,
            layout=runtime.layout,
            pages=PageAllocator(info.num_pages),
            slots=slots,
            peers=peers,
        )
        self._scheduler = Scheduler(
            info.max_num_seqs, runtime.layout.pages_for(info.max_model_len), runtime.eos_token_ids
        )
        self._do(peers.start())
        host.spawn(self._beat())
        host.spawn(self._steps())
        host.post(Ready(self._epoch, control, info))

    # events

    def on_front(self, message: ToEngine) -> None:
        match message:
            case Generate() if self._draining:
                self._do(self._intake.refuse(message, Unavailable("this service is stopping", code="shutting_down")))
            case Generate():
                self._do(self._intake.submit(message, self._config.request_timeout_s, self._host.now_s()))
            case Cancel(request=request):
                self._cancel(request)
            case Drain(grace_s=grace_s):
                self._host.spawn(self._drain(grace_s))
        self._flush()

    def _on_control(self, message: m.ToDecode) -> None:
        if isinstance(message, m.Refused) and message.differences:
            differences = "; ".join(map(str, message.differences))
            self._limited.warning(differences, "a prefill refused this decode: %s", differences)
        self._do(self._intake.on_message(message, self._host.now_s()))
        self._flush()
        if isinstance(message, m.Registered | m.Refused):
            self._host.post(self._status())  # the front refuses requests by what it knows of the peers

    def _cancel(self, request: RequestId) -> None:
        if self._running is not None and request in self._running.rows:
            self._leaving.add(request)
        else:
            self._scheduler.leave(request)
            self._do(self._intake.cancel(request, self._host.now_s()))

    def _on_disconnect(self, address: str) -> None:
        self._intake.peers.on_disconnect(address, self._host.now_s())

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(address, message):
                    self._host.outbox.send(address, message)
                case OpenSession():
                    self._host.spawn(self._open_session(effect))
                case Fence():
                    self._host.spawn(self._fence(effect))
                case Prebuild(request):
                    self._landed.append(request)
                    self._prebuild_landed()
                case Ended(request, outcome, output):
                    if outcome == "failed" and output is not None and output.error is not None:
                        log.warning("request %s failed: %s", request, output.error.message)
                    if output is not None:
                        self._outputs.append(output)

    def _prebuild_landed(self) -> None:
        """Committed requests join the batch as rows become free; each consumes its metadata row and frees its slot."""
        while self._landed and len(self._scheduler) < self._runtime.info.max_num_seqs:
            request = self._intake.requests.get(self._landed.popleft())
            if request is None or request.state is not RequestState.LANDED:
                continue
            lease = request.lease
            assert lease is not None
            assert lease.slot is not None
            row = self._intake.slots.rows[lease.slot]
            if (int(row["room"]), int(row["ticket"])) != (lease.room, lease.ticket):
                wrong = TransferFailed(f"metadata slot {lease.slot} does not hold room {lease.room}'s row")
                self._do(self._intake.fail(request.id, wrong, self._host.now_s()))
                continue
            log.debug("room %d slot %d token %d", lease.room, lease.slot, row["token"])
            token, logprob = int(row["token"]), float(row["logprob"])
            self._intake.prebuilt(request.id)
            step = self._scheduler.prebuilt(request.spec, token, logprob, self._intake.pages_of(request.id))
            if step.finish is not None:
                self._do(self._intake.finish(request.id, [token], [logprob], step.finish, self._host.now_s()))
            else:
                self._outputs.append(Output(request.id, [token], [logprob], handover=request.handover))
                request.handover = None  # shown once
                self._wake.set()

    # sessions

    async def _open_session(self, effect: OpenSession) -> None:
        """A receive engine of its own for one writer incarnation; tried again until the memory can be registered."""
        while True:
            try:
                engine = await self._host.blocking(self._make_session)
                break
            except HandoffError as error:
                log.warning("cannot open a receive session for %s: %s", effect.address, error.message)
                await asyncio.sleep(1.0)
        self._sessions[effect.address, effect.registration] = engine
        self._intake.peers.session_ready(effect.address, effect.registration, engine.session)
        self._tick()

    def _make_session(self) -> TransferEngine:
        regions = [*self._runtime.pool.regions(), self._intake.slots.region()]
        memory = [(r.base, r.item_bytes * r.items) for r in regions]
        return open_engine(lambda: MooncakeEngine(self._advertise), memory)

    async def _fence(self, effect: Fence) -> None:
        started_s = self._host.now_s()
        engine = self._sessions.pop((effect.address, effect.registration), None)
        if engine is not None:
            await self._host.blocking(engine.retire)
        now_s = self._host.now_s()
        log.warning("fenced prefill %s (session %d) in %.2f s", effect.address, effect.registration, now_s - started_s)
        self._do(self._intake.fenced(effect.address, effect.registration, now_s))
        self._flush()

    # loops

    async def _steps(self) -> None:
        while True:
            self._wake.clear()
            plan = self._scheduler.plan() if self._stepping else None
            if plan is None:
                self._intake.check_integrity()
                await self._wake.wait()
                continue
            self._running = plan
            started_s = self._host.now_s()
            batch = DecodeBatch(plan.tokens, plan.lengths, plan.page_table, plan.sampling)
            try:
                samples = await self._host.compute(self._runtime.runner.decode, batch)
            except Exception as error:  # a defect or an exhausted device: this step's requests end, the engine lives
                log.exception("a decode step of %d requests failed", len(plan.rows))
                self._running = None
                for request in plan.rows:
                    self._fail_running(request, Unavailable(f"the decode step failed: {error}", code="compute_failed"))
            else:
                self._running = None
                self._meter.sample("handoff_step_seconds", self._host.now_s() - started_s)
                self._apply(plan, samples)
            self._prebuild_landed()
            self._flush()

    def _apply(self, plan: Plan, samples: Sequence[tuple[int, float]]) -> None:
        self._steps_done += 1
        for request in self._leaving:
            self._scheduler.leave(request)
            self._do(self._intake.cancel(request, self._host.now_s()))
        self._leaving.clear()
        for step in self._scheduler.apply(plan, samples):
            if step.finish is None:
                self._outputs.append(Output(step.request, [step.token], [step.logprob]))
            else:
                now_s = self._host.now_s()
                self._do(self._intake.finish(step.request, [step.token], [step.logprob], step.finish, now_s))

    def _fail_running(self, request: RequestId, error: HandoffError) -> None:
        self._scheduler.leave(request)
        if request in self._intake.requests:
            self._do(self._intake.fail(request, error, self._host.now_s()))

    def _flush(self) -> None:
        if self._outputs:
            self._host.post(Outputs(self._outputs))
            self._outputs = []

    def _tick(self) -> None:
        self._do(self._intake.tick(self._host.now_s()))
        self._flush()

    async def _beat(self) -> None:
        next_status_s = 0.0
        while True:
            self._tick()
            if self._host.now_s() >= next_status_s:
                next_status_s = self._host.now_s() + HEARTBEAT_S
                self._host.post(self._status())
            await asyncio.sleep(TICK_S)

    def _status(self) -> Status:
        intake, meter, counts = self._intake, self._meter, self._intake.counts
        meter.total("handoff_malformed_messages_total", self._host.malformed_messages)
        meter.total("handoff_busy_sends_total", self._host.outbox.dropped)
        meter.count("handoff_heartbeats_total")
        meter.total("handoff_steps_total", self._steps_done)
        meter.total("handoff_retries_total", counts.retries)
        meter.total("handoff_aborts_total", counts.aborts)
        meter.total("handoff_fences_total", counts.fences)
        meter.total("handoff_bad_completions_total", counts.bad_completions)
        meter.gauge("handoff_running_requests", len(self._scheduler))
        meter.gauge("handoff_waiting_requests", len(intake.requests) - len(self._scheduler))
        meter.gauge("handoff_pages_usable", intake.pages.usable_pages)
        meter.gauge("handoff_pages_free", intake.pages.free_pages)
        meter.gauge("handoff_pages_quarantined", intake.pages.quarantined_pages)
        meter.gauge("handoff_slots_free", intake.slots.free_slots)
        peers = [peer.status() for peer in intake.peers.peers.values()]
        return Status(self._steps_done, self._running is not None, peers, *meter.take())

    async def _drain(self, grace_s: float) -> None:
        """Nothing new; what runs may finish within the grace time, then ends with an explicit error."""
        self._draining = True
        end_s = time.monotonic() + grace_s
        while self._intake.requests and time.monotonic() < end_s:
            await asyncio.sleep(0.05)
        stopping = Unavailable("the service stopped before the answer was complete", code="shutting_down")
        self._stepping = False
        while self._running is not None:
            await asyncio.sleep(0.005)
        for request in list(self._intake.requests):
            self._fail_running(request, stopping)
        self._flush()
        self._host.post(Drained())
        if not self._host.stopped.done():
            self._host.stopped.set_result(None)
