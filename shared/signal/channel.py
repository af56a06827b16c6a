"""The contract of a control channel: small messages between event loops, at most once, no order promised.

One channel has one inbox (a bound address) and any number of outgoing links. Both implementations (``zmq_channel``,
``memory_channel``) pass the same contract tests.

- A message may be lost (peer absent at close, reconnect); it is never delivered in part, and never to another address.
- The inbox handler is called on the loop, one message at a time. What it raises is logged and counted, and the next
  message is delivered all the same. Frames that do not decode are counted and logged at a limited rate.
- ``send`` never blocks and never waits: past ``MAX_BUFFERED_BYTES`` for a link, or ``MAX_QUEUED`` messages while its
  peer is absent, it raises PeerBusy and sends nothing.
- A link to an absent peer reconnects by itself, also to a new process on the same address. What was queued before goes
  to whoever listens there then, so that a message must say whom it is meant for (epochs do).
- ``close`` sends what is buffered for at most ``LINGER_S`` and leaves no open socket, task or file.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from shared.errors import ConfigError

M = TypeVar("M")
M_co = TypeVar("M_co", covariant=True)
Handler = Callable[[M], None]
OnDisconnect = Callable[[], None] | None

MAX_BUFFERED_BYTES = 8 << 20
MAX_QUEUED = 64
LINGER_S = 0.5

_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\s/:\[\]]+):(?P<port>\d{1,5})|ipc://\S+")


def check_address(address: str) -> None:
    """Raises ConfigError unless it is ``tcp://host:port`` or ``ipc://path``; libzmq lets port 99999 pass."""
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"] or 0) > 65535:
        raise ConfigError(f"control address {address!r} is malformed: expected tcp://HOST:PORT or ipc://PATH")


@dataclass
class ChannelCounters:
    received: int = 0
    malformed: int = 0
    handler_errors: int = 0
    sent: int = 0
    refused_busy: int = 0


class Link(Protocol):
    """One outgoing direction, to one address."""

    @property
    def address(self) -> str: ...

    @property
    def connected(self) -> bool:
        """Whether the peer is there, as far as this side has noticed; False until the first contact."""
        ...

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message. Raises PeerBusy (also after ``close``), or MessageError if it is over the size limit."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...


class Channel(Protocol, Generic[M_co]):
    """One inbox and its links."""

    @property
    def address(self) -> str:
        """The bound address, with the real port where 0 was asked for."""
        ...

    @property
    def counters(self) -> ChannelCounters: ...

    async def connect(self, address: str, *, on_disconnect: OnDisconnect = None) -> Link:
        """A link to that address; succeeds whether or not anyone listens there.

        Raises ConfigError if it is malformed or this process has no file left, PeerBusy after ``close``.
        ``on_disconnect`` is called on the loop each time an established connection ends other than by our ``close``:
        at once when the peer's process dies, late or never when its machine or the network does.
        """
        ...

    async def close(self) -> None:
        """Close the inbox and all links; idempotent."""
        ...
