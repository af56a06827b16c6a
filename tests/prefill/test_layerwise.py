"""Prefill's decisions when a prompt's layers are sent while later ones compute (S7, S10, S11, S24, S25, S64)."""

from typing import Any

import numpy as np
import pytest

from prefill_svc.effects import Drain, Drop, Effect, Finish, Halt, SenderId, Stream, Sweep, Write
from shared.ids import Epoch, Room, Ticket
from shared.kv.layout import META_ROW
from shared.protocol import messages as m
from shared.protocol.machine import SenderState
from tests.prefill.rig import DECODE, ME, WHOLE, Rig, register, sent


def forward(rig: Rig, budget: int = 100) -> list[Any]:
    _, effects = rig.handoff.next_forward(budget, 8, rig.now_s)
    rig.handoff.check_integrity()
    return [e for e in effects if isinstance(e, Stream)]


def kinds(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects]


def written(rig: Rig, ticket: int = 1) -> list[Any]:
    return list(rig.handoff.written(rig.key(ticket), WHOLE, 0.01, None, rig.now_s))


def pairs(stream: Stream) -> list[tuple[int, int]]:
    runs = stream.runs
    return [
        (int(src) + i, int(dst) + i)
        for src, dst, length in zip(runs.src, runs.dst, runs.length, strict=True)
        for i in range(length)
    ]


def test_one_chunk_from_stream_to_completion() -> None:
    rig = Rig(layerwise=True)
    rig.prefill(1)
    (stream,) = forward(rig)
    assert (stream.chunk, pairs(stream)) == (0, [(1, 20), (2, 21)])
    (finish,) = rig.computed()
    assert isinstance(finish, Finish)
    assert (finish.chunk, finish.row.length.tolist()) == (0, [META_ROW.itemsize])
    (done,) = sent(written(rig), m.Completed)
    assert done.parts[0].bytes_by_component == {"kv": 32}
    assert rig.pages.free_pages == 11


def test_s7_s10_s64_the_chunks_of_a_prompt_are_together_the_whole_send() -> None:
    """Every range goes by layer, each position to its own destination: chunk 1 never lands on chunk 0's pages."""
    rig = Rig(layerwise=True)
    rig.prefill(1, length=22)
    streams = []
    for expected in ([0, 8], [8, 16], [16, 22]):
        (stream,) = forward(rig, budget=8)
        streams.append(stream)
        assert stream.chunk == expected[0]
        effects = rig.computed()
        assert kinds(effects) == [Sweep if expected[1] < 22 else Finish]
        rig.handoff.check_integrity()
    together = [pair for stream in streams for pair in pairs(stream)]
    assert together == [(1 + i, 20 + i) for i in range(6)]
    whole = Rig()
    whole.prefill(1, length=22)
    whole.forward()
    (write,) = whole.computed()
    assert isinstance(write, Write)
    by_layer = [stream.pairing.blocks(stream.runs) for stream in streams]
    assert sum(b.total_bytes for b in by_layer) == write.batches[0].total_bytes


@pytest.mark.parametrize("rank", range(3))
def test_s5_s7_ranks_send_what_they_own_to_where_it_belongs(rank: int) -> None:
    """Three prefill ranks, the same code: pages 1 … 6 of the scheduler; each position is sent by one of them."""
    rig = Rig(layerwise=True, rank=rank, ranks=3)
    rig.prefill(1, length=22)
    found = []
    for _ in range(3):
        for stream in forward(rig, budget=8):
            found += pairs(stream)
        rig.computed()
    logical = np.arange(1, 7)
    mine = np.flatnonzero(logical % 3 == rank)
    assert found == [(int(logical[i]) // 3, 20 + int(i)) for i in mine]


def test_s11_s14_a_last_chunk_in_which_a_rank_owns_nothing_still_sends_the_row() -> None:
    rig = Rig(layerwise=True, rank=2, ranks=4)
    rig.prefill(1, length=4)  # page 1: rank 1's
    assert forward(rig) == []
    (finish,) = rig.computed()
    assert isinstance(finish, Finish)
    assert finish.row.length.tolist() == [META_ROW.itemsize]
    effects = list(rig.handoff.written(rig.key(1), META_ROW.itemsize, 0.01, None, rig.now_s))
    (done,) = sent(effects, m.Completed)
    assert done.parts == [m.Coverage(2, b"", {"kv": 0}, write_s=0.01)]


def test_s25_mixed_requests_of_one_batch_each_have_their_own_context() -> None:
    rig = Rig(layerwise=True)
    for ticket in (1, 2, 3):
        rig.prefill(ticket, dst_pages=m.pack_int32([20 + 2 * ticket, 21 + 2 * ticket]))
    streams = forward(rig)
    assert [pairs(s) for s in streams] == [[(1, 22), (2, 23)], [(3, 24), (4, 25)], [(5, 26), (6, 27)]]
    assert kinds(rig.computed()) == [Finish] * 3


def test_s25_what_is_switched_off_or_unknown_is_sent_whole_and_counted() -> None:
    rig = Rig()
    rig.prefill(1)
    assert forward(rig) == []
    (write,) = rig.computed()
    assert isinstance(write, Write)
    assert rig.handoff.counts.whole_sends == 1


def test_s19_s31_an_abort_in_the_forward_stops_the_layers_and_is_answered_after_the_last_byte() -> None:
    rig = Rig(layerwise=True)
    rig.prefill(1, length=16)
    forward(rig, budget=8)
    assert kinds(rig.abort(1)) == [Halt]
    effects = rig.computed()
    assert kinds(effects) == [Halt, Drop]
    assert rig.pages.free_pages == 7  # still read
    assert not forward(rig)
    (ack,) = sent(written(rig), m.AbortAck)
    assert ack.clean
    assert (rig.pages.free_pages, rig.handoff.senders) == (11, {})


def test_an_abort_between_two_chunks_waits_for_the_first_ones_writes() -> None:
    rig = Rig(layerwise=True)
    rig.prefill(1, length=16)
    forward(rig, budget=8)
    rig.computed()
    assert rig.state(1) is SenderState.PARTIAL
    assert kinds(rig.abort(1)) == [Halt, Drop]
    assert not forward(rig)
    assert sent(written(rig), m.AbortAck)
    assert rig.pages.free_pages == 11


def test_a_failed_forward_waits_for_the_layers_that_went_out() -> None:
    rig = Rig(layerwise=True)
    rig.prefill(1)
    forward(rig)
    effects = list(rig.handoff.compute_failed(RuntimeError("boom"), rig.now_s))
    assert kinds(effects) == [Halt, Drop]
    (failed,) = sent(written(rig), m.Failed)
    assert (failed.code, failed.retryable, failed.clean) == ("compute_failed", False, True)
    assert rig.pages.free_pages == 11


@pytest.mark.parametrize("late", [False, True])
def test_a_failed_layer_ends_the_room_once(late: bool) -> None:
    """Whichever group it was: it is heard at the finish, drained, and announced as unclean."""
    rig = Rig(layerwise=True)
    rig.prefill(1)
    forward(rig)
    rig.computed()
    if late:
        rig.abort(1)
    (drain,) = rig.handoff.write_failed(rig.key(1), TimeoutError("x"), rig.now_s)
    assert isinstance(drain, Drain)
    effects = list(rig.handoff.drained(rig.key(1), rig.now_s))
    (answer,) = sent(effects, m.AbortAck if late else m.Failed)
    assert not answer.clean
    assert rig.pages.free_pages == 11


def test_s24_a_rest_that_does_not_land_in_time_is_given_up_and_its_pages_stay_held() -> None:
    rig = Rig(layerwise=True)
    rig.prefill(1)
    forward(rig)
    rig.computed()
    rig.now_s += 19.9
    rig.take(
        m.Heartbeat(
            DECODE, ME, rig.handoff.peers.peers[next(iter(rig.handoff.peers.peers))].address, 1, 1, 0, 0, False, b""
        )
    )
    assert not sent(list(rig.handoff.tick(False, rig.now_s)), m.GivenUp)
    rig.now_s += 0.2
    effects = list(rig.handoff.tick(False, rig.now_s))
    (given_up,) = sent(effects, m.GivenUp)
    assert (given_up.code, given_up.retryable) == ("transfer_timeout", True)
    assert Halt(rig.key(1)) in effects
    assert rig.pages.free_pages == 9
    (failed,) = sent(written(rig), m.Failed)  # the drain is proven
    assert failed.clean
    assert rig.pages.free_pages == 11
    rig.take(m.Ack(DECODE, ME, Room(9), Ticket(1)))
    assert not rig.handoff.senders


@pytest.mark.parametrize("sent_bytes", [0, WHOLE - 8, WHOLE + 8])
def test_s67_what_was_written_must_be_what_was_meant_to_be(sent_bytes: int) -> None:
    """A completion is proof of bytes, so a wrong sum is a failed transfer."""
    rig = Rig(layerwise=True)
    rig.prefill(1)
    forward(rig)
    rig.computed()
    effects = list(rig.handoff.written(rig.key(1), sent_bytes, 0.01, None, rig.now_s))
    assert kinds(effects) == [Drain]
    (failed,) = sent(list(rig.handoff.drained(rig.key(1), rig.now_s)), m.Failed)
    assert (failed.code, failed.clean) == ("transfer_failed", False)


def test_a5_the_first_reason_stays() -> None:
    rig = Rig(layerwise=True)
    rig.prefill(1)
    forward(rig)
    rig.stop("r1")
    rig.handoff.compute_failed(RuntimeError("boom"), rig.now_s)
    (failed,) = sent(written(rig), m.Failed)
    assert (failed.code, failed.retryable) == ("aborted", True)


def test_prompts_of_a_host_that_has_not_answered_yet_hold_no_pages_and_delay_no_other() -> None:
    rig = Rig(layerwise=True)
    rig.take(register(Epoch(51), reply_to="tcp://127.0.0.1:2"))
    rig.prefill(1, epoch=Epoch(51))
    rig.prefill(2)
    (stream,) = forward(rig)
    assert stream.key.ticket == 2
    rig.computed()
    assert rig.pages.free_pages == 9
    rig.handoff.met(SenderId(Epoch(51), 1))
    (stream,) = forward(rig)
    assert stream.key.decode_epoch == 51
    rig.handoff.met(SenderId(Epoch(99), 1))  # gone meanwhile: nothing
