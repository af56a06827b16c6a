"""The two kinds of channel behind one face, for the contract tests."""

import asyncio
import itertools
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import zmq

from shared.errors import PeerBusy
from shared.protocol.codec import Codec
from shared.protocol.messages import Ack, Prefill, Sampling, ToPrefill
from shared.signal.channel import Channel, Handler, Link
from shared.signal.memory_channel import MemoryHub, open_memory_channel
from shared.signal.zmq_channel import ZmqChannel, open_channel

T = TypeVar("T")


def ack(ticket: int) -> Ack:
    return Ack(epoch=1, to_epoch=2, room=3, ticket=ticket)  # type: ignore[arg-type]


def big(ticket: int, size_bytes: int) -> Prefill:
    """A message of a little more than ``size_bytes``."""
    ids = (1, 2, "", 0, 3, ticket, "r")
    return Prefill(*ids, b"x" * size_bytes, 0, b"", 0, Sampling(1), 0, False)  # type: ignore[arg-type]


async def fill(link: Link, size_bytes: int = 0) -> int:
    """Send numbered messages until the link refuses one; returns how many it took."""
    for sent in range(300):
        try:
            link.send(big(sent, size_bytes))
        except PeerBusy:
            return sent
        await asyncio.sleep(0)
    raise AssertionError("it took 300")


class Net(Protocol):
    async def open(self, handler: Handler[ToPrefill], bind: str = "") -> Channel[ToPrefill]:
        """An inbox at ``bind``, else at any free address."""
        ...

    def free_address(self) -> str:
        """An address where nobody listens."""
        ...

    def inject(self, address: str, frames: Sequence[bytes]) -> None:
        """Raw frames from a stranger."""
        ...

    async def close(self) -> None: ...


class ZmqNet:
    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind
        self._count = itertools.count()
        self._channels: list[ZmqChannel[ToPrefill]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._strangers: list[zmq.Socket[bytes]] = []

    async def open(self, handler: Handler[ToPrefill], bind: str = "") -> ZmqChannel[ToPrefill]:
        any_address = "tcp://127.0.0.1:0" if self._kind == "tcp" else self._path()
        channel = await open_channel(bind or any_address, Codec[ToPrefill](ToPrefill), handler, name="test")
        self._channels.append(channel)
        return channel

    def free_address(self) -> str:
        if self._kind == "ipc":
            return self._path()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return f"tcp://127.0.0.1:{probe.getsockname()[1]}"

    def stranger(self, kind: int, address: str = "") -> "zmq.Socket[bytes]":
        """A socket with none of our options, connected if an address is given."""
        stranger: zmq.Socket[bytes] = self._context.socket(kind)
        self._strangers.append(stranger)
        if address:
            stranger.connect(address)
        return stranger

    def inject(self, address: str, frames: Sequence[bytes]) -> None:
        stranger = self.stranger(zmq.PUSH, address)
        stranger.send_multipart(frames)
        stranger.close(linger=1000)

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))
        self._context.destroy(linger=0)

    def _path(self) -> str:
        return f"ipc://{self._folder}/{next(self._count)}"


class MemoryNet:
    def __init__(self) -> None:
        self._hub = MemoryHub(auto=True)
        self._ports = itertools.count(1)

    async def open(self, handler: Handler[ToPrefill], bind: str = "") -> Channel[ToPrefill]:
        codec = Codec[ToPrefill](ToPrefill)
        return await open_memory_channel(self._hub, bind or "tcp://127.0.0.1:0", codec, handler, name="test")

    def free_address(self) -> str:
        return f"tcp://absent:{next(self._ports)}"

    def inject(self, address: str, frames: Sequence[bytes]) -> None:
        self._hub.inject(address, frames)

    async def close(self) -> None:
        pass


async def until(condition: Callable[[], T], limit_s: float = 10.0) -> T:
    """What ``condition`` returns as soon as it is true; fails the test after ``limit_s``."""
    async with asyncio.timeout(limit_s):
        while not (value := condition()):
            await asyncio.sleep(0.002)
        return value
