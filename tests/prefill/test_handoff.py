"""Prefill's decisions, one event at a time."""

from typing import Any

import numpy as np
import pytest

from prefill_svc.effects import CloseSender, Drain, Interrupt, OpenSender, SenderId, Write
from prefill_svc.peers import LOST_S, RETIRED_KEPT, Retired
from prefill_svc.scheduler import Waiting, pack
from shared.errors import MessageError
from shared.ids import AttemptKey, Epoch, PeerAddress, Room, Ticket
from shared.kv.layout import META_ROW
from shared.protocol import messages as m
from shared.protocol.machine import SenderState
from tests.prefill.rig import DECODE, FINGERPRINT, ME, REPLY, WHOLE, Rig, regions, register, sent


def test_one_attempt_from_prefill_to_ack() -> None:
    rig = Rig()
    assert rig.registered[0] == OpenSender(SenderId(DECODE, 1), "host:1")
    assert rig.prefill(1) == []
    assert [(p.start, p.length, p.last) for p in rig.forward()] == [(0, 6, True)]
    (write,) = rig.computed()
    assert isinstance(write, Write)
    kv, row = write.batches
    assert kv.dst.tolist() == [1_000_000 + 20 * 8, 1_010_000 + 20 * 8]
    assert kv.length.tolist() == [16, 16]
    assert (row.dst.tolist(), row.length.tolist()) == ([1_050_000 + 2 * META_ROW.itemsize], [META_ROW.itemsize])
    effects = list(rig.handoff.written(rig.key(1), WHOLE, 0.01, None, 101.0))
    (done,) = sent(effects, m.Completed)
    assert isinstance(done, m.Completed)
    assert done.parts == [m.Coverage(0, m.pack_int32([0, 1]), {"kv": 32}, write_s=0.01)]
    assert rig.pages.free_pages == 11
    assert rig.take(m.Ack(DECODE, ME, Room(9), Ticket(1))) == []
    assert not rig.handoff.senders


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"tokens": b""}, "capacity"),
        ({"tokens": m.pack_int32(np.zeros(41))}, "capacity"),
        ({"tokens": m.pack_int32([1, 2, 3, 4, 5, 100])}, "bad_token"),
        ({"tokens": m.pack_int32([1, 2, 3, 4, 5, -1])}, "bad_token"),
        ({"dst_first_position": 1}, "destination_refused"),
        ({"dst_pages": m.pack_int32([20])}, "destination_refused"),
        ({"dst_pages": m.pack_int32([20, 21, 22])}, "destination_refused"),
        ({"dst_pages": m.pack_int32([20, 20])}, "destination_refused"),
        ({"dst_pages": m.pack_int32([20, 50])}, "destination_refused"),
        ({"dst_pages": m.pack_int32([0, 1])}, "destination_refused"),
        ({"slot": 4}, "destination_refused"),
        ({"slot": -1}, "destination_refused"),
    ],
)
def test_s7_s8_what_cannot_be_right_is_refused_before_any_work(changed: dict[str, Any], code: str) -> None:
    rig = Rig()
    (failed,) = sent(rig.prefill(1, **changed), m.Failed)
    assert isinstance(failed, m.Failed)
    assert (failed.code, failed.retryable) == (code, False)
    assert not rig.forward()
    assert rig.pages.free_pages == 11


@pytest.mark.parametrize("field", ["tokens", "dst_pages"])
def test_a_list_that_is_cut_off_is_the_peers_mistake_and_leaves_nothing(field: str) -> None:
    rig = Rig()
    cut_off: dict[str, Any] = {field: b"12345"}
    with pytest.raises(MessageError, match="room 9"):
        rig.prefill(1, **cut_off)
    rig.handoff.check_integrity()
    assert not rig.handoff.senders


def test_s31_an_aborted_attempt_is_acknowledged_only_when_its_writes_have_ended() -> None:
    rig = Rig()
    rig.prefill(1)
    rig.forward()
    assert rig.abort(1) == []  # computing
    assert len(sent(rig.computed(), m.AbortAck)) == 1
    rig.prefill(2)
    rig.forward()
    rig.computed()
    assert rig.abort(2) == []  # writing
    assert rig.pages.free_pages == 9
    assert len(sent(list(rig.handoff.written(rig.key(2), WHOLE, 0.1, None, 101.0)), m.AbortAck)) == 1
    rig.prefill(3)
    assert len(sent(rig.abort(3), m.AbortAck)) == 1  # queued: nothing runs
    assert rig.pages.free_pages == 11
    assert len(sent(rig.abort(3), m.AbortAck)) == 1  # repeated: acknowledged again


def test_s31_an_attempt_that_was_aborted_before_it_came_never_starts() -> None:
    rig = Rig()
    assert len(sent(rig.abort(5), m.AbortAck)) == 1
    (failed,) = sent(rig.prefill(5), m.Failed)
    assert isinstance(failed, m.Failed)
    assert (failed.code, failed.retryable) == ("stale", True)
    assert not rig.forward()


def test_s31_retired_tickets_take_flat_memory() -> None:
    retired = Retired()
    for ticket in range(1, 100_001):
        retired.add(Ticket(ticket))
    assert len(retired._tickets) == RETIRED_KEPT
    assert all(Ticket(t) in retired for t in (1, 50_000, 100_000))
    assert Ticket(100_001) not in retired


def test_s66_a_failed_write_is_drained_before_its_pages_are_free() -> None:
    rig = Rig()
    rig.prefill(1)
    rig.forward()
    rig.computed()
    effects = list(rig.handoff.write_failed(rig.key(1), RuntimeError("-1"), 101.0))
    assert effects == [Drain(SenderId(DECODE, 1), rig.key(1))]
    assert rig.pages.free_pages == 9
    (failed,) = sent(list(rig.handoff.drained(rig.key(1), 101.0)), m.Failed)
    assert isinstance(failed, m.Failed)
    assert (failed.code, failed.retryable, failed.clean) == ("transfer_failed", True, False)
    assert rig.pages.free_pages == 11
    for ticket in (1, 1, 99):  # whatever is asked of this registration from here on
        (ack,) = sent(rig.abort(ticket), m.AbortAck)
        assert isinstance(ack, m.AbortAck)
        assert not ack.clean
    rig.take(register(registration=2))
    fresh = m.Abort(DECODE, ME, REPLY, 2, Room(9), Ticket(100), "x")
    (ack,) = sent(rig.take(fresh), m.AbortAck)
    assert isinstance(ack, m.AbortAck)
    assert ack.clean


def test_s30_a_result_is_repeated_until_it_is_acknowledged() -> None:
    rig = Rig()
    rig.prefill(1)
    rig.forward()
    rig.computed()
    rig.handoff.written(rig.key(1), WHOLE, 0.1, None, 101.0)
    for now_s in (102.5, 104.0):
        rig.take(m.Heartbeat(DECODE, ME, REPLY, 1, 1, 1, 0, False, b""))
        assert len(sent(list(rig.handoff.tick(False, now_s)), m.Completed)) == 1
        rig.now_s = now_s
    rig.take(m.Ack(DECODE, ME, Room(9), Ticket(1)))
    rig.take(m.Ack(DECODE, ME, Room(9), Ticket(1)))
    assert not sent(list(rig.handoff.tick(False, 106.0)), m.Completed)


def test_a_duplicate_prefill_starts_nothing() -> None:
    rig = Rig()
    rig.prefill(1)
    assert rig.prefill(1) == []
    assert len(rig.forward()) == 1
    assert not rig.forward()


def test_messages_for_another_incarnation_or_registration_are_refused_and_do_nothing() -> None:
    rig = Rig()
    for changed in ({"to_epoch": Epoch(69)}, {"registration": 2}, {"epoch": Epoch(51)}):
        (refused,) = sent(rig.prefill(1, **changed), m.Refused)
        assert isinstance(refused, m.Refused)
        assert (refused.differences, refused.epoch) == ([], ME)
    assert not rig.handoff.senders
    aborted = m.Abort(DECODE, Epoch(69), REPLY, 1, Room(9), Ticket(1), "x")
    assert not sent(rig.take(aborted), m.AbortAck)  # it would be no proof for what its predecessor started


def test_a_new_registration_ends_the_old_ones_attempts_and_its_worker() -> None:
    rig = Rig()
    rig.prefill(1)
    effects = rig.take(register(registration=2))
    assert len(sent(effects, m.AbortAck)) == 1
    assert OpenSender(SenderId(DECODE, 2), "host:1") in effects
    assert CloseSender(SenderId(DECODE, 1)) in rig.handoff.tick(False, 100.5)
    assert rig.take(register(registration=1)) == []  # a late copy
    assert rig.handoff.peers.find(DECODE, 2) is not None


def test_a_silent_decode_is_lost_and_its_attempts_end() -> None:
    rig = Rig()
    rig.prefill(1)
    for now_s in np.arange(100.0, 100.0 + LOST_S + 1, 0.25):
        effects = rig.handoff.tick(False, float(now_s))
    assert CloseSender(SenderId(DECODE, 1)) in effects or not rig.handoff.peers.peers
    assert not rig.handoff.senders
    assert rig.pages.free_pages == 11


def test_a_loop_that_was_itself_stopped_listens_again_before_it_judges() -> None:
    rig = Rig()
    rig.handoff.tick(False, 100.0)
    rig.handoff.tick(False, 160.0)
    assert rig.handoff.peers.find(DECODE, 1) is not None


def test_s45_every_difference_is_named_with_both_values() -> None:
    rig = Rig()
    effects = rig.take(register(epoch=Epoch(60), page_size="32", model="other"))
    (refused,) = sent(effects, m.Refused)
    assert isinstance(refused, m.Refused)
    assert set(refused.differences) == {m.Difference("page_size", "4", "32"), m.Difference("model", "m", "other")}
    status = {s.state: s for s in rig.handoff.peers.statuses()}
    assert status["refused"].differences == refused.differences


def test_s45_a_missing_value_refuses_too() -> None:
    rig = Rig()
    message = register(epoch=Epoch(60))
    del message.fingerprint["model"]
    (refused,) = sent(rig.take(message), m.Refused)
    assert isinstance(refused, m.Refused)
    assert refused.differences == [m.Difference("model", "m", "(missing)")]


@pytest.mark.parametrize(
    ("layers", "ok"), [([0, 1], True), ([0, 2], False), ([1, 0], False), ([0], False), ([0, 1, 2], False)]
)
def test_s35_layer_ids_are_equal_in_order_or_nothing_is_copied(layers: list[int], ok: bool) -> None:
    rig = Rig()
    kv = [m.Region("kv", layer, 1_000_000 + i * 10_000, 8, 50) for i, layer in enumerate(layers)]
    meta = regions(1_000_000, 50)[-1]
    message = m.Register(Epoch(60), Epoch(0), REPLY, 1, "host:2", FINGERPRINT, [*kv, meta])
    effects = rig.take(message)
    assert bool(sent(effects, m.Registered)) == ok
    assert bool(sent(effects, m.Refused)) != ok


def test_a_prompt_waits_for_pages_and_those_behind_it_wait_too() -> None:
    rig = Rig(num_pages=6)
    rig.prefill(1, length=16)
    rig.prefill(2, length=16)
    rig.prefill(3, length=4)
    assert [p.key.ticket for p in rig.forward()] == [1]
    rig.computed()
    assert not rig.forward()
    rig.handoff.written(rig.key(1), 64 + META_ROW.itemsize, 0.1, None, 101.0)
    assert [p.key.ticket for p in rig.forward()] == [2, 3]


def test_a2_a_prompt_that_waited_too_long_fails_explicitly_and_frees_what_it_held() -> None:
    rig = Rig()
    rig.prefill(1, length=16)
    rig.forward(budget=8)
    rig.computed()  # one chunk of two
    assert rig.pages.free_pages == 7
    rig.now_s = 111.0
    pieces, effects = rig.handoff.next_forward(8, 8, rig.now_s)
    (failed,) = sent(list(effects), m.Failed)
    assert isinstance(failed, m.Failed)
    assert (pieces, failed.code, failed.retryable) == ([], "timeout", True)
    assert rig.pages.free_pages == 11


def waiting(ticket: int, done: int, total: int) -> Waiting:
    return Waiting(AttemptKey(DECODE, Room(1), Ticket(ticket)), done, total)


def test_s10_a_chunk_that_is_not_the_last_ends_at_a_page() -> None:
    """Up to 8200 with more to come: 128 pages. Then the last 8 tokens."""
    pieces = pack([waiting(1, 0, 8300)], 8200, 64, 8)
    assert [(p.start, p.length, p.last) for p in pieces] == [(0, 8192, False)]
    pieces = pack([waiting(1, 8192, 8200)], 8192, 64, 8)
    assert [(p.start, p.length, p.last) for p in pieces] == [(8192, 8, True)]


def test_chunks_are_packed_up_to_the_budget_in_order() -> None:
    pieces = pack([waiting(1, 0, 30), waiting(2, 0, 10), waiting(3, 0, 100), waiting(4, 0, 1)], 64, 16, 8)
    assert [(p.key.ticket, p.length, p.last) for p in pieces] == [
        (1, 30, True),
        (2, 10, True),
        (3, 16, False),
        (4, 1, True),
    ]
    assert [p.key.ticket for p in pack([waiting(i, 0, 1) for i in range(9)], 64, 16, 3)] == [0, 1, 2]


def other_decode(rig: Rig) -> None:
    rig.take(register(Epoch(51), reply_to="tcp://127.0.0.1:2"))
    rig.handoff.met(SenderId(Epoch(51), 1))


def test_no_peer_takes_more_than_half_of_the_pages_while_there_are_others() -> None:
    """If it stands still, its prompts keep their pages for seconds; the other's go on."""
    rig = Rig(num_pages=9)
    other_decode(rig)
    for ticket in (1, 2, 3):
        rig.prefill(ticket, length=8)
    rig.prefill(4, length=8, epoch=Epoch(51), reply_to=PeerAddress("tcp://127.0.0.1:2"))
    assert [(p.key.decode_epoch, p.key.ticket) for p in rig.forward()] == [(50, 1), (50, 2), (51, 4)]


def test_alone_a_peer_has_all_pages_and_one_large_prompt_always_fits() -> None:
    rig = Rig(num_pages=9)
    for ticket in (1, 2, 3, 4):
        rig.prefill(ticket, length=8)
    assert len(rig.forward()) == 4
    rig = Rig(num_pages=9)
    other_decode(rig)
    rig.prefill(1, length=32)
    assert len(rig.forward()) == 1


def test_pages_are_taken_for_what_the_next_forward_computes() -> None:
    rig = Rig(num_pages=12)
    for ticket in (1, 2, 3):
        rig.prefill(ticket, length=8)
    assert [p.key.ticket for p in rig.forward(budget=8)] == [1]
    assert rig.pages.free_pages == rig.pages.usable_pages - 2


def test_a_lost_peers_worker_is_interrupted() -> None:
    rig = Rig()
    rig.prefill(1)
    rig.forward()
    rig.computed()
    effects = [e for i in range(20) for e in rig.handoff.tick(False, 100 + 0.25 * i)]
    assert effects.count(Interrupt(SenderId(DECODE, 1))) == 1
    assert rig.state(1) is SenderState.ABORTING


def test_who_shared_a_failed_forward_may_try_again_and_who_was_alone_need_not() -> None:
    for count in (1, 2):
        rig = Rig()
        for ticket in range(1, count + 1):
            rig.prefill(ticket)
        rig.forward()
        failed = sent(list(rig.handoff.compute_failed(RuntimeError("x"), rig.now_s)), m.Failed)
        assert [f.retryable for f in failed] == [count > 1] * count


def test_heartbeats_say_that_it_is_draining() -> None:
    rig = Rig()
    for draining in (False, True):
        rig.handoff.draining = draining
        rig.now_s += 1
        (beat,) = sent(list(rig.handoff.tick(False, rig.now_s)), m.Heartbeat)
        assert beat.draining is draining
