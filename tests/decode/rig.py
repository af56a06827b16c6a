"""One decode engine's decisions, one event at a time."""

from typing import Any

import numpy as np

from decode_svc.effects import Ended, Fence, Send
from decode_svc.intake import Intake
from decode_svc.peers import PeerBook
from shared.ids import Epoch, PeerAddress, RequestId, Room, Ticket
from shared.kv.layout import Buffer, Layout
from shared.kv.pages import PageAllocator
from shared.kv.slots import SlotPool
from shared.protocol import messages as m
from shared.protocol.local import Generate
from shared.protocol.machine import RequestState

LAYOUT = Layout(4, (Buffer("kv", 0, (2,), "uint8"), Buffer("kv", 1, (2,), "uint8")))
ME, P0, P1 = Epoch(5), Epoch(70), Epoch(71)
FIRST, SECOND = PeerAddress("tcp://p:0"), PeerAddress("tcp://p:1")
TIMINGS = m.Timings(0, 0, 0, 0)


class Rig:
    """One decode engine's decisions; two prefills, registered unless told otherwise."""

    def __init__(
        self, *epochs: Epoch, num_pages: int = 16, slots: int = 3, digest_every: int = 0, local: bool = False
    ) -> None:
        self.now_s = 100.0
        self.pages, self.slots = PageAllocator(num_pages), SlotPool(slots)
        self.peers = PeerBook([FIRST, SECOND], epoch=ME, reply_to=PeerAddress("tcp://d:0"), fingerprint={}, regions=[])
        self.intake = Intake(
            epoch=ME,
            reply_to=PeerAddress("tcp://d:0"),
            layout=LAYOUT,
            pages=self.pages,
            slots=self.slots,
            peers=self.peers,
            digest_every=digest_every,
            local=local,
        )
        self.peers.start(self.now_s)
        for registration, epoch in enumerate(epochs, 1):
            self.take(m.Registered(epoch, ME, registration, m.Capacity(30)))

    def take(self, message: m.ToDecode) -> list[Any]:
        effects = list(self.intake.on_message(message, self.now_s))
        self.intake.check_integrity()
        return effects

    def submit(self, name: str, prompt: int = 6, max_tokens: int = 3, timeout_s: float = 60.0) -> list[Any]:
        spec = Generate(RequestId(name), m.pack_int32(np.ones(prompt)), max_tokens, m.Sampling(seed=1), [], False)
        effects = list(self.intake.submit(spec, timeout_s, self.now_s))
        self.intake.check_integrity()
        return effects

    def cancel(self, name: str) -> list[Any]:
        effects = list(self.intake.cancel(RequestId(name), self.now_s))
        self.intake.check_integrity()
        return effects

    def completed(self, number: int, **changed: object) -> m.Completed:
        part = m.Coverage(0, m.pack_int32([0, 1]), {"kv": 32})
        fields: dict[str, object] = {"epoch": P0, "to_epoch": ME, "room": Room(1), "ticket": Ticket(number)}
        return m.Completed(**(fields | {"parts": [part], "timings": TIMINGS} | changed))  # type: ignore[arg-type]

    def state(self, name: str) -> RequestState:
        return self.intake.requests[RequestId(name)].state


def messages(effects: list[Any], kind: type) -> list[Any]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def fenced(effects: list[Any]) -> list[tuple[str, int]]:
    return [(e.address, e.registration) for e in effects if isinstance(e, Fence)]


def endings(effects: list[Any]) -> list[tuple[str, str]]:
    """(outcome, error code) each."""
    found: list[tuple[str, str]] = []
    for e in effects:
        if isinstance(e, Ended):
            code = e.output.error.code if e.output is not None and e.output.error is not None else ""
            found.append((e.outcome, code))
    return found
