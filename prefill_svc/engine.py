"""The prefill engine's async shell: it owns the pools, the model and the sending workers, and carries out what
``handoff.py`` decides."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from prefill_svc.effects import (
    CloseSender,
    Digest,
    Drain,
    Drop,
    Effect,
    Finish,
    Halt,
    Interrupt,
    OpenSender,
    Send,
    SenderId,
    Stream,
    Sweep,
    Write,
)
from prefill_svc.handoff import Handoff
from prefill_svc.peers import DecodePeers
from prefill_svc.scheduler import Piece
from shared.config import PrefillConfig
from shared.ids import AttemptKey, PeerAddress, new_epoch
from shared.kv.digest import digest
from shared.kv.pages import PageAllocator
from shared.kv.slots import SlotPool
from shared.limited_log import RateLimitedLog
from shared.ops.host import Host, advertised_host
from shared.ops.metrics import Meter
from shared.ops.setup import LoadedRuntime, load_runtime
from shared.protocol import messages as m
from shared.protocol.codec import Codec
from shared.protocol.local import HEARTBEAT_S, Cancel, Drained, Generate, Ready, Status, Stop, ToEngine
from shared.protocol.local import Drain as DrainRequest
from shared.runtime.runner import PrefillBatch
from shared.runtime.sampler import History
from shared.transfer.layers import ActiveContexts, Context, LayerGroups, Outgoing, Post, Step, at_once
from shared.transfer.mooncake_engine import MooncakeEngine
from shared.transfer.plan import Pairing, Runs
from shared.transfer.sender import PeerSender, SendResult, try_engine

log = logging.getLogger(__name__)
REFUSAL_LOG_S = 60.0
TICK_S = 0.25


class PrefillEngine:
    """One prefill rank. ``start`` loads and listens; then forwards run whenever something waits for one."""

    def __init__(self, config: PrefillConfig, host: Host) -> None:
        self._config, self._host = config, host
        self._epoch = new_epoch()
        self._meter = Meter("prefill")
        self._limited = RateLimitedLog(log, REFUSAL_LOG_S)
        self._senders: dict[SenderId, PeerSender] = {}
        self._active = ActiveContexts()
        self._contexts: list[Context] = []
        """Of the forward that is about to start."""
        self._wake = asyncio.Event()
        self._busy = False
        self._submits = 0
        self._runtime: LoadedRuntime
        self._handoff: Handoff
        self._groups: LayerGroups
        self._advertise = ""

    async def start(self) -> None:
        """Load, allocate, bind, announce. Raises ConfigError, EngineMissing."""
        config, host = self._config, self._host
        self._advertise = advertised_host(config.advertise_host, config.host, [])
        MooncakeEngine.require()
        runtime = self._runtime = await host.compute(load_runtime, config)
        slots = SlotPool(config.max_num_seqs * 4)
        memory = [(r.base, r.item_bytes * r.items) for r in (*runtime.pool.regions(), slots.region())]
        await host.blocking(try_engine, partial(MooncakeEngine, self._advertise), memory)
        control = await host.open_control(
            f"tcp://{config.host}:{config.control_port}",
            Codec[m.ToPrefill](m.ToPrefill),
            self._on_control,
            self._on_disconnect,
        )
        max_prompt = runtime.info.max_model_len - 1
        peers = DecodePeers(
            epoch=self._epoch,
            reply_to=PeerAddress(control),
            layout=runtime.layout,
            regions=runtime.pool.regions(),
            rows=slots.region(),
            fingerprint=runtime.fingerprint,
            capacity=m.Capacity(max_prompt),
        )
        self._handoff = Handoff(
            epoch=self._epoch,
            layout=runtime.layout,
            regions=runtime.pool.regions(),
            pages=PageAllocator(runtime.info.num_pages),
            slots=slots,
            peers=peers,
            max_prompt_tokens=max_prompt,
            vocab_size=runtime.info.vocab_size,
            layerwise=config.layerwise,
            finish_limit_s=config.transfer_limit_s,
        )
        self._groups = LayerGroups([b.layer for b in runtime.layout.buffers], config.transfer_layer_group)
        host.spawn(self._beat())
        host.spawn(self._forwards())
        host.post(Ready(self._epoch, control, runtime.info))

    # events

    def on_front(self, message: ToEngine) -> None:
        match message:
            case DrainRequest(grace_s=grace_s):
                self._host.spawn(self._drain(grace_s))
            case Stop(request=request):
                self._do(self._handoff.stop(request, self._host.now_s()))
            case Generate() | Cancel():
                log.warning("a prefill engine takes no %s from its front", type(message).__name__)

    def _on_control(self, message: m.ToPrefill) -> None:
        self._do(self._handoff.on_message(message, self._host.now_s()))
        if isinstance(message, m.Register):
            self._host.post(self._status())
        self._wake.set()

    def _on_disconnect(self, address: str) -> None:
        self._handoff.peers.on_disconnect(address, self._host.now_s())

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(address, message):
                    if isinstance(message, m.Refused) and message.differences:
                        differences = "; ".join(map(str, message.differences))
                        self._limited.warning(address, "refused decode %s: %s", address, differences)
                    self._host.outbox.send(address, message)
                case Write(sender, key, batches, of):
                    future = self._senders[sender].send(batches, self._digest(of))
                    future.add_done_callback(partial(self._written, key))
                case Stream(sender, key, chunk, pairing, runs):
                    post = self._senders[sender].post
                    context = self._active.register(key, chunk, partial(_context, pairing, runs, post))
                    if context is not None:
                        self._contexts.append(context)
                case Sweep(sender, key, chunk):
                    if (context := self._active.finish(key, chunk)) is not None:
                        self._senders[sender].post(partial(context.sweep, at_once))
                case Finish(sender, key, chunk, row, of):
                    context, outgoing = self._active.finish(key, chunk), self._active.outgoing(key)
                    future = self._senders[sender].settle(outgoing, context, row, self._digest(of))
                    future.add_done_callback(partial(self._written, key))
                case Halt(key):
                    self._active.halt(key)
                case Drop(sender, key):
                    future = self._senders[sender].settle(self._active.outgoing(key), None, None, None)
                    future.add_done_callback(partial(self._written, key))
                case Interrupt(sender):
                    log.info("decode %d is gone, or registers anew", sender.decode_epoch)
                    self._senders[sender].interrupt()
                case Drain(sender, key):
                    log.warning("transfer failed, retiring the sending engine of decode %d", sender.decode_epoch)
                    self._senders[sender].drain().add_done_callback(partial(self._drained, key))
                case OpenSender(sender, session):
                    log.info("decode %s registered", self._handoff.peers.peers[sender].address)
                    self._senders[sender] = PeerSender(
                        partial(MooncakeEngine, self._advertise), self._sources(), session, name=session
                    )
                    self._senders[sender].contact().add_done_callback(partial(self._met, sender))
                case CloseSender(sender):
                    self._host.spawn(self._senders.pop(sender).close())

    def _digest(self, of: Digest | None) -> Callable[[], int] | None:
        pool = self._runtime.pool
        return partial(digest, pool.layout, pool.read, *of) if of is not None else None

    def _met(self, sender: SenderId, future: "asyncio.Future[None]") -> None:
        if error := future.exception():
            log.warning("first contact with decode %d: %s", sender.decode_epoch, error)
        self._handoff.met(sender)
        self._wake.set()

    def _written(self, key: AttemptKey, future: "asyncio.Future[SendResult]") -> None:
        now_s = self._host.now_s()
        self._active.drop(key)
        if error := future.exception():
            log.warning("transfer failed: %s", error, extra=self._about(key))
            self._do(self._handoff.write_failed(key, error if isinstance(error, Exception) else OSError(error), now_s))
        else:
            result = future.result()
            took_ms = 1e3 * result.write_s
            log.debug("%d bytes in %.1f ms", result.sent_bytes, took_ms, extra=self._about(key))
            self._do(self._handoff.written(key, result.sent_bytes, result.write_s, result.digest, now_s))
        self._wake.set()

    def _about(self, key: AttemptKey) -> dict[str, object]:
        """What a line of the log is about."""
        return {"request": self._handoff.senders[key].spec.request, "room": key.room, "attempt": key.ticket}

    def _drained(self, key: AttemptKey, future: "asyncio.Future[None]") -> None:
        future.result()
        self._do(self._handoff.drained(key, self._host.now_s()))
        self._wake.set()

    # loops

    async def _forwards(self) -> None:
        config, handoff = self._config, self._handoff
        while True:
            self._wake.clear()
            pieces, effects = handoff.next_forward(config.chunked_prefill_size, config.max_num_seqs, self._host.now_s())
            self._contexts = []
            self._do(effects)
            if not pieces:
                handoff.check_integrity()
                await self._wake.wait()
                continue
            self._busy = True
            started_s = self._host.now_s()
            step = Step(self._groups, self._runtime.pool.record, self._contexts)
            try:
                samples = await self._host.compute(self._runtime.runner.prefill, self._batch(pieces), step.layer_end)
            except Exception as error:  # a defect or an exhausted device: this forward's requests end, the engine lives
                log.exception("a forward of %d prompts failed", len(pieces))
                self._do(handoff.compute_failed(error, self._host.now_s()))
            else:
                self._do(handoff.computed(samples, self._host.now_s()))
            self._busy = False
            self._submits += step.submits
            self._meter.sample("handoff_step_seconds", self._host.now_s() - started_s)

    def _batch(self, pieces: list[Piece]) -> PrefillBatch:
        senders = [self._handoff.senders[p.key] for p in pieces]
        return PrefillBatch(
            tokens=np.concatenate(
                [s.tokens[p.start : p.start + p.length] for s, p in zip(senders, pieces, strict=True)]
            ),
            q_lens=[p.length for p in pieces],
            starts=[p.start for p in pieces],
            pages=[s.pages for s in senders if s.pages is not None],
            sampling=[s.spec.sampling if p.last else None for s, p in zip(senders, pieces, strict=True)],
            histories=[History(s.tokens, s.tokens[:0]) if s.spec.sampling.needs_history else None for s in senders],
            scored=[s.score(p) for s, p in zip(senders, pieces, strict=True)],
        )

    async def _beat(self) -> None:
        next_status_s = 0.0
        while True:
            now_s = self._host.now_s()
            self._do(self._handoff.tick(self._busy, now_s))
            if now_s >= next_status_s:
                next_status_s = now_s + HEARTBEAT_S
                self._host.post(self._status())
            await asyncio.sleep(TICK_S)

    async def _drain(self, grace_s: float) -> None:
        """Nothing new; what is accepted ends, or is cut at the end of the grace time by the exit of this process."""
        self._handoff.draining = True
        end_s = time.monotonic() + grace_s
        while self._handoff.senders and time.monotonic() < end_s:
            await asyncio.sleep(0.05)
        if self._handoff.senders:
            log.warning("stopping with %d hand-overs not finished", len(self._handoff.senders))
        self._host.post(Drained())
        if not self._host.stopped.done():
            self._host.stopped.set_result(None)

    def _sources(self) -> list[tuple[int, int]]:
        regions = [*self._runtime.pool.regions(), self._handoff.slots.region()]
        return [(r.base, r.item_bytes * r.items) for r in regions]

    def _status(self) -> Status:
        handoff, meter, counts = self._handoff, self._meter, self._handoff.counts
        meter.total("handoff_malformed_messages_total", self._host.malformed_messages)
        meter.total("handoff_busy_sends_total", self._host.outbox.dropped)
        meter.count("handoff_heartbeats_total")
        meter.total("handoff_steps_total", handoff.steps)
        meter.total("handoff_attempts_started_total", counts.accepted)
        for outcome, total in counts.ended.items():
            meter.total(f"handoff_attempts_total{{outcome={outcome}}}", total)
        meter.total("handoff_aborts_total", counts.ended["aborted"])
        meter.total("handoff_prefill_tokens_total", counts.tokens)
        meter.total("handoff_transfer_failures_total", counts.transfer_failures)
        meter.total("handoff_transfer_bytes_total", counts.bytes_sent)
        meter.total("handoff_stopped_total", counts.stopped)
        meter.total("handoff_layer_submits_total", self._submits)
        meter.total("handoff_whole_sends_total", counts.whole_sends)
        for timings, sent_bytes in counts.finished:
            meter.sample("handoff_queue_seconds", timings.queue_s)
            meter.sample("handoff_prefill_seconds", timings.prefill_s)
            meter.sample("handoff_transfer_seconds", timings.write_s)
            meter.sample("handoff_transfer_exposed_seconds", timings.exposed_s)
            meter.sample("handoff_transfer_size_bytes", sent_bytes)
            meter.sample("handoff_goodput_bytes_per_second", sent_bytes / max(timings.write_s, 1e-9))
        counts.finished.clear()
        meter.gauge("handoff_tasks", self._host.tasks)
        meter.gauge("handoff_running_requests", len(handoff.senders) - len(handoff.queue))
        meter.gauge("handoff_waiting_requests", len(handoff.queue))
        meter.gauge("handoff_pages_usable", handoff.pages.usable_pages)
        meter.gauge("handoff_pages_free", handoff.pages.free_pages)
        return Status(handoff.steps, self._busy, handoff.peers.statuses(), *meter.take())


def _context(pairing: Pairing, runs: Runs, post: Post, outgoing: Outgoing) -> Context:
    return Context(outgoing, pairing, runs, post)
