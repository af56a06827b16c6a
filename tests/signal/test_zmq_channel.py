"""What only real sockets can do wrong."""

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import zmq

from shared.errors import ConfigError
from shared.protocol.codec import HEADER, MAX_MESSAGE_BYTES, Codec
from shared.protocol.messages import ToPrefill
from shared.signal.channel import MAX_BUFFERED_BYTES, MAX_QUEUED
from shared.signal.zmq_channel import open_channel
from tests.signal.nets import ZmqNet, ack, big, fill, until


def ignore(message: ToPrefill) -> None:
    raise AssertionError(f"nobody was to send {message}")


def open_files() -> list[str]:
    """What this process has open, by kind rather than by number."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            names.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
    return sorted(names)


async def test_a_port_in_use_is_one_clear_line(tcp: ZmqNet) -> None:
    taken = (await tcp.open(ignore)).address
    port = taken.rsplit(":", 1)[1]
    with pytest.raises(ConfigError) as caught:
        await tcp.open(ignore, taken)
    assert caught.value.message == f"control port {port} on 127.0.0.1 is in use by another process"


@pytest.mark.parametrize(
    ("bind", "reason"),
    [
        ("tcp://192.0.2.1:8998", "Cannot assign requested address"),
        ("tcp://no-such-host.invalid:8998", "No such device"),
        ("ipc:///no/such/folder/socket", "No such file or directory"),
    ],
)
async def test_an_address_that_cannot_be_bound_is_one_clear_line(tcp: ZmqNet, bind: str, reason: str) -> None:
    before = open_files()
    with pytest.raises(ConfigError) as caught:
        await tcp.open(ignore, bind)
    assert caught.value.message.startswith(f"cannot listen on control address {bind!r}: {reason}")
    assert "\n" not in caught.value.message
    assert open_files() == before


async def test_a_peer_that_does_not_read_costs_bounded_memory_and_loses_nothing(tcp: ZmqNet) -> None:
    slow = tcp.stranger(zmq.PULL)
    slow.setsockopt(zmq.RCVHWM, 1)
    port = slow.bind_to_random_port("tcp://127.0.0.1")
    a = await tcp.open(ignore)
    link = await a.connect(f"tcp://127.0.0.1:{port}")
    await until(lambda: link.connected)
    size_bytes = 256 << 10
    sent = await fill(link, size_bytes)
    # our buffer, libzmq's queue, and what two kernels hold
    assert sent * size_bytes <= MAX_BUFFERED_BYTES + MAX_QUEUED * size_bytes + (24 << 20)
    codec = Codec[ToPrefill](ToPrefill)
    for i in range(sent):
        await until(lambda: slow.poll(0))
        assert codec.decode(slow.recv_multipart()) == big(i, size_bytes)
    link.send(ack(1))  # there is room again
    await until(lambda: slow.poll(0))
    assert codec.decode(slow.recv_multipart()) == ack(1)
    assert a.counters.refused_busy == 1


async def test_close_gives_up_on_a_peer_that_does_not_read(tcp: ZmqNet) -> None:
    slow = tcp.stranger(zmq.PULL)
    slow.setsockopt(zmq.RCVHWM, 1)
    port = slow.bind_to_random_port("tcp://127.0.0.1")
    a = await tcp.open(ignore)
    link = await a.connect(f"tcp://127.0.0.1:{port}")
    await until(lambda: link.connected)
    await fill(link, 1 << 20)
    async with asyncio.timeout(5):
        await a.close()
    assert link.closed  # aiozmq has let go of it


async def test_nothing_is_delivered_once_close_has_begun(tcp: ZmqNet) -> None:
    late: list[bool] = []
    closing: list[asyncio.Future[None]] = []

    def handler(message: ToPrefill) -> None:
        late.append(b._endpoint.closed)
        closing.append(asyncio.ensure_future(b.close()))

    b = await tcp.open(handler)
    link = await (await tcp.open(ignore)).connect(b.address)
    await until(lambda: link.connected)
    for i in range(50):
        link.send(ack(i))
    await until(lambda: closing)
    await closing[0]
    assert len(late) < 50
    assert not any(late)


@pytest.mark.parametrize("turns", [1, 2, 3, 4])
async def test_a_link_that_is_given_up_while_it_opens(
    tcp: ZmqNet, turns: int, caplog: pytest.LogCaptureFixture
) -> None:
    a = await tcp.open(ignore)
    task = asyncio.ensure_future(a.connect(tcp.free_address()))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(5):
        await a.close()
    assert [r for r in caplog.records if r.name == "asyncio"] == []


async def last_words(address: str) -> None:
    """What a process says that ends right after ``close``."""
    channel = await open_channel("tcp://127.0.0.1:0", Codec[ToPrefill](ToPrefill), ignore, name="test")
    link = await channel.connect(address)
    await until(lambda: link.connected)
    for i in range(60):
        link.send(big(i, 400_000))
    print("closing", flush=True)
    await channel.close()
    os._exit(0)


async def test_what_close_has_sent_survives_the_end_of_the_process(tcp: ZmqNet) -> None:
    slow = tcp.stranger(zmq.PULL)
    slow.setsockopt(zmq.RCVHWM, 1)
    address = f"tcp://127.0.0.1:{slow.bind_to_random_port('tcp://127.0.0.1')}"
    program = f"import asyncio; from tests.signal import test_zmq_channel as t; asyncio.run(t.last_words({address!r}))"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert child.stdout is not None
    await child.stdout.readline()
    await asyncio.sleep(0.05)  # more than it needs to end if it does not wait; less than LINGER_S
    codec = Codec[ToPrefill](ToPrefill)
    for i in range(60):
        await until(lambda: slow.poll(0))
        assert codec.decode(slow.recv_multipart()) == big(i, 400_000)
    assert await child.wait() == 0


async def test_close_leaves_no_socket_no_task_and_no_file(tcp: ZmqNet) -> None:
    b = await tcp.open(lambda message: None)
    nobody = tcp.free_address()
    before, tasks = open_files(), asyncio.all_tasks()
    a = await tcp.open(ignore)
    present, absent = await a.connect(b.address), await a.connect(nobody)
    await until(lambda: present.connected)
    present.send(ack(1))
    absent.send(ack(2))
    assert len(open_files()) > len(before)
    await a.close()
    assert asyncio.all_tasks() == tasks
    await until(lambda: open_files() == before)  # b's end of the connection closes in its own time


async def test_an_oversized_frame_ends_its_connection_and_nothing_else(tcp: ZmqNet) -> None:
    got: list[ToPrefill] = []
    b = await tcp.open(got.append)
    link = await (await tcp.open(ignore)).connect(b.address)
    await until(lambda: link.connected)
    hostile = tcp.stranger(zmq.PUSH)
    events = hostile.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    hostile.connect(b.address)
    hostile.send_multipart([HEADER, bytes(MAX_MESSAGE_BYTES + 1)])
    await until(lambda: events.poll(0))
    assert (b.counters.received, b.counters.malformed) == (0, 0)
    link.send(ack(1))
    await until(lambda: got == [ack(1)])
    hostile.send_multipart([b"noise"])  # it may come back
    await until(lambda: b.counters.malformed == 1)
    hostile.disable_monitor()
    events.close()


async def test_a_stranger_that_speaks_no_zeromq_harms_nothing(tcp: ZmqNet) -> None:
    got: list[ToPrefill] = []
    b = await tcp.open(got.append)
    _, writer = await asyncio.open_connection("127.0.0.1", int(b.address.rsplit(":", 1)[1]))
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    link = await (await tcp.open(ignore)).connect(b.address)
    link.send(ack(1))
    await until(lambda: got == [ack(1)])


async def test_a_killed_process_is_noticed_and_its_successor_is_found(tcp: ZmqNet) -> None:
    address = tcp.free_address()
    program = f"import zmq; s = zmq.Context().socket(zmq.PULL); s.bind({address!r}); s.recv()"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    lost = asyncio.Event()
    link = await (await tcp.open(ignore)).connect(address, on_disconnect=lost.set)
    await until(lambda: link.connected)
    child.kill()
    async with asyncio.timeout(5):
        await lost.wait()
    assert not link.connected
    await child.wait()
    got: list[ToPrefill] = []
    await tcp.open(got.append, address)
    await until(lambda: link.connected)
    link.send(ack(3))
    await until(lambda: got == [ack(3)])


async def test_every_connection_is_noticed(tcp: ZmqNet) -> None:
    """A monitor that misses an event would leave a link "absent" for good."""
    b = await tcp.open(lambda message: None)
    lost: list[int] = []
    a = await tcp.open(ignore)
    links = [await a.connect(b.address, on_disconnect=lambda: lost.append(1)) for _ in range(20)]
    await until(lambda: all(link.connected for link in links))
    await b.close()
    await until(lambda: len(lost) == 20)
    assert not any(link.connected for link in links)


@contextmanager
def room_for_files(count: int) -> Iterator[None]:
    """This process can open so many more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    files: list[int] = []
    try:
        with suppress(OSError):
            while True:
                files.append(os.open("/", os.O_RDONLY))
        for _ in range(count):
            os.close(files.pop())
        yield
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("count", [0, 1, 2])  # a link takes three
async def test_too_many_links_are_an_error_and_no_crash(tcp: ZmqNet, count: int) -> None:
    a = await tcp.open(ignore)
    nobody = tcp.free_address()
    with room_for_files(count), pytest.raises(ConfigError, match="Too many open files"):
        await a.connect(nobody)
    await a.connect(nobody)


async def test_ipv6(tcp: ZmqNet) -> None:
    got: list[ToPrefill] = []
    b = await open_channel("tcp://[::1]:0", Codec[ToPrefill](ToPrefill), got.append, name="test")
    assert b.address.startswith("tcp://[::1]:")
    (await (await tcp.open(ignore)).connect(b.address)).send(ack(1))
    await until(lambda: got == [ack(1)])
    await b.close()
