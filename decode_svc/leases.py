"""Who may write to landing memory: one lease an attempt, freed only on proof. Pure and synchronous.

Hand-over sentence: a lease, never a task or a request, owns landing pages and slot from its reservation on; it gives
them back when its owner is done, its writer has stopped cleanly, or its writer's session is fenced.
"""

from collections.abc import Iterable, Sequence

from decode_svc.effects import Effect, Send, Verify
from decode_svc.peers import Peer
from decode_svc.records import Counts, Lease, Request
from shared.errors import IntegrityError
from shared.ids import Epoch, PeerAddress, RequestId, Room, Ticket
from shared.kv.pages import PageAllocator, Pages
from shared.kv.slots import SlotPool
from shared.protocol import messages as m
from shared.protocol.machine import LEASE, Do, LeaseEvent, LeaseState

ABORT_REPEAT_S = 1.0
QUARANTINE_S = 30.0
"""A writer that has not stopped so long after its attempt was given up is fenced (S66) …"""
CROWDED_S = 5.0
"""… or so long, once quarantine holds half of the pool and requests wait for pages."""


class LeaseBook:
    """All leases of one decode engine, with the pages and slots that they own."""

    def __init__(
        self, *, epoch: Epoch, reply_to: PeerAddress, pages: PageAllocator, slots: SlotPool, counts: Counts
    ) -> None:
        self.open: dict[Ticket, Lease] = {}
        self.pages, self.slots = pages, slots
        self._epoch, self._reply_to, self._counts = epoch, reply_to, counts
        self._next_ticket = 1

    def reserve(
        self, request: RequestId, room: Room, peer: Peer, landing: int, total: int, now_s: float
    ) -> tuple[Lease, Pages] | None:
        """(a lease on the first ``landing`` of ``total`` pages, the other pages), or None where there is no room."""
        if self.slots.free_slots == 0 or (pages := self.pages.allocate(total)) is None:
            return None
        ticket = Ticket(self._next_ticket)
        self._next_ticket += 1
        lease = Lease(
            room,
            ticket,
            request,
            peer.address,
            peer.epoch,
            peer.registration,
            pages[:landing],
            self.slots.take(),
            now_s,
        )
        self.open[ticket] = lease
        return lease, pages[landing:]

    def step(self, lease: Lease, event: LeaseEvent, now_s: float) -> list[Effect]:
        """One transition, carried out here but for what it asks of others."""
        lease.state, todo = LEASE.step(lease.state, event)
        effects: list[Effect] = []
        for do in todo:
            match do:
                case Do.SEND_PREFILL:
                    pass  # by ``announce``
                case Do.SEND_ABORT:
                    lease.next_abort_s = now_s + ABORT_REPEAT_S
                    self._counts.aborts += event is LeaseEvent.ABANDON
                    effects.append(Send(lease.peer, self._abort(lease)))
                case Do.SEND_ACK:
                    effects.append(Send(lease.peer, m.Ack(self._epoch, lease.peer_epoch, lease.room, lease.ticket)))
                case Do.DIGEST:
                    effects.append(Verify(lease.ticket, lease.pages, lease.tokens))
                case Do.QUARANTINE:
                    lease.given_up_s = now_s
                    self.pages.quarantine(lease.pages)
                case Do.FREE:
                    self.pages.release(lease.pages)
                    self.free_slot(lease)
                    del self.open[lease.ticket]
                case _:
                    raise AssertionError(do)
        return effects

    def announce(self, lease: Lease, request: Request, now_s: float) -> list[Effect]:
        """Ask the lease's prefill to fill it: from here on it may be written to."""
        effects = self.step(lease, LeaseEvent.ANNOUNCE, now_s)
        return [*effects, Send(lease.peer, self._prefill(lease, request, now_s))]

    def ack(self, address: PeerAddress, message: m.Completed | m.Failed) -> Effect:
        """So that its sender may forget the attempt, whatever it is here."""
        return Send(address, m.Ack(self._epoch, message.epoch, message.room, message.ticket))

    def abandon(self, lease: Lease, reason: str, now_s: float) -> list[Effect]:
        """Its request goes on without it, or has ended."""
        lease.reason, lease.request = reason, None
        verifying = lease.state is LeaseState.VERIFYING  # its completion is its writer's word
        return self.step(lease, LeaseEvent.DISCARD if verifying else LeaseEvent.ABANDON, now_s)

    def free_slot(self, lease: Lease) -> None:
        if lease.slot is not None:
            self.slots.free(lease.slot)
            lease.slot = None

    def fenced(self, registration: int, now_s: float) -> list[Effect]:
        """No byte can land through that session any more: every lease that it could reach is proven."""
        mine = [x for x in self.open.values() if x.registration == registration]
        return [e for x in mine if x.state is not LeaseState.OWNED for e in self.step(x, LeaseEvent.FENCED, now_s)]

    def repeat_aborts(self, now_s: float) -> list[Effect]:
        due = [x for x in self.open.values() if x.state is LeaseState.QUARANTINED and now_s >= x.next_abort_s]
        return [effect for x in due for effect in self.step(x, LeaseEvent.REPEAT, now_s)]

    def overdue(self, peers: Iterable[Peer], pages_wanted: bool, now_s: float) -> list[Peer]:
        """Peers whose quarantine is beyond its bound: not lost, but to be fenced all the same (S66)."""
        crowded = pages_wanted and 2 * self.pages.quarantined_pages > self.pages.usable_pages
        limit_s = CROWDED_S if crowded else QUARANTINE_S
        late = {
            x.registration
            for x in self.open.values()
            if x.state is LeaseState.QUARANTINED and now_s - x.given_up_s > limit_s
        }
        return [peer for peer in peers if peer.registration in late]

    def check_integrity(self, own_pages: Sequence[Pages], users: dict[Ticket, RequestId]) -> None:
        """Pages, slots and leases explain each other, and ``users`` (a request's lease → that request) are exactly
        those that leases know. Raises IntegrityError."""
        quarantined = [x.pages for x in self.open.values() if x.state is LeaseState.QUARANTINED]
        owned = [x.pages for x in self.open.values() if x.state is not LeaseState.QUARANTINED]
        self.pages.check_integrity([*own_pages, *owned], quarantined)
        self.slots.check_integrity({x.slot for x in self.open.values() if x.slot is not None})
        for ticket, lease in self.open.items():
            wanted = None if lease.state is LeaseState.QUARANTINED else lease.request
            if lease.state is LeaseState.FREE or users.get(ticket) != wanted:
                raise IntegrityError(f"lease {ticket} is {lease.state.value}, used by {users.get(ticket)}")
        if users.keys() - self.open.keys():
            raise IntegrityError(f"requests use leases that are over: {users.keys() - self.open.keys()}")

    def _prefill(self, lease: Lease, request: Request, now_s: float) -> m.Prefill:
        assert lease.slot is not None
        return m.Prefill(
            epoch=self._epoch,
            to_epoch=lease.peer_epoch,
            reply_to=self._reply_to,
            registration=lease.registration,
            room=lease.room,
            ticket=lease.ticket,
            request=request.id,
            tokens=request.spec.prompt,
            dst_first_position=0,
            dst_pages=m.pack_int32(lease.pages),
            slot=lease.slot,
            sampling=request.spec.sampling,
            remaining_ms=max(1, int(1000 * (request.deadline_s - now_s))),
            digest=lease.digest,
            prompt_logprobs=request.spec.prompt_logprobs,
        )

    def _abort(self, lease: Lease) -> m.Abort:
        return m.Abort(
            epoch=self._epoch,
            to_epoch=lease.peer_epoch,
            reply_to=self._reply_to,
            registration=lease.registration,
            room=lease.room,
            ticket=lease.ticket,
            reason=m.short(lease.reason),
        )
