"""Layer by layer: what is sent when, by whom, how often, and what is waited for (S14 … S26)."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shared.errors import TransferFailed
from shared.ids import AttemptKey, Epoch, Room, Ticket
from shared.protocol.messages import Region
from shared.transfer.engine import Batch, Blocks
from shared.transfer.layers import ActiveContexts, Context, LayerGroups, Outgoing, Step, Work, at_once, one_destination
from shared.transfer.plan import pair_regions, runs_of

KEY = AttemptKey(Epoch(1), Room(7), Ticket(1))


class Engine:
    """Notes what it is given; fails on demand."""

    session = "x"

    def __init__(self) -> None:
        self.submits: list[Blocks] = []
        self.waits: list[Batch] = []
        self.refuse_at: int | None = None
        self.fail: Batch | None = None

    def register(self, base: int, length_bytes: int) -> None:
        raise AssertionError

    def submit(self, session: str, blocks: Blocks) -> Batch:
        if self.refuse_at == len(self.submits):
            raise TransferFailed("refused")
        self.submits.append(blocks)
        return Batch(len(self.submits))

    def contact(self, session: str) -> None:
        raise AssertionError

    def interrupt(self) -> None:
        raise AssertionError

    def wait(self, batch: Batch) -> None:
        self.waits.append(batch)
        if batch == self.fail:
            raise TransferFailed("failed")

    def retire(self) -> None:
        pass


class Bench:
    """A peer's worker that does its work when told to, for a cache of ``layers`` layers."""

    def __init__(self, layers: int = 16, group: int = 8) -> None:
        self.layers = layers
        self.engine = Engine()
        self.groups = LayerGroups(range(layers), group)
        self.work: list[Work] = []
        self.events = 0
        regions = [Region("kv", i, 1_000 * (i + 1), 10, 50) for i in range(layers)]
        targets = [Region("kv", i, 1_000_000 + 1_000 * i, 10, 50) for i in range(layers)]
        self.pairing = pair_regions(regions, targets)
        self.active = ActiveContexts()

    def context(self, pages: list[int], chunk: int = 0, key: AttemptKey = KEY) -> Context:
        source = np.array(pages, np.int32)
        runs = runs_of(source, source + 20)
        made = self.active.register(
            key, chunk, lambda outgoing: Context(outgoing, self.pairing, runs, self.work.append)
        )
        assert made is not None
        return made

    def step(self, *contexts: Context) -> Step:
        return Step(self.groups, self.record, contexts)

    def record(self) -> Callable[[], None]:
        self.events += 1
        return at_once

    def run(self) -> None:
        while self.work:
            self.work.pop(0)(lambda: self.engine, "session")

    def finish(self, context: Context) -> None:
        """As the worker does at the end of a chunk that is the last."""
        self.run()
        context.sweep(at_once, lambda: self.engine, "session")
        context.outgoing.settle(lambda: self.engine)

    def layers_of(self, blocks: Blocks) -> list[int]:
        return sorted({int(src) // 1_000 - 1 for src in blocks.src})


def test_s23_one_submit_a_group_and_the_other_layers_cost_nothing() -> None:
    """10 requests of 79 layers in groups of 8: 9 groups by layer's end and one sweep, not 79 submits each."""
    bench = Bench(layers=79)
    keys = [AttemptKey(Epoch(1), Room(i), Ticket(i)) for i in range(10)]
    contexts = [bench.context([1, 2], key=key) for key in keys]
    step = bench.step(*contexts)
    for layer in range(79):
        before = len(bench.work)
        step.layer_end(layer)
        assert len(bench.work) - before == (10 if layer % 8 == 7 or layer == 78 else 0)
    assert bench.events == 10  # one for each group, whatever the number of requests
    for context in contexts:
        bench.finish(context)
    assert step.submits == len(bench.engine.submits) == 100


def test_s22_layers_whose_end_was_never_announced_go_in_one_submit() -> None:
    """79 buffers and 78 ends: nine groups cover 0 … 71, one more submit 72 … 78."""
    bench = Bench(layers=79)
    context = bench.context([1])
    step = bench.step(context)
    for layer in range(78):
        step.layer_end(layer)
    bench.finish(context)
    sent = [bench.layers_of(blocks) for blocks in bench.engine.submits]
    assert [len(x) for x in sent] == [8] * 9 + [7]
    assert sent[-1] == list(range(72, 79))
    assert sorted(layer for x in sent for layer in x) == list(range(79))


def test_s22_a_layer_that_was_skipped_within_a_group_is_not_sent_before_it_is_written() -> None:
    bench = Bench(layers=8, group=4)
    context = bench.context([1])
    step = bench.step(context)
    for layer in (0, 2, 3, 4, 5, 6, 7):
        step.layer_end(layer)
    bench.run()
    assert [bench.layers_of(b) for b in bench.engine.submits] == [[0, 2, 3], [4, 5, 6, 7]]
    bench.finish(context)
    assert bench.layers_of(bench.engine.submits[-1]) == [1]


def test_s21_a_layers_end_counts_once_and_later_forwards_add_nothing() -> None:
    """16 layers in groups of 8, three forwards: 2 submits are what finishing waits for."""
    bench = Bench()
    context = bench.context([1])
    first = bench.step(context)
    for _ in range(2):
        for layer in range(16):
            first.layer_end(layer)
    for _ in range(2):
        other = bench.step()
        for layer in range(16):
            other.layer_end(layer)
    bench.finish(context)
    assert (len(bench.engine.submits), len(bench.engine.waits)) == (2, 2)


def test_s18_a_layers_end_reaches_only_the_contexts_of_its_own_step() -> None:
    bench = Bench()
    here = bench.context([1])
    running = bench.step(here)
    later = bench.context([5], chunk=64)  # registered while that forward runs
    for layer in range(16):
        running.layer_end(layer)
    bench.run()
    assert {int(b.src.min()) % 1_000 for b in bench.engine.submits} == {10}
    waiting = bench.step(later)
    for layer in range(16):
        waiting.layer_end(layer)
    bench.run()
    assert [int(b.src.min()) % 1_000 for b in bench.engine.submits] == [10, 10, 50, 50]


def test_s18_without_contexts_no_event_is_recorded() -> None:
    bench = Bench()
    step = bench.step()
    for layer in range(16):
        step.layer_end(layer)
    assert (bench.events, bench.work) == (0, [])


def test_s15_the_worker_waits_for_the_layer_and_compute_never_does() -> None:
    bench = Bench(layers=8)
    there = threading.Event()
    context = bench.context([1])
    step = Step(bench.groups, lambda: lambda: _must(there), [context])
    for layer in range(8):
        step.layer_end(layer)  # returns although the event has not come
    worker = threading.Thread(target=bench.run)
    worker.start()
    assert not bench.engine.submits
    there.set()
    worker.join(10)
    assert len(bench.engine.submits) == 1


def _must(event: threading.Event) -> None:
    assert event.wait(10)


def test_s15_an_event_that_fails_marks_its_context_and_the_worker_goes_on() -> None:
    bench = Bench(layers=8)

    def broken() -> None:
        raise RuntimeError("device lost")

    ill, well = bench.context([1]), bench.context([5], key=AttemptKey(Epoch(1), Room(8), Ticket(2)))
    for context, wait in ((ill, broken), (well, at_once)):
        step = Step(bench.groups, lambda wait=wait: wait, [context])  # type: ignore[misc]
        for layer in range(8):
            step.layer_end(layer)
    bench.finish(well)
    with pytest.raises(RuntimeError, match="device lost"):
        bench.finish(ill)
    assert len(bench.engine.submits) == 1


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_s15_s17_the_first_failure_stops_the_rest_and_what_was_submitted_is_waited_for(refused: int) -> None:
    """In the first group, in the middle, in the sweep."""
    bench = Bench(layers=24)
    bench.engine.refuse_at = refused
    context = bench.context([1])
    step = bench.step(context)
    for layer in range(16):
        step.layer_end(layer)
    with pytest.raises(TransferFailed, match="refused"):
        bench.finish(context)
    assert len(bench.engine.submits) == len(bench.engine.waits) == refused


def test_s17_a_batch_that_fails_ends_the_wait() -> None:
    bench = Bench()
    bench.engine.fail = Batch(1)
    context = bench.context([1])
    step = bench.step(context)
    for layer in range(16):
        step.layer_end(layer)
    with pytest.raises(TransferFailed, match="failed"):
        bench.finish(context)
    assert bench.engine.waits == [1]


def test_an_engine_that_was_retired_for_anothers_sake_fails_what_went_through_it() -> None:
    bench = Bench()
    context = bench.context([1])
    step = bench.step(context)
    for layer in range(8):
        step.layer_end(layer)
    bench.run()
    bench.engine = Engine()
    for layer in range(8, 16):
        step.layer_end(layer)
    with pytest.raises(TransferFailed, match="was retired"):
        bench.finish(context)
    assert not bench.engine.submits


def test_s19_chunks_finish_in_the_order_in_which_they_were_sent() -> None:
    """Chunks 0 and 4096 of room 7: finish gives the first, then the second, then nothing."""
    bench = Bench()
    first, second = bench.context([1], 0), bench.context([5], 4096)
    assert bench.active.finish(KEY, 4096) is None  # not before the first
    assert bench.active.finish(KEY, 0) is first
    assert bench.active.finish(KEY, 0) is None
    assert bench.active.finish(KEY, 4096) is second
    assert bench.active.finish(KEY, 4096) is None
    bench.active.drop(KEY)
    assert len(bench.active) == 0


def test_s19_dropping_submits_no_more_and_waits_for_what_is_under_way() -> None:
    bench = Bench()
    context = bench.context([1])
    step = bench.step(context)
    for layer in range(8):
        step.layer_end(layer)
    bench.run()
    bench.active.halt(KEY)
    for layer in range(8, 16):
        step.layer_end(layer)
    bench.run()
    assert (len(bench.engine.submits), bench.engine.waits) == (1, [])
    bench.active.outgoing(KEY).settle(lambda: bench.engine)
    assert bench.engine.waits == [1]


def test_s20_a_chunk_that_is_seen_again_is_not_registered_again() -> None:
    """Seen elsewhere: 917 registrations for about 100 requests."""
    bench = Bench()
    bench.context([1])

    def never(outgoing: Outgoing) -> Context:
        raise AssertionError("made twice")

    for _ in range(9):
        assert bench.active.register(KEY, 0, never) is None
    assert bench.context([1], chunk=64) is not None


@pytest.mark.parametrize(
    ("real", "allowed"),
    [([True], True), ([True, False, False, False], True), ([True, True], False), ([False], False), ([], False)],
)
def test_s26_only_a_room_with_one_real_destination_goes_by_layer(real: list[bool], allowed: bool) -> None:
    assert one_destination(real) == allowed


@pytest.mark.parametrize("ends", ["all", "none", "some"])
def test_s13_s14_by_layer_and_whole_the_bytes_are_the_same(ends: str) -> None:
    """The same lists, the same blocks, each once, in whatever order the layers end."""
    bench = Bench(layers=11, group=4)
    pages = [3, 4, 9, 1]
    context = bench.context(pages)
    step = bench.step(context)
    for layer in {"all": range(11), "none": [], "some": [0, 1, 2, 3, 6, 7, 10]}[ends]:
        step.layer_end(layer)
    bench.finish(context)
    source = np.array(pages, np.int32)
    whole = bench.pairing.blocks(runs_of(source, source + 20))
    assert sorted(x for b in bench.engine.submits for x in triples(b)) == sorted(triples(whole))
    assert context.outgoing.sent_bytes == whole.total_bytes


def triples(blocks: Blocks) -> list[Any]:
    return list(zip(blocks.src.tolist(), blocks.dst.tolist(), blocks.length.tolist(), strict=True))


def test_a_layer_with_several_buffers_goes_with_all_of_them() -> None:
    """Keys of an indexer ride with their layer's group (S25)."""
    groups = LayerGroups([0, 1, 2, 3, 0, 2], 2)
    assert [groups.regions(group).tolist() for group in groups.groups] == [[0, 4, 1], [2, 5, 3]]


def test_s67_addresses_that_cannot_be_made_fail_the_attempt_and_nothing_is_taken_for_sent() -> None:
    """Whatever goes wrong in a group that nobody waits for is heard at the end."""
    bench = Bench()
    context = bench.context([1])

    class NoMemory:
        bases = context._pairing.bases

        def blocks(self, *_: Any) -> Blocks:
            raise MemoryError("no room for the addresses")

    context._pairing = NoMemory()  # type: ignore[assignment]
    step = bench.step(context)
    for layer in range(16):
        step.layer_end(layer)
    with pytest.raises(MemoryError):
        bench.finish(context)
    assert not bench.engine.submits
