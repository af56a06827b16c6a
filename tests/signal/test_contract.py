"""The contract in ``shared/signal/channel.py``, for ZeroMQ over tcp and ipc and for the channel in memory."""

import asyncio
import logging
from typing import Any

import pytest

from shared.errors import ConfigError, MessageError, PeerBusy
from shared.protocol.codec import HEADER, MAX_MESSAGE_BYTES, encode
from shared.protocol.messages import Registered, ToPrefill
from shared.signal.channel import MAX_QUEUED
from tests.signal.nets import Net, ack, big, fill, until


def ignore(message: ToPrefill) -> None:
    raise AssertionError(f"nobody was to send {message}")


async def test_messages_arrive_whole_in_both_directions(net: Net) -> None:
    got_a: list[ToPrefill] = []
    got_b: list[ToPrefill] = []
    a, b = await net.open(got_a.append), await net.open(got_b.append)
    to_b, to_a = await a.connect(b.address), await b.connect(a.address)
    sent = [ack(i) for i in range(300)]
    for message in sent:
        await until(lambda: to_b.connected)
        to_b.send(message)
    to_a.send(big(7, 100_000))
    await until(lambda: len(got_b) == 300 and len(got_a) == 1)
    assert got_b == sent
    assert got_a == [big(7, 100_000)]
    assert (a.counters.sent, a.counters.received) == (300, 1)
    assert (b.counters.sent, b.counters.received) == (1, 300)
    assert to_b.address == b.address


async def test_port_zero_is_replaced_by_the_real_one(net: Net) -> None:
    a, b = await net.open(ignore), await net.open(ignore)
    assert not a.address.endswith(":0")
    assert a.address != b.address


async def test_each_link_reaches_its_own_address_only(net: Net) -> None:
    got: list[list[ToPrefill]] = [[], []]
    inboxes = [await net.open(mine.append) for mine in got]
    a = await net.open(ignore)
    links = [await a.connect(inbox.address) for inbox in inboxes]
    for i in range(40):
        links[i % 2].send(ack(i))
    await until(lambda: len(got[0]) == len(got[1]) == 20)
    assert got == [[ack(i) for i in range(0, 40, 2)], [ack(i) for i in range(1, 40, 2)]]


@pytest.mark.parametrize("error", [RuntimeError("no"), asyncio.CancelledError()], ids=["Exception", "CancelledError"])
async def test_a_failing_handler_never_silences_the_inbox(
    net: Net, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[ToPrefill] = []

    def handler(message: ToPrefill) -> None:
        got.append(message)
        if len(got) <= 20:
            raise error

    b = await net.open(handler)
    link = await (await net.open(ignore)).connect(b.address)
    for i in range(22):
        link.send(ack(i))
    await until(lambda: len(got) == 22)
    assert (b.counters.handler_errors, b.counters.received, b.counters.malformed) == (20, 22, 0)
    lines = [r for r in caplog.records if r.name == "shared.signal.inbox"]
    assert [r.getMessage() for r in lines] == ["test: handling Ack failed"]  # one line, not twenty
    assert lines[0].exc_info is not None


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b""],
        [HEADER],
        [HEADER, b""],
        [HEADER, b"\xc1"],
        [HEADER, b"x", b"y"],
        [b"HO\xff\x7f", encode(ack(1))[1]],
        [b"GE" + HEADER[2:], encode(ack(1))[1]],
        encode(Registered(epoch=1, to_epoch=2, registration=1, capacity={})),  # type: ignore[arg-type]
    ],
    ids=["empty", "all empty", "1 frame", "no body", "no msgpack", "3 frames", "version", "magic", "other direction"],
)
async def test_malformed_frames_are_counted_and_the_next_message_arrives(net: Net, frames: list[bytes]) -> None:
    got: list[ToPrefill] = []
    b = await net.open(got.append)
    net.inject(b.address, frames)
    await until(lambda: b.counters.malformed == 1)
    link = await (await net.open(ignore)).connect(b.address)
    link.send(ack(5))
    await until(lambda: got == [ack(5)])
    assert (b.counters.received, b.counters.malformed) == (1, 1)


async def test_malformed_frames_are_logged_at_a_limited_rate(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    b = await net.open(ignore)
    for _ in range(50):
        net.inject(b.address, [b"noise"])
    await until(lambda: b.counters.malformed == 50)
    lines = [r for r in caplog.records if r.name == "shared.signal.inbox"]
    assert [(r.levelno, r.getMessage()) for r in lines] == [
        (logging.WARNING, "test: dropped what a peer sent: expected 2 frames, got 1")
    ]


async def test_what_is_sent_to_an_absent_peer_arrives_when_it_comes(net: Net) -> None:
    address = net.free_address()
    link = await (await net.open(ignore)).connect(address)
    assert not link.connected
    for i in range(10):
        link.send(ack(i))
    got: list[ToPrefill] = []
    await net.open(got.append, address)
    await until(lambda: len(got) == 10)
    assert got == [ack(i) for i in range(10)]
    assert link.connected


async def test_an_absent_peer_cannot_make_the_queue_grow(net: Net) -> None:
    a = await net.open(ignore)
    link = await a.connect(net.free_address())
    taken = await fill(link)
    assert MAX_QUEUED <= taken <= MAX_QUEUED + 1
    assert (a.counters.sent, a.counters.refused_busy) == (taken, 1)
    with pytest.raises(PeerBusy, match="absent"):
        link.send(ack(0))


async def test_a_link_finds_a_new_process_on_the_same_address(net: Net) -> None:
    lost = asyncio.Event()
    old = await net.open(lambda message: None)
    a = await net.open(ignore)
    link = await a.connect(old.address, on_disconnect=lost.set)
    await until(lambda: link.connected)
    await old.close()
    async with asyncio.timeout(5):
        await lost.wait()
    assert not link.connected
    got: list[ToPrefill] = []
    await net.open(got.append, old.address)
    await until(lambda: link.connected)
    link.send(ack(9))
    await until(lambda: ack(9) in got)


async def test_a_failing_on_disconnect_harms_nothing(net: Net) -> None:
    def on_disconnect() -> None:
        raise RuntimeError("no")

    old = await net.open(ignore)
    a = await net.open(ignore)
    link = await a.connect(old.address, on_disconnect=on_disconnect)
    for _ in range(2):
        await until(lambda: link.connected)
        errors = a.counters.handler_errors
        await old.close()
        await until(lambda: a.counters.handler_errors == errors + 1)  # noqa: B023
        old = await net.open(ignore, old.address)


async def test_closing_a_link_is_no_disconnect(net: Net) -> None:
    lost: list[int] = []
    b = await net.open(ignore)
    a = await net.open(ignore)
    link = await a.connect(b.address, on_disconnect=lambda: lost.append(1))
    await until(lambda: link.connected)
    await link.close()
    await b.close()
    await asyncio.sleep(0.05)
    assert lost == []


async def test_close_sends_what_is_buffered(net: Net) -> None:
    got: list[ToPrefill] = []
    b = await net.open(got.append)
    a = await net.open(ignore)
    link = await a.connect(b.address)
    await until(lambda: link.connected)
    for i in range(20):
        link.send(big(i, 100_000))
    await a.close()
    await until(lambda: len(got) == 20)
    assert got == [big(i, 100_000) for i in range(20)]


async def test_a_message_sent_before_the_first_contact_survives_a_close_at_once(net: Net) -> None:
    got: list[ToPrefill] = []
    b = await net.open(got.append)
    a = await net.open(ignore)
    (await a.connect(b.address)).send(ack(1))
    await a.close()
    await until(lambda: got == [ack(1)])


async def test_close_is_idempotent_and_ends_sending(net: Net) -> None:
    b = await net.open(ignore)
    a = await net.open(ignore)
    link = await a.connect(b.address)
    other = await a.connect(b.address)
    await link.close()
    await link.close()
    with pytest.raises(PeerBusy, match="closed"):
        link.send(ack(1))
    await asyncio.gather(a.close(), a.close())
    await a.close()
    with pytest.raises(PeerBusy, match="closed"):
        other.send(ack(1))
    with pytest.raises(PeerBusy, match="closed"):
        await a.connect(b.address)


async def test_nothing_is_delivered_after_close(net: Net) -> None:
    got: list[ToPrefill] = []
    b = await net.open(got.append)
    link = await (await net.open(ignore)).connect(b.address)
    await until(lambda: link.connected)
    for i in range(50):
        link.send(ack(i))
    await until(lambda: got)
    await b.close()
    seen = len(got)
    await asyncio.sleep(0.02)
    assert len(got) == seen


async def test_an_oversized_message_is_refused_and_nothing_is_sent(net: Net) -> None:
    got: list[ToPrefill] = []
    b = await net.open(got.append)
    a = await net.open(ignore)
    link = await a.connect(b.address)
    with pytest.raises(MessageError, match="over the limit"):
        link.send(big(1, MAX_MESSAGE_BYTES))
    link.send(ack(2))
    await until(lambda: got == [ack(2)])
    assert a.counters.sent == 1


async def test_a_message_just_under_the_limit_arrives(net: Net) -> None:
    got: list[Any] = []
    b = await net.open(got.append)
    link = await (await net.open(ignore)).connect(b.address)
    link.send(big(1, MAX_MESSAGE_BYTES - 600))
    await until(lambda: got)
    assert len(got[0].tokens) == MAX_MESSAGE_BYTES - 600


@pytest.mark.parametrize(
    "bad", ["", "127.0.0.1:1", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "tcp://a b:1", "ipc://"]
)
async def test_a_malformed_address_is_the_operators_mistake(net: Net, bad: str) -> None:
    a = await net.open(ignore)
    with pytest.raises(ConfigError, match=r"malformed: expected tcp://HOST:PORT"):
        await a.connect(bad)
