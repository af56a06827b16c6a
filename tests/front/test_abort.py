"""The operator's abort: one request by its id or its client's name, or all; always with an explicit ending."""

import asyncio
from typing import Any

import pytest

from prefill_svc.app import build_app
from shared.config import PrefillConfig
from shared.ids import RequestId
from shared.protocol.local import Stop
from tests.front.fakes import FakeEngine, Http, served

BODY = {"prompt": [1, 2, 3], "max_tokens": 5}


async def running(engine: FakeEngine, http: Http, *names: str) -> list["asyncio.Task[tuple[int, Any]]"]:
    engine.manual = True
    tasks = []
    for count, name in enumerate(names, 1):
        headers = {"X-Request-Id": name} if name else {}
        tasks.append(asyncio.ensure_future(http.post("/v1/completions", BODY, headers=headers)))
        while len(engine.generates) < count:
            engine.arrived.clear()
            await engine.arrived.wait()
    return tasks


async def assert_aborted(task: "asyncio.Task[tuple[int, Any]]") -> None:
    code, body = await task
    assert (code, body["error"]["code"], body["error"]["retryable"]) == (503, "aborted", True)


@pytest.mark.parametrize("prefix", ["", "cmpl-"])
async def test_by_its_id(engine: FakeEngine, http: Http, prefix: str) -> None:
    first, second = await running(engine, http, "", "")
    rid = prefix + engine.generates[0].request
    assert await http.post("/abort_request", {"rid": rid}) == (200, {"aborted": 1})
    await assert_aborted(first)
    assert [c.request for c in engine.cancels] == [engine.generates[0].request]
    engine.say(engine.generates[1], [65], "length")
    assert (await second)[0] == 200
    assert engine.metric('handoff_requests_total{outcome="failed"}') == 1


async def test_by_the_clients_name_all_that_carry_it(engine: FakeEngine, http: Http) -> None:
    tasks = await running(engine, http, "mine", "mine", "other")
    assert await http.post("/abort_request", {"rid": "mine"}) == (200, {"aborted": 2})
    await assert_aborted(tasks[0])
    await assert_aborted(tasks[1])
    engine.say(engine.generates[2], [65], "length")
    assert (await tasks[2])[0] == 200


async def test_all_and_then_none_is_left(engine: FakeEngine, http: Http) -> None:
    tasks = await running(engine, http, "a", "", "c")
    assert await http.post("/abort_request", {"abort_all": True}) == (200, {"aborted": 3})
    for task in tasks:
        await assert_aborted(task)
    assert await http.post("/abort_request", {"abort_all": True}) == (200, {"aborted": 0})
    assert await http.post("/abort_request", {"rid": "nobody"}) == (200, {"aborted": 0})


@pytest.mark.parametrize(
    "body", [{}, {"rid": "a", "abort_all": True}, {"rid": 5}, {"other": 1}, [], b"", b"{", b"\xff"]
)
async def test_a_bad_body_aborts_nobody(engine: FakeEngine, http: Http, body: Any) -> None:
    (task,) = await running(engine, http, "a")
    code, answer = await http.post("/abort_request", body)
    assert (code, answer["error"]["type"]) == (400, "invalid_request_error")
    assert not engine.cancels
    engine.say(engine.generates[0], [65], "length")
    assert (await task)[0] == 200


async def test_prefill_tells_its_engine() -> None:
    engine = FakeEngine(side="prefill")
    async with served(build_app(PrefillConfig(model="m"), engine.front, engine.registry)) as http:
        assert (await http.post("/abort_request", {"abort_all": True}))[0] == 503  # still starting
        engine.ready()
        assert (await http.post("/abort_request", {"rid": "chatcmpl-abc"}))[0] == 202
        assert (await http.post("/abort_request", {"abort_all": True}))[0] == 202
        for nobody in ("-", "somebody-elses-"):  # an id that ends in a dash is not "all"
            assert (await http.post("/abort_request", {"rid": nobody}))[0] == 202
        names = [message.request for message in engine.received if isinstance(message, Stop)]
        assert names == [RequestId("abc"), None, RequestId("-"), RequestId("somebody-elses-")]
