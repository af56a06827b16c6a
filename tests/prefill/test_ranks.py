"""Prefill's decisions with real workers and real bytes: two ranks over Mooncake into another process, and the failure
of each group, of the sweep and of the row (S5, S7, S10, S11, S15, S22, S25, S67)."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from prefill_svc import effects as p
from prefill_svc.handoff import Handoff
from prefill_svc.peers import DecodePeers
from shared.errors import TransferFailed
from shared.ids import Epoch, PeerAddress, RequestId, Room, Ticket
from shared.kv.layout import META_ROW, Buffer, Layout
from shared.kv.pages import PageAllocator
from shared.kv.slots import SlotPool
from shared.protocol import messages as m
from shared.transfer.engine import Batch, Blocks, TransferEngine
from shared.transfer.layers import ActiveContexts, Context, LayerGroups, Outgoing, Post, Step, at_once
from shared.transfer.memory_engine import Fault, MemoryEngine, MemoryNetwork
from shared.transfer.mooncake_engine import MooncakeEngine
from shared.transfer.plan import Pairing, Runs, check_coverage
from shared.transfer.sender import PeerSender
from tests.transfer.peers import peer

LAYERS, PAGE, ITEM = 6, 4, 256
LAYOUT = Layout(PAGE, tuple(Buffer("kv", layer, (ITEM // PAGE,), "uint8") for layer in range(LAYERS)))
DECODE, ME = Epoch(50), Epoch(70)
PAGES, ROWS = 64, 4
Bytes = npt.NDArray[np.uint8]


class Memory:
    """One side's pool and metadata rows."""

    def __init__(self, pages: int) -> None:
        self.pool: Bytes = np.zeros((LAYERS, pages, ITEM), np.uint8)
        self.rows = np.zeros(ROWS, META_ROW)

    def arrays(self) -> list[tuple[int, int]]:
        return [(a.ctypes.data, a.nbytes) for a in (self.pool, self.rows)]

    def regions(self) -> list[m.Region]:
        kv = [m.Region("kv", i, self.pool[i].ctypes.data, ITEM, self.pool.shape[1]) for i in range(LAYERS)]
        return [*kv, m.Region("meta", 0, self.rows.ctypes.data, META_ROW.itemsize, ROWS)]


def decode_process(pipe: Connection) -> None:
    """Offers its memory, and shows it when asked."""
    memory = Memory(PAGES)
    engine = MooncakeEngine("127.0.0.1")
    for base, length in memory.arrays():
        engine.register(base, length)
    pipe.send((engine.session, memory.regions()))
    with suppress(EOFError):
        while pipe.recv() == "show":
            pipe.send((memory.pool, memory.rows))
    engine.retire()


def content(layer: int, position: int) -> int:
    return 1 + (31 * layer + 7 * position) % 255


@dataclass
class Rank:
    """One prefill rank as its engine runs it, but for the model: decisions, contexts, a worker."""

    make: Callable[[], TransferEngine]
    session: str
    target: list[m.Region]
    rank: int = 0
    ranks: int = 1
    layerwise: bool = True
    sent: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory, slots = Memory(PAGES), SlotPool(ROWS)
        self.memory.rows = slots.rows
        regions = self.memory.regions()
        peers = DecodePeers(
            epoch=ME,
            reply_to=PeerAddress("x"),
            layout=LAYOUT,
            regions=regions[:-1],
            rows=regions[-1],
            fingerprint={},
            capacity=m.Capacity(200),
        )
        self.handoff = Handoff(
            epoch=ME,
            layout=LAYOUT,
            regions=regions[:-1],
            pages=PageAllocator(PAGES),
            slots=slots,
            peers=peers,
            max_prompt_tokens=200,
            vocab_size=1000,
            layerwise=self.layerwise,
            rank=self.rank,
            ranks=self.ranks,
        )
        self.active, self.contexts = ActiveContexts(), list[Context]()
        self.futures: list[tuple[Any, asyncio.Future[Any]]] = []
        register = m.Register(DECODE, Epoch(0), PeerAddress("d"), 1, self.session, {}, self.target)
        self.do(self.handoff.on_message(register, 0.0))
        self.handoff.met(p.SenderId(DECODE, 1))

    def do(self, effects: Sequence[p.Effect]) -> None:
        for effect in effects:
            match effect:
                case p.OpenSender(_, session):
                    self.worker = PeerSender(self.make, self.memory.arrays(), session, "test")
                case p.Send(_, message):
                    self.sent.append(message)
                case p.Stream(_, key, chunk, pairing, runs):
                    post = self.worker.post
                    made = self.active.register(key, chunk, partial(_context, pairing, runs, post))
                    assert made is not None
                    self.contexts.append(made)
                case p.Sweep(_, key, chunk):
                    if (context := self.active.finish(key, chunk)) is not None:
                        self.worker.post(partial(context.sweep, at_once))
                case p.Finish(_, key, chunk, row, _):
                    context, outgoing = self.active.finish(key, chunk), self.active.outgoing(key)
                    self.futures.append((key, self.worker.settle(outgoing, context, row, None)))
                case p.Write(_, key, batches, _):
                    self.futures.append((key, self.worker.send(batches)))
                case p.Drain(_, key):
                    self.futures.append((key, self.worker.drain()))
                case _:
                    raise AssertionError(effect)

    def ask(self, ticket: int, tokens: int, pages: Sequence[int], slot: int) -> None:
        message = m.Prefill(
            DECODE, ME, PeerAddress("d"), 1, Room(ticket), Ticket(ticket), RequestId(f"r{ticket}"),
            m.pack_int32(np.arange(tokens)), 0, m.pack_int32(pages), slot, m.Sampling(1, 0.0), 10_000, False,
        )  # fmt: skip
        self.do(self.handoff.on_message(message, 0.0))

    async def forward(self, budget: int, announced: Sequence[int], after: Callable[[int], Any] | None = None) -> None:
        """Compute the next chunks layer by layer; those layers' ends are announced. ``after`` sees each layer."""
        self.contexts = []
        pieces, effects = self.handoff.next_forward(budget, 8, 0.0)
        self.do(effects)
        step = Step(LayerGroups(range(LAYERS), 2), lambda: at_once, self.contexts)
        for layer in range(LAYERS):
            for piece in pieces:
                logical = self.handoff.senders[piece.key].pages
                assert logical is not None
                for position in range(piece.start // PAGE, -(-(piece.start + piece.length) // PAGE)):
                    if logical[position] % self.ranks == self.rank:
                        self.memory.pool[layer, logical[position] // self.ranks] = content(layer, position)
            if layer in announced:
                step.layer_end(layer)
            if after is not None:
                await after(layer)
        self.do(self.handoff.computed([(7, -0.5, ()) if piece.last else None for piece in pieces], 0.0))

    async def end(self) -> list[Any]:
        """What is announced once everything that was started has ended: Completed and Failed."""
        while self.futures:
            key, future = self.futures.pop(0)
            try:
                result = await asyncio.wait_for(future, 20)
            except TransferFailed as error:
                self.active.drop(key)
                self.do(self.handoff.write_failed(key, error, 0.0))
                continue
            if result is None:
                self.do(self.handoff.drained(key, 0.0))
            else:
                self.active.drop(key)
                self.do(self.handoff.written(key, result.sent_bytes, result.write_s, None, 0.0))
        self.handoff.check_integrity()
        return [message for message in self.sent if isinstance(message, m.Completed | m.Failed)]


def _context(pairing: Pairing, runs: Runs, post: Post, outgoing: Outgoing) -> Context:
    return Context(outgoing, pairing, runs, post)


@asynccontextmanager
async def running(*ranks: Rank) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for rank in ranks:
            await rank.worker.close()


FRAGMENTED = [40, 22, 31, 30, 45, 12, 13, 3]


@pytest.mark.parametrize("tokens", [20, 18, 17, 8, 3, 24, 30])
@pytest.mark.parametrize("announced", [range(LAYERS), [0, 1, 2, 4, 5], []], ids=["all", "one missing", "none"])
async def test_s5_s11_two_ranks_and_a_last_chunk_that_only_one_owns(tokens: int, announced: Sequence[int]) -> None:
    """Chunks of two pages by layer, and the same whole, from two ranks into another process's memory: byte for byte
    what each position holds, and both ranks complete once although one may own nothing of the last chunk."""
    with peer(decode_process) as decode:
        session, target = decode.hear()
        layered = [Rank(lambda: MooncakeEngine("127.0.0.1"), session, target, rank, 2) for rank in (0, 1)]
        whole = [Rank(lambda: MooncakeEngine("127.0.0.1"), session, target, rank, 2, False) for rank in (0, 1)]
        pages = LAYOUT.pages_for(tokens)
        there, other = FRAGMENTED[:pages], list(range(50, 50 + pages))
        async with running(*layered, *whole):
            for rank in layered:
                rank.ask(1, tokens, there, 1)
                while rank.handoff.queue:
                    await rank.forward(2 * PAGE, announced)
            for rank in whole:
                rank.ask(2, tokens, other, 2)
                while rank.handoff.queue:
                    await rank.forward(2 * PAGE, announced)
            for ranks, ticket in ((layered, 1), (whole, 2)):
                done = [answer for rank in ranks for answer in await rank.end()]
                assert [(type(d), d.ticket) for d in done] == [(m.Completed, ticket)] * 2
                parts = [part for d in done for part in d.parts]
                assert check_coverage(parts, np.arange(pages), LAYOUT.page_bytes_by_component(), 2) is None
        decode.pipe.send("show")
        pool, rows = decode.hear()
        for layer in range(LAYERS):
            for position in range(pages):
                for page in (there[position], other[position]):
                    assert set(pool[layer, page].tolist()) == {content(layer, position)}, (layer, position)
        untouched = [page for page in range(PAGES) if page not in there + other]
        assert not pool[:, untouched].any()
        assert [(int(rows[i]["ticket"]), int(rows[i]["token"])) for i in range(ROWS)] == [
            (0, 0),
            (1, 7),
            (2, 7),
            (0, 0),
        ]


class Failing(MemoryEngine):
    """Its submit number ``at`` goes wrong."""

    def __init__(self, network: MemoryNetwork, at: int, fault: Fault, submits: list[int]) -> None:
        super().__init__(network)
        self._faults, self._at, self._fault, self._submits = network.faults, at, fault, submits

    def submit(self, session: str, blocks: Blocks) -> Batch:
        self._submits.append(len(blocks))
        if len(self._submits) - 1 == self._at:
            self._faults.append(self._fault)
        return super().submit(session, blocks)


@pytest.mark.parametrize("fault", ["refuse", "fail"])
@pytest.mark.parametrize(
    ("at", "announced", "which"),
    [
        (0, range(LAYERS), "first group"),
        (1, range(LAYERS), "a group in the middle"),
        (2, range(LAYERS), "last group"),
        (2, range(LAYERS - 1), "sweep"),
        (3, range(LAYERS), "row"),
    ],
)
async def test_s15_s22_whatever_fails_ends_the_room_once(
    fault: Fault, at: int, announced: Sequence[int], which: str
) -> None:
    """Unclean, never complete, without a row that would say otherwise; and the next room over that worker is whole."""
    network, target = MemoryNetwork(), Memory(PAGES)
    receiver = MemoryEngine(network)
    for base, length in target.arrays():
        receiver.register(base, length)
    submits: list[int] = []
    rank = Rank(lambda: Failing(network, at, fault, submits), receiver.session, target.regions())
    async with running(rank):
        rank.ask(1, 7, [20, 21], 1)
        await rank.forward(100, announced)
        (failed,) = await rank.end()
        assert isinstance(failed, m.Failed), which
        assert (failed.code, failed.clean, failed.retryable) == ("transfer_failed", False, True)
        if which != "row":
            assert not target.rows["ticket"].any()
        if fault == "refuse":
            assert len(submits) == at + 1, "nothing is submitted after the first failure"
        rank.do(rank.handoff.on_message(m.Ack(DECODE, ME, Room(1), Ticket(1)), 0.0))
        assert rank.handoff.pages.free_pages == PAGES - 1

        rank.ask(2, 7, [30, 31], 2)
        await rank.forward(100, announced)
        answers = await rank.end()
        assert [type(answer) for answer in answers] == [m.Failed, m.Completed]
        for layer in range(LAYERS):
            assert [set(target.pool[layer, page].tolist()) for page in (30, 31)] == [
                {content(layer, 0)},
                {content(layer, 1)},
            ]
        assert int(target.rows[2]["ticket"]) == 2


@pytest.mark.parametrize(
    ("killed_after", "announced"), [(0, range(LAYERS)), (3, range(LAYERS)), (4, range(LAYERS - 1))]
)
async def test_a_decode_that_dies_between_two_groups_ends_the_room_once(
    killed_after: int, announced: Sequence[int]
) -> None:
    """Over Mooncake: before the first group, before the last, before the sweep."""
    with peer(decode_process) as decode:
        session, target = decode.hear()
        rank = Rank(lambda: MooncakeEngine("127.0.0.1"), session, target)

        async def after(layer: int) -> None:
            if layer == killed_after:
                await rank.worker.contact()  # what was posted before is submitted
                decode.process.kill()
                await asyncio.to_thread(decode.process.join)

        async with running(rank):
            rank.ask(1, 30, FRAGMENTED, 1)
            await rank.forward(100, announced, after)
            (failed,) = await rank.end()
            assert isinstance(failed, m.Failed)
            assert (failed.code, failed.clean) == ("transfer_failed", False)
            assert len([s for s in rank.handoff.senders.values() if s.pages is not None]) == 0
