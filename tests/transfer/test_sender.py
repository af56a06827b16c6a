"""One worker per peer: order, failures, drains, and a stalled peer that stalls only itself."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import numpy as np
import pytest

from shared.errors import TransferFailed
from shared.transfer.engine import TransferEngine
from shared.transfer.memory_engine import MemoryEngine, MemoryNetwork
from shared.transfer.mooncake_engine import MooncakeEngine
from shared.transfer.sender import PeerSender, open_engine
from tests.transfer.conftest import MakeEngine
from tests.transfer.test_contract import Bytes, blocks, memory


class Bench:
    """One source, receivers, and the senders to them."""

    def __init__(self, make: MakeEngine) -> None:
        self.make, self.made = make, 0
        self.source = memory(4096, seed=1)
        self.senders: list[PeerSender] = []

    def receiver(self) -> tuple[TransferEngine, Bytes]:
        target = memory(4096)
        engine = self.make()
        engine.register(target.ctypes.data, 4096)
        return engine, target

    def sender(self, session: str) -> PeerSender:
        sender = PeerSender(self._engine, [(self.source.ctypes.data, 4096)], session, "test")
        self.senders.append(sender)
        return sender

    def _engine(self) -> TransferEngine:
        self.made += 1
        return self.make()


@pytest.fixture
async def bench(make: MakeEngine) -> AsyncIterator[Bench]:
    bench = Bench(make)
    yield bench
    for sender in bench.senders:
        await sender.close()


@pytest.fixture
async def fake(network: MemoryNetwork) -> AsyncIterator[Bench]:
    bench = Bench(lambda: MemoryEngine(network))
    yield bench
    network.land()
    for sender in bench.senders:
        await sender.close()


async def test_batches_land_one_after_the_other_and_are_counted(bench: Bench) -> None:
    engine, target = bench.receiver()
    sender = bench.sender(engine.session)
    batches = [
        blocks(bench.source, target.ctypes.data, r) for r in ([(0, 0, 1000), (1000, 1000, 24)], [(4000, 4000, 64)])
    ]
    result = await sender.send(batches)
    assert result.sent_bytes == 1088
    assert result.write_s >= 0
    assert np.array_equal(target[:1024], bench.source[:1024])
    assert np.array_equal(target[4000:4064], bench.source[4000:4064])


async def test_a_failure_ends_its_job_and_a_fresh_engine_serves_the_next(bench: Bench) -> None:
    engine, target = bench.receiver()
    sender = bench.sender(engine.session)
    outside = blocks(bench.source, target.ctypes.data, [(0, 4090, 100)])
    good = blocks(bench.source, target.ctypes.data, [(0, 0, 500)])
    with pytest.raises(TransferFailed):
        await sender.send([outside, good])
    assert not target[:500].any()
    await sender.drain()
    result = await sender.send([good])
    assert (result.sent_bytes, bench.made) == (500, 2)
    assert np.array_equal(target[:500], bench.source[:500])


async def test_close_is_idempotent_and_takes_no_more(bench: Bench) -> None:
    engine, target = bench.receiver()
    sender = bench.sender(engine.session)
    await sender.close()
    await sender.close()
    with pytest.raises(ValueError, match="closed"):
        sender.send([blocks(bench.source, target.ctypes.data, [(0, 0, 5)])])


async def test_a_stalled_peer_stalls_only_itself(fake: Bench, network: MemoryNetwork) -> None:
    stalled_engine, stalled_target = fake.receiver()
    engine, target = fake.receiver()
    stalled, healthy = fake.sender(stalled_engine.session), fake.sender(engine.session)
    network.faults.append("hang")
    two = blocks(fake.source, stalled_target.ctypes.data, [(0, 0, 50), (50, 50, 50)])
    hanging = stalled.send([two])
    while not network.moves:
        await asyncio.sleep(0.001)
    await healthy.send([blocks(fake.source, target.ctypes.data, [(0, 0, 4096)])])
    assert np.array_equal(target, fake.source)
    assert not hanging.done()
    network.land()
    assert (await hanging).sent_bytes == 100


async def test_giving_up_a_future_does_not_stop_the_job_and_drain_comes_after_it(
    fake: Bench, network: MemoryNetwork
) -> None:
    """A cancelled await is no proof: the bytes land all the same, and the drain waits for them."""
    engine, target = fake.receiver()
    sender = fake.sender(engine.session)
    network.faults.append("hang")
    future = sender.send([blocks(fake.source, target.ctypes.data, [(0, 0, 50), (50, 50, 50)])])
    while not network.moves:
        await asyncio.sleep(0.001)
    future.cancel()
    with suppress(asyncio.CancelledError):
        await future
    drained = sender.drain()
    await asyncio.sleep(0.02)
    assert not drained.done()
    network.land()
    await drained
    assert np.array_equal(target[:100], fake.source[:100])


async def test_an_engine_that_cannot_be_made_fails_the_job_not_the_worker() -> None:
    made: list[MooncakeEngine] = []
    source, target = memory(64, seed=1), memory(64)
    receiver = MooncakeEngine("127.0.0.1")
    receiver.register(target.ctypes.data, 64)

    def make() -> TransferEngine:
        made.append(MooncakeEngine("127.0.0.1"))
        if len(made) == 1:
            made[0].retire()  # as one whose memory cannot be registered
        return made[-1]

    sender = PeerSender(make, [(source.ctypes.data, 64)], receiver.session, "test")
    try:
        with pytest.raises(TransferFailed, match="retired"):
            await sender.send([blocks(source, target.ctypes.data, [(0, 0, 64)])])
        await sender.send([blocks(source, target.ctypes.data, [(0, 0, 64)])])
        assert np.array_equal(source, target)
    finally:
        await sender.close()
        receiver.retire()


def test_s39_an_engine_whose_memory_cannot_all_be_registered_is_retired(make: MakeEngine) -> None:
    source = memory(4096, seed=1)
    made: list[TransferEngine] = []

    def one() -> TransferEngine:
        made.append(make())
        return made[-1]

    base = source.ctypes.data
    with pytest.raises(TransferFailed):
        open_engine(one, [(base, 2048), (base, 2048)])
    with pytest.raises(ValueError, match="retired"):
        made[0].register(base, 2048)
    open_engine(one, [(base, 2048), (base + 2048, 2048)])


async def test_an_interrupt_ends_the_wait_for_a_peer_that_stands_still(fake: Bench, network: MemoryNetwork) -> None:
    receiver, target = fake.receiver()
    sender = fake.sender(receiver.session)
    network.faults.append("hang")
    stuck = sender.send([blocks(fake.source, target.ctypes.data, [(0, 0, 100), (200, 200, 100)])])
    behind = sender.send([blocks(fake.source, target.ctypes.data, [(300, 300, 100)])])
    done, _ = await asyncio.wait([stuck], timeout=0.2)
    assert not done
    sender.interrupt()
    for future in (stuck, behind, sender.contact()):
        with pytest.raises(TransferFailed):
            await asyncio.wait_for(future, 5)
    await asyncio.wait_for(sender.drain(), 5)
    with pytest.raises(TransferFailed, match="lost"):
        await sender.send([blocks(fake.source, target.ctypes.data, [(300, 300, 100)])])
    assert fake.made == 1
    assert not target[200:].any()
