"""The walk is worth something only if it sees defects: each of these is planted, and must be caught."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from decode_svc import effects as d
from decode_svc import intake as intake_module
from decode_svc.intake import Intake
from decode_svc.leases import LeaseBook
from prefill_svc import effects as p
from prefill_svc import handoff as handoff_module
from prefill_svc.handoff import Handoff
from prefill_svc.peers import Retired
from shared.errors import HandoffError
from shared.ids import Epoch, Room, Ticket
from shared.kv.layout import META_ROW
from shared.protocol import messages as m
from shared.protocol.machine import (
    LEASE,
    SENDER,
    Do,
    LeaseEvent,
    LeaseState,
    SenderEvent,
    SenderState,
    Table,
)
from shared.transfer import plan
from tests.walk.nodes import DecodeNode, Violation
from tests.walk.world import World

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def _rewrite(patch: Patch, table: Table[Any, Any], state: Any, event: Any, after: Any, *todo: Do) -> None:
    patch.setitem(table.rows[state], event, (after, todo))


def early_free(patch: Patch) -> None:
    """A given-up lease is freed instead of quarantined."""
    _rewrite(patch, LEASE, LeaseState.EXPOSED, LeaseEvent.ABANDON, LeaseState.FREE, Do.SEND_ABORT, Do.FREE)


def quarantine_ends_by_time(patch: Patch) -> None:
    """The abort timer, not a proof, frees a quarantined lease."""
    _rewrite(patch, LEASE, LeaseState.QUARANTINED, LeaseEvent.REPEAT, LeaseState.FREE, Do.FREE)


def lost_ack(patch: Patch) -> None:
    """Completions are never acknowledged."""
    _rewrite(patch, LEASE, LeaseState.EXPOSED, LeaseEvent.PROVE, LeaseState.OWNED)
    _rewrite(patch, LEASE, LeaseState.OWNED, LeaseEvent.STOPPED, LeaseState.OWNED)
    nothing = m.Ack(Epoch(0), Epoch(0), Room(0), Ticket(0))
    patch.setattr(LeaseBook, "ack", lambda self, address, message: d.Send(address, nothing))


def failed_write_counts_as_stopped(patch: Patch) -> None:
    """The engine's -1 is taken for proof: no drain."""
    announced = (SenderState.ANNOUNCED, Do.FREE, Do.SEND_RESULT)
    _rewrite(patch, SENDER, SenderState.WRITING, SenderEvent.WRITE_FAILED, *announced)
    _say_clean(patch)


def drain_counts_as_proof(patch: Patch) -> None:
    """Once its sending engine is retired, a failed write is taken to be over on the receiver's side too."""
    _say_clean(patch)


def _say_clean(patch: Patch) -> None:
    real = Handoff._failed

    def failed(self: Handoff, sender: Any, *rest: Any) -> Any:
        sender.peer.dirty = False
        return real(self, sender, *rest)

    patch.setattr(Handoff, "_failed", failed)


def abort_answered_while_writing(patch: Patch) -> None:
    """AbortAck goes out, and the source pages back, with the transfer still running."""
    real = Handoff._event

    def event(self: Handoff, sender: Any, what: SenderEvent, **rest: Any) -> Any:
        effects = real(self, sender, what, **rest)
        if what is SenderEvent.ABORT and sender.state is SenderState.ABORTING:
            ack = m.AbortAck(self._epoch, sender.key.decode_epoch, sender.key.room, sender.key.ticket, clean=True)
            effects.append(p.Send(sender.peer.address, ack))
        return effects

    patch.setattr(Handoff, "_event", event)


def completed_before_written(patch: Patch) -> None:
    """Completed is announced when the transfer starts, not when it has ended."""
    real = Handoff._write

    def write(self: Handoff, sender: Any, sample: Any) -> Any:
        effect = real(self, sender, sample)
        key, positions = sender.key, range(self._layout.pages_for(len(sender.tokens)))
        part = plan.coverage(0, positions, self._regions)
        early = m.Completed(self._epoch, key.decode_epoch, key.room, key.ticket, [part], m.Timings(0, 0, 0, 0))
        self.early = [p.Send(sender.peer.address, early)]  # type: ignore[attr-defined]
        return effect

    real_computed = Handoff.computed

    def computed(self: Handoff, samples: Any, now_s: float) -> Any:
        self.early = []  # type: ignore[attr-defined]
        return real_computed(self, samples, now_s) + self.early  # type: ignore[attr-defined]

    patch.setattr(Handoff, "_write", write)
    patch.setattr(Handoff, "computed", computed)


def _claim_all_bytes(patch: Patch) -> None:
    """The worker counts what should have been sent; else prefill itself sees that something is missing."""
    real = Handoff.written

    def written(self: Handoff, key: Any, sent_bytes: int, *rest: Any) -> Any:
        pages = self._layout.pages_for(len(self.senders[key].tokens))
        meant = pages * sum(self._layout.page_bytes_by_component().values()) + META_ROW.itemsize
        return real(self, key, meant, *rest)

    patch.setattr(Handoff, "written", written)


def missing_layer(patch: Patch) -> None:
    """One layer is not sent, and the completion claims it all the same."""
    real = plan.Pairing.blocks

    def blocks(self: plan.Pairing, runs: Any, regions: Any = slice(None)) -> Any:
        wanted = np.arange(len(self.bases))[regions]
        return real(self, runs, wanted[wanted < 2] if len(self.bases) > 1 else wanted)

    patch.setattr(plan.Pairing, "blocks", blocks)
    _claim_all_bytes(patch)


def truncated_page_list(patch: Patch) -> None:
    """The last page of longer prompts is not sent, and the completion claims it all the same."""
    real = plan.runs_of

    def truncated(source: Any, destination: Any) -> Any:
        keep = max(1, len(source) - 1)
        return real(source[:keep], destination[:keep])

    patch.setattr(handoff_module, "runs_of", truncated)
    _claim_all_bytes(patch)


def destination_not_by_position(patch: Patch) -> None:
    """Pages go to the destination list in reverse."""
    real = plan.runs_of
    patch.setattr(
        handoff_module, "runs_of", lambda source, destination: real(source, np.ascontiguousarray(destination[::-1]))
    )


def coverage_not_checked(patch: Patch) -> None:
    """Decode commits whatever is announced, and a prefill announces a lost attempt as complete without writing."""
    patch.setattr(intake_module, "unproven", lambda *_: None)
    real = Handoff.compute_failed

    def lies(self: Handoff, error: Exception, now_s: float) -> Any:
        pieces = list(self._forward)
        effects = real(self, error, now_s)
        for piece in pieces:
            key = piece.key
            empty = m.Completed(self._epoch, key.decode_epoch, key.room, key.ticket, [], m.Timings(0, 0, 0, 0))
            address = next(x.address for x in self.peers.peers.values() if x.epoch == key.decode_epoch)
            effects.insert(0, p.Send(address, empty))
        return effects

    patch.setattr(Handoff, "compute_failed", lies)


def old_attempt_accepted(patch: Patch) -> None:
    """An answer is matched by room alone: an aborted attempt's proof is taken for the present one's."""
    real = Intake._on_answer

    def by_room(self: Intake, message: Any, now_s: float) -> Any:
        lease = next(
            (x for x in self.leases.open.values() if x.room == message.room and x.state is LeaseState.EXPOSED), None
        )
        if lease is not None:
            message = msgspec.structs.replace(message, ticket=lease.ticket, epoch=lease.peer_epoch)
        return real(self, message, now_s)

    patch.setattr(Intake, "_on_answer", by_room)


def late_prefill_starts(patch: Patch) -> None:
    """An attempt that was aborted before it arrived starts all the same."""
    patch.setattr(Retired, "__contains__", lambda self, ticket: False)


def fence_skipped(patch: Patch) -> None:
    """A lost peer's session is declared fenced and stays open."""
    patch.setattr(World, "retire", lambda self, session: None)


def double_finish(patch: Patch) -> None:
    """A cancelled request is ended twice."""
    real = Intake.cancel

    def twice(self: Intake, request_id: Any, now_s: float) -> Any:
        effects = real(self, request_id, now_s)
        return effects + [e for e in effects if isinstance(e, d.Ended)]

    patch.setattr(Intake, "cancel", twice)


def slot_freed_at_commit(patch: Patch) -> None:
    """The slot goes back before the prebuilt step has read its row (S42)."""
    real = Intake._committed

    def committed(self: Intake, lease: Any, now_s: float) -> Any:
        effects = real(self, lease, now_s)
        self.leases.free_slot(lease)
        return effects

    patch.setattr(Intake, "_committed", committed)


def slot_leaks_on_abort(patch: Patch) -> None:
    """The slot of a quarantined lease never comes back."""
    real = LeaseBook.free_slot

    def free_slot(self: LeaseBook, lease: Any) -> None:
        if lease.reason:
            lease.slot = None
        real(self, lease)

    patch.setattr(LeaseBook, "free_slot", free_slot)


def old_epoch_accepted(patch: Patch) -> None:
    """What was meant for a dead incarnation of decode is taken for an attempt of the present one, as equal numbers
    would have it."""
    real = Intake.on_message

    def on_message(self: Intake, message: Any, now_s: float) -> Any:
        mine = [x for x in self.leases.open.values() if x.state is LeaseState.EXPOSED]
        answer = isinstance(message, m.Completed | m.Failed | m.AbortAck)
        if answer and message.to_epoch != self._epoch and mine:
            names = {"epoch": mine[0].peer_epoch, "room": mine[0].room, "ticket": mine[0].ticket}
            message = msgspec.structs.replace(message, to_epoch=self._epoch, **names)
        return real(self, message, now_s)

    patch.setattr(Intake, "on_message", on_message)
    patch.setattr(World, "restlessness", 0.3)  # it takes a restart in mid-transfer to see it


def lease_freed_by_task_cancellation(patch: Patch) -> None:
    """A client that leaves takes its landing pages along, as a ``finally`` in its task would."""
    real = LeaseBook.abandon

    def abandon(self: LeaseBook, lease: Any, reason: str, now_s: float) -> Any:
        effects = real(self, lease, reason, now_s)
        if reason == "cancelled" and lease.ticket in self.open:
            self.pages.release(lease.pages)
            self.free_slot(lease)
            del self.open[lease.ticket]
        return effects

    patch.setattr(LeaseBook, "abandon", abandon)


def retry_into_the_old_lease(patch: Patch) -> None:
    """A new attempt takes over the pages of the one that failed before it."""
    real = LeaseBook.reserve

    def reserve(self: LeaseBook, request: Any, room: Any, *rest: Any) -> Any:
        old = next((x for x in self.open.values() if x.room == room), None)
        if old is not None:
            self.pages.release(old.pages)
            self.free_slot(old)
            del self.open[old.ticket]
        return real(self, request, room, *rest)

    patch.setattr(LeaseBook, "reserve", reserve)


def given_up_counts_as_stopped(patch: Patch) -> None:
    """Prefill's word that no result will come is taken for its word that it writes no more."""
    real = Intake._on_answer

    def on_answer(self: Intake, message: Any, now_s: float) -> Any:
        if isinstance(message, m.GivenUp):
            stamps = message.epoch, message.to_epoch, message.room, message.ticket
            message = m.Failed(*stamps, message.reason, message.code, message.retryable, clean=True)
        return real(self, message, now_s)

    patch.setattr(Intake, "_on_answer", on_answer)


def old_registration_accepted(patch: Patch) -> None:
    """Prefill takes any registration of a decode epoch for the present one."""
    from prefill_svc.peers import DecodePeers

    def find(self: DecodePeers, epoch: Any, registration: int) -> Any:
        return next((x for x in self.peers.values() if x.epoch == epoch), None)

    patch.setattr(DecodePeers, "find", find)


def running_pages_freed_early(patch: Patch) -> None:
    """A committed request's landed pages are given back while it still runs."""
    real = DecodeNode._prebuild

    def prebuild(self: DecodeNode, request_id: Any) -> None:
        real(self, request_id)
        request = self.intake.requests[request_id]
        assert request.lease is not None
        self.pages.release(request.lease.pages)

    patch.setattr(DecodeNode, "_prebuild", prebuild)


WRITTEN = "page given away while"
FOREIGN = "reads foreign bytes"
REUSED = f"{WRITTEN}|{FOREIGN}"
"""Whichever of the two comes first."""
NO_ROW = "foreign or missing metadata row"

DEFECTS: dict[Plant, str] = {
    early_free: REUSED,
    quarantine_ends_by_time: REUSED,
    lost_ack: "not at rest",
    failed_write_counts_as_stopped: f"{WRITTEN}|not at rest",
    drain_counts_as_proof: REUSED,
    abort_answered_while_writing: REUSED,
    completed_before_written: NO_ROW,
    missing_layer: FOREIGN,
    truncated_page_list: FOREIGN,
    destination_not_by_position: FOREIGN,
    coverage_not_checked: NO_ROW,
    old_attempt_accepted: f"{WRITTEN}|{FOREIGN}|{NO_ROW}",
    late_prefill_starts: f"{WRITTEN}|{FOREIGN}|{NO_ROW}",
    fence_skipped: REUSED,
    double_finish: "more than one ending",
    slot_freed_at_commit: "no slot before its prebuilt step",
    slot_leaks_on_abort: "owners hold slots",
    old_epoch_accepted: f"{WRITTEN}|{FOREIGN}|{NO_ROW}",
    lease_freed_by_task_cancellation: REUSED,
    retry_into_the_old_lease: REUSED,
    given_up_counts_as_stopped: REUSED,
    old_registration_accepted: "keeps workers of dead sessions",
    running_pages_freed_early: "two owners|not as their owners say",
}


@pytest.mark.parametrize("plant", DEFECTS, ids=lambda p: p.__name__)
def test_a_planted_defect_is_caught_for_what_it_is(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((Violation, HandoffError), match=DEFECTS[plant]):
        _walk(seeds=60, steps=800)


def _walk(seeds: int, steps: int) -> None:
    for seed in range(seeds):
        world = World(seed)
        for _ in range(steps):
            world.step()
        world.settle()
