"""The status page at / and its data at /status.json: what an operator wants to see first, dead engine or not."""

import base64
import hashlib
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from aiohttp import web

from decode_svc.answers import Answer, Job
from shared.config import DecodeConfig
from shared.errors import HandoffError
from shared.ops.front import EngineClient, Health
from shared.ops.http import json_response
from shared.ops.stream import EngineFailure, RequestStream
from shared.protocol.local import Handover, PeerStatus, Status

ENDED_KEPT = 50
RUNNING_SHOWN = 20
DIFFERENCES_SHOWN = 20
TEXT_SHOWN = 300
"""What others wrote is cut here: an error's message, a difference's values."""
_COUNTERS = {
    "retries": "handoff_retries_total",
    "attempts given up": "handoff_aborts_total",
    "fences": "handoff_fences_total",
    "digests different": "handoff_digests_total{outcome=different}",
    "malformed messages": "handoff_malformed_messages_total",
    "bad completions": "handoff_bad_completions_total",
    "busy sends": "handoff_busy_sends_total",
    "local prefills": "handoff_local_prefills_total",
}


class Entry:
    """One HTTP request on the page. It costs nothing per token: what is shown is read when it is shown."""

    def __init__(self, name: str, job: Job, stream: RequestStream, now: Callable[[], float]) -> None:
        self._name, self._job, self._stream, self._now = name, job, stream, now
        self._answer: Answer | None = None
        self._first_s: float | None = None
        self._error: HandoffError | None = None

    def first(self, answer: Answer) -> None:
        """Its first token is there."""
        self._first_s, self._answer = self._now(), answer

    def failed(self, error: HandoffError) -> None:
        self._error = error

    def outcome(self) -> str:
        """The metrics' words; of several prompts the worst one's."""
        outcomes = self._stream.outcomes.values()
        return next((word for word in ("failed", "aborted") if word in outcomes), "finished")

    def row(self, outcome: str) -> dict[str, Any]:
        now_s, messages, error = self._now(), self._job.messages, self._error
        handover = self._answer.handover if self._answer is not None else None
        return {
            "id": self._name,
            "client_id": self._stream.client_id,
            "outcome": outcome,
            "error": f"{error.code}: {error.message}"[:TEXT_SHOWN] if error is not None else "",
            "prompts": len(messages),
            "choices": sum(message.choices for message in messages),
            "prompt_tokens": sum(len(message.prompt) // 4 for message in messages),
            "completion_tokens": self._answer.usage()["completion_tokens"] if self._answer is not None else 0,
            "peer": handover.peer if handover is not None else "",
            "attempts": handover.attempts if handover is not None else 0,
            "bytes": handover.bytes_sent if handover is not None else 0,
            "goodput": _goodput(handover),
            "total_ms": _ms(now_s - self._job.arrived_s),
            "segments": segments(handover, self._job.arrived_s, self._first_s, now_s),
        }


def segments(handover: Handover | None, arrived_s: float, first_s: float | None, end_s: float) -> dict[str, float]:
    """One request's time in the order it passed, in ms. They add up to the whole: ``overlapped`` is the part of the
    prefill during which bytes went already, ``queue`` every wait before and between, earlier attempts included."""
    if first_s is None:
        return {"waiting": _ms(end_s - arrived_s)}
    if handover is None:  # decode computed the prompt itself
        return {"local prefill": _ms(first_s - arrived_s), "decode": _ms(end_s - first_s)}
    timings = handover.timings
    overlapped_s = min(max(handover.slowest_write_s - timings.exposed_s, 0.0), timings.prefill_s)
    commit_s = max(handover.commit_s - timings.queue_s - timings.prefill_s - timings.exposed_s, 0.0)
    queue_s = max(first_s - arrived_s - timings.prefill_s - timings.exposed_s - commit_s, 0.0)
    return {
        "queue": _ms(queue_s),
        "prefill": _ms(timings.prefill_s - overlapped_s),
        "overlapped": _ms(overlapped_s),
        "exposed": _ms(timings.exposed_s),
        "commit": _ms(commit_s),
        "decode": _ms(end_s - first_s),
    }


class Recent:
    """The requests that run, and the last that ended. ``now``: monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.outcomes = Counter(finished=0, failed=0, aborted=0)
        self._now = now
        self._running: dict[str, Entry] = {}
        self._ended: deque[tuple[float, dict[str, Any]]] = deque(maxlen=ENDED_KEPT)

    @contextmanager
    def follow(self, name: str, job: Job, stream: RequestStream) -> Iterator[Entry]:
        """For as long as the block runs; how it ended is what ``stream`` then says."""
        entry = self._running[name] = Entry(name, job, stream, self._now)
        try:
            yield entry
        except EngineFailure as error:
            entry.failed(error)
            raise
        finally:
            del self._running[name]
            outcome = entry.outcome()
            self.outcomes[outcome] += 1
            self._ended.append((self._now(), entry.row(outcome)))

    def running(self) -> list[dict[str, Any]]:
        """The oldest first: those are the ones that may be stuck."""
        return [entry.row("running") for entry in islice(self._running.values(), RUNNING_SHOWN)]

    def ended(self) -> list[dict[str, Any]]:
        """The newest first."""
        now_s = self._now()
        return [{**row, "ended_ago_s": round(now_s - ended_s, 1)} for ended_s, row in reversed(self._ended)]


def add_routes(
    app: web.Application,
    engine: EngineClient,
    recent: Recent,
    config: DecodeConfig,
    objections: Callable[[Status], list[str]],
) -> None:
    """GET / and GET /status.json. ``objections``: see EngineClient.readiness."""
    html = Path(__file__).with_name("status.html").read_text("utf-8")
    headers = {"Content-Security-Policy": _policy(html), "X-Content-Type-Options": "nosniff"}
    headers |= {"Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
    started_s = engine.clock()

    async def page(_request: web.Request) -> web.Response:
        return web.Response(text=html, content_type="text/html", charset="utf-8", headers=headers)

    async def data(_request: web.Request) -> web.Response:
        now_s = engine.clock()
        shown = {
            "model": config.served_model_name or config.model,
            "up_s": int(now_s - started_s),
            "health": _verdict(engine.health(now_s)),
            "ready": _verdict(engine.readiness(now_s, objections)),
            **_engine(engine),
            "outcomes": dict(recent.outcomes),
            "running": recent.running(),
            "ended": recent.ended(),
        }
        return json_response(shown, headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})

    app.router.add_get("/", page)
    app.router.add_get("/status.json", data)


def _policy(html: str) -> str:
    """Only the page's own style and script, by their hashes; it loads nothing else and talks to this service alone."""

    def source(tag: str) -> str:
        [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {source('script')}; style-src {source('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )


def _engine(engine: EngineClient) -> dict[str, Any]:
    """What the engine said last; zeros before it has said anything."""
    status, ready = engine.status, engine.ready
    gauges = status.gauges if status is not None else {}
    counters = status.counters if status is not None else {}

    def gauge(name: str) -> int:
        return int(gauges.get(f"handoff_{name}", 0))

    usable, free, quarantined = gauge("pages_usable"), gauge("pages_free"), gauge("pages_quarantined")
    slots = ready.info.max_num_seqs if ready is not None else 0
    return {
        "engine": {
            "epoch": str(ready.epoch) if ready is not None else "",  # more than a double holds
            "control": ready.control if ready is not None else "",
            "steps": status.steps if status is not None else 0,
        },
        "requests": {
            "running": gauge("running_requests"),
            "waiting": gauge("waiting_requests"),
            "open in front": engine.running,
            "leases": gauge("leases"),
        },
        "pages": {"held": usable - free - quarantined, "quarantined": quarantined, "free": free},
        "slots": {"taken": slots - gauge("slots_free") if status is not None else 0, "free": gauge("slots_free")},
        "peers": [_peer(peer) for peer in status.peers] if status is not None else [],
        "counters": {shown: int(counters.get(name, 0)) for shown, name in _COUNTERS.items()},
    }


def _peer(peer: PeerStatus) -> dict[str, Any]:
    shown = [str(difference)[:TEXT_SHOWN] for difference in peer.differences[:DIFFERENCES_SHOWN]]
    if more := len(peer.differences) - len(shown):
        shown.append(f"and {more} more")
    epoch = str(peer.epoch) if peer.epoch else ""
    return {
        "address": peer.address,
        "state": peer.state,
        "epoch": epoch,
        "longest_prompt": peer.max_prompt_tokens,
        "differences": shown,
    }


def _verdict(health: Health) -> dict[str, Any]:
    return {"ok": health.ok, "reasons": health.reasons}


def _goodput(handover: Handover | None) -> float:
    """Bytes a second, by the slowest rank's writes."""
    return handover.bytes_sent / handover.slowest_write_s if handover is not None and handover.slowest_write_s else 0.0


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
