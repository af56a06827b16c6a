"""The faults that the fake can inject."""

import threading

import numpy as np
import pytest

from shared.errors import TransferFailed
from shared.transfer.memory_engine import MemoryEngine, MemoryNetwork
from tests.transfer.test_contract import Bytes, blocks, memory


def pair(network: MemoryNetwork) -> tuple[MemoryEngine, MemoryEngine, Bytes, Bytes]:
    source, target = memory(300, seed=1), memory(300)
    sender, receiver = MemoryEngine(network), MemoryEngine(network)
    sender.register(source.ctypes.data, 300)
    receiver.register(target.ctypes.data, 300)
    return sender, receiver, source, target


THIRDS = [(0, 0, 100), (100, 100, 100), (200, 200, 100)]


def test_a_refused_submit_moves_nothing(network: MemoryNetwork) -> None:
    sender, receiver, source, target = pair(network)
    network.faults.append("refuse")
    with pytest.raises(TransferFailed):
        sender.submit(receiver.session, blocks(source, target.ctypes.data, THIRDS))
    assert not target.any()
    sender.wait(sender.submit(receiver.session, blocks(source, target.ctypes.data, THIRDS)))
    assert np.array_equal(source, target)


def test_a_failed_batch_goes_on_landing_until_the_sender_is_retired(network: MemoryNetwork) -> None:
    sender, receiver, source, target = pair(network)
    network.faults.append("fail")
    batch = sender.submit(receiver.session, blocks(source, target.ctypes.data, THIRDS))
    with pytest.raises(TransferFailed, match="on demand"):
        sender.wait(batch)
    assert target[:100].all()
    assert not target[100:].any()
    assert network.land(1) == 1
    assert target[100:200].all()
    assert not target[200:].any()
    sender.retire()
    assert network.land() == 0
    assert not target[200:].any()


def test_a_hanging_batch_ends_when_it_has_landed(network: MemoryNetwork) -> None:
    sender, receiver, source, target = pair(network)
    network.faults.append("hang")
    batch = sender.submit(receiver.session, blocks(source, target.ctypes.data, THIRDS))
    waiter = threading.Thread(target=sender.wait, args=(batch,))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    assert network.land() == 2
    waiter.join(5)
    assert not waiter.is_alive()
    assert np.array_equal(source, target)


def test_retiring_the_receiver_ends_a_hanging_batch_as_failed(network: MemoryNetwork) -> None:
    sender, receiver, source, target = pair(network)
    network.faults.append("hang")
    batch = sender.submit(receiver.session, blocks(source, target.ctypes.data, THIRDS))
    receiver.retire()
    with pytest.raises(TransferFailed):
        sender.wait(batch)
    assert network.land() == 0
    assert not target[100:].any()
