"""What every transfer engine promises; run on Mooncake and on the fake."""

import numpy as np
import numpy.typing as npt
import pytest

from shared.errors import TransferFailed
from shared.transfer.engine import Blocks, TransferEngine
from tests.transfer.conftest import MakeEngine

Bytes = npt.NDArray[np.uint8]
GUARD = 64


def memory(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(1, 255, size, np.uint8) if seed else np.zeros(size, np.uint8)


def blocks(source: Bytes, target_base: int, ranges: list[tuple[int, int, int]]) -> Blocks:
    """(source offset, target offset, length) each."""
    src, dst, length = np.array(ranges, np.int64).reshape(-1, 3).T
    return Blocks(src + source.ctypes.data, dst + target_base, length)


def joined(make: MakeEngine, source: Bytes, target: Bytes) -> tuple[TransferEngine, TransferEngine]:
    """(sender that may send ``source``, receiver of ``target`` without its guards)."""
    sender, receiver = make(), make()
    sender.register(source.ctypes.data, source.nbytes)
    receiver.register(target.ctypes.data + GUARD, target.nbytes - 2 * GUARD)
    return sender, receiver


def test_blocks_land_where_they_should_and_nowhere_else(make: MakeEngine) -> None:
    source, target = memory(1 << 16, seed=1), memory(1 << 16)
    sender, receiver = joined(make, source, target)
    ranges = [(0, 1000, 5000), (9000, GUARD, 1), (20_000, 30_000, 8192), (7, 60_000, 13)]
    sender.wait(sender.submit(receiver.session, blocks(source, target.ctypes.data, ranges)))
    expected = memory(1 << 16)
    for src, dst, length in ranges:
        expected[dst : dst + length] = source[src : src + length]
    assert np.array_equal(target, expected)


def test_more_blocks_than_the_engine_takes_at_once(make: MakeEngine) -> None:
    source, target = memory(5000 * 16, seed=2), memory(5000 * 16 + 2 * GUARD)
    sender, receiver = joined(make, source, target)
    order = np.random.default_rng(3).permutation(5000)
    ranges = [(16 * int(i), GUARD + 16 * int(i), 16) for i in order]
    first = sender.submit(receiver.session, blocks(source, target.ctypes.data, ranges[:2600]))
    second = sender.submit(receiver.session, blocks(source, target.ctypes.data, ranges[2600:]))
    sender.wait(second)
    sender.wait(first)
    assert np.array_equal(target[GUARD:-GUARD], source)


def test_a_target_that_is_not_registered_fails_and_stays_as_it_is(make: MakeEngine) -> None:
    source, target = memory(4096, seed=3), memory(8192)
    sender, receiver = joined(make, source, target)
    for offset in (0, 8192 - GUARD - 100):  # before the region, and past its end
        batch = sender.submit(receiver.session, blocks(source, target.ctypes.data, [(0, offset, 1000)]))
        with pytest.raises(TransferFailed):
            sender.wait(batch)
    assert not target.any()


def test_one_bad_block_fails_its_batch_wherever_it_stands(make: MakeEngine) -> None:
    source, target = memory(4096, seed=3), memory(8192)
    sender, receiver = joined(make, source, target)
    good = [(0, GUARD, 100), (100, GUARD + 100, 100), (200, GUARD + 200, 100)]
    for at in range(4):
        ranges = [*good[:at], (0, 8192 - GUARD, 8), *good[at:]]
        batch = sender.submit(receiver.session, blocks(source, target.ctypes.data, ranges))
        with pytest.raises(TransferFailed):
            sender.wait(batch)
    assert not target[-GUARD:].any()


def test_a_session_that_is_not_there_fails(make: MakeEngine) -> None:
    source, target = memory(4096, seed=3), memory(8192)
    sender, receiver = joined(make, source, target)
    receiver.retire()
    with pytest.raises(TransferFailed):
        sender.wait(sender.submit(receiver.session, blocks(source, target.ctypes.data, [(0, GUARD, 1000)])))
    assert not target.any()


def test_a_failed_session_does_not_harm_another(make: MakeEngine) -> None:
    source, gone, target = memory(4096, seed=4), memory(8192), memory(8192)
    sender, dead = joined(make, source, gone)
    alive = make()
    alive.register(target.ctypes.data, target.nbytes)
    dead.retire()
    with pytest.raises(TransferFailed):
        sender.wait(sender.submit(dead.session, blocks(source, gone.ctypes.data, [(0, GUARD, 100)])))
    sender.wait(sender.submit(alive.session, blocks(source, target.ctypes.data, [(0, 0, 4096)])))
    assert np.array_equal(target[:4096], source)


def test_wrong_calls_are_refused_before_anything_moves(make: MakeEngine) -> None:
    source, target = memory(4096, seed=5), memory(8192)
    sender, receiver = joined(make, source, target)
    base = target.ctypes.data
    for ranges in ([], [(0, GUARD, 0)], [(4000, GUARD, 200)], [(0, GUARD, -5)]):
        with pytest.raises(ValueError, match=r"."):
            sender.submit(receiver.session, blocks(source, base, ranges))
    uneven = blocks(source, base, [(0, GUARD, 8), (8, GUARD, 8)])
    with pytest.raises(ValueError, match=r"."):
        sender.submit(receiver.session, Blocks(uneven.src[:1], uneven.dst, uneven.length))
    with pytest.raises(ValueError, match=r"."):
        sender.register(0, 100)
    assert not target.any()


def test_a_batch_is_waited_for_exactly_once(make: MakeEngine) -> None:
    source, target = memory(4096, seed=6), memory(8192)
    sender, receiver = joined(make, source, target)
    batch = sender.submit(receiver.session, blocks(source, target.ctypes.data, [(0, GUARD, 100)]))
    sender.wait(batch)
    with pytest.raises(ValueError, match="unknown, or was waited for"):
        sender.wait(batch)


def test_the_same_region_in_several_engines_and_twice_in_one(make: MakeEngine) -> None:
    source, target = memory(4096, seed=7), memory(8192)
    sender, first = joined(make, source, target)
    second = make()
    second.register(target.ctypes.data + GUARD, target.nbytes - 2 * GUARD)
    for receiver, offset in ((first, GUARD), (second, 4096)):
        sender.wait(sender.submit(receiver.session, blocks(source, target.ctypes.data, [(0, offset, 100)])))
        assert np.array_equal(target[offset : offset + 100], source[:100])
    with pytest.raises(TransferFailed):
        first.register(target.ctypes.data + GUARD, 100)


def test_a_retired_engine_takes_no_more_calls(make: MakeEngine) -> None:
    source, target = memory(4096, seed=8), memory(8192)
    sender, receiver = joined(make, source, target)
    sender.retire()
    sender.retire()
    with pytest.raises(ValueError, match="retired"):
        sender.submit(receiver.session, blocks(source, target.ctypes.data, [(0, GUARD, 100)]))
    with pytest.raises(ValueError, match="retired"):
        sender.register(source.ctypes.data, 100)


def test_sessions_are_not_reused(make: MakeEngine) -> None:
    sessions = set()
    for _ in range(12):
        engine = make()
        sessions.add(engine.session)
        engine.retire()
    assert len(sessions) == 12


def test_contact_writes_nothing_and_says_whether_anybody_is_there(make: MakeEngine) -> None:
    source, target = memory(256, seed=1), memory(256)
    sender, receiver = joined(make, source, target)
    for _ in range(2):
        sender.contact(receiver.session)
    assert not target.any()
    with pytest.raises(TransferFailed):
        sender.contact("127.0.0.1:1")
    with pytest.raises(ValueError, match="no source"):
        make().contact(receiver.session)


def test_an_interrupted_engine_fails_at_once_and_can_be_retired(make: MakeEngine) -> None:
    source, target = memory(4096, seed=5), memory(4096)
    sender, receiver = joined(make, source, target)
    batch = sender.submit(receiver.session, blocks(source, target.ctypes.data, [(0, GUARD, 100)]))
    sender.interrupt()
    with pytest.raises(TransferFailed):
        sender.wait(batch)
    with pytest.raises(TransferFailed):
        sender.submit(receiver.session, blocks(source, target.ctypes.data, [(0, GUARD, 100)]))
    with pytest.raises(TransferFailed):
        sender.contact(receiver.session)
    sender.retire()
    fresh = make()
    fresh.register(source.ctypes.data, source.nbytes)
    fresh.wait(fresh.submit(receiver.session, blocks(source, target.ctypes.data, [(0, GUARD, 100)])))
    assert np.array_equal(target[GUARD : GUARD + 100], source[:100])
