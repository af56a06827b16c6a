"""The front's client of its engine: one ending a request, one Cancel, and a truthful /health (A22, A23)."""

import asyncio
from contextlib import aclosing

import pytest

from shared.errors import ConfigError, PeerBusy, StateError, Unavailable
from shared.ids import RequestId
from shared.ops.front import GIVE_UP_S, SILENT_S, STALLED_S, TICK_S
from shared.ops.stream import EngineFailure
from shared.protocol.local import (
    HEARTBEAT_S,
    Cancel,
    Drain,
    Drained,
    EngineError,
    Generate,
    Output,
    Outputs,
    StartFailed,
)
from shared.protocol.messages import Sampling, pack_int32
from tests.front.fakes import Clock, FakeEngine, refused, registered, status


def generate(name: str = "r1") -> Generate:
    return Generate(RequestId(name), pack_int32([1, 2]), 8, Sampling(1), [], False)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def engine(clock: Clock) -> FakeEngine:
    engine = FakeEngine(clock)
    engine.manual = True
    engine.ready()
    return engine


def outcomes(engine: FakeEngine) -> dict[str, float]:
    names = {name: f'handoff_requests_total{{outcome="{name}"}}' for name in ("finished", "failed", "aborted")}
    counted = {name: engine.metric(line) for name, line in names.items()}
    assert engine.metric("handoff_requests_started_total") == sum(counted.values())
    return counted


def ticking(engine: FakeEngine, clock: Clock, seconds: float) -> None:
    """Time passes, and the front's loop runs all along."""
    end = clock.now_s + seconds
    while clock.now_s < end:
        clock.now_s += TICK_S
        engine.front.tick(clock.now_s)


async def test_outputs_reach_their_request_in_order(engine: FakeEngine) -> None:
    one, two = generate("r1"), generate("r2")
    with engine.front.generate(one) as first, engine.front.generate(two) as second:
        engine.front.on_message(Outputs([Output(one.request, [1], [0.0]), Output(two.request, [9], [0.0])]))
        engine.say(one, [2], "length")
        engine.say(two, [8], "stop")
        assert [output.tokens async for output in first] == [[1], [2]]
        assert [output.tokens async for output in second] == [[9], [8]]
    assert engine.received == [one, two]
    assert outcomes(engine) == {"finished": 2, "failed": 0, "aborted": 0}


async def test_an_error_is_raised_once_and_ends_the_request(engine: FakeEngine) -> None:
    message = generate()
    with engine.front.generate(message) as stream:
        engine.say(message, [1])
        engine.fail(message, EngineError("no memory", "no_memory", 507, "server_error", False))
        assert (await anext(stream)).tokens == [1]
        with pytest.raises(EngineFailure, match="no memory") as caught:
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert (caught.value.http_status, caught.value.code, caught.value.retryable) == (507, "no_memory", False)
    assert engine.cancels == []
    assert outcomes(engine) == {"finished": 0, "failed": 1, "aborted": 0}


async def test_leaving_early_cancels_once(engine: FakeEngine) -> None:
    message = generate()
    with engine.front.generate(message) as stream:
        engine.say(message, [1])
        await anext(stream)
    assert engine.received == [message, Cancel(message.request)]
    engine.say(message, [2], "stop")  # was on its way; belongs to nobody
    assert outcomes(engine) == {"finished": 0, "failed": 0, "aborted": 1}


async def test_no_cancel_once_the_ending_has_arrived(engine: FakeEngine) -> None:
    message = generate()
    with engine.front.generate(message):
        engine.say(message, [1], "stop")
    assert engine.cancels == []


async def test_a_stop_string_is_a_finish_and_a_cancel(engine: FakeEngine) -> None:
    message = generate()
    with engine.front.generate(message) as stream:
        engine.say(message, [1])
        await anext(stream)
        stream.stop(message.request, 0)
        assert [output async for output in stream] == []
    assert engine.cancels == [Cancel(message.request)]
    assert outcomes(engine) == {"finished": 1, "failed": 0, "aborted": 0}


async def test_outputs_after_the_ending_are_dropped(engine: FakeEngine) -> None:
    message = generate()
    with engine.front.generate(message) as stream:
        engine.say(message, [1], "stop")
        engine.say(message, [2], "length")
        engine.front.engine_died("late")
        assert [output.tokens async for output in stream] == [[1]]


async def test_two_requests_cannot_share_an_id(engine: FakeEngine) -> None:
    with engine.front.generate(generate()), pytest.raises(StateError), engine.front.generate(generate()):
        pass
    assert len(engine.generates) == 1


async def test_what_cannot_be_sent_is_no_request(engine: FakeEngine) -> None:
    engine.refusal = PeerBusy("full")
    with pytest.raises(PeerBusy), engine.front.generate(generate()):
        pytest.fail("entered")
    assert engine.received == []
    assert outcomes(engine) == {"finished": 0, "failed": 1, "aborted": 0}


async def test_a_cancel_that_cannot_be_sent_is_sent_later_once(engine: FakeEngine, clock: Clock) -> None:
    message = generate()
    with engine.front.generate(message):
        engine.refusal = PeerBusy("full")
    ticking(engine, clock, 1.0)
    assert engine.cancels == []
    engine.refusal = None
    ticking(engine, clock, 1.0)
    assert engine.cancels == [Cancel(message.request)]


# death


async def test_death_ends_every_request_at_once(engine: FakeEngine) -> None:
    one, two = generate("r1"), generate("r2")
    with engine.front.generate(one) as first, engine.front.generate(two) as second:
        engine.front.engine_died("signal 9")
        engine.front.engine_died("noticed again")
        for stream in (first, second):
            with pytest.raises(EngineFailure, match="signal 9") as caught:
                await anext(stream)
            assert (caught.value.http_status, caught.value.code, caught.value.retryable) == (503, "engine_dead", True)
    assert engine.cancels == []
    assert outcomes(engine) == {"finished": 0, "failed": 2, "aborted": 0}
    with pytest.raises(Unavailable, match="signal 9"), engine.front.generate(generate("r3")):
        pytest.fail("entered")


async def test_death_wakes_a_request_that_waits(engine: FakeEngine) -> None:
    async def read() -> None:
        with engine.front.generate(generate()) as stream:
            await anext(stream)

    task = asyncio.create_task(read())
    await engine.generate()
    engine.front.engine_died("gone")
    with pytest.raises(EngineFailure):
        await asyncio.wait_for(task, 5)


async def test_a_dead_engine_says_nothing(engine: FakeEngine, clock: Clock) -> None:
    engine.front.engine_died("gone")
    engine.ready()
    engine.front.on_message(status(registered()))
    assert engine.front.health(clock.now_s) == (False, ["engine dead: gone"])
    assert engine.front.status is None


# start and drain


async def test_start(clock: Clock) -> None:
    engine = FakeEngine(clock)
    assert engine.front.health(clock.now_s) == (False, ["starting"])
    with pytest.raises(Unavailable) as caught:
        engine.front.require()
    assert caught.value.code == "starting"
    waiting = asyncio.create_task(engine.front.started())
    await asyncio.sleep(0)
    engine.ready()
    assert (await waiting).epoch == 5
    assert engine.front.health(clock.now_s).ok


async def test_a_long_start_is_not_silence(clock: Clock) -> None:
    engine = FakeEngine(clock)
    ticking(engine, clock, 600)
    engine.ready()
    assert engine.front.health(clock.now_s).ok


async def test_start_failures() -> None:
    engine = FakeEngine()
    engine.front.on_message(StartFailed("no such model: x"))
    with pytest.raises(ConfigError, match="no such model: x"):
        await engine.front.started()
    assert engine.front.health(0.0).reasons == ["engine cannot start: no such model: x"]
    engine = FakeEngine()
    engine.front.engine_died("exit status 1")
    with pytest.raises(Unavailable, match="exit status 1"):
        await engine.front.started()


async def test_draining_is_alive_and_takes_nothing_new(engine: FakeEngine, clock: Clock) -> None:
    message = generate()
    with engine.front.generate(message) as stream:
        engine.front.drain(8.0)
        engine.front.drain(8.0)
        assert engine.received == [message, Drain(8.0)]
        assert engine.front.health(clock.now_s).ok
        with pytest.raises(Unavailable) as caught:
            engine.front.require()
        assert caught.value.code == "shutting_down"
        engine.say(message, [1], "stop")
        assert (await anext(stream)).tokens == [1]
    assert not engine.front.drained.is_set()
    engine.front.on_message(Drained())
    await asyncio.wait_for(engine.front.drained.wait(), 5)


async def test_death_ends_a_drain(engine: FakeEngine) -> None:
    engine.front.drain(8.0)
    engine.front.engine_died("gone")
    await asyncio.wait_for(engine.front.drained.wait(), 5)


# silence


async def test_a_frozen_engine_is_red_within_two_probes(engine: FakeEngine, clock: Clock) -> None:
    ticking(engine, clock, 2 * HEARTBEAT_S)
    assert engine.front.health(clock.now_s).ok
    ticking(engine, clock, SILENT_S - 2 * HEARTBEAT_S + TICK_S)
    ok, reasons = engine.front.health(clock.now_s)
    assert not ok
    assert "silent" in reasons[0]
    assert SILENT_S + TICK_S < 2.0


async def test_a_busy_engine_is_green(engine: FakeEngine, clock: Clock) -> None:
    for _ in range(40):
        ticking(engine, clock, HEARTBEAT_S)
        engine.front.on_message(status(registered()))
        assert engine.front.health(clock.now_s).ok


async def test_any_message_is_a_sign_of_life(engine: FakeEngine, clock: Clock) -> None:
    ticking(engine, clock, SILENT_S)
    engine.say(generate("of nobody"), [1])
    ticking(engine, clock, 2 * HEARTBEAT_S)
    assert engine.front.health(clock.now_s).ok


async def test_a_front_that_was_stopped_itself_does_not_judge(engine: FakeEngine, clock: Clock) -> None:
    message = generate()
    with engine.front.generate(message) as stream:
        ticking(engine, clock, HEARTBEAT_S)
        clock.now_s += 30.0  # SIGSTOP, a suspended machine, a stalled loop
        assert engine.front.health(clock.now_s).ok
        engine.front.tick(clock.now_s)
        engine.say(message, [1])
        assert (await anext(stream)).tokens == [1]
        ticking(engine, clock, SILENT_S + TICK_S)
        assert not engine.front.health(clock.now_s).ok
    assert STALLED_S < SILENT_S


async def test_a_silent_engines_requests_end_and_it_is_told(engine: FakeEngine, clock: Clock) -> None:
    message = generate()
    with engine.front.generate(message) as stream:
        ticking(engine, clock, GIVE_UP_S)
        assert engine.cancels == []
        ticking(engine, clock, 2 * TICK_S)
        with pytest.raises(EngineFailure) as caught:
            await anext(stream)
    assert (caught.value.code, caught.value.http_status, caught.value.retryable) == ("engine_silent", 503, True)
    assert engine.cancels == [Cancel(message.request)]
    engine.front.on_message(status(registered()))  # it thaws
    assert engine.front.health(clock.now_s).ok
    ticking(engine, clock, HEARTBEAT_S)
    assert engine.cancels == [Cancel(message.request)]


async def test_watch_ticks_until_it_is_left(engine: FakeEngine, clock: Clock) -> None:
    async with aclosing(engine.front.watch()) as watching:
        await anext(watching)
        message = generate()
        with engine.front.generate(message):
            engine.refusal = PeerBusy("full")
        engine.refusal = None
        engine.arrived.clear()
        await asyncio.wait_for(engine.arrived.wait(), 5)
        assert engine.cancels == [Cancel(message.request)]
        with pytest.raises(StopAsyncIteration):
            await anext(watching)


async def test_peers_are_counted_by_state(engine: FakeEngine) -> None:
    engine.front.on_message(status(registered("a"), registered("b"), refused()))
    assert engine.metric('handoff_peers{state="registered"}') == 2
    assert engine.metric('handoff_peers{state="refused"}') == 1
    assert engine.metric('handoff_peers{state="lost"}') == 0


async def test_a_stop_at_once_is_told_as_what_it_is(engine: FakeEngine) -> None:
    message = generate()
    with engine.front.generate(message) as stream:
        engine.front.stopped()
        with pytest.raises(EngineFailure) as caught:
            await anext(stream)
    assert (caught.value.code, caught.value.http_status, caught.value.retryable) == ("shutting_down", 503, True)
    assert engine.front.drained.is_set()
