"""The few names that everything else is keyed by. All are plain values; the types only keep them apart."""

import os
import time
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
"""One client request inside one decode service; made by its front, never by the client."""

Room = NewType("Room", int)
"""One request's hand-over session: 0 … 2**63-1. Chosen by decode in direct mode, by the router in routed mode."""

Ticket = NewType("Ticket", int)
"""One try at handing a room over. Strictly increasing within a decode epoch, never used twice in it."""

Epoch = NewType("Epoch", int)
"""One incarnation of an engine process. A later incarnation on the same machine has a larger one."""

PeerAddress = NewType("PeerAddress", str)
"""Where a peer's control socket listens, as ``tcp://host:port``."""


class AttemptKey(NamedTuple):
    """What every message about a hand-over names, on both sides."""

    decode_epoch: Epoch
    room: Room
    ticket: Ticket


def new_epoch() -> Epoch:
    """Nanoseconds since 1970 with the low 16 bits replaced by the process id, so that two starts never share one."""
    return Epoch((time.time_ns() & ~0xFFFF) | (os.getpid() & 0xFFFF))
