"""Reserve → request → commit: everything that decode decides about a hand-over. Pure and synchronous.

Each call takes one event and returns what is to be done (``effects.py``); ``engine.py`` carries it out. Landing pages
and slots belong to leases (``leases.py``), never to a task, so that no cancelled await can free them.
"""

from collections import deque
from collections.abc import Collection, Iterable

import numpy as np

from decode_svc.choices import PageNeed
from decode_svc.effects import Compute, Effect, Ended, Outcome, Prebuild
from decode_svc.failures import ABORTED, altered, failure_of, incomplete, lost, shown, unproven
from decode_svc.leases import LeaseBook
from decode_svc.peers import GRACE_S, RETRY_GRACE_S, Peer, PeerBook, PeerState
from decode_svc.records import Counts, Lease, Request
from shared.errors import HandoffError, IntegrityError, RequestError, Unavailable
from shared.ids import Epoch, PeerAddress, RequestId, Room, Ticket
from shared.kv.digest import MODULUS
from shared.kv.layout import Layout
from shared.kv.pages import PageAllocator, Pages
from shared.kv.slots import SlotPool
from shared.protocol import messages as m
from shared.protocol.local import EngineError, Generate, Handover, Output
from shared.protocol.machine import REQUEST, Do, LeaseEvent, LeaseState, RequestEvent, RequestState

NO_TOKEN_YET = (RequestState.WAITING, RequestState.REQUESTED, RequestState.LANDED, RequestState.COMPUTING)
MAX_ATTEMPTS = 2
MISSED_BEATS = 2
"""An attempt that its peer does not list in so many heartbeats running, each sent after it heard one of ours that came
behind its Prefill, is lost: the Prefill never arrived. Older ones, which a stopped loop reads late, say nothing."""


class Intake:
    """All requests and leases of one decode engine. Times are seconds of one monotonic clock.

    ``digest_every``: each so many-th attempt's content is compared before it is committed; 0: none. ``local``: compute
    a prompt here where no prefill will.
    """

    def __init__(
        self,
        *,
        epoch: Epoch,
        reply_to: PeerAddress,
        layout: Layout,
        pages: PageAllocator,
        slots: SlotPool,
        peers: PeerBook,
        digest_every: int = 0,
        local: bool = False,
    ) -> None:
        self.requests: dict[RequestId, Request] = {}
        self.waiting: deque[Request] = deque()
        self.counts = Counts()
        self.leases = LeaseBook(epoch=epoch, reply_to=reply_to, pages=pages, slots=slots, counts=self.counts)
        self.pages, self.slots, self.peers = pages, slots, peers
        self._epoch, self._layout = epoch, layout
        self._digest_every, self._local = digest_every, local
        self._page_bytes = layout.page_bytes_by_component()
        self._next_room = 1

    # the client's side

    def submit(self, spec: Generate, timeout_s: float, now_s: float) -> list[Effect]:
        """A validated request. Ends at once where no prefill peer can be hoped for."""
        request = self._request(spec, Room(self._next_room), now_s + timeout_s)
        self._next_room += 1
        request.patient_until_s = now_s + GRACE_S
        self.requests[request.id] = request
        self.waiting.append(request)
        self.counts.started += 1
        return self.admit(now_s)

    def refuse(self, spec: Generate, error: HandoffError) -> list[Effect]:
        """A request that is not even begun; it is counted, and it has its one ending."""
        self.requests[spec.request] = self._request(spec, Room(0), 0.0)
        self.counts.started += 1
        return self._fail(self.requests[spec.request], error, 0.0)

    def _request(self, spec: Generate, room: Room, deadline_s: float) -> Request:
        need = PageNeed.of(len(spec.prompt) // 4, spec.max_tokens, spec.choices, self._layout.page_size)
        return Request(spec, room, need, deadline_s)

    def cancel(self, request_id: RequestId, now_s: float) -> list[Effect]:
        """The client is gone. Call for a request that a forward is computing only after it. Unknown or ended:
        nothing."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        return self._end(request, RequestEvent.CANCEL, "cancelled", None, now_s) + self.admit(now_s)

    def fail(self, request_id: RequestId, error: HandoffError, now_s: float) -> list[Effect]:
        """End with an explicit error, whatever it is waiting for; same rule about forwards as ``cancel``."""
        return self._fail(self.requests[request_id], error, now_s)

    def prebuilt(self, request_id: RequestId) -> None:
        """The prebuilt step has consumed the metadata row; its slot is free from here on (S42)."""
        request = self.requests[request_id]
        request.state, todo = REQUEST.step(request.state, RequestEvent.PREBUILT)
        assert todo == (Do.FREE_SLOT,)
        assert request.lease is not None
        self.leases.free_slot(request.lease)

    def computed(self, request_id: RequestId) -> None:
        """Decode has computed the prompt itself, and the first token takes part in the batch."""
        request = self.requests[request_id]
        request.state, _ = REQUEST.step(request.state, RequestEvent.COMPUTED)

    def choice_ended(self, request_id: RequestId) -> bool:
        """One choice of a running request is over; was it the last? Then ``finish`` or ``cancel`` is due."""
        request = self.requests[request_id]
        request.ended_choices += 1
        return request.ended_choices == request.spec.choices

    def finish(self, output: Output, now_s: float) -> list[Effect]:
        """The last tokens of a running request's last choice."""
        request = self.requests[output.request]
        return self._end(request, RequestEvent.FINISH, "finished", output, now_s) + self.admit(now_s)

    def pages_of(self, request_id: RequestId, choice: int = 0) -> Pages:
        """A choice's pages in position order: those that landed, then those that decode fills."""
        request = self.requests[request_id]
        assert request.own_pages is not None
        landed = [] if request.lease is None else [request.lease.pages]
        return request.need.of_choice(np.concatenate([*landed, request.own_pages]), choice)

    # admission

    def admit(self, now_s: float) -> list[Effect]:
        """Give waiting requests, in order, their pages, a slot and a peer. No landing place, no prefill.

        The whole need is reserved at once (prompt and every token it may still compute), so that a running request
        never stops half-way for want of a page.
        """
        effects: list[Effect] = []
        while self.waiting:
            request = self.waiting[0]
            peer = None if request.local else self.peers.pick(request.prompt_tokens, request.avoid)
            if peer is None and not request.local:
                error = self._hopeless(request, now_s)
                if error is None:
                    break
                if not self._local:
                    self.waiting.popleft()
                    effects += self._failed(request, request.lost or shown(error), now_s)
                    continue
                request.local = True
            started = self._start(request, peer, now_s)
            if started is None:
                break
            self.waiting.popleft()
            effects += started
        return effects

    def _hopeless(self, request: Request, now_s: float) -> HandoffError | None:
        """Why no peer will take this request, if none will."""
        if self.peers.hopeful(request.prompt_tokens, now_s, request.patient_until_s - now_s):
            return None
        limit = self.peers.largest_capacity_tokens()
        if 0 < limit < request.prompt_tokens:
            why = f"the prompt has {request.prompt_tokens} tokens; the largest prefill service takes {limit}"
            return RequestError(why, code="prefill_capacity_exceeded")
        return Unavailable(f"no prefill service: {self.peers}", code="no_prefill")

    def _start(self, request: Request, peer: Peer | None, now_s: float) -> list[Effect] | None:
        """With a peer: a lease, and Prefill. Without: pages, and a forward here. None where there is no room now."""
        if peer is None:
            request.own_pages = self.pages.allocate(request.need.total)
            if request.own_pages is None:
                return None
            request.state, _ = REQUEST.step(request.state, RequestEvent.ADMIT_LOCAL)
            self.counts.local_prefills += 1
            return [Compute(request.id)]
        need = request.need
        reserved = self.leases.reserve(request.id, request.room, peer, need.landing, need.total, now_s)
        if reserved is None:
            return None
        lease, request.own_pages = reserved
        request.state, _ = REQUEST.step(request.state, RequestEvent.ADMIT)
        request.lease, request.attempts = lease, request.attempts + 1
        lease.tokens = lease.load_tokens = request.prompt_tokens
        lease.sent_beat = self.peers.beats
        lease.digest = self._digest_every > 0 and lease.ticket % self._digest_every == 0
        peer.outstanding_tokens += lease.load_tokens
        return self.leases.announce(lease, request, now_s)

    # the peer's side

    def on_message(self, message: m.ToDecode, now_s: float) -> list[Effect]:
        """One message of a prefill; those for another incarnation of this engine are ignored."""
        if message.to_epoch != self._epoch:
            return []
        match message:
            case m.Registered():
                twins, effects = self.peers.on_registered(message, now_s)
                effects += self._lose_peers(twins, "it is another peer by a second name", now_s)
                self.peers.park(twins, message.epoch)
                return effects + self.admit(now_s)
            case m.Refused():
                gone = self.peers.on_refused(message, now_s)
                return self._lose_peers(gone, "the prefill service was restarted or gave us up", now_s)
            case m.Heartbeat():
                return self._on_heartbeat(message, now_s)
            case m.Completed() | m.Failed() | m.GivenUp() | m.AbortAck():
                return self._on_answer(message, now_s)

    def _on_answer(self, message: m.Completed | m.Failed | m.GivenUp | m.AbortAck, now_s: float) -> list[Effect]:
        lease = self.leases.open.get(message.ticket)
        if lease is None or (lease.room, lease.peer_epoch) != (message.room, message.epoch):
            # over here already, or another incarnation's: answered so that its sender may forget it, never acted on
            peer = self.peers.find(message.epoch)
            if peer is None or not isinstance(message, m.Completed | m.Failed):
                return []
            return [self.leases.ack(peer.address, message)]
        in_use = lease.state is LeaseState.EXPOSED
        match message:
            case m.Failed(clean=False) | m.AbortAck(clean=False) if in_use or lease.state is LeaseState.QUARANTINED:
                return self._on_unclean_end(lease, message, now_s)
            case m.Completed() if in_use:
                return self._commit(lease, message, now_s)
            case m.Failed() | m.AbortAck() if in_use:
                request, error = self._request_of(lease), failure_of(message)
                effects = self.leases.step(lease, LeaseEvent.STOPPED, now_s)
                return effects + self._lose_attempt(request, error, now_s) + self.admit(now_s)
            case m.GivenUp():
                if not in_use:
                    return []  # the abort that answers it is repeated by itself
                return self._abandon_attempt(lease, failure_of(message), now_s) + self.admit(now_s)
            case _:
                return self.leases.step(lease, LeaseEvent.STOPPED, now_s) + self.admit(now_s)

    def _on_unclean_end(self, lease: Lease, message: m.Failed | m.AbortAck, now_s: float) -> list[Effect]:
        """The writer stopped after a failed write, which proves nothing here: its session is fenced (S66)."""
        effects = [self.leases.ack(lease.peer, message)] if isinstance(message, m.Failed) else []
        peer = self.peers.peers[lease.peer]
        if peer.registration == lease.registration and peer.state is PeerState.REGISTERED:
            why = message.reason if isinstance(message, m.Failed) else "a transfer failed"
            return effects + self._lose_peers([peer], f"prefill: {why}", now_s)
        return effects

    def _commit(self, lease: Lease, message: m.Completed, now_s: float) -> list[Effect]:
        """S67: only a completion that proves exactly what was asked for commits; any other fails the attempt."""
        self._settle_load(lease)
        if wrong := unproven(lease, self._request_of(lease).spec, message, self._page_bytes):
            self.counts.bad_completions += 1
            return self._abandon_attempt(lease, incomplete(wrong), now_s) + self.admit(now_s)
        lease.completion = message
        if lease.digest:
            return self.leases.step(lease, LeaseEvent.VERIFY, now_s)
        return self._committed(lease, now_s)

    def verified(self, ticket: Ticket, digest: int, now_s: float) -> list[Effect]:
        """What landed has this digest. The attempt may have been given up meanwhile."""
        lease = self.leases.open.get(ticket)
        if lease is None or lease.state is not LeaseState.VERIFYING:
            return []
        assert lease.completion is not None
        told = sum(part.digest or 0 for part in lease.completion.parts) % MODULUS
        self.counts.digests += 1
        if told == digest:
            return self._committed(lease, now_s)
        self.counts.digest_mismatches += 1
        return self._abandon_attempt(lease, altered(told, digest), now_s) + self.admit(now_s)

    def _committed(self, lease: Lease, now_s: float) -> list[Effect]:
        request, message = self._request_of(lease), lease.completion
        assert message is not None
        effects = self.leases.step(lease, LeaseEvent.PROVE, now_s)
        sent = sum(sum(part.bytes_by_component.values()) for part in message.parts)
        write_s, rank = max(((part.write_s, part.rank) for part in message.parts), default=(0.0, 0))
        took_s = now_s - lease.sent_s
        request.handover = Handover(lease.peer, request.attempts, sent, took_s, message.timings, rank, write_s)
        request.prompt = message.prompt
        request.state, todo = REQUEST.step(request.state, RequestEvent.COMMIT)
        assert todo == (Do.PREBUILD,)
        return [*effects, Prebuild(request.id)]

    def _on_heartbeat(self, message: m.Heartbeat, now_s: float) -> list[Effect]:
        peer = self.peers.on_heartbeat(message, now_s)
        if peer is None:
            return []
        active = set(m.unpack_int64(message.active).tolist())
        effects: list[Effect] = []
        for lease in list(self.leases.open.values()):
            exposed = lease.state is LeaseState.EXPOSED and lease.peer_epoch == message.epoch
            if not exposed or message.heard <= lease.sent_beat:
                continue
            lease.missed_beats = 0 if lease.ticket in active else lease.missed_beats + 1
            if lease.missed_beats >= MISSED_BEATS:
                effects += self._abandon_attempt(lease, lost("the request was lost on its way to prefill"), now_s)
        return effects + self.admit(now_s) if effects else effects

    def fenced(self, address: PeerAddress, registration: int, now_s: float) -> list[Effect]:
        """No byte can land through that session any more, and a fresh one takes its place."""
        self.counts.fences += 1
        effects = self.leases.fenced(registration, now_s)
        return effects + self.peers.fenced(address, registration, now_s) + self.admit(now_s)

    def tick(self, now_s: float, in_forward: Collection[RequestId] = ()) -> list[Effect]:
        """Call a few times a second: silent peers, due messages, deadlines, aborts to repeat, quarantine to end.
        Requests ``in_forward`` keep their pages until it has ended."""
        silent, effects = self.peers.tick(now_s)
        effects = self._lose_peers(silent, "the prefill service stopped answering", now_s) + effects
        registered = [p for p in self.peers.peers.values() if p.state is PeerState.REGISTERED]
        overdue = self.leases.overdue(registered, bool(self.waiting), now_s)
        effects += self._lose_peers(overdue, "the prefill service does not end its writes", now_s)
        for request in list(self.requests.values()):
            if request.state in NO_TOKEN_YET and now_s >= request.deadline_s and request.id not in in_forward:
                late = Unavailable("no first token within the time limit", code="timeout")
                effects += self._fail(request, late, now_s)
        return effects + self.leases.repeat_aborts(now_s) + self.admit(now_s)

    def check_integrity(self) -> None:
        """Pages, slots, leases and requests explain each other. Raises IntegrityError."""
        requests = self.requests.values()
        users = {r.lease.ticket: r.id for r in requests if r.lease is not None}
        self.leases.check_integrity([r.own_pages for r in requests if r.own_pages is not None], users)
        started, ended = self.counts.started, sum(self.counts.ended.values())
        if started != ended + len(self.requests):
            raise IntegrityError(f"{started} requests started, {ended} ended, {len(self.requests)} open")

    # carrying out instructions

    def _lose_peers(self, gone: Iterable[Peer], why: str, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for peer in gone:
            effects += self.peers.lose(peer, why, now_s)
            mine = [x for x in self.leases.open.values() if x.registration == peer.registration]
            for lease in [x for x in mine if x.state is LeaseState.EXPOSED]:
                effects += self._abandon_attempt(lease, lost(why), now_s)
        return effects + self.admit(now_s) if effects else effects

    def _abandon_attempt(self, lease: Lease, error: EngineError, now_s: float) -> list[Effect]:
        """Its writer may still write; its request is tried again or ends."""
        request = self._request_of(lease)
        effects = self.leases.abandon(lease, error.message, now_s)
        return effects + self._lose_attempt(request, error, now_s)

    def _lose_attempt(self, request: Request, error: EngineError, now_s: float) -> list[Effect]:
        """Its lease is on its own from here; the request waits for one more attempt, or ends."""
        avoid = request.lease.peer if request.lease else None
        if error.code == "shutting_down" and avoid:
            self.peers.peers[avoid].draining = True
            request.attempts -= 1  # nothing was tried
        self._detach(request)
        again = error.retryable and error.code != ABORTED
        elsewhere = request.attempts < MAX_ATTEMPTS and self.peers.hopeful(request.prompt_tokens, now_s, RETRY_GRACE_S)
        if again and (elsewhere or self._local):
            request.state, _ = REQUEST.step(request.state, RequestEvent.LOSE)
            request.avoid, request.local = avoid, not elsewhere
            request.lost, request.patient_until_s = error, now_s + RETRY_GRACE_S
            self.waiting.appendleft(request)
            self.counts.retries += 1
            return []
        return self._failed(request, error, now_s)

    def _fail(self, request: Request, error: HandoffError, now_s: float) -> list[Effect]:
        return self._failed(request, shown(error), now_s)

    def _failed(self, request: Request, error: EngineError, now_s: float) -> list[Effect]:
        return self._end(request, RequestEvent.FAIL, "failed", Output(request.id, [], [], error=error), now_s)

    def _end(
        self, request: Request, event: RequestEvent, outcome: Outcome, output: Output | None, now_s: float
    ) -> list[Effect]:
        effects: list[Effect] = []
        if request.state is RequestState.WAITING and request in self.waiting:
            self.waiting.remove(request)
        if request.state is RequestState.REQUESTED and request.lease is not None:
            effects += self.leases.abandon(request.lease, outcome, now_s)
            self._detach(request)
        request.state, todo = REQUEST.step(request.state, event)
        for do in todo:
            if do is Do.FREE:
                if request.lease is not None:
                    effects += self.leases.step(request.lease, LeaseEvent.RELEASE, now_s)
                self._detach(request)
            elif do is Do.END:
                del self.requests[request.id]
                self.counts.ended[outcome] += 1
                effects.append(Ended(request.id, outcome, output, request.room))
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

    def _request_of(self, lease: Lease) -> Request:
        assert lease.request is not None
        return self.requests[lease.request]
