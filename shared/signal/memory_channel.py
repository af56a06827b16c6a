"""Control channels inside one process, with faults: what the tests of everything above the sockets run on.

Messages pass through the real codec. Time is counted in steps: a message sent in step t is delivered in step t + 1 or,
delayed, later. All chance comes from one ``random.Random``, so that a seed names a run.
"""

import asyncio
import heapq
import itertools
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

import msgspec

from shared.errors import ConfigError, PeerBusy
from shared.protocol.codec import Codec, encode
from shared.signal.channel import (
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

REORDER_SPAN = 8
"""A reordered message is overtaken by up to about so many later ones of its step."""


@dataclass(frozen=True)
class Faults:
    """Probabilities per message, and the longest extra delay in steps (uniform from 0)."""

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    max_delay_steps: int = 0


class MemoryHub:
    """The network. ``faults`` may be replaced at any time; with ``auto`` a step runs at each turn of the event loop."""

    def __init__(self, rng: random.Random | None = None, faults: Faults = Faults(), *, auto: bool = False) -> None:
        self.faults = faults
        self.steps = 0
        self._rng = rng or random.Random(0)
        self._auto, self._scheduled = auto, False
        self._inboxes: dict[str, MemoryChannel[Any]] = {}
        self._links: dict[str, set[MemoryLink]] = {}
        self._flights: list[tuple[int, float, int, Callable[[], None]]] = []
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self._count = itertools.count()
        self._ports = itertools.count(49152)

    def __len__(self) -> int:
        """How many deliveries are on their way; those for absent peers are not counted."""
        return len(self._flights)

    def open(self, bind: str, codec: Codec[M], handler: Handler[M], *, name: str) -> "MemoryChannel[M]":
        """Raises ConfigError where the address is malformed or in use."""
        check_address(bind)
        host, _, port = bind.removeprefix("tcp://").rpartition(":")
        address = f"tcp://{host}:{next(self._ports)}" if bind.startswith("tcp://") and port == "0" else bind
        if address in self._inboxes:
            raise ConfigError(f"control port {port} on {host} is in use by another channel")
        channel = MemoryChannel(self, address, Inbox(codec, handler, name))
        self._inboxes[address] = channel
        for arrive in self._waiting.pop(address, []):
            self._fly(arrive)
        return channel

    def step(self) -> int:
        """Deliver all that is due in the next step; returns how many."""
        self.steps += 1
        delivered = 0
        while self._flights and self._flights[0][0] <= self.steps:
            heapq.heappop(self._flights)[3]()
            delivered += 1
        return delivered

    def deliver_next(self) -> bool:
        """Deliver one, moving on to its step; False where none is on its way."""
        if not self._flights:
            return False
        due, _, _, arrive = heapq.heappop(self._flights)
        self.steps = max(self.steps, due)
        arrive()
        return True

    def inject(self, address: str, frames: Sequence[bytes]) -> None:
        """Whatever frames, from nobody."""
        self._fly(partial(self._arrive, address, frames, None))

    def _present(self, address: str) -> bool:
        return address in self._inboxes

    def _send(self, link: "MemoryLink", frames: Sequence[bytes]) -> None:
        arrive = partial(self._arrive, link.address, frames, link)
        link._queued += 1
        link._queued_bytes += sum(map(len, frames))
        if self._present(link.address) and self._rng.random() < self.faults.loss:
            self._fly(partial(link._sent, frames))
            return
        self._fly(arrive)
        if self._rng.random() < self.faults.duplicate:
            self._fly(partial(self._arrive, link.address, frames, None))

    def _fly(self, arrive: Callable[[], None]) -> None:
        due = self.steps + 1 + self._rng.randint(0, self.faults.max_delay_steps)
        number = next(self._count)
        overtaken = self._rng.random() * REORDER_SPAN if self._rng.random() < self.faults.reorder else 0.0
        heapq.heappush(self._flights, (due, number + overtaken, number, arrive))
        self._schedule()

    def _arrive(self, address: str, frames: Sequence[bytes], link: "MemoryLink | None") -> None:
        channel = self._inboxes.get(address)
        if link is not None and link._killed:
            return
        if channel is None:
            self._waiting.setdefault(address, []).append(partial(self._arrive, address, frames, link))
            return
        if link is not None:
            link._sent(frames)
        channel._inbox.deliver(frames)

    def _leave(self, channel: "MemoryChannel[Any]") -> None:
        if self._inboxes.get(channel.address) is channel:
            del self._inboxes[channel.address]
            for link in sorted(self._links.get(channel.address, ()), key=lambda link: link._number):
                self._fly(link._on_lost)

    def _schedule(self) -> None:
        if self._auto and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._auto_step)

    def _auto_step(self) -> None:
        self._scheduled = False
        self.step()
        if self._flights:
            self._schedule()


class MemoryLink:
    """See ``channel.Link``."""

    def __init__(self, hub: MemoryHub, address: str, counters: ChannelCounters, on_disconnect: OnDisconnect) -> None:
        self.address = address
        self.closed = False
        self._hub, self._counters, self._on_disconnect = hub, counters, on_disconnect
        self._number = next(hub._count)
        self._queued = self._queued_bytes = 0
        self._killed = False
        hub._links.setdefault(address, set()).add(self)

    @property
    def connected(self) -> bool:
        return not self.closed and self._hub._present(self.address)

    def send(self, message: msgspec.Struct) -> None:
        if self.closed:
            raise PeerBusy(f"the link to {self.address} is closed")
        frames = encode(message)
        too_much = self._queued_bytes + sum(map(len, frames)) > MAX_BUFFERED_BYTES
        too_many = not self.connected and self._queued >= MAX_QUEUED
        if self._queued and (too_much or too_many):
            self._counters.refused_busy += 1
            raise PeerBusy(f"peer {self.address} is absent or slow: {self._queued_bytes} bytes wait for it")
        self._hub._send(self, frames)
        self._counters.sent += 1

    def shut(self) -> None:
        """``close`` without an event loop; what was sent stays on its way."""
        self.closed = True
        self._hub._links[self.address].discard(self)

    async def close(self) -> None:
        self.shut()

    def _sent(self, frames: Sequence[bytes]) -> None:
        self._queued -= 1
        self._queued_bytes -= sum(map(len, frames))

    def _on_lost(self) -> None:
        if self.closed or self._on_disconnect is None:
            return
        try:
            self._on_disconnect()
        except (Exception, asyncio.CancelledError):
            self._counters.handler_errors += 1
            log.warning("handling the loss of %s failed", self.address, exc_info=True)


class MemoryChannel(Generic[M]):
    """See ``channel.Channel``; made by ``MemoryHub.open``. The calls that are not ``async`` need no event loop."""

    def __init__(self, hub: MemoryHub, address: str, inbox: Inbox[M]) -> None:
        self.address = address
        self._hub, self._inbox = hub, inbox
        self._links: list[MemoryLink] = []
        self._closed = False

    @property
    def counters(self) -> ChannelCounters:
        return self._inbox.counters

    def link(self, address: str, *, on_disconnect: OnDisconnect = None) -> MemoryLink:
        check_address(address)
        if self._closed:
            raise PeerBusy(f"cannot connect to {address}: the channel is closed")
        link = MemoryLink(self._hub, address, self.counters, on_disconnect)
        self._links.append(link)
        return link

    async def connect(self, address: str, *, on_disconnect: OnDisconnect = None) -> MemoryLink:
        return self.link(address, on_disconnect=on_disconnect)

    def shut(self) -> None:
        """``close`` without an event loop."""
        self._closed = True
        self._hub._leave(self)
        for link in self._links:
            link.shut()

    def kill(self) -> None:
        """The process dies: like ``shut``, and what it had sent that has not arrived never does."""
        self.shut()
        for link in self._links:
            link._killed = True

    async def close(self) -> None:
        self.shut()


async def open_memory_channel(
    hub: MemoryHub, bind: str, codec: Codec[M], handler: Handler[M], *, name: str
) -> MemoryChannel[M]:
    return hub.open(bind, codec, handler, name=name)
