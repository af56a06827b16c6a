"""Decode's decisions, one event at a time."""

from typing import Any

import pytest

from decode_svc.effects import Fence, OpenSession, Prebuild
from decode_svc.peers import LOST_S, RETRY_GRACE_S, PeerState
from shared.errors import Unavailable
from shared.ids import Epoch, RequestId, Room, Ticket
from shared.protocol import messages as m
from shared.protocol.local import Generate, Output
from shared.protocol.machine import LeaseState, RequestState
from tests.decode.rig import FIRST, ME, P0, P1, Rig, endings, fenced, messages


def test_one_request_from_submit_to_finish() -> None:
    rig = Rig(P0)
    (prefill,) = messages(rig.submit("r"), m.Prefill)
    assert isinstance(prefill, m.Prefill)
    assert m.unpack_int32(prefill.dst_pages).tolist() == [1, 2]  # the prompt's; decode's own pages stay its own
    assert rig.pages.free_pages == 13
    effects = rig.take(rig.completed(1))
    assert len(messages(effects, m.Ack)) == 1
    assert Prebuild(RequestId("r")) in effects
    assert rig.slots.free_slots == 2
    rig.intake.prebuilt(RequestId("r"))
    assert rig.slots.free_slots == 3
    assert rig.state("r") is RequestState.RUNNING
    assert rig.intake.pages_of(RequestId("r")).tolist() == [1, 2]
    assert endings(list(rig.intake.finish(Output(RequestId("r"), [5], [0.0], "stop"), rig.now_s))) == [("finished", "")]
    rig.intake.check_integrity()
    assert (rig.pages.free_pages, rig.intake.leases.open, rig.intake.requests) == (15, {}, {})


def test_s63_the_slowest_rank_is_what_a_hand_over_took() -> None:
    rig = Rig(P0)
    rig.submit("r")
    parts = [m.Coverage(0, m.pack_int32([0, 1]), {"kv": 32}, write_s=0.25)]
    rig.take(rig.completed(1, parts=parts))
    handover = rig.intake.requests[RequestId("r")].handover
    assert handover is not None
    assert (handover.slowest_rank, handover.slowest_write_s, handover.bytes_sent) == (0, 0.25, 32)


def test_s42_the_slot_is_the_requests_until_its_prebuilt_step() -> None:
    rig = Rig(P0)
    rig.submit("r")
    taken = [rig.slots.free_slots]
    rig.take(rig.completed(1))
    taken.append(rig.slots.free_slots)
    rig.intake.prebuilt(RequestId("r"))
    taken.append(rig.slots.free_slots)
    assert taken == [2, 2, 3]


def test_s41_no_slot_or_no_page_means_wait_in_order() -> None:
    rig = Rig(P0, slots=1)
    assert messages(rig.submit("a"), m.Prefill)
    assert rig.submit("b") == []
    rig.take(rig.completed(1))
    rig.intake.prebuilt(RequestId("a"))
    assert len(messages(list(rig.intake.tick(rig.now_s)), m.Prefill)) == 1
    small = Rig(P0, num_pages=6)
    small.submit("a", prompt=16, max_tokens=1)
    assert small.submit("b", prompt=8) == []
    assert small.submit("c", prompt=1, max_tokens=1) == []  # behind b, although it would fit


@pytest.mark.parametrize(
    "changed",
    [
        {"parts": []},
        {"parts": [m.Coverage(0, m.pack_int32([0]), {"kv": 16})]},
        {"parts": [m.Coverage(0, m.pack_int32([0, 1, 2]), {"kv": 48})]},
        {"parts": [m.Coverage(0, m.pack_int32([0, 1]), {"kv": 16})]},
        {"parts": [m.Coverage(0, m.pack_int32([0, 1]), {})]},
        {"parts": [m.Coverage(1, m.pack_int32([0, 1]), {"kv": 32})]},
    ],
)
def test_s67_a_completion_that_does_not_prove_everything_commits_nothing(changed: dict[str, object]) -> None:
    rig = Rig(P0)
    rig.submit("r")
    effects = rig.take(rig.completed(1, **changed))
    assert not [e for e in effects if isinstance(e, Prebuild)]
    assert len(messages(effects, m.Abort)) == 1
    assert rig.intake.leases.open[Ticket(1)].state is LeaseState.QUARANTINED
    assert rig.intake.counts.bad_completions == 1


@pytest.mark.parametrize(
    "changed", [{"epoch": Epoch(69)}, {"to_epoch": Epoch(4)}, {"room": Room(2)}, {"ticket": Ticket(2)}]
)
def test_s67_a_completion_of_another_epoch_room_or_attempt_commits_nothing(changed: dict[str, object]) -> None:
    rig = Rig(P0)
    rig.submit("r")
    rig.take(rig.completed(1, **changed))
    assert rig.state("r") is RequestState.REQUESTED
    assert rig.intake.leases.open[Ticket(1)].state is LeaseState.EXPOSED


def test_s29_s30_one_abort_per_attempt_repeated_until_answered() -> None:
    """Cancelled, then past its deadline: one abort, and the same again until something answers."""
    rig = Rig(P0)
    rig.submit("r", timeout_s=5)
    effects = rig.cancel("r")
    (abort,) = messages(effects, m.Abort)
    assert isinstance(abort, m.Abort)
    assert (abort.room, abort.ticket, abort.to_epoch, abort.reason) == (1, 1, P0, "cancelled")
    assert endings(effects) == [("cancelled", "")]
    assert rig.cancel("r") == []
    count = 0
    for _ in range(20):
        rig.now_s += 0.25
        rig.take(m.Heartbeat(P0, ME, FIRST, 1, 1, 1, 0, False, b""))
        count += len(messages(list(rig.intake.tick(rig.now_s)), m.Abort))
    assert count == 5
    assert rig.intake.counts.aborts == 1
    rig.take(m.AbortAck(P0, ME, Room(1), Ticket(1), clean=True))
    rig.take(m.AbortAck(P0, ME, Room(1), Ticket(1), clean=True))
    assert not rig.intake.leases.open


@pytest.mark.parametrize("answer", ["AbortAck", "Failed", "Completed"])
def test_s66_quarantine_ends_by_the_writers_word_for_that_attempt(answer: str) -> None:
    rig = Rig(P0)
    rig.submit("r")
    rig.cancel("r")
    assert (rig.pages.quarantined_pages, rig.pages.free_pages, rig.slots.free_slots) == (2, 13, 2)
    proofs: dict[str, m.ToDecode] = {
        "AbortAck": m.AbortAck(P0, ME, Room(1), Ticket(1), clean=True),
        "Failed": m.Failed(P0, ME, Room(1), Ticket(1), "x", "x", True, clean=True),
        "Completed": rig.completed(1),
    }
    rig.take(proofs[answer])
    assert (rig.pages.quarantined_pages, rig.pages.free_pages, rig.slots.free_slots) == (0, 15, 3)


def test_s66_time_alone_frees_nothing_and_a_fence_does() -> None:
    rig = Rig(P0)
    rig.submit("r", timeout_s=1)
    fences: list[Any] = []
    for _ in range(4 * 600):
        rig.now_s += 0.25
        fences += [e for e in rig.intake.tick(rig.now_s) if isinstance(e, Fence)]
        assert rig.pages.quarantined_pages == (2 if rig.now_s >= 101 else 0)
    assert [(f.address, f.registration) for f in fences] == [(FIRST, 1)]
    effects = list(rig.intake.fenced(FIRST, 1, rig.now_s))
    assert OpenSession(FIRST, 3) in effects
    assert (rig.pages.quarantined_pages, rig.pages.free_pages) == (0, 15)
    assert rig.peers.peers[FIRST].state is PeerState.CONNECTING


def test_s66_a_retry_takes_a_fresh_lease_and_slot_on_another_peer() -> None:
    rig = Rig(P0, P1)
    rig.submit("r")
    effects = rig.take(m.Failed(P0, ME, Room(1), Ticket(1), "x", "transfer_failed", True, clean=True))
    (again,) = messages(effects, m.Prefill)
    assert isinstance(again, m.Prefill)
    assert (again.room, again.ticket, again.to_epoch) == (1, 2, P1)
    effects = rig.take(m.Failed(P1, ME, Room(1), Ticket(2), "x", "transfer_failed", True, clean=True))
    assert endings(effects) == [("failed", "transfer_failed")]
    assert rig.pages.free_pages == 15


def test_a_failure_that_a_retry_cannot_mend_is_not_retried() -> None:
    rig = Rig(P0, P1)
    rig.submit("r")
    effects = rig.take(m.Failed(P0, ME, Room(1), Ticket(1), "x", "capacity", False, clean=True))
    assert endings(effects) == [("failed", "prefill_capacity_exceeded")]


def test_a_lost_peers_requests_end_at_once_and_its_pages_wait_for_the_fence() -> None:
    rig = Rig(P0)
    rig.submit("r")
    ended: list[tuple[str, str]] = []
    start_s = rig.now_s
    while not ended:
        rig.now_s += 0.25
        ended = endings(list(rig.intake.tick(rig.now_s)))
    assert ended == [("failed", "prefill_lost")]
    assert LOST_S <= rig.now_s - start_s <= LOST_S + RETRY_GRACE_S + 0.5
    assert rig.pages.quarantined_pages == 2


def test_after_its_connection_ended_a_silent_peer_is_lost_sooner() -> None:
    rig = Rig(P0)
    rig.submit("r")
    rig.peers.on_disconnect(FIRST, rig.now_s)
    start_s = rig.now_s
    while rig.peers.peers[FIRST].state is PeerState.REGISTERED:
        rig.now_s += 0.25
        rig.intake.tick(rig.now_s)
    assert rig.now_s - start_s <= 1.5


def test_a_loop_that_was_itself_stopped_listens_again_before_it_judges() -> None:
    rig = Rig(P0)
    rig.intake.tick(100.0)
    rig.intake.tick(160.0)
    assert rig.peers.peers[FIRST].state is PeerState.REGISTERED


def test_an_attempt_that_its_peer_does_not_list_is_lost() -> None:
    """Its Prefill never arrived: noticed by heartbeats, long before any time limit."""
    rig = Rig(P0, P1)
    rig.submit("r")
    busy = m.Heartbeat(P0, ME, FIRST, 1, 1, 1, 0, True, m.pack_int64([1]))
    idle = m.Heartbeat(P0, ME, FIRST, 1, 1, 1, 0, False, b"")
    for beat in (idle, busy, idle):
        assert rig.take(beat) == []
    effects = rig.take(idle)
    assert len(messages(effects, m.Abort)) == 1
    assert len(messages(effects, m.Prefill)) == 1


def test_heartbeats_from_before_the_prefill_was_sent_say_nothing_about_it() -> None:
    """A decode that was stopped reads many at once when it goes on."""
    rig = Rig(P0, P1)
    rig.intake.tick(rig.now_s)
    rig.submit("r")
    assert rig.peers.beats == 1
    for heard in (0, 1, 1, 1):
        assert rig.take(m.Heartbeat(P0, ME, FIRST, 1, 1, heard, 0, False, b"")) == []
    rig.take(m.Heartbeat(P0, ME, FIRST, 1, 1, 2, 0, False, b""))
    assert messages(rig.take(m.Heartbeat(P0, ME, FIRST, 1, 1, 2, 0, False, b"")), m.Abort)


def test_a_prefill_that_does_not_know_us_is_lost_and_registered_anew() -> None:
    rig = Rig(P0)
    effects = rig.take(m.Refused(Epoch(99), ME, 1, []))
    assert (FIRST, 1) in fenced(effects)
    assert rig.take(m.Refused(Epoch(99), ME, 1, [])) == []


def test_requests_wait_for_a_peer_that_was_heard_from_and_end_where_there_is_none() -> None:
    rig = Rig(P0)
    rig.take(m.Refused(Epoch(99), ME, 1, []))  # restarted: about to register again
    assert rig.submit("r") == []
    rig.intake.fenced(FIRST, 1, rig.now_s)
    effects = rig.take(m.Registered(Epoch(99), ME, 3, m.Capacity(30)))
    assert len(messages(effects, m.Prefill)) == 1


def test_the_least_loaded_peer_that_can_take_the_prompt_is_asked() -> None:
    rig = Rig(P0, P1, num_pages=60, slots=9)
    asked = [x.to_epoch for name in "abcd" for x in messages(rig.submit(name), m.Prefill)]
    assert sorted(asked) == [P0, P0, P1, P1]
    for name in "abcd":
        rig.cancel(name)
    assert [p.outstanding_tokens for p in rig.peers.peers.values()] == [0, 0]


def test_a_refused_request_has_its_one_ending_too() -> None:
    rig = Rig(P0)
    spec = Generate(RequestId("r"), m.pack_int32([1]), 1, m.Sampling(seed=1), [], False)
    assert endings(list(rig.intake.refuse(spec, Unavailable("stopping", code="shutting_down")))) == [
        ("failed", "shutting_down")
    ]
    rig.intake.check_integrity()


@pytest.mark.parametrize("cancelled", [False, True])
def test_s66_a_writer_that_stopped_after_a_failure_proves_nothing_until_its_session_is_fenced(cancelled: bool) -> None:
    """Its bytes may lie in our own socket buffers."""
    rig = Rig(P0)
    rig.submit("r")
    answer: m.ToDecode = m.Failed(P0, ME, Room(1), Ticket(1), "x", "transfer_failed", True, clean=False)
    if cancelled:
        rig.cancel("r")
        answer = m.AbortAck(P0, ME, Room(1), Ticket(1), clean=False)
    effects = rig.take(answer)
    assert (FIRST, 1) in fenced(effects)
    assert rig.pages.quarantined_pages == 2
    assert not fenced(rig.take(answer))
    rig.intake.fenced(FIRST, 1, rig.now_s)
    assert rig.pages.quarantined_pages == 0


def test_an_attempt_that_prefill_gave_up_by_itself_is_lost() -> None:
    """It had not heard from us for a while, and aborted what it did for us."""
    rig = Rig(P0, P1)
    rig.submit("r")
    effects = rig.take(m.AbortAck(P0, ME, Room(1), Ticket(1), clean=True))
    assert [x.ticket for x in messages(effects, m.Prefill)] == [2]
    effects = rig.take(m.AbortAck(P1, ME, Room(1), Ticket(2), clean=True))
    assert endings(effects) == [("failed", "prefill_lost")]
    assert rig.pages.free_pages == 15
