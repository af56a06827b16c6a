"""The walk's processes: real decisions inside, and everything around them done when the walk says so."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from decode_svc import effects as d
from decode_svc.intake import Intake
from decode_svc.peers import PeerBook
from prefill_svc import effects as p
from prefill_svc.handoff import Handoff
from prefill_svc.peers import DecodePeers
from prefill_svc.scheduler import Piece
from shared.ids import AttemptKey, Epoch, PeerAddress, RequestId, Ticket
from shared.kv.digest import digest
from shared.kv.layout import Buffer, Layout
from shared.kv.pages import PageAllocator
from shared.kv.slots import SlotPool
from shared.protocol import messages as m
from shared.protocol.codec import Codec
from shared.protocol.local import Generate, Output
from shared.transfer.engine import Blocks

if TYPE_CHECKING:
    from tests.walk.world import World

PAGE_SIZE = 4
LAYOUT = Layout(PAGE_SIZE, tuple(Buffer("kv", layer, (2,), "uint8") for layer in (0, 1, 2)))
ITEM_BYTES = 8
VOCAB = 1000
FINGERPRINT = {**LAYOUT.fingerprint(), "model": "walk"}
BYTE = npt.NDArray[np.uint8]


class Violation(AssertionError):
    """The world saw what must never happen."""


def tag(prompt: bytes, position: int, layer: int) -> BYTE:
    """The one right content of a page: ``[ITEM_BYTES]``."""
    text = prompt + bytes([position, layer])
    return np.frombuffer(hashlib.blake2b(text, digest_size=ITEM_BYTES).digest(), np.uint8)


@dataclass
class Pool:
    """One engine's memory: ``[layers, pages, ITEM_BYTES]`` with real addresses."""

    pages: int
    data: BYTE = field(init=False)

    def __post_init__(self) -> None:
        self.data = np.zeros((len(LAYOUT.buffers), self.pages, ITEM_BYTES), np.uint8)

    def read(self, component: str, layer: int, pages: npt.NDArray[np.int32]) -> BYTE:
        content: BYTE = self.data[[b.layer for b in LAYOUT.buffers].index(layer), pages]
        return content

    def regions(self) -> list[m.Region]:
        return [
            m.Region(b.component, b.layer, self.data[i].ctypes.data, ITEM_BYTES, self.pages)
            for i, b in enumerate(LAYOUT.buffers)
        ]


@dataclass
class Job:
    """What goes to one session for one attempt: its blocks land one by one, and more may be added while its layers are
    computed. ``failed`` ones may still land."""

    node: "PrefillNode"
    sender: p.SenderId
    key: AttemptKey
    session: str
    blocks: list[tuple[int, int, int]] = field(default_factory=list)
    """(source, destination, bytes)"""
    complete: bool = False
    """The node waits for its end, and adds no more."""
    digest: p.Digest | None = None
    halted: bool = False
    landed: int = 0
    reported: bool = False
    broken: bool = False
    """The engine that a part of it went through was retired for another's sake, or interrupted."""
    drained: bool = False
    """Its sending engine is retired; what was under way may still lie in the receiver's socket buffers."""

    def add(self, blocks: Blocks) -> None:
        if not self.halted:
            self.blocks += zip(blocks.src.tolist(), blocks.dst.tolist(), blocks.length.tolist(), strict=True)


class DecodeNode:
    """One incarnation of a decode engine, with a stand-in for its batch: a request runs for a few ticks."""

    def __init__(self, world: "World", address: PeerAddress, epoch: Epoch) -> None:
        self.world, self.address, self.epoch = world, address, epoch
        self.pool, self.slots = Pool(world.decode_pages), SlotPool(4)
        self.pages = PageAllocator(world.decode_pages)
        self.peers = PeerBook(
            list(world.prefill_addresses),
            epoch=epoch,
            reply_to=address,
            fingerprint=FINGERPRINT,
            regions=[*self.pool.regions(), self.slots.region()],
        )
        self.intake = Intake(
            epoch=epoch,
            reply_to=address,
            layout=LAYOUT,
            pages=self.pages,
            slots=self.slots,
            peers=self.peers,
            digest_every=3,
            local=epoch % 2 == 0,
        )
        self.codec: Codec[m.ToDecode] = Codec(m.ToDecode)
        self.sessions: dict[tuple[PeerAddress, int], str] = {}
        self.todo: list[Callable[[], None]] = []
        self.running: dict[RequestId, Generate] = {}
        self.computing: set[RequestId] = set()
        """Prompts in a forward of decode's own: neither cancelled nor failed meanwhile."""
        self.frozen = False
        real = self.pages.allocate

        def allocate(count: int) -> npt.NDArray[np.int32] | None:
            pages = real(count)
            if pages is not None:
                world.check_not_written(self, pages)
            return pages

        self.pages.allocate = allocate  # type: ignore[method-assign]

    def do(self, effects: list[d.Effect]) -> None:
        for effect in effects:
            match effect:
                case d.Send(address, message):
                    self.world.post(address, message)
                case d.OpenSession(address, registration):
                    self.todo.append(lambda a=address, r=registration: self._open(a, r))  # type: ignore[misc]
                case d.Up():
                    pass
                case d.Verify(ticket, pages, tokens):
                    self.todo.append(lambda t=ticket, p=pages, n=tokens: self._verify(t, p, n))  # type: ignore[misc]
                case d.Compute(request):
                    self.todo.append(lambda r=request: self._compute(r))  # type: ignore[misc]
                case d.Fence(address, registration, _):
                    self.todo.append(lambda a=address, r=registration: self._fence(a, r))  # type: ignore[misc]
                case d.Prebuild(request):
                    self._prebuild(request)
                case d.Ended(request, outcome, _):
                    self.world.endings[request] += 1
                    self.world.outcomes[outcome] += 1
                    self.running.pop(request, None)

    def deliver(self, frames: list[bytes]) -> None:
        self.do(self.intake.on_message(self.codec.decode(frames), self.world.now_s))

    def _open(self, address: PeerAddress, registration: int) -> None:
        session = f"{self.epoch}/{address}/{registration}"
        self.sessions[address, registration] = session
        self.world.live_sessions[session] = self
        self.peers.session_ready(address, registration, session)

    def _fence(self, address: PeerAddress, registration: int) -> None:
        self.world.retire(self.sessions.pop((address, registration)))
        self.do(self.intake.fenced(address, registration, self.world.now_s))

    def _verify(self, ticket: Ticket, pages: npt.NDArray[np.int32], tokens: int) -> None:
        found = digest(LAYOUT, self.pool.read, pages, np.arange(len(pages)), tokens)
        self.do(self.intake.verified(ticket, found, self.world.now_s))

    def _compute(self, request_id: RequestId) -> None:
        """Its forward starts now and ends at a later step."""
        if request_id in self.intake.requests:
            self.computing.add(request_id)
            self.todo.append(lambda: self._computed(request_id))

    def _computed(self, request_id: RequestId) -> None:
        self.computing.remove(request_id)
        request = self.intake.requests[request_id]
        pages = self.intake.pages_of(request_id)
        for position in range(LAYOUT.pages_for(request.prompt_tokens)):
            for i, buffer in enumerate(LAYOUT.buffers):
                self.pool.data[i, pages[position]] = tag(request.spec.prompt, position, buffer.layer)
        self.intake.computed(request_id)
        self.running[request_id] = request.spec

    def _prebuild(self, request_id: RequestId) -> None:
        request = self.intake.requests[request_id]
        lease = request.lease
        assert lease is not None
        if lease.slot is None:
            raise Violation(f"request {request_id} has no slot before its prebuilt step")
        row = self.slots.rows[lease.slot]
        if (row["room"], row["ticket"], row["token"]) != (lease.room, lease.ticket, int(request.spec.prompt[0])):
            raise Violation(f"request {request_id} committed with a foreign or missing metadata row")
        self.check_content(request_id)
        self.intake.prebuilt(request_id)
        self.running[request_id] = request.spec

    def check_content(self, request_id: RequestId) -> None:
        request = self.intake.requests[request_id]
        for position, page in enumerate(self.intake.pages_of(request_id)[: LAYOUT.pages_for(request.prompt_tokens)]):
            for i, buffer in enumerate(LAYOUT.buffers):
                if not np.array_equal(self.pool.data[i, page], tag(request.spec.prompt, position, buffer.layer)):
                    raise Violation(f"request {request_id} reads foreign bytes at position {position}, layer {i}")

    def finish(self, request_id: RequestId) -> None:
        self.check_content(request_id)
        self.do(self.intake.finish(Output(request_id, [1], [0.0], "stop"), self.world.now_s))


class PrefillNode:
    """One incarnation of a prefill engine; its forwards and transfers end when the walk says so."""

    def __init__(self, world: "World", address: PeerAddress, epoch: Epoch) -> None:
        self.world, self.address, self.epoch = world, address, epoch
        self.pool, slots = Pool(world.prefill_pages), SlotPool(6)
        max_prompt = (world.prefill_pages - 1) * PAGE_SIZE
        peers = DecodePeers(
            epoch=epoch,
            reply_to=address,
            layout=LAYOUT,
            regions=self.pool.regions(),
            rows=slots.region(),
            fingerprint=FINGERPRINT,
            capacity=m.Capacity(max_prompt),
        )
        self.handoff = Handoff(
            epoch=epoch,
            layout=LAYOUT,
            regions=self.pool.regions(),
            pages=PageAllocator(world.prefill_pages),
            slots=slots,
            peers=peers,
            max_prompt_tokens=max_prompt,
            vocab_size=VOCAB,
            layerwise=epoch % 3 != 0,
        )
        self.codec: Codec[m.ToPrefill] = Codec(m.ToPrefill)
        self.sessions: dict[p.SenderId, str] = {}
        self.todo: list[Callable[[], None]] = []
        self.forward: list[Piece] = []
        self.streams: list[p.Stream] = []
        self.layer = 0
        """Layers of the forward that are computed."""
        self.frozen = False

    def do(self, effects: list[p.Effect]) -> None:
        for effect in effects:
            match effect:
                case p.Send(address, message):
                    self.world.post(address, message)
                case p.OpenSender(sender, session):
                    self.sessions[sender] = session
                    self.todo.append(lambda s=sender: self.handoff.met(s))  # type: ignore[misc]
                case p.CloseSender(sender):
                    del self.sessions[sender]
                case p.Write(sender, key, batches, of):
                    job = self._job(sender, key)
                    for blocks in batches:
                        job.add(blocks)
                    job.complete, job.digest = True, of
                case p.Stream():
                    self.streams.append(effect)
                case p.Sweep():
                    pass  # in this world every layer's end is announced
                case p.Finish(sender, key, _, row, of):
                    job = self._job(sender, key)
                    job.add(row)
                    job.complete, job.digest = True, of
                case p.Halt(key):
                    for job in self._jobs(key):
                        job.halted = True
                case p.Drop(sender, key):
                    self._job(sender, key).complete = True
                case p.Interrupt(sender):
                    for job in self.world.jobs:
                        if job.node is self and job.sender == sender and not job.reported:
                            job.broken = True
                case p.Drain(sender, key):
                    self.todo.append(lambda s=sender, k=key: self._drain(s, k))  # type: ignore[misc]

    def deliver(self, frames: list[bytes]) -> None:
        self.do(self.handoff.on_message(self.codec.decode(frames), self.world.now_s))

    def _jobs(self, key: AttemptKey) -> list[Job]:
        return [job for job in self.world.jobs if job.node is self and job.key == key]

    def _job(self, sender: p.SenderId, key: AttemptKey) -> Job:
        """The attempt's job, which is made when it is first needed."""
        if not (jobs := self._jobs(key)):
            jobs = [Job(self, sender, key, self.sessions[sender])]
            self.world.jobs += jobs
        return jobs[0]

    def start_forward(self) -> None:
        self.streams, self.layer = [], 0
        self.forward, effects = self.handoff.next_forward(12, 4, self.world.now_s)
        self.do(effects)

    def advance_forward(self, ok: bool) -> None:
        """One layer of it, or its end."""
        if ok and self.layer < len(LAYOUT.buffers):
            self._compute_layer(self.layer)
            for stream in self.streams:
                self._job(stream.sender, stream.key).add(stream.pairing.blocks(stream.runs, np.array([self.layer])))
            self.layer += 1
            return
        pieces, self.forward = self.forward, []
        if not ok:
            self.do(self.handoff.compute_failed(RuntimeError("injected"), self.world.now_s))
            return
        samples = [(int(self.handoff.senders[x.key].spec.tokens[0]), -0.5, ()) if x.last else None for x in pieces]
        self.do(self.handoff.computed(samples, self.world.now_s))

    def _compute_layer(self, i: int) -> None:
        for piece in self.forward:
            sender = self.handoff.senders[piece.key]
            assert sender.pages is not None
            last_position = LAYOUT.pages_for(piece.start + piece.length)
            for position in range(piece.start // PAGE_SIZE, last_position):
                self.pool.data[i, sender.pages[position]] = tag(sender.spec.tokens, position, LAYOUT.buffers[i].layer)

    def written(self, job: Job) -> None:
        sent_bytes = sum(length for _, _, length in job.blocks)
        told = digest(LAYOUT, self.pool.read, *job.digest) if job.digest is not None else None
        self.do(self.handoff.written(job.key, sent_bytes, 0.01, told, self.world.now_s))

    def _drain(self, sender: p.SenderId, key: AttemptKey) -> None:
        for job in self.world.jobs:
            if job.node is self and job.sender == sender and job.reported:
                job.drained = True
            elif job.node is self and job.sender == sender and job.blocks:
                job.broken = True
        self.do(self.handoff.drained(key, self.world.now_s))
