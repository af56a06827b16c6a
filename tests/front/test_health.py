"""Three questions with three answers (S62): does it live, should requests come, does a token come out (A22, A23)."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from decode_svc.app import build_app
from prefill_svc.app import build_app as build_prefill_app
from shared.config import DecodeConfig, PrefillConfig
from shared.errors import PeerBusy
from shared.ids import Epoch
from shared.ops.front import STEP_LIMIT_S
from shared.protocol.local import EngineError, PeerStatus, Status
from tests.front.fakes import MODEL, Clock, FakeEngine, Http, decode_app, refused, registered, served, status

BODY = {"prompt": [1, 2, 3], "max_tokens": 5}
LOST = PeerStatus("tcp://127.0.0.1:8996", "lost", Epoch(3))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def clocked(clock: Clock, tokenizer: Any) -> AsyncIterator[tuple[FakeEngine, Http]]:
    engine = FakeEngine(clock)
    engine.ready()
    async with served(decode_app(engine, tokenizer)) as http:
        yield engine, http


async def test_ready_needs_a_status_a_registered_prefill_and_room(engine: FakeEngine, http: Http) -> None:
    engine.front.status = None
    assert await http.get("/ready") == (503, {"status": "not ready", "reasons": ["starting"]})
    draining = PeerStatus("tcp://127.0.0.1:8998", "draining", Epoch(7), 100)
    for peers in ([], [refused()], [LOST], [draining]):
        engine.front.on_message(status(*peers))
        assert (await http.get("/ready"))[1]["reasons"] == ["no prefill service is registered"]
        assert (await http.get("/health"))[0] == 200  # a dead prefill is no reason to restart decode
    engine.front.on_message(status(LOST, registered()))
    assert await http.get("/ready") == (200, {"status": "ok", "reasons": []})
    engine.front.on_message(status(registered(), gauges={"handoff_waiting_requests": 256.0}))
    assert (await http.get("/ready"))[1]["reasons"] == ["overloaded: 256 requests wait"]
    assert (await http.get("/health"))[0] == 200


async def test_ready_without_a_prefill_where_decode_computes_itself(tokenizer: Any) -> None:
    engine = FakeEngine()
    engine.ready()
    engine.front.on_message(status(LOST))
    config = DecodeConfig(model=MODEL, on_prefill_loss="local", max_waiting=0)
    async with served(build_app(config, engine.front, tokenizer, engine.registry)) as http:
        assert (await http.get("/ready"))[0] == 200
        engine.front.on_message(status(LOST, gauges={"handoff_waiting_requests": 1e6}))
        assert (await http.get("/ready"))[0] == 200  # 0: never overloaded


async def test_draining_is_alive_and_not_ready(engine: FakeEngine, http: Http) -> None:
    engine.front.drain(5.0)
    assert (await http.get("/ready"))[1]["reasons"] == ["draining"]
    assert (await http.get("/health"))[0] == 200


async def test_a_dead_engine_is_neither(engine: FakeEngine, http: Http) -> None:
    engine.front.engine_died("signal 9")
    for path in ("/health", "/ready"):
        code, body = await http.get(path)
        assert (code, body["reasons"]) == (503, ["engine dead: signal 9"])
    code, body = await http.get("/health_generate")
    assert (code, body["error"]["code"]) == (503, "engine_dead")


async def test_prefill_is_ready_without_a_decode() -> None:
    engine = FakeEngine(side="prefill")
    async with served(build_prefill_app(PrefillConfig(model="m"), engine.front, engine.registry)) as http:
        assert (await http.get("/ready"))[0] == 503
        engine.ready()
        engine.front.on_message(status())
        assert (await http.get("/ready"))[0] == 200


def step(steps: int, busy: bool) -> Status:
    return Status(steps, busy, [], {}, {}, {})


async def test_a22_an_engine_that_speaks_but_ends_no_forward_is_stuck(
    clocked: tuple[FakeEngine, Http], clock: Clock
) -> None:
    engine, http = clocked

    async def pass_time(seconds: float, steps: int, busy: bool) -> int:
        for _ in range(int(seconds)):
            clock.now_s += 1.0
            engine.front.on_message(step(steps, busy))
            engine.front.tick(clock.now_s)
        return (await http.get("/health"))[0]

    assert await pass_time(300, 7, busy=False) == 200  # idle is no standstill
    assert await pass_time(STEP_LIMIT_S - 1, 7, busy=True) == 200  # nor is a long forward
    assert await pass_time(1, 8, busy=True) == 200
    assert await pass_time(STEP_LIMIT_S + 1, 8, busy=True) == 503
    assert (await http.get("/health"))[1]["reasons"] == ["no forward has ended for 121.0 s"]
    assert await pass_time(1, 9, busy=True) == 200


async def test_an_idle_engine_is_given_one_token_to_make(engine: FakeEngine, http: Http) -> None:
    assert await http.get("/health_generate") == (200, {"status": "ok", "reasons": []})
    (probe,) = engine.generates
    assert (probe.max_tokens, probe.ignore_eos, len(engine.prompt())) == (1, True, 1)


async def test_a_failed_probe_says_why(engine: FakeEngine, http: Http) -> None:
    engine.manual = True
    asking = asyncio.ensure_future(http.get("/health_generate"))
    probe = await engine.generate()
    engine.fail(probe, EngineError("no prefill service: gone", "no_prefill", 503, "service_unavailable", True))
    code, body = await asking
    assert (code, body["error"]["code"]) == (503, "no_prefill")
    engine.refusal = PeerBusy("the engine is busy")
    assert (await http.get("/health_generate"))[0] == 503


async def test_a23_with_work_running_the_next_output_answers(engine: FakeEngine, http: Http) -> None:
    engine.manual = True
    running = asyncio.ensure_future(http.post("/v1/completions", BODY))
    work = await engine.generate()
    engine.front.on_message(status(registered(), gauges={"handoff_running_requests": 1.0}))
    asking = asyncio.ensure_future(http.get("/health_generate"))
    await asyncio.sleep(0.05)
    assert not asking.done()
    engine.say(work, [65])
    assert (await asking)[0] == 200
    assert len(engine.generates) == 1
    engine.say(work, [66], "length")
    assert (await running)[0] == 200


async def test_a_heartbeat_from_before_the_last_answer_is_not_believed(engine: FakeEngine, http: Http) -> None:
    """Half a second old, it says that something runs; nothing does, and no output would come."""
    engine.front.on_message(status(registered(), gauges={"handoff_running_requests": 1.0}))
    async with asyncio.timeout(5):
        assert (await http.get("/health_generate"))[0] == 200
    assert len(engine.generates) == 1


async def test_a_probe_that_waits_for_work_which_ends_without_output_makes_its_own(
    engine: FakeEngine, http: Http
) -> None:
    engine.manual = True
    running = asyncio.ensure_future(http.post("/v1/completions", BODY))
    await engine.generate()
    engine.front.on_message(status(registered(), gauges={"handoff_running_requests": 1.0}))
    asking = asyncio.ensure_future(http.get("/health_generate"))
    await asyncio.sleep(0.05)
    engine.manual = False
    running.cancel()
    async with asyncio.timeout(5):
        assert (await asking)[0] == 200
    assert [message.max_tokens for message in engine.generates][1:] == [1]


async def test_a23_with_work_only_waiting_the_heartbeat_answers_and_nothing_is_queued(
    engine: FakeEngine, http: Http
) -> None:
    engine.manual = True
    running = asyncio.ensure_future(http.post("/v1/completions", BODY))
    work = await engine.generate()
    engine.front.on_message(status(registered(), gauges={"handoff_waiting_requests": 1.0}))
    assert (await http.get("/health_generate"))[0] == 200
    assert len(engine.generates) == 1
    engine.say(work, [66], "length")
    assert (await running)[0] == 200
