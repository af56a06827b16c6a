"""What decode does when a hand-over does not go as it should."""

from decode_svc.effects import Compute, Ended, OpenSession, Prebuild, Send, Verify
from decode_svc.leases import CROWDED_S, QUARANTINE_S
from decode_svc.peers import GRACE_S, HOPE_S, PeerState
from shared.ids import PeerAddress, RequestId, Room, Ticket
from shared.protocol import messages as m
from shared.protocol.local import Output
from shared.protocol.machine import RequestState
from tests.decode.rig import FIRST, ME, P0, P1, SECOND, Rig, endings, fenced, messages


def test_a19_a_new_request_waits_as_long_as_a_restarted_peer_needs_to_be_found() -> None:
    rig = Rig()
    assert rig.submit("r") == []
    rig.now_s += GRACE_S - 0.1
    assert endings(list(rig.intake.tick(rig.now_s))) == []
    assert len(messages(rig.take(m.Registered(P0, ME, 1, m.Capacity(30))), m.Prefill)) == 1
    alone = Rig()
    alone.submit("r")
    alone.now_s += GRACE_S
    (ended,) = [e for e in alone.intake.tick(alone.now_s) if isinstance(e, Ended)]
    assert ended.output is not None
    assert ended.output.error is not None
    assert (ended.output.error.code, ended.output.error.retryable) == ("no_prefill", True)
    assert "tcp://p:0 is connecting, tcp://p:1 is connecting" in ended.output.error.message


def test_a3_a_prompt_that_no_peer_takes_is_refused_not_kept_waiting() -> None:
    rig = Rig(P0, P1)
    rig.now_s += GRACE_S
    assert endings(rig.submit("r", prompt=31, max_tokens=1)) == [("failed", "prefill_capacity_exceeded")]


def test_s67_a_digest_that_differs_re_prefills_once_and_is_counted() -> None:
    rig = Rig(P0, P1, digest_every=1)
    effects = rig.submit("r")
    for attempt, (epoch, found) in enumerate(((P0, 8), (P1, 8)), 1):
        (prefill,) = messages(effects, m.Prefill)
        assert prefill.digest
        part = m.Coverage(0, m.pack_int32([0, 1]), {"kv": 32}, digest=7)
        effects = rig.take(rig.completed(attempt, epoch=epoch, parts=[part]))
        (verify,) = [e for e in effects if isinstance(e, Verify)]
        assert (verify.ticket, verify.tokens, len(verify.pages)) == (Ticket(attempt), 6, 2)
        assert not [e for e in effects if isinstance(e, Prebuild)]
        assert rig.state("r") is RequestState.REQUESTED
        effects = list(rig.intake.verified(Ticket(attempt), found, rig.now_s))
        rig.intake.check_integrity()
    assert endings(effects) == [("failed", "digest_mismatch")]
    assert (rig.intake.counts.digests, rig.intake.counts.digest_mismatches, rig.intake.counts.retries) == (2, 2, 1)
    assert rig.pages.free_pages == 15


def test_a_digest_that_is_equal_commits_and_one_that_comes_too_late_is_nothing() -> None:
    rig = Rig(P0, digest_every=2)
    assert not messages(rig.submit("a"), m.Prefill)[0].digest
    assert messages(rig.submit("b"), m.Prefill)[0].digest
    part = m.Coverage(0, m.pack_int32([0, 1]), {"kv": 32}, digest=7)
    rig.take(rig.completed(2, room=Room(2), parts=[part]))
    rig.take(rig.completed(2, room=Room(2), parts=[part]))  # repeated
    assert Prebuild(RequestId("b")) in list(rig.intake.verified(Ticket(2), 7, rig.now_s))
    assert messages(rig.submit("c"), m.Prefill)
    assert messages(rig.submit("d", prompt=5, max_tokens=1), m.Prefill) == []  # no slot
    rig.cancel("a")
    rig.take(m.AbortAck(P0, ME, Room(1), Ticket(1), clean=True))
    part = m.Coverage(0, m.pack_int32([0, 1]), {"kv": 32}, digest=7)
    rig.take(rig.completed(4, room=Room(4), parts=[part]))
    rig.cancel("d")
    assert list(rig.intake.verified(Ticket(4), 7, rig.now_s)) == []
    rig.intake.check_integrity()


def test_a_missing_digest_is_no_proof() -> None:
    rig = Rig(P0, digest_every=1)
    rig.submit("r")
    effects = rig.take(rig.completed(1))
    assert len(messages(effects, m.Abort)) == 1
    assert rig.intake.counts.bad_completions == 1


def test_a5_what_prefill_gives_up_ends_its_request_at_once_and_its_pages_wait() -> None:
    rig = Rig(P0, P1)
    rig.submit("r")
    given_up = m.GivenUp(P0, ME, Room(1), Ticket(1), "stopped by an operator", "aborted", retryable=True)
    effects = rig.take(given_up)
    assert endings(effects) == [("failed", "aborted")]  # not tried elsewhere: the operator meant it
    assert len(messages(effects, m.Abort)) == 1
    assert rig.pages.quarantined_pages == 2
    assert rig.take(given_up) == []
    rig.take(m.AbortAck(P0, ME, Room(1), Ticket(1), clean=True))
    assert rig.pages.free_pages == 15


def test_a6_without_a_prefill_decode_computes_by_itself_where_it_is_told_to() -> None:
    rig = Rig(local=True)
    assert rig.submit("r", prompt=6, max_tokens=4) == []
    rig.now_s += GRACE_S
    assert Compute(RequestId("r")) in list(rig.intake.tick(rig.now_s))
    assert len(rig.intake.pages_of(RequestId("r"))) == 3
    assert (rig.slots.free_slots, rig.state("r")) == (3, RequestState.COMPUTING)
    rig.intake.check_integrity()
    rig.now_s += 100
    assert endings(list(rig.intake.tick(rig.now_s, {RequestId("r")}))) == []  # a forward holds its pages
    rig.intake.computed(RequestId("r"))
    assert endings(list(rig.intake.finish(Output(RequestId("r"), [5], [0.0], "stop"), rig.now_s))) == [("finished", "")]
    rig.intake.check_integrity()
    assert rig.pages.free_pages == 15


def test_a6_a_lost_attempt_goes_on_locally_with_fresh_pages() -> None:
    rig = Rig(P0, local=True)
    rig.submit("r")
    while not (found := [e for e in rig.intake.tick(rig.now_s) if isinstance(e, Compute)]):
        rig.now_s += 0.25
    assert found == [Compute(RequestId("r"))]
    assert not set(rig.intake.pages_of(RequestId("r")).tolist()) & {1, 2}
    assert rig.pages.quarantined_pages == 2
    rig.intake.fenced(FIRST, 1, rig.now_s)
    rig.intake.check_integrity()
    assert rig.pages.quarantined_pages == 0


def test_s66_quarantine_beyond_its_bound_ends_by_a_fence() -> None:
    rig = Rig(P0)
    rig.submit("r")
    rig.cancel("r")

    def fences_after(seconds: float) -> list[tuple[str, int]]:
        """The peer is alive all the time, and does not answer the abort."""
        found = []
        end_s = rig.now_s + seconds
        while rig.now_s < end_s:
            rig.now_s += 0.25
            rig.take(m.Heartbeat(P0, ME, PeerAddress("tcp://p:0"), 1, 1, 1, 0, True, b""))
            found += fenced(list(rig.intake.tick(rig.now_s)))
        return found

    assert fences_after(QUARANTINE_S - 1) == []
    assert fences_after(2) == [(FIRST, 1)]
    crowded = rig = Rig(P0, num_pages=6)
    crowded.submit("a", prompt=12, max_tokens=1)
    crowded.cancel("a")
    crowded.submit("b", prompt=12, max_tokens=1)
    assert fences_after(CROWDED_S) == []
    assert fences_after(0.5) == [(FIRST, 1)]


def test_a_prefill_that_is_draining_is_not_asked_and_costs_no_attempt() -> None:
    rig = Rig(P0, P1)
    rig.submit("r")
    (first,) = (lease.peer for lease in rig.intake.leases.open.values())
    epoch, ticket = (P0, 1) if first == FIRST else (P1, 1)
    stopping = m.Failed(epoch, ME, Room(1), Ticket(ticket), "the service is stopping", "shutting_down", True, True)
    (again,) = messages(rig.take(stopping), m.Prefill)
    assert again.to_epoch != epoch
    assert rig.intake.requests[RequestId("r")].attempts == 1
    for name in ("a", "b", "c"):
        (asked,) = messages(rig.submit(name), m.Prefill) or [None]
        assert asked is None or asked.to_epoch != epoch


def test_a_heartbeat_tells_that_a_prefill_is_draining_and_that_it_is_no_more() -> None:
    rig = Rig(P0)
    beat = m.Heartbeat(P0, ME, FIRST, 1, 1, 0, 0, False, b"", True)
    rig.take(beat)
    assert not messages(rig.submit("r"), m.Prefill)
    rig.take(m.Heartbeat(P0, ME, FIRST, 1, 2, 0, 0, False, b"", False))
    rig.now_s += 0.1
    assert messages(list(rig.intake.tick(rig.now_s)), m.Prefill)


def test_two_names_of_one_prefill_are_one_peer() -> None:
    """The newer registration is the one that it knows; the older name is asked no more, and says so."""
    rig = Rig()
    for registration in (1, 2):
        rig.take(m.Registered(P0, ME, registration, m.Capacity(30)))
    states = {peer.address: peer.state for peer in rig.peers.peers.values()}
    assert states == {FIRST: PeerState.REFUSED, SECOND: PeerState.REGISTERED}
    assert f"address: prefill has '{SECOND}'" in str(rig.peers)
    assert not rig.intake.fenced(FIRST, 1, rig.now_s)
    rig.take(m.Registered(P0, ME, 1, m.Capacity(30)))  # a late copy
    assert rig.peers.peers[FIRST].state is PeerState.REFUSED
    for _ in range(10):
        rig.now_s += 1
        rig.take(m.Heartbeat(P0, ME, SECOND, 2, 1, 0, 0, False, b""))
        effects = list(rig.intake.tick(rig.now_s))
        assert {e.address for e in effects if isinstance(e, Send)} <= {SECOND}
        assert not fenced(effects)


def test_sessions_that_come_and_go_without_end_are_opened_at_a_limited_rate() -> None:
    rig = Rig(P0)
    opened = 0
    for second in range(120):
        rig.now_s = 100.0 + second
        peer = rig.peers.peers[FIRST]
        if peer.state is PeerState.REGISTERED:
            rig.take(m.Refused(P0, ME, peer.registration, []))
            opened += len(
                [e for e in rig.intake.fenced(FIRST, peer.registration, rig.now_s) if isinstance(e, OpenSession)]
            )
        opened += len([e for e in rig.intake.tick(rig.now_s) if isinstance(e, OpenSession)])
        rig.take(m.Registered(P0, ME, peer.registration, m.Capacity(30)))
    assert 30 <= opened <= 61


def test_while_the_only_prefill_drains_a_prompt_that_fits_may_be_sent_again() -> None:
    """It is not too long for anybody: 503, not 400. And routers are told not to send more."""
    rig = Rig(P0)
    rig.take(m.Heartbeat(P0, ME, FIRST, 1, 1, 0, 0, False, b"", True))
    assert rig.peers.peers[FIRST].status().state == "draining"
    rig.now_s += GRACE_S + HOPE_S
    rig.take(m.Heartbeat(P0, ME, FIRST, 1, 2, 0, 0, False, b"", True))
    for peer in rig.peers.peers.values():
        if peer.address == SECOND:
            peer.state = PeerState.REFUSED
    assert endings(rig.submit("fits", prompt=6)) == [("failed", "no_prefill")]
    assert endings(rig.submit("never", prompt=31)) == [("failed", "prefill_capacity_exceeded")]


def test_a2_a_landed_prompt_that_waits_for_rows_beyond_its_limit_ends_and_frees_everything() -> None:
    rig = Rig(P0)
    rig.submit("r", timeout_s=2.0)
    rig.take(rig.completed(1))
    assert rig.state("r") is RequestState.LANDED
    rig.now_s += 2.1
    assert endings(list(rig.intake.tick(rig.now_s))) == [("failed", "timeout")]
    rig.intake.check_integrity()
    assert rig.pages.free_pages == rig.pages.usable_pages
