"""The fence and its neighbours, over the real engine and between processes: what S66 and A1 stand on."""

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from shared.errors import TransferFailed
from shared.transfer.layers import Outgoing
from shared.transfer.mooncake_engine import MooncakeEngine
from shared.transfer.sender import PeerSender
from tests.transfer.peers import Peer, peer, receive, write_for_ever
from tests.transfer.test_contract import Bytes, blocks, memory

SIZE = 48 << 20
WRITER, NEXT_OWNER = 0xAA, 0x55


def stop_in_mid_write(writer: Peer, target: Bytes) -> int:
    """Clear, wait for a part to land, stop the writer. Returns the bytes of the interrupted write that are there."""
    while True:
        target[:] = 0
        while not target[0]:
            pass
        writer.pause()
        time.sleep(0.2)  # what is in the socket buffers arrives
        landed = int(np.count_nonzero(target == WRITER))
        if 0 < landed < SIZE:
            return landed
        writer.go_on()


@pytest.mark.parametrize("run", range(3))
def test_a1_s66_a_writer_stopped_in_mid_write_never_reaches_the_next_owner(run: int) -> None:
    """Its session is fenced and its pages have a new owner before it goes on."""
    target = memory(SIZE)
    receiver, other = MooncakeEngine("127.0.0.1"), MooncakeEngine("127.0.0.1")
    receiver.register(target.ctypes.data, SIZE)
    other.register(target.ctypes.data, SIZE)
    with peer(write_for_ever, receiver.session, target.ctypes.data, SIZE, WRITER) as writer:
        assert writer.hear() == "ready"
        assert stop_in_mid_write(writer, target) < SIZE
        receiver.retire()
        target[:] = NEXT_OWNER
        writer.go_on()
        time.sleep(1.0)
        assert int(np.count_nonzero(target != NEXT_OWNER)) == 0
        writer.pipe.send("stop")
        writer.hear()
    other.retire()


def test_s66_no_byte_lands_through_a_retired_session_of_mooncake() -> None:
    """Against a writer that never stops."""
    target = memory(SIZE)
    receiver, other = MooncakeEngine("127.0.0.1"), MooncakeEngine("127.0.0.1")
    receiver.register(target.ctypes.data, SIZE)
    other.register(target.ctypes.data, SIZE)
    with peer(write_for_ever, receiver.session, target.ctypes.data, SIZE, WRITER) as writer:
        assert writer.hear() == "ready"
        end_s = time.monotonic() + 20
        while not target.all():  # one write has landed whole, so the next ones are under way
            assert time.monotonic() < end_s
        receiver.retire()
        target[:] = 0
        time.sleep(0.5)
        assert not target.any()
        writer.pipe.send("stop")
        assert writer.hear() >= 1
    other.retire()


def test_without_the_fence_the_same_writer_does_reach_the_next_owner() -> None:
    """So that the test above is known to see what it looks for."""
    target = memory(SIZE)
    receiver = MooncakeEngine("127.0.0.1")
    receiver.register(target.ctypes.data, SIZE)
    with peer(write_for_ever, receiver.session, target.ctypes.data, SIZE, WRITER) as writer:
        assert writer.hear() == "ready"
        stop_in_mid_write(writer, target)
        target[:] = NEXT_OWNER
        writer.go_on()
        end_s = time.monotonic() + 20
        while not (target == WRITER).any():
            assert time.monotonic() < end_s
        writer.pipe.send("stop")
        writer.hear()
    receiver.retire()


@contextmanager
def black_hole() -> Iterator[str]:
    """A session whose host does not answer: a listener with a full backlog drops every further connection."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("ill", ["stopped", "black hole"])
async def test_a_peer_that_is_ill_at_first_contact_delays_no_other(ill: str) -> None:
    source = memory(1 << 20, seed=1)
    memory_of = [(source.ctypes.data, source.nbytes)]
    with ExitStack() as stack:
        sick, well = (stack.enter_context(peer(receive, 1 << 20)) for _ in range(2))
        sick_session, sick_base = sick.hear()
        session, base = well.hear()
        if ill == "stopped":
            sick.pause()
        else:
            sick_session = stack.enter_context(black_hole())

        def sender(to: str) -> PeerSender:
            return PeerSender(lambda: MooncakeEngine("127.0.0.1"), memory_of, to, name=to)

        stuck, free = sender(sick_session), sender(session)
        waiting = stuck.send([blocks(source, sick_base, [(0, 0, 1 << 20)])])
        for _ in range(3):
            result = await asyncio.wait_for(free.send([blocks(source, base, [(0, 0, 1 << 20)])]), 3)
            assert result.sent_bytes == 1 << 20
        assert not waiting.done()
        sick.go_on()
        ended = (await asyncio.gather(waiting, return_exceptions=True))[0]
        assert isinstance(ended, Exception) == (ill == "black hole")
        await free.close()
        await stuck.close()


async def test_a_stalled_peer_fails_all_that_waits_for_it_at_once_not_one_after_the_other() -> None:
    """Several attempts have submitted before the first of them is waited for, as layer-wise sending does."""
    source = memory(8 << 20, seed=1)
    with peer(receive, 8 << 20) as frozen:
        session, base = frozen.hear()
        sender = PeerSender(lambda: MooncakeEngine("127.0.0.1"), [(source.ctypes.data, source.nbytes)], session, "x")
        await sender.send([blocks(source, base, [(0, 0, 1 << 20)])])
        frozen.pause()
        outgoings = [Outgoing() for _ in range(4)]
        for outgoing in outgoings:
            parts = blocks(source, base, [(i << 20, i << 20, 1 << 20) for i in range(8)])
            sender.post(lambda open_engine, to, out=outgoing, parts=parts: out.submit(open_engine, to, parts))  # type: ignore[misc]
        started_s = time.monotonic()
        settled = [sender.settle(outgoing, None, None, None) for outgoing in outgoings]
        ends = await asyncio.wait_for(asyncio.gather(*settled, return_exceptions=True), 40)
        assert all(isinstance(end, TransferFailed) for end in ends), ends
        await asyncio.wait_for(sender.drain(), 10)
        assert time.monotonic() - started_s < 25  # one time-out without progress, not one for each
        await sender.close()
