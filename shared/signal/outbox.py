"""Fire-and-forget sending to many addresses: links are made at the first message and kept.

For messages that the protocol repeats anyway: what a busy link refuses is counted and dropped.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from shared.errors import HandoffError, PeerBusy
from shared.limited_log import RateLimitedLog
from shared.signal.channel import Channel, Link

log = logging.getLogger(__name__)

LOG_PERIOD_S = 10.0
MAX_LINKS = 64
"""A control port may be told any reply address; beyond so many, the one used longest ago is closed."""


class Outbox:
    """``on_disconnect`` is called with the address each time an established connection ends."""

    def __init__(self, channel: Channel[Any], on_disconnect: Callable[[str], None]) -> None:
        self._channel, self._on_disconnect = channel, on_disconnect
        self._links: dict[str, Link] = {}
        self._opening: dict[str, list[msgspec.Struct]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.dropped = 0
        self._limited = RateLimitedLog(log, LOG_PERIOD_S)

    def send(self, address: str, message: msgspec.Struct) -> None:
        """Queue it now, or as soon as the link is made. Never blocks, never raises for a peer's state."""
        if link := self._links.pop(address, None):
            self._links[address] = link  # most recently used last
            self._send(link, message)
        elif address in self._opening:
            self._opening[address].append(message)
        elif len(self._opening) >= MAX_LINKS:
            self.dropped += 1
        else:
            self._opening[address] = [message]
            self._spawn(self._open(address))

    async def close(self) -> None:
        """Links still being made are given up; open ones belong to the channel and close with it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _open(self, address: str) -> None:
        try:
            link = await self._channel.connect(address, on_disconnect=partial(self._on_disconnect, address))
        except HandoffError as error:
            self.dropped += len(self._opening.pop(address))
            self._limited.warning("cannot send", "cannot send to %s: %s", address, error.message)
            return
        if len(self._links) >= MAX_LINKS:
            oldest = next(iter(self._links))
            self._spawn(self._links.pop(oldest).close())
        self._links[address] = link
        for message in self._opening.pop(address):
            self._send(link, message)

    def _send(self, link: Link, message: msgspec.Struct) -> None:
        try:
            link.send(message)
        except PeerBusy:
            self.dropped += 1

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
