"""The status page: what it tells of each request, of the engine even when that is dead, and that nothing runs on it but
its own script."""

import asyncio
import base64
import hashlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from decode_svc.status import DIFFERENCES_SHOWN, ENDED_KEPT, RUNNING_SHOWN, TEXT_SHOWN, segments
from shared.ids import Epoch
from shared.protocol.local import EngineError, Handover, PeerStatus
from shared.protocol.messages import Difference, Timings
from tests.front.fakes import Clock, FakeEngine, Http, decode_app, handover, refused, registered, served, status

BODY = {"prompt": [1, 2, 3], "max_tokens": 5}
ERROR = EngineError("prefill is gone", "prefill_lost", 503, "prefill_failed", True)
MARKUP = "<script>alert(1)</script>"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(clock: Clock) -> FakeEngine:
    engine = FakeEngine(clock)
    engine.ready()
    engine.front.on_message(status(registered()))
    return engine


async def shown(http: Http) -> dict[str, Any]:
    code, data = await http.get("/status.json")
    assert code == 200
    return dict(data)


async def until(http: Http, happened: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The data once the front has handled what it was sent."""
    async with asyncio.timeout(10):
        while not happened(data := await shown(http)):
            await asyncio.sleep(0)
    return data


def post(http: Http, client_id: str = "") -> "asyncio.Task[tuple[int, Any]]":
    headers = {"X-Request-Id": client_id} if client_id else {}
    return asyncio.ensure_future(http.post("/v1/completions", BODY, headers=headers))


async def test_a_request_from_its_start_to_its_end(engine: FakeEngine, http: Http, clock: Clock) -> None:
    engine.manual = True
    task = post(http, "mine")
    message = await engine.generate()
    clock.now_s += 0.2
    [row] = (await shown(http))["running"]
    assert (row["outcome"], row["client_id"], row["prompt_tokens"]) == ("running", "mine", 3)
    assert row["segments"] == {"waiting": 200}

    clock.now_s += 0.3
    engine.say(message, [65, 66], handover=handover())
    data = await until(http, lambda data: "decode" in data["running"][0]["segments"])
    assert (data["running"][0]["completion_tokens"], data["running"][0]["total_ms"], data["ended"]) == (2, 500, [])

    clock.now_s += 0.3
    engine.say(message, [67], "length")
    answer = (await task)[1]
    clock.now_s += 2
    data = await shown(http)
    assert (data["running"], data["outcomes"]) == ([], {"finished": 1, "failed": 0, "aborted": 0})
    parts = {"queue": 251, "prefill": 154, "overlapped": 46, "exposed": 4, "commit": 45, "decode": 300}
    assert data["ended"] == [
        {
            "id": answer["id"],
            "client_id": "mine",
            "outcome": "finished",
            "error": "",
            "prompts": 1,
            "choices": 1,
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "peer": "tcp://127.0.0.1:8998",
            "attempts": 1,
            "bytes": 4200,
            "goodput": 84000,
            "total_ms": 800,
            "segments": parts,
            "ended_ago_s": 2,
        }
    ]
    assert sum(parts.values()) == 800


async def test_a_failure_before_the_first_token(engine: FakeEngine, http: Http) -> None:
    engine.manual = True
    task = post(http)
    engine.fail(await engine.generate(), ERROR)
    assert (await task)[0] == 503
    [row] = (await shown(http))["ended"]
    assert (row["outcome"], row["error"]) == ("failed", "prefill_lost: prefill is gone")
    assert (row["peer"], row["completion_tokens"], list(row["segments"])) == ("", 0, ["waiting"])


async def test_a_failure_in_mid_stream_with_a_long_message(engine: FakeEngine, http: Http) -> None:
    engine.manual = True
    task = asyncio.ensure_future(http.events("/v1/completions", BODY))
    message = await engine.generate()
    engine.say(message, [65], handover=handover())
    engine.fail(message, EngineError("x" * 10_000, "engine_dead", 503, "service_unavailable", True))
    assert "error" in (await task)[-2]
    [row] = (await shown(http))["ended"]
    assert (row["outcome"], row["completion_tokens"], len(row["error"])) == ("failed", 1, TEXT_SHOWN)
    assert row["error"].startswith("engine_dead: xxx")


async def test_a_client_that_leaves(engine: FakeEngine, http: Http) -> None:
    engine.manual = True
    task = post(http)
    message = await engine.generate()
    task.cancel()
    data = await until(http, lambda data: data["ended"] != [])
    assert (data["ended"][0]["outcome"], data["outcomes"]["aborted"], data["running"]) == ("aborted", 1, [])
    assert [cancel.request for cancel in engine.cancels] == [message.request]


async def test_only_the_last_are_kept(engine: FakeEngine, http: Http) -> None:
    for number in range(ENDED_KEPT + 3):
        await http.post("/v1/completions", BODY, headers={"X-Request-Id": f"r{number}"})
    data = await shown(http)
    assert [row["client_id"] for row in data["ended"]] == [f"r{n}" for n in range(ENDED_KEPT + 2, 2, -1)]
    assert data["outcomes"]["finished"] == ENDED_KEPT + 3


async def test_of_those_that_run_the_oldest_are_shown(engine: FakeEngine, http: Http) -> None:
    engine.manual = True
    tasks = []
    for number in range(RUNNING_SHOWN + 2):
        tasks.append(post(http, f"r{number}"))
        while len(engine.generates) <= number:
            engine.arrived.clear()
            await engine.arrived.wait()
    data = await shown(http)
    assert [row["client_id"] for row in data["running"]] == [f"r{n}" for n in range(RUNNING_SHOWN)]
    await http.post("/abort_request", {"abort_all": True})
    await asyncio.gather(*tasks)
    data = await shown(http)
    assert (data["running"], data["outcomes"]["failed"]) == ([], RUNNING_SHOWN + 2)
    assert data["ended"][0]["error"] == "aborted: aborted by an operator"


async def test_the_engines_numbers(engine: FakeEngine, http: Http) -> None:
    gauges = {"pages_usable": 64.0, "pages_free": 40.0, "pages_quarantined": 4.0, "slots_free": 3.0}
    gauges |= {"running_requests": 1.0, "waiting_requests": 2.0, "leases": 5.0}
    counters = {"handoff_retries_total": 6.0, "handoff_digests_total{outcome=different}": 1.0}
    named = {f"handoff_{name}": value for name, value in gauges.items()}
    engine.front.on_message(status(registered(max_prompt_tokens=48), refused(), gauges=named, counters=counters))
    data = await shown(http)
    assert data["pages"] == {"held": 20, "quarantined": 4, "free": 40}
    assert data["slots"] == {"taken": 1, "free": 3}
    assert data["requests"] == {"running": 1, "waiting": 2, "open in front": 0, "leases": 5}
    assert {name: n for name, n in data["counters"].items() if n} == {"retries": 6, "digests different": 1}
    assert data["engine"] == {"epoch": "5", "control": "tcp://127.0.0.1:8999", "steps": 0}
    good, bad = data["peers"]
    assert (good["state"], good["epoch"], good["longest_prompt"]) == ("registered", "7", 48)
    assert (bad["state"], bad["differences"]) == ("refused", ["page_size: prefill has '32', decode has '16'"])


async def test_a_peers_differences_are_bounded(engine: FakeEngine, http: Http) -> None:
    many = [Difference(f"field{n}", "x" * 1000, "y") for n in range(DIFFERENCES_SHOWN + 7)]
    engine.front.on_message(status(PeerStatus("tcp://a:1", "refused", Epoch(0), differences=many)))
    [peer] = (await shown(http))["peers"]
    assert (len(peer["differences"]), peer["differences"][-1]) == (DIFFERENCES_SHOWN + 1, "and 7 more")
    assert max(map(len, peer["differences"])) == TEXT_SHOWN


async def test_a_dead_engine_is_shown_with_its_last_numbers(engine: FakeEngine, http: Http) -> None:
    engine.front.on_message(status(refused(), gauges={"handoff_pages_usable": 64.0}))
    engine.front.engine_died("signal 9")
    data = await shown(http)
    assert data["health"] == {"ok": False, "reasons": ["engine dead: signal 9"]}
    assert (data["ready"]["ok"], data["pages"]["held"], len(data["peers"])) == (False, 64, 1)
    async with http.session.get("/") as page:
        assert page.status == 200


async def test_an_engine_that_has_said_nothing_yet(tokenizer: Any) -> None:
    async with served(decode_app(FakeEngine(), tokenizer)) as http:
        data = await shown(http)
    assert data["ready"] == {"ok": False, "reasons": ["starting"]}
    assert (data["peers"], data["slots"], data["engine"]["epoch"]) == ([], {"taken": 0, "free": 0}, "")


async def test_nothing_runs_on_the_page_but_its_own_script(http: Http) -> None:
    async with http.session.get("/") as response:
        html, headers = await response.text(), response.headers
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    for tag in ("script", "style"):
        [text] = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|\sstyle=|\son\w+=|https?:", html)


async def test_a_clients_name_is_data_and_never_markup(engine: FakeEngine, http: Http) -> None:
    before = await (await http.session.get("/")).text()
    await http.post("/v1/completions", BODY, headers={"X-Request-Id": MARKUP})
    async with http.session.get("/status.json") as response:
        assert response.headers["Content-Type"] == "application/json; charset=utf-8"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert (await response.json())["ended"][0]["client_id"] == MARKUP
    assert await (await http.session.get("/")).text() == before


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {"local prefill": 1000, "decode": 500}),
        (
            Handover("p", 1, 10, 0.0, Timings(9.0, 2.0, 0.1, 5.0), 0, 5.0),
            {"queue": 0, "prefill": 0, "overlapped": 2000},
        ),
        (Handover("p", 1, 10, 0.9, Timings(0.1, 0.6, 0.2, 0.1), 0, 0.1), {"queue": 200, "overlapped": 0, "commit": 0}),
    ],
)
def test_segments_are_never_negative(given: Handover | None, expected: dict[str, float]) -> None:
    parts = segments(given, 10.0, 11.0, 11.5)
    assert {name: parts[name] for name in expected} == expected
    assert min(parts.values()) >= 0
