"""The operator's abort on prefill (A5, S31): clients hear of it at once, pages wait for the end of the work."""

from typing import Any

from prefill_svc.effects import Drain, Write
from shared.ids import Room, Ticket
from shared.protocol import messages as m
from tests.prefill.rig import DECODE, ME, WHOLE, Rig, sent


def given_up(effects: list[Any]) -> list[Any]:
    return sent(effects, m.GivenUp)


def test_a_queued_attempt_ends_at_once() -> None:
    rig = Rig()
    rig.prefill(1)
    (failed,) = sent(rig.stop("r1"), m.Failed)
    assert (failed.code, failed.clean) == ("aborted", True)
    assert rig.pages.free_pages == 11
    assert not rig.forward()


def test_one_in_a_forward_is_given_up_now_and_failed_after_it() -> None:
    rig = Rig()
    rig.prefill(1)
    rig.forward()
    (notice,) = given_up(rig.stop("r1"))
    assert (notice.ticket, notice.code) == (Ticket(1), "aborted")
    assert not rig.stop("r1")
    rig.now_s += 1.5
    assert len(given_up(list(rig.handoff.tick(True, rig.now_s)))) == 1  # until somebody answers
    assert rig.pages.free_pages == 9
    (failed,) = sent(rig.computed(), m.Failed)
    assert failed.code == "aborted"
    assert rig.pages.free_pages == 11
    rig.take(m.Ack(DECODE, ME, Room(9), Ticket(1)))
    assert not rig.handoff.senders
    assert rig.handoff.counts.ended == {"finished": 0, "failed": 1, "aborted": 0}


def test_its_answer_abort_turns_the_failure_into_an_acknowledgement() -> None:
    rig = Rig()
    rig.prefill(1)
    rig.forward()
    rig.stop(None)
    assert rig.abort(1) == []  # not before the forward has ended
    (ack,) = sent(rig.computed(), m.AbortAck)
    assert ack.clean
    assert not rig.handoff.senders


def test_the_remaining_chunks_of_a_stopped_prompt_are_dropped() -> None:
    rig = Rig()
    rig.prefill(1, length=16)
    rig.forward(budget=8)
    rig.stop(None)
    assert sent(rig.computed(), m.Failed)
    assert not rig.forward(budget=8)


def test_one_that_writes_is_failed_after_its_last_byte() -> None:
    rig = Rig()
    rig.prefill(1)
    rig.forward()
    rig.computed()
    assert given_up(rig.stop("r1"))
    (failed,) = sent(list(rig.handoff.written(rig.key(1), WHOLE, 0.01, None, rig.now_s)), m.Failed)
    assert failed.clean
    assert (rig.pages.free_pages, rig.handoff.counts.bytes_sent) == (11, 0)


def test_a_write_that_fails_after_the_stop_is_drained_and_unclean() -> None:
    rig = Rig()
    rig.prefill(1)
    rig.forward()
    rig.computed()
    rig.stop("r1")
    (drain,) = rig.handoff.write_failed(rig.key(1), TimeoutError("x"), rig.now_s)
    assert isinstance(drain, Drain)
    (failed,) = sent(list(rig.handoff.drained(rig.key(1), rig.now_s)), m.Failed)
    assert not failed.clean


def test_what_is_announced_stays_so_and_others_go_on() -> None:
    rig = Rig()
    for ticket in (1, 2):
        rig.prefill(ticket)
    rig.forward()
    rig.computed()
    rig.handoff.written(rig.key(1), WHOLE, 0.01, None, rig.now_s)
    assert rig.stop("r1") == []
    assert rig.stop("nobody") == []
    assert sent(list(rig.handoff.written(rig.key(2), WHOLE, 0.01, None, rig.now_s)), m.Completed)


def test_a_digest_is_computed_of_the_pages_that_are_sent() -> None:
    rig = Rig()
    rig.prefill(1, digest=True)
    rig.forward()
    (write,) = rig.computed()
    assert isinstance(write, Write)
    assert write.digest is not None
    assert (write.digest.pages.tolist(), write.digest.positions.tolist(), write.digest.tokens) == ([1, 2], [0, 1], 6)
    (done,) = sent(list(rig.handoff.written(rig.key(1), WHOLE, 0.01, 99, rig.now_s)), m.Completed)
    assert done.parts[0].digest == 99
