"""The faults of the network in memory. None of this needs an event loop."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from shared.errors import ConfigError, PeerBusy
from shared.protocol.codec import Codec
from shared.protocol.messages import ToPrefill
from shared.signal.channel import MAX_BUFFERED_BYTES
from shared.signal.memory_channel import Faults, MemoryChannel, MemoryHub, MemoryLink
from tests.signal.nets import ack, big

B = "tcp://b:1"
NO_FAULTS = Faults()


class Pair:
    """A link from a to b, and the tickets that b got, with the step in which it got them."""

    def __init__(self, faults: Faults = NO_FAULTS, seed: int = 7) -> None:
        self.hub = MemoryHub(random.Random(seed), faults)
        self.got: list[int] = []
        self.at: list[int] = []
        self.a = self.open("tcp://a:1")
        self.b = self.open(B)
        self.link: MemoryLink = self.a.link(B)

    def open(self, address: str) -> MemoryChannel[ToPrefill]:
        return self.hub.open(address, Codec[ToPrefill](ToPrefill), self._take, name=address)

    def _take(self, message: ToPrefill) -> None:
        self.got.append(message.ticket)  # type: ignore[union-attr]
        self.at.append(self.hub.steps)

    def run(self, count: int) -> list[int]:
        for i in range(count):
            self.link.send(ack(i))
        while self.hub.deliver_next():
            pass
        return self.got


def test_without_faults_everything_arrives_in_order_in_the_next_step() -> None:
    pair = Pair()
    for i in range(10):
        pair.link.send(ack(i))
    assert pair.got == []
    assert pair.hub.step() == 10
    assert pair.got == list(range(10))
    assert set(pair.at) == {1}
    assert pair.hub.step() == 0


def test_deliver_next_delivers_one() -> None:
    pair = Pair()
    pair.link.send(ack(0))
    pair.link.send(ack(1))
    assert pair.hub.deliver_next()
    assert (pair.got, len(pair.hub)) == ([0], 1)
    assert pair.hub.deliver_next()
    assert not pair.hub.deliver_next()


def test_what_a_handler_sends_arrives_in_a_later_step() -> None:
    hub = MemoryHub()
    bounces: list[int] = []

    def bounce(message: ToPrefill) -> None:
        bounces.append(hub.steps)
        link.send(ack(0))

    channel = hub.open(B, Codec[ToPrefill](ToPrefill), bounce, name="b")
    link = channel.link(B)
    link.send(ack(0))
    for _ in range(3):
        assert hub.step() == 1
    assert bounces == [1, 2, 3]


def test_loss() -> None:
    got = Pair(Faults(loss=0.3)).run(1000)
    assert 600 < len(got) < 800
    assert got == sorted(set(got))


def test_duplication() -> None:
    counts = Counter(Pair(Faults(duplicate=0.3)).run(1000))
    assert set(counts) == set(range(1000))
    assert 200 < sum(n == 2 for n in counts.values()) < 400
    assert max(counts.values()) == 2


def test_delay() -> None:
    pair = Pair(Faults(max_delay_steps=5))
    got = pair.run(1000)
    assert sorted(got) == list(range(1000))
    assert set(pair.at) == {1, 2, 3, 4, 5, 6}
    assert pair.at == sorted(pair.at)
    assert got != sorted(got)


def test_reordering() -> None:
    got = Pair(Faults(reorder=0.3)).run(1000)
    assert sorted(got) == list(range(1000))
    assert sum(a > b for a, b in pairwise(got)) > 100


def test_a_seed_names_a_run() -> None:
    faults = Faults(loss=0.1, duplicate=0.1, reorder=0.1, max_delay_steps=3)
    assert Pair(faults, seed=1).run(200) == Pair(faults, seed=1).run(200)
    assert Pair(faults, seed=1).run(200) != Pair(faults, seed=2).run(200)


def test_a_slow_peer_is_refused_at_the_byte_limit_and_lost_messages_do_not_count_for_ever() -> None:
    pair = Pair(Faults(loss=0.5))
    for _ in range(3):
        for i in range(8):
            pair.link.send(big(i, (1 << 20) - 600))
        with pytest.raises(PeerBusy):
            pair.link.send(big(8, 1 << 20))
        pair.hub.step()
    assert pair.link._queued_bytes == 0
    pair.link.send(big(0, MAX_BUFFERED_BYTES + 1))  # any one message may start on an idle link


def test_what_a_killed_process_had_sent_never_arrives() -> None:
    pair = Pair()
    pair.link.send(ack(1))
    pair.a.kill()
    pair.hub.step()
    assert pair.got == []
    with pytest.raises(PeerBusy):
        pair.link.send(ack(2))


def test_what_was_sent_to_a_killed_process_reaches_its_successor() -> None:
    pair = Pair()
    lost: list[int] = []
    watcher = pair.a.link(B, on_disconnect=lambda: lost.append(pair.hub.steps))
    pair.link.send(ack(1))
    pair.b.kill()
    pair.hub.step()
    assert (pair.got, lost, watcher.connected) == ([], [1], False)
    pair.open(B)
    pair.hub.step()
    assert (pair.got, watcher.connected) == ([1], True)


def test_an_address_in_use_is_refused() -> None:
    pair = Pair()
    with pytest.raises(ConfigError, match="control port 1 on b is in use"):
        pair.open(B)
    pair.b.shut()
    pair.open(B)
