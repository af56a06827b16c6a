"""Accept → compute → write → announce: everything that prefill decides about a hand-over. Pure and synchronous.

Each call takes one event and returns what is to be done (``effects.py``); ``engine.py`` carries it out. A ``Sender``
owns its source pages and source row until neither a forward nor a transfer touches them.
"""

from collections.abc import Sequence

from prefill_svc.checks import objection
from prefill_svc.effects import (
    Digest,
    Drain,
    Drop,
    Effect,
    Finish,
    Halt,
    Interrupt,
    Send,
    SenderId,
    Stream,
    Sweep,
    Write,
)
from prefill_svc.peers import DecodePeer, DecodePeers
from prefill_svc.records import Counts, Sender
from prefill_svc.scheduler import Piece, Waiting, pack
from prefill_svc.sources import Sources
from shared.errors import IntegrityError, MessageError, TransferFailed
from shared.ids import AttemptKey, Epoch, RequestId, Ticket
from shared.kv.layout import Layout, TopLogprobs, meta_row
from shared.kv.pages import PageAllocator
from shared.kv.placement import destinations, owned
from shared.kv.slots import SlotPool
from shared.protocol import messages as m
from shared.protocol.machine import SENDER, Do, SenderEvent, SenderState
from shared.protocol.scores import packed
from shared.transfer.layers import one_destination
from shared.transfer.plan import Runs, check_page_count, coverage, one_item, runs_of

REPEAT_S = 1.0
WAITING = (SenderState.QUEUED, SenderState.PARTIAL)
"""For a forward."""


class Handoff:
    """All attempts of one prefill engine."""

    def __init__(
        self,
        *,
        epoch: Epoch,
        layout: Layout,
        regions: list[m.Region],
        pages: PageAllocator,
        slots: SlotPool,
        peers: DecodePeers,
        max_prompt_tokens: int,
        vocab_size: int,
        layerwise: bool = True,
        finish_limit_s: float = 20.0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.senders: dict[AttemptKey, Sender] = {}
        self.queue: list[AttemptKey] = []
        self.counts = Counts()
        self.pages, self.slots, self.peers = pages, slots, peers
        self._sources = Sources(layout, pages, slots)
        self.steps = 0
        self.draining = False
        """Nothing new is accepted; what was accepted goes on."""
        self._forward: list[Piece] = []
        self._epoch, self._layout = epoch, layout
        self._regions = regions
        self._max_prompt_tokens, self._vocab_size = max_prompt_tokens, vocab_size
        self._layerwise, self._finish_limit_s = layerwise, finish_limit_s
        self._rank, self._ranks = rank, ranks

    # messages

    def on_message(self, message: m.ToPrefill, now_s: float) -> list[Effect]:
        match message:
            case m.Register():
                replaced, effects = self.peers.on_register(message, now_s)
                return self._lose(replaced) + effects
            case m.Ack():
                return self._on_ack(message) if message.to_epoch == self._epoch else []
            case m.Prefill() | m.Abort() | m.Heartbeat() if message.to_epoch != self._epoch:
                return self._refuse(message)
            case m.Heartbeat():
                peer = self.peers.find(message.epoch, message.registration)
                if peer is None:
                    return self._refuse(message)
                peer.last_seen_s, peer.heard = now_s, max(peer.heard, message.number)
                return []
            case m.Prefill():
                return self._on_prefill(message, now_s)
            case m.Abort():
                return self._on_abort(message)

    def _on_prefill(self, message: m.Prefill, now_s: float) -> list[Effect]:
        key = m.key_to_prefill(message)
        peer = self.peers.find(message.epoch, message.registration)
        if peer is None:
            return self._refuse(message)
        if key in self.senders:
            self.counts.refused_messages += 1
            return []
        try:
            tokens, pages = m.unpack_int32(message.tokens), m.unpack_int32(message.dst_pages)
        except ValueError as wrong:
            raise MessageError(f"room {key.room}: {wrong}") from wrong
        sender = Sender(key, peer, message, tokens, pages, now_s, now_s + message.remaining_ms / 1000)
        if key.ticket in peer.retired:
            self.counts.refused_messages += 1
            return [Send(peer.address, self._failed(sender, "the attempt was aborted or has ended", "stale", True))]
        if self.draining:
            return [Send(peer.address, self._failed(sender, "the service is stopping", "shutting_down", True))]
        self.senders[key] = sender
        self.counts.accepted += 1
        if error := objection(sender, self._layout, self._max_prompt_tokens, self._vocab_size):
            return self._fail(sender, SenderEvent.REFUSE, error.message, error.code, error.retryable, now_s)
        self.queue.append(key)
        return []

    def _on_abort(self, message: m.Abort) -> list[Effect]:
        key = m.key_to_prefill(message)
        if sender := self.senders.get(key):
            return self._event(sender, SenderEvent.ABORT)
        peer = self.peers.find(message.epoch, message.registration)
        if peer is not None:
            peer.retired.add(message.ticket)
        clean = peer is not None and not peer.dirty
        return [Send(message.reply_to, m.AbortAck(self._epoch, message.epoch, message.room, message.ticket, clean))]

    def _on_ack(self, message: m.Ack) -> list[Effect]:
        sender = self.senders.get(m.key_to_prefill(message))
        if sender is None or sender.state is not SenderState.ANNOUNCED:
            return []
        return self._event(sender, SenderEvent.ACK)

    def stop(self, request: RequestId | None, now_s: float) -> list[Effect]:
        """An operator ends the attempts of this client request, or (None) all of them. What is announced stays so."""
        effects: list[Effect] = []
        for sender in list(self.senders.values()):
            meant = request in (None, sender.spec.request.partition(".")[0])
            if meant and SenderEvent.STOP in SENDER.rows[sender.state]:
                self.counts.stopped += 1
                effects += self._fail(sender, SenderEvent.STOP, "stopped by an operator", "aborted", True, now_s)
        return effects

    # forwards

    def next_forward(self, budget_tokens: int, max_pieces: int, now_s: float) -> tuple[list[Piece], list[Effect]]:
        """(the pieces to compute next, what else to do). Pages are taken for a whole prompt when its first piece is
        planned; a prompt that finds none waits, and those behind it too."""
        effects: list[Effect] = []
        for key in [k for k in self.queue if now_s >= self.senders[k].deadline_s]:
            effects += self._fail(
                self.senders[key], SenderEvent.REFUSE, "waited too long in the queue", "timeout", True, now_s
            )
        ready: list[Waiting] = []
        left = budget_tokens
        others = sum(not peer.gone for peer in self.peers.peers.values()) > 1
        for sender in [self.senders[key] for key in self.queue if self.senders[key].peer.met]:
            if left <= 0 or len(ready) == max_pieces:
                break
            if others and self._sources.crowded_by(sender, self.senders.values()):
                continue
            if not self._sources.reserve(sender):
                break
            ready.append(sender.waiting())
            left -= len(sender.tokens) - sender.done
        self._forward = pack(ready, budget_tokens, self._layout.page_size, max_pieces)
        for piece in self._forward:
            sender = self.senders[piece.key]
            self._event(sender, SenderEvent.START)
            if piece.start == 0:
                sender.started_s = now_s
                sender.layerwise = self._layerwise and one_destination([not sender.peer.gone])
                self.counts.whole_sends += not sender.layerwise
            if sender.layerwise:
                runs = self._runs(sender, piece.start, piece.start + piece.length)
                if len(runs.src):  # else this rank owns none of the chunk's pages (S11)
                    effects.append(Stream(sender.peer.sender, piece.key, piece.start, sender.peer.pairing, runs))
        return self._forward, effects

    def computed(self, samples: Sequence[tuple[int, float, TopLogprobs] | None], now_s: float) -> list[Effect]:
        """The forward has ended: one (token, log-prob, likeliest) for each piece that is the last of its prompt."""
        pieces, self._forward = self._forward, []
        self.steps += 1
        effects: list[Effect] = []
        unfinished: list[AttemptKey] = []
        for piece, sample in zip(pieces, samples, strict=True):
            sender = self.senders[piece.key]
            sender.done += piece.length
            self.counts.tokens += piece.length
            if sample is None:
                effects += self._event(sender, SenderEvent.CHUNK, piece=piece)
                if sender.state is SenderState.PARTIAL:
                    unfinished.append(piece.key)
                continue
            sender.computed_s, sender.finish_by_s = now_s, now_s + self._finish_limit_s
            assert sender.slot is not None
            self.slots.rows[sender.slot] = meta_row(piece.key.room, piece.key.ticket, *sample)[0]
            effects += self._event(sender, SenderEvent.COMPUTED, piece=piece)
        self.queue[:0] = unfinished
        return effects

    def compute_failed(self, error: Exception, now_s: float) -> list[Effect]:
        """The forward raised: its attempts end, nothing else does."""
        pieces, self._forward = self._forward, []
        why, event = f"the forward failed: {type(error).__name__}: {error}", SenderEvent.COMPUTE_FAILED
        shared = len(pieces) > 1  # then another's prompt may be to blame
        failing = [self._fail(self.senders[p.key], event, why, "compute_failed", shared, now_s) for p in pieces]
        return [effect for effects in failing for effect in effects]

    # transfers

    def met(self, sender: SenderId) -> None:
        """First contact is over, well or not: a write will tell."""
        if (peer := self.peers.peers.get(sender)) is not None:
            peer.met = True

    def written(
        self, key: AttemptKey, sent_bytes: int, write_s: float, digest: int | None, now_s: float
    ) -> list[Effect]:
        """Every byte of the attempt has landed. ``digest``: of what was sent, where it was asked for."""
        sender = self.senders[key]
        if sender.state is not SenderState.WRITING:
            sender.next_repeat_s = now_s + REPEAT_S
            return self._event(sender, SenderEvent.WRITTEN)
        timings = m.Timings(
            queue_s=m.duration_s(sender.arrived_s, sender.started_s),
            prefill_s=m.duration_s(sender.started_s, sender.computed_s),
            exposed_s=m.duration_s(sender.computed_s, now_s),
            write_s=write_s,
        )
        assert sender.pages is not None
        _, positions = owned(sender.pages, 0, self._rank, self._ranks)
        part = coverage(self._rank, positions, self._regions, digest, write_s)
        expected = sum(part.bytes_by_component.values()) + sender.peer.regions[-1].item_bytes
        if sent_bytes != expected:  # a defect: the proof is of what was sent, not of what was meant to be (S67)
            wrong = TransferFailed(f"{sent_bytes} bytes were written, expected {expected}")
            return self.write_failed(key, wrong, now_s)
        scores = packed(sender.scores) if sender.scores else None
        sender.result = m.Completed(self._epoch, key.decode_epoch, key.room, key.ticket, [part], timings, scores)
        sender.next_repeat_s = now_s + REPEAT_S
        self.counts.bytes_sent += sent_bytes
        self.counts.finished.append((timings, sent_bytes))
        return self._event(sender, SenderEvent.WRITTEN)

    def write_failed(self, key: AttemptKey, error: Exception, now_s: float) -> list[Effect]:
        """The transfer says that it failed: bytes of it may still be moving."""
        sender = self.senders[key]
        self.counts.transfer_failures += 1
        sender.peer.dirty = True
        if (known := sender.given_up) is not None:
            sender.result = self._failed(sender, known.reason, known.code, known.retryable)
        else:
            sender.result = self._failed(sender, f"the transfer failed: {error}", "transfer_failed", True)
        return self._event(sender, SenderEvent.WRITE_FAILED)

    def drained(self, key: AttemptKey, now_s: float) -> list[Effect]:
        """The engine that wrote it is retired: nothing moves any more."""
        sender = self.senders[key]
        sender.next_repeat_s = now_s + REPEAT_S
        return self._event(sender, SenderEvent.DRAINED)

    # time

    def tick(self, busy: bool, now_s: float) -> list[Effect]:
        """Call a few times a second: silent peers, results to repeat, heartbeats, workers to close."""
        effects = self._lose(self.peers.tick(now_s))
        for sender in list(self.senders.values()):
            if sender.layerwise and sender.state is SenderState.WRITING and now_s >= sender.finish_by_s:
                why = f"the rest had not landed {self._finish_limit_s:g} s after the forward"
                effects += self._fail(sender, SenderEvent.STOP, why, "transfer_timeout", True, now_s)
            if SenderEvent.REPEAT in SENDER.rows[sender.state] and now_s >= sender.next_repeat_s:
                sender.next_repeat_s = now_s + REPEAT_S
                effects += self._event(sender, SenderEvent.REPEAT)
        active: dict[SenderId, list[Ticket]] = {}
        for sender in self.senders.values():
            active.setdefault(sender.peer.sender, []).append(sender.key.ticket)
        effects += self.peers.heartbeats(active, self.steps, busy, self.draining, now_s)
        return effects + self.peers.close_unused(set(active))

    def check_integrity(self) -> None:
        """Pages, rows, queue and senders explain each other. Raises IntegrityError."""
        self._sources.check_integrity(self.senders.values())
        queued = {k for k, s in self.senders.items() if s.state in WAITING}
        if queued != set(self.queue) or len(queued) != len(self.queue):
            raise IntegrityError(f"queue holds {self.queue}, senders in state queued are {sorted(queued)}")
        open_ = sum(s.state is not SenderState.ANNOUNCED for s in self.senders.values())
        if self.counts.accepted != open_ + sum(self.counts.ended.values()):
            raise IntegrityError(f"{self.counts.accepted} attempts accepted, {self.counts.ended} ended, {open_} open")
        for key, sender in self.senders.items():
            if sender.state in (SenderState.ANNOUNCED, SenderState.RELEASED) and sender.pages is not None:
                raise IntegrityError(f"sender {key} is {sender.state.value} and still holds pages")

    # carrying out instructions

    def _event(self, sender: Sender, event: SenderEvent, *, piece: Piece | None = None) -> list[Effect]:
        before = sender.state
        sender.state, todo = SENDER.step(before, event)
        if before in WAITING and sender.state not in WAITING and sender.key in self.queue:
            self.queue.remove(sender.key)
        if before is not SenderState.ANNOUNCED and sender.state in (SenderState.ANNOUNCED, SenderState.RELEASED):
            finished = "finished" if isinstance(sender.result, m.Completed) else "failed"
            self.counts.ended["aborted" if sender.state is SenderState.RELEASED else finished] += 1
        effects: list[Effect] = []
        for do in todo:
            match do:
                case Do.FREE:
                    self._sources.free(sender)
                case Do.SWEEP:
                    assert piece is not None
                    if sender.layerwise:
                        effects.append(Sweep(sender.peer.sender, sender.key, piece.start))
                case Do.WRITE:
                    assert piece is not None
                    effects.append(self._write(sender, piece))
                case Do.HALT:
                    if sender.layerwise:
                        effects.append(Halt(sender.key))
                case Do.DROP:
                    if sender.layerwise:
                        effects += [Halt(sender.key), Drop(sender.peer.sender, sender.key)]
                    else:  # nothing of it was ever submitted
                        effects += self._event(sender, SenderEvent.WRITTEN)
                case Do.DRAIN:
                    effects.append(Drain(sender.peer.sender, sender.key))
                case Do.SEND_RESULT:
                    assert sender.result is not None
                    effects.append(Send(sender.peer.address, sender.result))
                case Do.SEND_GIVEN_UP:
                    assert sender.given_up is not None
                    effects.append(Send(sender.peer.address, sender.given_up))
                case Do.SEND_ABORT_ACK:
                    key = sender.key
                    ack = m.AbortAck(self._epoch, key.decode_epoch, key.room, key.ticket, not sender.peer.dirty)
                    effects.append(Send(sender.peer.address, ack))
                case _:
                    raise AssertionError(do)
        if sender.state is SenderState.RELEASED:
            sender.peer.retired.add(sender.key.ticket)
            self.senders.pop(sender.key, None)
        return effects

    def _runs(self, sender: Sender, start: int, end: int) -> Runs:
        """S7, S9: the pages of tokens ``start`` … ``end`` - 1, of which the first begins a page, and where they go."""
        assert sender.pages is not None
        first = start // self._layout.page_size
        chunk = sender.pages[first : self._layout.pages_for(end)]
        source, positions = owned(chunk, first, self._rank, self._ranks)
        destination = destinations(sender.destination, sender.spec.dst_first_position, positions)
        check_page_count(sender.key.room, self._rank, source, destination)
        return sender.peer.pairing.check(runs_of(source, destination))

    def _write(self, sender: Sender, piece: Piece) -> Write | Finish:
        """S25: what went by layer is finished, the rest is sent whole; the metadata row comes last in both."""
        assert sender.pages is not None
        assert sender.slot is not None
        peer, spec, tokens = sender.peer, sender.spec, len(sender.tokens)
        row = peer.rows.blocks(one_item(sender.slot, spec.slot))
        source, positions = owned(sender.pages, 0, self._rank, self._ranks)
        digest = Digest(source, positions, tokens) if spec.digest else None
        if sender.layerwise:
            return Finish(peer.sender, sender.key, piece.start, row, digest)
        kv = peer.pairing.blocks(self._runs(sender, 0, tokens))
        return Write(peer.sender, sender.key, [kv, row], digest)

    def _fail(
        self, sender: Sender, event: SenderEvent, reason: str, code: str, retryable: bool, now_s: float
    ) -> list[Effect]:
        if sender.given_up is None:  # the first reason stays
            said = sender.result = self._failed(sender, reason, code, retryable)
            key = said.epoch, said.to_epoch, said.room, said.ticket
            sender.given_up = m.GivenUp(*key, said.reason, code, retryable)
        sender.next_repeat_s = now_s + REPEAT_S
        return self._event(sender, event)

    def _failed(self, sender: Sender, reason: str, code: str, retryable: bool) -> m.Failed:
        key, clean = sender.key, not sender.peer.dirty
        return m.Failed(self._epoch, key.decode_epoch, key.room, key.ticket, m.short(reason), code, retryable, clean)

    def _lose(self, peers: list[DecodePeer]) -> list[Effect]:
        """A registration is replaced or silent: nothing new for it, and what runs ends as if it were aborted."""
        effects: list[Effect] = []
        for peer in peers:
            peer.gone = True
            effects.append(Interrupt(peer.sender))
            for sender in [s for s in self.senders.values() if s.peer is peer]:
                effects += self._event(sender, SenderEvent.ABORT)
        return effects

    def _refuse(self, message: m.Prefill | m.Abort | m.Heartbeat) -> list[Effect]:
        self.counts.refused_messages += 1
        return [Send(message.reply_to, self.peers.refusal(message, []))]
