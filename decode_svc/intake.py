"""Reserve → request → commit: everything that decode decides about a hand-over. Pure and synchronous.

Each call takes one event and returns what is to be done (``effects.py``); ``engine.py`` carries it out. The transfer
record here (``Lease``), never a task, owns landing pages and slot, so that no cancelled await can free them.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

from decode_svc.effects import Effect, Ended, Outcome, Prebuild, Send
from decode_svc.failures import failure_of, incomplete, lost, shown
from decode_svc.peers import Peer, PeerBook, PeerState
from decode_svc.records import Counts, Lease, Request
from shared.errors import HandoffError, IntegrityError, Unavailable
from shared.ids import Epoch, PeerAddress, RequestId, Room, Ticket
from shared.kv.layout import Layout
from shared.kv.pages import PageAllocator, Pages
from shared.kv.slots import SlotPool
from shared.protocol import messages as m
from shared.protocol.local import EngineError, FinishReason, Generate, Handover, Output
from shared.protocol.machine import LEASE, REQUEST, Do, LeaseEvent, LeaseState, RequestEvent, RequestState
from shared.transfer.plan import check_coverage

ABORT_REPEAT_S = 1.0
MAX_ATTEMPTS = 2
MISSED_BEATS = 2
"""An attempt that its peer does not list in so many heartbeats running is lost: its Prefill never arrived."""


class Intake:
    """All requests and leases of one decode engine. Times are seconds of one monotonic clock."""

    def __init__(
        self,
        *,
        epoch: Epoch,
        reply_to: PeerAddress,
        layout: Layout,
        pages: PageAllocator,
        slots: SlotPool,
        peers: PeerBook,
    ) -> None:
        self.requests: dict[RequestId, Request] = {}
        self.leases: dict[Ticket, Lease] = {}
        self.waiting: deque[Request] = deque()
        self.counts = Counts()
        self.pages, self.slots, self.peers = pages, slots, peers
        self._epoch, self._reply_to, self._layout = epoch, reply_to, layout
        self._page_bytes = layout.page_bytes_by_component()
        self._next_ticket = 1
        self._next_room = 1

    # the client's side

    def submit(self, spec: Generate, timeout_s: float, now_s: float) -> list[Effect]:
        """A validated request. Ends at once where no prefill peer is registered or about to be."""
        request = Request(spec, Room(self._next_room), len(spec.prompt) // 4, now_s + timeout_s)
        self._next_room += 1
        self.requests[request.id] = request
        self.waiting.append(request)
        self.counts.started += 1
        return self.admit(now_s)

    def refuse(self, spec: Generate, error: HandoffError) -> list[Effect]:
        """A request that is not even begun; it is counted, and it has its one ending."""
        self.requests[spec.request] = Request(spec, Room(0), len(spec.prompt) // 4, 0.0)
        self.counts.started += 1
        return self._fail(self.requests[spec.request], error, 0.0)

    def cancel(self, request_id: RequestId, now_s: float) -> list[Effect]:
        """The client is gone. Call for a running request only between steps. Unknown or ended: nothing."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        return self._end(request, RequestEvent.CANCEL, "cancelled", None, now_s) + self.admit(now_s)

    def fail(self, request_id: RequestId, error: HandoffError, now_s: float) -> list[Effect]:
        """End with an explicit error, whatever it is waiting for; same rule about steps as ``cancel``."""
        return self._fail(self.requests[request_id], error, now_s)

    def prebuilt(self, request_id: RequestId) -> None:
        """The prebuilt step has consumed the metadata row; its slot is free from here on (S42)."""
        request = self.requests[request_id]
        request.state, todo = REQUEST.step(request.state, RequestEvent.PREBUILT)
        assert todo == (Do.FREE_SLOT,)
        assert request.lease is not None
        self._free_slot(request.lease)

    def finish(
        self, request_id: RequestId, tokens: list[int], logprobs: list[float], why: FinishReason, now_s: float
    ) -> list[Effect]:
        """The last tokens of a running request."""
        request = self.requests[request_id]
        output = Output(request_id, tokens, logprobs, finish=why, handover=request.handover)
        return self._end(request, RequestEvent.FINISH, "finished", output, now_s) + self.admit(now_s)

    def pages_of(self, request_id: RequestId) -> Pages:
        """All pages of a committed request in position order: those that landed, then those that decode fills."""
        request = self.requests[request_id]
        assert request.lease is not None
        assert request.own_pages is not None
        return np.concatenate([request.lease.pages, request.own_pages])

    # admission

    def admit(self, now_s: float) -> list[Effect]:
        """Give waiting requests, in order, their pages, a slot and a peer. No landing place, no prefill.

        The whole need is reserved at once (prompt and every token it may still compute), so that a running request
        never stops half-way for want of a page.
        """
        effects: list[Effect] = []
        while self.waiting:
            request = self.waiting[0]
            peer = self.peers.pick(request.prompt_tokens, request.avoid)
            if peer is None and not self.peers.hopeful(now_s):
                self.waiting.popleft()
                effects += self._fail(
                    request, Unavailable("no prefill service is registered", code="no_prefill"), now_s
                )
                continue
            if peer is None or not (lease := self._reserve(request, peer, now_s)):
                break
            self.waiting.popleft()
            request.state, _ = REQUEST.step(request.state, RequestEvent.ADMIT)
            request.lease, request.attempts = lease, request.attempts + 1
            self.leases[lease.ticket] = lease
            effects += self._lease_event(lease, LeaseEvent.ANNOUNCE, now_s, request)
            lease.load_tokens = request.prompt_tokens
            peer.outstanding_tokens += lease.load_tokens
        return effects

    def _reserve(self, request: Request, peer: Peer, now_s: float) -> Lease | None:
        landing = self._layout.pages_for(request.prompt_tokens)
        # the last token is sampled but never written
        total = self._layout.pages_for(request.prompt_tokens + request.spec.max_tokens - 1)
        if self.slots.free_slots == 0 or (pages := self.pages.allocate(total)) is None:
            return None
        slot = self.slots.take()
        request.own_pages = pages[landing:]
        lease = Lease(
            request.room, Ticket(self._next_ticket), peer.address, peer.epoch, peer.registration,
            pages[:landing], slot, now_s,
        )  # fmt: skip
        self._next_ticket += 1
        return lease

    # the peer's side

    def on_message(self, message: m.ToDecode, now_s: float) -> list[Effect]:
        """One message of a prefill; those for another incarnation of this engine are ignored."""
        if message.to_epoch != self._epoch:
            return []
        match message:
            case m.Registered():
                self.peers.on_registered(message, now_s)
                return self.admit(now_s)
            case m.Refused():
                gone = self.peers.on_refused(message, now_s)
                return self._lose_peers(gone, "the prefill service was restarted or gave us up", now_s)
            case m.Heartbeat():
                return self._on_heartbeat(message, now_s)
            case m.Completed() | m.Failed() | m.AbortAck():
                return self._on_answer(message, now_s)

    def _on_answer(self, message: m.Completed | m.Failed | m.AbortAck, now_s: float) -> list[Effect]:
        lease = self.leases.get(message.ticket)
        if lease is None or (lease.room, lease.peer_epoch) != (message.room, message.epoch):
            # over here already, or another incarnation's: answered so that its sender may forget it, never acted on
            peer = self.peers.find(message.epoch)
            return [] if peer is None or isinstance(message, m.AbortAck) else [self._ack(peer.address, message)]
        match message:
            case m.Failed(clean=False) | m.AbortAck(clean=False) if lease.state is not LeaseState.OWNED:
                return self._on_unclean_end(lease, message, now_s)
            case m.Completed() if lease.state is LeaseState.EXPOSED:
                return self._commit(lease, self._request_of(lease), message, now_s)
            case m.Failed() | m.AbortAck() if lease.state is LeaseState.EXPOSED:
                request, error = self._request_of(lease), failure_of(message)
                effects = self._lease_event(lease, LeaseEvent.STOPPED, now_s)
                return effects + self._lose_attempt(request, error, now_s) + self.admit(now_s)
            case _:
                return self._lease_event(lease, LeaseEvent.STOPPED, now_s) + self.admit(now_s)

    def _on_unclean_end(self, lease: Lease, message: m.Failed | m.AbortAck, now_s: float) -> list[Effect]:
        """The writer stopped after a failed write, which proves nothing here: its session is fenced (S66)."""
        effects = [self._ack(lease.peer, message)] if isinstance(message, m.Failed) else []
        peer = self.peers.peers[lease.peer]
        if peer.registration == lease.registration and peer.state is PeerState.REGISTERED:
            why = message.reason if isinstance(message, m.Failed) else "a transfer failed"
            return effects + self._lose_peers([peer], f"prefill: {why}", now_s)
        return effects

    def _commit(self, lease: Lease, request: Request, message: m.Completed, now_s: float) -> list[Effect]:
        """S67: only a completion that proves exactly what was asked for commits; any other fails the attempt."""
        self._settle_load(lease)
        wrong = check_coverage(message.parts, np.arange(len(lease.pages)), self._page_bytes)
        if wrong:
            self.counts.bad_completions += 1
            error = incomplete(wrong)
            effects = self._abandon(lease, wrong, now_s)
            return effects + self._lose_attempt(request, error, now_s) + self.admit(now_s)
        effects = self._lease_event(lease, LeaseEvent.PROVE, now_s)
        sent = sum(sum(part.bytes_by_component.values()) for part in message.parts)
        request.handover = Handover(lease.peer, request.attempts, sent, now_s - lease.sent_s, message.timings)
        request.state, todo = REQUEST.step(request.state, RequestEvent.COMMIT)
        assert todo == (Do.PREBUILD,)
        return [*effects, Prebuild(request.id)]

    def _on_heartbeat(self, message: m.Heartbeat, now_s: float) -> list[Effect]:
        peer = self.peers.on_heartbeat(message, now_s)
        if peer is None:
            return []
        active = set(m.unpack_int64(message.active).tolist())
        effects: list[Effect] = []
        for lease in list(self.leases.values()):
            if lease.state is not LeaseState.EXPOSED or lease.peer_epoch != message.epoch:
                continue
            lease.missed_beats = 0 if lease.ticket in active else lease.missed_beats + 1
            if lease.missed_beats >= MISSED_BEATS:
                request = self._request_of(lease)
                effects += self._abandon(lease, "the prefill service does not know this attempt", now_s)
                effects += self._lose_attempt(request, lost("the request was lost on its way to prefill"), now_s)
        return effects + self.admit(now_s) if effects else effects

    def fenced(self, address: PeerAddress, registration: int, now_s: float) -> list[Effect]:
        """No byte can land through that session any more: every lease that it could reach is proven."""
        self.counts.fences += 1
        effects: list[Effect] = []
        for lease in [x for x in self.leases.values() if x.registration == registration]:
            if lease.state is not LeaseState.OWNED:
                effects += self._lease_event(lease, LeaseEvent.FENCED, now_s)
        return effects + self.peers.fenced(address, registration) + self.admit(now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Call a few times a second: silent peers, due messages, deadlines, aborts to repeat."""
        silent, effects = self.peers.tick(now_s)
        effects = self._lose_peers(silent, "the prefill service stopped answering", now_s) + effects
        for request in list(self.requests.values()):
            if request.state in (RequestState.WAITING, RequestState.REQUESTED) and now_s >= request.deadline_s:
                late = Unavailable("no first token within the time limit", code="timeout")
                effects += self._fail(request, late, now_s)
        for lease in list(self.leases.values()):
            if lease.state is LeaseState.QUARANTINED and now_s >= lease.next_abort_s:
                effects += self._lease_event(lease, LeaseEvent.REPEAT, now_s)
        return effects + self.admit(now_s)

    def check_integrity(self) -> None:
        """Pages, slots, leases and requests explain each other. Raises IntegrityError."""
        owned: list[Pages] = [r.own_pages for r in self.requests.values() if r.own_pages is not None]
        quarantined = [x.pages for x in self.leases.values() if x.state is LeaseState.QUARANTINED]
        owned += [x.pages for x in self.leases.values() if x.state is not LeaseState.QUARANTINED]
        self.pages.check_integrity(owned, quarantined)
        self.slots.check_integrity({x.slot for x in self.leases.values() if x.slot is not None})
        for ticket, lease in self.leases.items():
            users = [r for r in self.requests.values() if r.lease is lease]
            if lease.state is LeaseState.FREE or len(users) != (lease.state is not LeaseState.QUARANTINED):
                raise IntegrityError(f"lease {ticket} is {lease.state.value} with {len(users)} requests")
        started, ended = self.counts.started, sum(self.counts.ended.values())
        if started != ended + len(self.requests):
            raise IntegrityError(f"{started} requests started, {ended} ended, {len(self.requests)} open")

    # carrying out instructions

    def _lose_peers(self, gone: Iterable[Peer], why: str, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for peer in gone:
            effects += self.peers.lose(peer)
            mine = [x for x in self.leases.values() if x.registration == peer.registration]
            for lease in [x for x in mine if x.state is LeaseState.EXPOSED]:
                request = self._request_of(lease)
                effects += self._abandon(lease, why, now_s)
                effects += self._lose_attempt(request, lost(why), now_s)
        return effects + self.admit(now_s) if effects else effects

    def _lose_attempt(self, request: Request, error: EngineError, now_s: float) -> list[Effect]:
        """Its lease is on its own from here; the request waits for one more attempt, or ends."""
        avoid = request.lease.peer if request.lease else None
        self._detach(request)
        if error.retryable and request.attempts < MAX_ATTEMPTS and self.peers.hopeful(now_s):
            request.state, _ = REQUEST.step(request.state, RequestEvent.LOSE)
            request.avoid = avoid
            self.waiting.appendleft(request)
            self.counts.retries += 1
            return []
        return self._end(request, RequestEvent.FAIL, "failed", Output(request.id, [], [], error=error), now_s)

    def _fail(self, request: Request, error: HandoffError, now_s: float) -> list[Effect]:
        return self._end(request, RequestEvent.FAIL, "failed", Output(request.id, [], [], error=shown(error)), now_s)

    def _end(
        self, request: Request, event: RequestEvent, outcome: Outcome, output: Output | None, now_s: float
    ) -> list[Effect]:
        effects: list[Effect] = []
        if request.state is RequestState.WAITING and request in self.waiting:
            self.waiting.remove(request)
        if request.state is RequestState.REQUESTED and request.lease is not None:
            effects += self._abandon(request.lease, outcome, now_s)
            self._detach(request)
        request.state, todo = REQUEST.step(request.state, event)
        for do in todo:
            if do is Do.FREE and request.lease is not None:
                effects += self._lease_event(request.lease, LeaseEvent.RELEASE, now_s)
                self._detach(request)
            elif do is Do.END:
                del self.requests[request.id]
                self.counts.ended[outcome] += 1
                effects.append(Ended(request.id, outcome, output))
        return effects

    def _detach(self, request: Request) -> None:
        """Own pages were never announced and go back at once; the lease's wait for its own end."""
        if request.lease is not None:
            self._settle_load(request.lease)
        if request.own_pages is not None:
            self.pages.release(request.own_pages)
        request.lease, request.own_pages = None, None

    def _settle_load(self, lease: Lease) -> None:
        self.peers.peers[lease.peer].outstanding_tokens -= lease.load_tokens
        lease.load_tokens = 0

    def _abandon(self, lease: Lease, reason: str, now_s: float) -> list[Effect]:
        lease.reason = reason
        return self._lease_event(lease, LeaseEvent.ABANDON, now_s)

    def _lease_event(
        self, lease: Lease, event: LeaseEvent, now_s: float, request: Request | None = None
    ) -> list[Effect]:
        lease.state, todo = LEASE.step(lease.state, event)
        effects: list[Effect] = []
        for do in todo:
            match do:
                case Do.SEND_PREFILL:
                    assert request is not None
                    effects.append(Send(lease.peer, self._prefill(lease, request, now_s)))
                case Do.SEND_ABORT:
                    lease.next_abort_s = now_s + ABORT_REPEAT_S
                    self.counts.aborts += event is LeaseEvent.ABANDON
                    effects.append(Send(lease.peer, self._abort(lease)))
                case Do.SEND_ACK:
                    effects.append(Send(lease.peer, m.Ack(self._epoch, lease.peer_epoch, lease.room, lease.ticket)))
                case Do.QUARANTINE:
                    self.pages.quarantine(lease.pages)
                case Do.FREE:
                    self.pages.release(lease.pages)
                    self._free_slot(lease)
                    del self.leases[lease.ticket]
                case _:
                    raise AssertionError(do)
        return effects

    def _free_slot(self, lease: Lease) -> None:
        if lease.slot is not None:
            self.slots.free(lease.slot)
            lease.slot = None

    def _request_of(self, lease: Lease) -> Request:
        return next(r for r in self.requests.values() if r.lease is lease)

    def _prefill(self, lease: Lease, request: Request, now_s: float) -> m.Prefill:
        assert lease.slot is not None
        return m.Prefill(
            epoch=self._epoch,
            to_epoch=lease.peer_epoch,
            reply_to=self._reply_to,
            registration=lease.registration,
            room=lease.room,
            ticket=lease.ticket,
            tokens=request.spec.prompt,
            dst_first_position=0,
            dst_pages=m.pack_int32(lease.pages),
            slot=lease.slot,
            sampling=request.spec.sampling,
            remaining_ms=max(1, int(1000 * (request.deadline_s - now_s))),
        )

    def _abort(self, lease: Lease) -> m.Abort:
        return m.Abort(
            epoch=self._epoch,
            to_epoch=lease.peer_epoch,
            reply_to=self._reply_to,
            registration=lease.registration,
            room=lease.room,
            ticket=lease.ticket,
            reason=lease.reason,
        )

    def _ack(self, address: PeerAddress, message: m.Completed | m.Failed) -> Effect:
        return Send(address, m.Ack(self._epoch, message.epoch, message.room, message.ticket))
