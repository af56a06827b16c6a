"""The decode engine's async shell: it owns the pools, the model and the receive sessions, and carries out what
``intake.py`` and ``scheduler.py`` decide."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from decode_svc.effects import Compute, Effect, Ended, Fence, OpenSession, Prebuild, Send, Up, Verify
from decode_svc.intake import Intake
from decode_svc.local import Chunk, LocalPrefills
from decode_svc.meters import measure
from decode_svc.peers import PeerBook
from decode_svc.records import Request
from decode_svc.scheduler import Plan, Scheduler, Step
from decode_svc.sessions import ReceiveSessions
from shared.config import DecodeConfig
from shared.errors import HandoffError, TransferFailed, Unavailable
from shared.ids import PeerAddress, RequestId, new_epoch
from shared.kv.digest import digest
from shared.kv.layout import TopLogprobs, first_token
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
    Handover,
    Output,
    Outputs,
    Ready,
    Status,
    ToEngine,
)
from shared.protocol.machine import RequestState
from shared.protocol.scores import SCORED_CHUNK_TOKENS, Scored, packed
from shared.runtime.runner import DecodeBatch, PrefillBatch
from shared.runtime.sampler import History
from shared.transfer.mooncake_engine import MooncakeEngine
from shared.transfer.sender import try_engine

log = logging.getLogger(__name__)
B = TypeVar("B")
T = TypeVar("T")
REFUSAL_LOG_S = 60.0
FAILURE_LOG_S = 1.0
TICK_S = 0.25


class DecodeEngine:
    """One decode rank. ``start`` loads and listens; then steps run whenever a request is in the batch."""

    def __init__(self, config: DecodeConfig, host: Host) -> None:
        self._config, self._host = config, host
        self._epoch = new_epoch()
        self._meter = Meter("decode")
        self._limited = RateLimitedLog(log, REFUSAL_LOG_S)
        self._failures = RateLimitedLog(log, FAILURE_LOG_S)
        self._wake = asyncio.Event()
        self._in_forward: frozenset[RequestId] = frozenset()
        self._leaving: set[Cancel] = set()
        """What was cancelled while a forward computes it: pages go back when it has ended."""
        self._local = LocalPrefills(config.chunked_prefill_size)
        self._landed: deque[RequestId] = deque()
        self._first_tokens: dict[RequestId, tuple[int, float, TopLogprobs]] = {}
        """Of prompts that were computed here."""
        self._outputs: list[Output] = []
        self._draining = False
        self._stepping = True
        self._steps_done = 0
        self._runtime: LoadedRuntime
        self._intake: Intake
        self._scheduler: Scheduler
        self._sessions: ReceiveSessions

    async def start(self) -> None:
        """Load, allocate, bind, announce. Raises ConfigError, EngineMissing."""
        config, host = self._config, self._host
        advertise = advertised_host(config.advertise_host, config.host, [p.rsplit(":", 1)[0] for p in config.prefill])
        MooncakeEngine.require()
        runtime = self._runtime = await host.compute(load_runtime, config)
        info = runtime.info
        slots = SlotPool(info.max_num_seqs)
        regions = [*runtime.pool.regions(), slots.region()]
        make, memory = partial(MooncakeEngine, advertise), [(r.base, r.item_bytes * r.items) for r in regions]
        await host.blocking(try_engine, make, memory)
        control = await host.open_control(
            f"tcp://{config.host}:{config.control_port}",
            Codec[m.ToDecode](m.ToDecode),
            self._on_control,
            self._on_disconnect,
        )
        reply_to = PeerAddress(f"tcp://{advertise}:{control.rsplit(':', 1)[1]}")
        peers = PeerBook(
            [PeerAddress(f"tcp://{p}") for p in config.prefill],
            epoch=self._epoch,
            reply_to=reply_to,
            fingerprint=runtime.fingerprint,
            regions=regions,
        )
        self._intake = Intake(
            epoch=self._epoch,
            reply_to=reply_to,
            layout=runtime.layout,
            pages=PageAllocator(info.num_pages),
            slots=slots,
            peers=peers,
            digest_every=config.digest_every,
            local=config.on_prefill_loss == "local",
        )
        self._sessions = ReceiveSessions(host, make, memory)
        self._scheduler = Scheduler(
            info.max_num_seqs, runtime.layout.pages_for(info.max_model_len), info.page_size, runtime.eos_token_ids
        )
        self._do(peers.start(host.now_s()))
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
            case Cancel():
                self._cancel(message)
            case Drain(grace_s=grace_s):
                self._host.spawn(self._drain(grace_s))
        self._flush()

    def _on_control(self, message: m.ToDecode) -> None:
        if isinstance(message, m.Refused) and message.differences:
            self._note_refusal(message)
        self._do(self._intake.on_message(message, self._host.now_s()))
        self._flush()
        if isinstance(message, m.Registered | m.Refused):
            self._host.post(self._status())  # the front refuses requests by what it knows of the peers

    def _note_refusal(self, message: m.Refused) -> None:
        if (peer := self._intake.peers.named(message.registration)) and message.to_epoch == self._epoch:
            said = "; ".join(map(str, message.differences))
            self._limited.warning(peer.address, "%s refuses this decode: %s", peer.address, said)

    def _cancel(self, cancel: Cancel) -> None:
        request, choice = cancel.request, cancel.choice
        if request in self._in_forward:
            self._leaving.add(cancel)
            return
        left = self._scheduler.leave(request, choice)
        if choice is None or (left and self._intake.choice_ended(request)):
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
                case Fence(address, _, reason):
                    log.warning("lost prefill %s: %s", address, reason)
                    self._host.spawn(self._fence(effect))
                    self._host.post(self._status())
                case Up(address, away_s):
                    log.info("prefill %s is registered, after %.1f s without it", address, away_s)
                case Verify():
                    self._host.spawn(self._verify(effect))
                case Compute(request):
                    started = self._intake.requests[request]
                    scored = started.spec.prompt_logprobs is not None
                    self._local.add(request, started.prompt_tokens, SCORED_CHUNK_TOKENS if scored else None)
                    self._wake.set()
                case Prebuild(request):
                    self._landed.append(request)
                    self._join_landed()
                case Ended(request, outcome, output, room):
                    self._local.leave(request)
                    self._first_tokens.pop(request, None)
                    if outcome == "failed" and output is not None and output.error is not None:
                        error = output.error
                        about = {"request": request, "room": room}
                        self._failures.warning(error.code, "failed: %s", error.message, extra=about)
                    if output is not None:
                        self._outputs.append(output)

    def _join_landed(self) -> None:
        """Committed requests join the batch as rows become free; each consumes its metadata row and frees its slot."""
        while self._landed:
            request = self._intake.requests.get(self._landed[0])
            if request is not None and request.spec.choices > self._scheduler.free_rows:
                return
            self._landed.popleft()
            if request is None or request.state not in (RequestState.LANDED, RequestState.COMPUTING):
                continue
            try:
                token, logprob, top = self._first_token(request)
            except TransferFailed as wrong:
                self._do(self._intake.fail(request.id, wrong, self._host.now_s()))
                continue
            pages = self._intake.pages_of(request.id)
            for choice in range(1, request.spec.choices):
                own = self._intake.pages_of(request.id, choice)
                self._scheduler.fork(request.spec, choice, own, int(pages[request.need.shared]))
            step = self._scheduler.prebuilt(request.spec, token, logprob, top, pages)
            self._output(step, request.handover, request.prompt)
            if request.prompt is not None:
                self._flush()  # by itself: two of them may be more than a message holds
            request.handover = request.prompt = None  # shown once
            self._wake.set()

    def _output(self, step: Step, handover: Handover | None = None, prompt: m.PromptLogprobs | None = None) -> None:
        """One request's new token, on its way to the front; perhaps its last."""
        top = [list(step.top)] if step.top else []
        output = Output(
            step.request, [step.token], [step.logprob], step.finish, None, handover, step.choice, prompt, top
        )
        if step.finish is not None and self._intake.choice_ended(step.request):
            self._do(self._intake.finish(output, self._host.now_s()))
        else:
            self._outputs.append(output)

    def _first_token(self, request: Request) -> tuple[int, float, TopLogprobs]:
        """Its token, with log-probabilities: from the metadata row, or computed here. Raises TransferFailed for a
        foreign row."""
        if request.state is RequestState.COMPUTING:
            self._intake.computed(request.id)
            return self._first_tokens.pop(request.id)
        lease = request.lease
        assert lease is not None
        assert lease.slot is not None
        row = self._intake.slots.rows[lease.slot]
        if (int(row["room"]), int(row["ticket"])) != (lease.room, lease.ticket):
            raise TransferFailed(f"metadata slot {lease.slot} does not hold room {lease.room}'s row")
        first = first_token(row)
        about = {"request": request.id, "room": lease.room, "attempt": lease.ticket, "peer": lease.peer}
        log.debug("slot %d token %d", lease.slot, first[0], extra=about)
        self._intake.prebuilt(request.id)
        return first

    # what blocks

    async def _open_session(self, effect: OpenSession) -> None:
        session = await self._sessions.open(effect.address, effect.registration)
        self._intake.peers.session_ready(effect.address, effect.registration, session)
        self._tick()

    async def _fence(self, effect: Fence) -> None:
        took_s = await self._sessions.fence(effect.address, effect.registration)
        self._meter.sample("handoff_fence_seconds", took_s)
        self._do(self._intake.fenced(effect.address, effect.registration, self._host.now_s()))
        self._flush()

    async def _verify(self, effect: Verify) -> None:
        positions = np.arange(len(effect.pages))
        layout, read = self._runtime.layout, self._runtime.pool.read
        found = await self._host.blocking(digest, layout, read, effect.pages, positions, effect.tokens)
        self._do(self._intake.verified(effect.ticket, found, self._host.now_s()))
        self._flush()

    # loops

    async def _steps(self) -> None:
        while True:
            self._wake.clear()
            plan = self._scheduler.plan() if self._stepping else None
            if plan is not None:
                await self._step(plan)
            chunk = self._local.next() if self._stepping else None
            if chunk is not None:
                await self._chunk(chunk)
            self._join_landed()
            self._flush()
            if plan is None and chunk is None:
                self._intake.check_integrity()
                await self._wake.wait()

    async def _step(self, plan: Plan) -> None:
        histories = [History(*x) if x is not None else None for x in plan.histories]
        rows = plan.tokens, plan.lengths, plan.page_table, plan.sampling, [choice for _, choice in plan.rows]
        batch = DecodeBatch(*rows, histories, plan.copies)
        samples = await self._forward([request for request, _ in plan.rows], self._runtime.runner.decode, batch)
        if samples is None:
            return
        for step in self._scheduler.apply(plan, samples):
            self._output(step)

    async def _chunk(self, chunk: Chunk) -> None:
        request = self._intake.requests[chunk.request]
        spec = request.spec
        prompt = m.unpack_int32(spec.prompt)
        after = prompt[chunk.start + 1 : chunk.start + chunk.length + 1]
        top = spec.prompt_logprobs
        batch = PrefillBatch(
            tokens=prompt[chunk.start : chunk.start + chunk.length],
            q_lens=[chunk.length],
            starts=[chunk.start],
            pages=[self._intake.pages_of(chunk.request)],
            sampling=[spec.sampling if chunk.last else None],
            histories=[History(prompt, prompt[:0])],
            scored=[Scored(after, top, request.scores) if top is not None else None],
        )
        samples = await self._forward([chunk.request], self._runtime.runner.prefill, batch)
        if samples is None or chunk.request not in self._intake.requests:
            return
        self._local.computed(chunk)
        if samples[0] is not None:
            self._first_tokens[chunk.request] = samples[0]
            request.prompt = packed(request.scores) if request.scores else None
            self._landed.append(chunk.request)

    async def _forward(
        self, requests: Sequence[RequestId], run: Callable[[B], Sequence[T]], batch: B
    ) -> Sequence[T] | None:
        """The forward's samples, or None where it failed and its requests with it. Those cancelled meanwhile left."""
        self._in_forward = frozenset(requests)
        started_s = self._host.now_s()
        try:
            samples = await self._host.compute(run, batch)
        except Exception as error:  # a defect or an exhausted device: these requests end, the engine lives
            log.exception("a forward of %d requests failed", len(requests))
            self._in_forward = frozenset()
            for request in requests:
                self._end_with(request, Unavailable(f"the forward failed: {error}", code="compute_failed"))
            return None
        self._in_forward = frozenset()
        self._steps_done += 1
        self._meter.sample("handoff_step_seconds", self._host.now_s() - started_s)
        leaving, self._leaving = self._leaving, set()
        for cancel in leaving:
            self._cancel(cancel)
        return samples

    def _end_with(self, request: RequestId, error: HandoffError) -> None:
        self._scheduler.leave(request)
        if request in self._intake.requests:
            self._do(self._intake.fail(request, error, self._host.now_s()))

    def _flush(self) -> None:
        if self._outputs:
            self._host.post(Outputs(self._outputs))
            self._outputs = []

    def _tick(self) -> None:
        self._do(self._intake.tick(self._host.now_s(), self._in_forward))
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
        meter = self._meter
        meter.total("handoff_malformed_messages_total", self._host.malformed_messages)
        meter.total("handoff_busy_sends_total", self._host.outbox.dropped)
        meter.total("handoff_steps_total", self._steps_done)
        meter.gauge("handoff_tasks", self._host.tasks)
        measure(meter, self._intake)
        peers = [peer.status() for peer in self._intake.peers.peers.values()]
        return Status(self._steps_done, bool(self._in_forward), peers, *meter.take())

    async def _drain(self, grace_s: float) -> None:
        """Nothing new; what runs may finish within the grace time, then ends with an explicit error."""
        self._draining = True
        end_s = time.monotonic() + grace_s
        while self._intake.requests and time.monotonic() < end_s:
            await asyncio.sleep(0.05)
        stopping = Unavailable("the service stopped before the answer was complete", code="shutting_down")
        self._stepping = False
        while self._in_forward:
            await asyncio.sleep(0.005)
        for request in list(self._intake.requests):
            self._end_with(request, stopping)
        self._flush()
        self._host.post(Drained())
        if not self._host.stopped.done():
            self._host.stopped.set_result(None)
