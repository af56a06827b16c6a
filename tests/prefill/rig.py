"""One prefill engine's decisions, with one decode registered."""

from typing import Any

import numpy as np

from prefill_svc.effects import Send, SenderId
from prefill_svc.handoff import Handoff
from prefill_svc.peers import DecodePeers
from prefill_svc.scheduler import Piece
from shared.ids import AttemptKey, Epoch, PeerAddress, RequestId, Room, Ticket
from shared.kv.layout import META_ROW, Buffer, Layout
from shared.kv.pages import PageAllocator
from shared.kv.slots import SlotPool
from shared.protocol import messages as m
from shared.protocol.machine import SenderState

LAYOUT = Layout(4, (Buffer("kv", 0, (2,), "uint8"), Buffer("kv", 1, (2,), "uint8")))
ME, DECODE = Epoch(70), Epoch(50)
REPLY = PeerAddress("tcp://127.0.0.1:1")
FINGERPRINT = {**LAYOUT.fingerprint(), "model": "m"}
SAMPLING = m.Sampling(seed=1)


def regions(base: int, items: int) -> list[m.Region]:
    kv = [m.Region("kv", layer, base + layer * 10_000, 8, items) for layer in (0, 1)]
    return [*kv, m.Region("meta", 0, base + 50_000, META_ROW.itemsize, 4)]


def register(epoch: Epoch = DECODE, registration: int = 1, reply_to: str = REPLY, **changed: str) -> m.Register:
    return m.Register(
        epoch, Epoch(0), PeerAddress(reply_to), registration, "host:1", FINGERPRINT | changed, regions(1_000_000, 50)
    )


WHOLE = 32 + META_ROW.itemsize
"""Bytes of a prompt of two pages, with its row."""


class Rig:
    """One prefill engine's decisions, with one decode registered."""

    def __init__(self, num_pages: int = 12, *, layerwise: bool = False, rank: int = 0, ranks: int = 1) -> None:
        self.now_s = 100.0
        self.pages = PageAllocator(num_pages)
        peers = DecodePeers(
            epoch=ME,
            reply_to=PeerAddress("x"),
            layout=LAYOUT,
            regions=regions(9_000_000, num_pages)[:-1],
            rows=regions(9_000_000, num_pages)[-1],
            fingerprint=FINGERPRINT,
            capacity=m.Capacity(40),
        )
        self.handoff = Handoff(
            epoch=ME,
            layout=LAYOUT,
            regions=regions(9_000_000, num_pages)[:-1],
            pages=self.pages,
            slots=SlotPool(4),
            peers=peers,
            max_prompt_tokens=40,
            vocab_size=100,
            layerwise=layerwise,
            rank=rank,
            ranks=ranks,
        )
        self.registered = self.take(register())
        self.handoff.met(SenderId(DECODE, 1))

    def take(self, message: m.ToPrefill) -> list[Any]:
        effects = list(self.handoff.on_message(message, self.now_s))
        self.handoff.check_integrity()
        return effects

    def prefill(self, number: int, length: int = 6, **changed: Any) -> list[Any]:
        pages = -(-length // 4)
        fields: dict[str, object] = {
            "epoch": DECODE,
            "to_epoch": ME,
            "reply_to": REPLY,
            "registration": 1,
            "room": Room(9),
            "ticket": Ticket(number),
            "request": RequestId(f"r{number}"),
            "tokens": m.pack_int32(np.arange(length) % 100),
            "dst_first_position": 0,
            "dst_pages": m.pack_int32(np.arange(20, 20 + pages)),
            "slot": 2,
            "sampling": SAMPLING,
            "remaining_ms": 10_000,
            "digest": False,
        }
        return self.take(m.Prefill(**(fields | changed)))  # type: ignore[arg-type]

    def abort(self, ticket: int) -> list[Any]:
        return self.take(m.Abort(DECODE, ME, REPLY, 1, Room(9), Ticket(ticket), "client left"))

    def stop(self, request: str | None) -> list[Any]:
        effects = list(self.handoff.stop(RequestId(request) if request is not None else None, self.now_s))
        self.handoff.check_integrity()
        return effects

    def key(self, ticket: int) -> AttemptKey:
        return AttemptKey(DECODE, Room(9), Ticket(ticket))

    def state(self, ticket: int) -> SenderState:
        return self.handoff.senders[self.key(ticket)].state

    def forward(self, budget: int = 100) -> list[Piece]:
        pieces, _ = self.handoff.next_forward(budget, 8, self.now_s)
        return pieces

    def computed(self) -> list[Any]:
        samples = [(7, -0.5, ()) if p.last else None for p in self.handoff._forward]
        effects = list(self.handoff.computed(samples, self.now_s))
        self.handoff.check_integrity()
        return effects


def sent(effects: list[Any], kind: type) -> list[Any]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]
