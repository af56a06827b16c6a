"""Control channels over ZeroMQ: a bound PULL socket is the inbox, each link is a connected PUSH socket.

The one file that knows aiozmq and zmq. What it does about their traps:

- aiozmq stops reading after an exception in ``msg_received``: nothing escapes from ours.
- aiozmq buffers writes without bound: ``send`` looks at its buffer first. Below that, libzmq holds up to MAX_QUEUED
  messages a link, and counts them rather than bytes.
- aiozmq leaves its reader on a socket whose bind or connect failed: sockets are bound and connected before it comes.
- aiozmq's own monitor lives in the global context: ours is made here, in the channel's.
- Closing a ZeroMQ socket returns before its messages are out, and what is not out when the process ends is lost. Each
  channel has a context of its own, whose end is awaited: that is when the last message has been handed to the kernel.

A restarted peer gets what was queued for its predecessor; a message half sent when the connection broke is gone.
libzmq drops the connection of a peer that sends an oversized frame; the peer's own socket connects again.
"""

import asyncio
import errno
import logging
import struct
import time
from collections.abc import Callable
from typing import Any, Generic

import aiozmq
import msgspec
import zmq

from shared.errors import ConfigError, PeerBusy
from shared.protocol.codec import MAX_MESSAGE_BYTES, Codec, encode
from shared.signal.channel import (
    LINGER_S,
    MAX_BUFFERED_BYTES,
    MAX_QUEUED,
    ChannelCounters,
    Handler,
    M,
    OnDisconnect,
    check_address,
)
from shared.signal.inbox import Inbox

log = logging.getLogger(__name__)

Frames = list[bytes]

_OPTIONS = {
    zmq.SNDHWM: MAX_QUEUED,
    zmq.RCVHWM: MAX_QUEUED,
    zmq.LINGER: int(LINGER_S * 1000),
    zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 500,  # decode's GRACE_S counts on finding a restarted peer in this time
    zmq.CONNECT_TIMEOUT: 2000,  # else a peer behind a dead route is tried every two minutes
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_MAXRT: 15_000,  # unacknowledged data, which keep-alive does not cover
}


class _Endpoint:
    """One socket under aiozmq and the end of it. aiozmq calls the methods without an underscore."""

    def __init__(self, name: str, socket: "zmq.Socket[bytes]", on_frames: Callable[[Frames], None]) -> None:
        self._name, self._socket, self._on_frames = name, socket, on_frames
        self._drain_until_s: float | None = None
        self.transport: Any = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, name: str, socket: "zmq.Socket[bytes]", on_frames: Callable[[Frames], None]) -> "_Endpoint":
        endpoint = cls(name, socket, on_frames)
        kind = socket.getsockopt(zmq.TYPE)
        endpoint.transport, _ = await aiozmq.create_zmq_connection(lambda: endpoint, kind, zmq_sock=socket)
        return endpoint

    @property
    def closed(self) -> bool:
        return self._drain_until_s is not None or self.ended.done()

    def connection_made(self, transport: object) -> None:
        pass

    def msg_received(self, frames: Frames) -> None:
        if not self.closed:
            self._on_frames(frames)

    def pause_writing(self) -> None:
        pass

    def resume_writing(self) -> None:
        pass

    def connection_lost(self, error: Exception | None) -> None:
        """Called once, before aiozmq closes the socket; libzmq may use what is left of the time to drain."""
        if error is not None:
            log.warning("%s: the socket broke: %s", self._name, error)
        left_s = 0.0 if self._drain_until_s is None else max(0.0, self._drain_until_s - time.monotonic())
        self._socket.setsockopt(zmq.LINGER, int(left_s * 1000))
        if not self.ended.done():
            self.ended.set_result(None)

    async def close(self, drain_s: float) -> None:
        """Give aiozmq's buffer and then libzmq's queue ``drain_s`` together; idempotent."""
        if self._drain_until_s is None:
            self._drain_until_s = time.monotonic() + drain_s
            self.transport.close()
        done, _ = await asyncio.wait([self.ended], timeout=max(0.0, self._drain_until_s - time.monotonic()))
        if not done:
            self.transport.abort()
            await asyncio.wait([self.ended])


class ZmqLink:
    """See ``channel.Link``."""

    def __init__(self, address: str, counters: ChannelCounters, on_disconnect: OnDisconnect) -> None:
        self.address = address
        self.connected = False
        self._counters, self._on_disconnect = counters, on_disconnect
        self._socket: zmq.Socket[bytes]
        self._endpoint: _Endpoint
        self._monitor: _Endpoint

    @classmethod
    async def open(
        cls, context: "zmq.Context[Any]", address: str, counters: ChannelCounters, on_disconnect: OnDisconnect
    ) -> "ZmqLink":
        link = cls(address, counters, on_disconnect)
        made: list[zmq.Socket[bytes]] = []
        try:
            made += [_socket(context, zmq.PUSH, address)]
            made += [_socket(context, zmq.PAIR, "")]
            link._socket, watch = made
            events = f"inproc://monitor-{id(link)}"
            watch.connect(events)  # first: no event ever comes where an inproc socket connects after the bind
            link._socket.monitor(events, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            link._socket.connect(address)
        except zmq.ZMQError as error:
            for socket in made:
                socket.close(linger=0)
            raise ConfigError(f"cannot connect to control address {address!r}: {_reason(error)}") from error
        link._monitor = await _Endpoint.open(f"monitor of {address}", watch, link._on_event)
        link._endpoint = await _Endpoint.open(f"link to {address}", link._socket, lambda frames: None)
        return link

    @property
    def closed(self) -> bool:
        return self._endpoint.ended.done()

    def send(self, message: msgspec.Struct) -> None:
        if self._endpoint.closed:
            raise PeerBusy(f"the link to {self.address} is closed")
        frames = encode(message)
        waiting_bytes: int = self._endpoint.transport.get_write_buffer_size()
        size_bytes = len(frames[0]) + len(frames[1])
        # Something waits only once libzmq's own queue is full, so that any message may start on an idle link.
        if waiting_bytes and (not self.connected or waiting_bytes + size_bytes > MAX_BUFFERED_BYTES):
            self._counters.refused_busy += 1
            state = "is slow" if self.connected else "is absent"
            raise PeerBusy(f"peer {self.address} {state}: {waiting_bytes} bytes wait for it")
        self._endpoint.transport.write(frames)
        self._counters.sent += 1

    async def close(self) -> None:
        if not self._endpoint.closed:
            self._socket.disable_monitor()
        await asyncio.gather(self._endpoint.close(LINGER_S), self._monitor.close(0.0))

    def _on_event(self, frames: Frames) -> None:
        event, _ = struct.unpack("=HI", frames[0])
        was_connected, self.connected = self.connected, event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if was_connected and not self.connected and self._on_disconnect is not None:
            try:
                self._on_disconnect()
            except (Exception, asyncio.CancelledError):
                self._counters.handler_errors += 1
                log.warning("handling the loss of %s failed", self.address, exc_info=True)


class ZmqChannel(Generic[M]):
    """See ``channel.Channel``; made by ``open_channel``."""

    def __init__(self, context: "zmq.Context[Any]", address: str, inbox: Inbox[M], endpoint: _Endpoint) -> None:
        self.address = address
        self._context, self._inbox, self._endpoint = context, inbox, endpoint
        self._links: set[ZmqLink] = set()
        self._opening: set[asyncio.Task[ZmqLink]] = set()
        self._closing: asyncio.Task[None] | None = None

    @property
    def counters(self) -> ChannelCounters:
        return self._inbox.counters

    async def connect(self, address: str, *, on_disconnect: OnDisconnect = None) -> ZmqLink:
        check_address(address)
        if self._closing is not None:
            raise PeerBusy(f"cannot connect to {address}: the channel is closed")
        # A task of its own: cancelled half-way, aiozmq would leave a socket that nobody closes.
        task = asyncio.ensure_future(ZmqLink.open(self._context, address, self.counters, on_disconnect))
        self._opening.add(task)
        task.add_done_callback(self._opened)
        return await asyncio.shield(task)

    def _opened(self, task: "asyncio.Task[ZmqLink]") -> None:
        self._opening.discard(task)
        if task.exception() is None:
            self._links = {link for link in self._links if not link.closed} | {task.result()}

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._endpoint.close(0.0)
        await asyncio.gather(*self._opening, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links))
        await asyncio.to_thread(self._context.destroy)  # waits for what libzmq still has to send, LINGER_S at most


async def open_channel(bind: str, codec: Codec[M], handler: Handler[M], *, name: str) -> ZmqChannel[M]:
    """Listen on ``tcp://host:port`` (port 0: any) or ``ipc://path``. Raises ConfigError where that is not possible.

    An ipc path that another process listens on is taken over, as ZeroMQ does: choose a private one.
    """
    check_address(bind)
    context: zmq.Context[Any] = zmq.Context()
    try:
        socket = _socket(context, zmq.PULL, bind)
        socket.bind(bind)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise ConfigError(_bind_failure(bind, error)) from error
    inbox = Inbox(codec, handler, name)
    endpoint = await _Endpoint.open(f"{name} inbox", socket, inbox.deliver)
    return ZmqChannel(context, socket.getsockopt_string(zmq.LAST_ENDPOINT), inbox, endpoint)


def _socket(context: "zmq.Context[Any]", kind: int, address: str) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = context.socket(kind)
    for option, value in _OPTIONS.items():
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.IPV6, int("[" in address))  # only there: with it a name may resolve to ::1 where none listens
    return socket


def _bind_failure(bind: str, error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE and bind.startswith("tcp://"):
        host, port = bind.removeprefix("tcp://").rsplit(":", 1)
        return f"control port {port} on {host} is in use by another process"
    return f"cannot listen on control address {bind!r}: {_reason(error)}"


def _reason(error: zmq.ZMQError) -> str:
    return str(error.strerror).split(" (addr=")[0]  # pyzmq repeats the address
