"""One table of every metric of both services; the engine's meter and the front's registry are both made from it.

A series is written ``name`` or ``name{label=value,…}``. All label values are in the table, so every series exists from
the start at 0, and a name that the table does not list is a KeyError: a defect of this project.
"""

from collections.abc import Iterator
from itertools import product
from typing import Literal, NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from shared.protocol.local import Status

Side: TypeAlias = Literal["prefill", "decode"]
Source: TypeAlias = Literal["engine", "front"]
Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BYTES = tuple(float(4**n << 10) for n in range(14))
"""1 KiB … 64 GiB"""
_OUTCOMES = ("finished", "failed", "aborted")
ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/health",
    "/metrics",
    "/server_info",
    "/get_server_info",
    "/abort_request",
    "/ready",
    "/health_generate",
    "other",
)


class Metric(NamedTuple):
    """``prefill`` and ``decode`` name the process that counts it on that side; None: that side does not have it."""

    name: str
    kind: Kind
    prefill: Source | None
    decode: Source | None
    help: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def series(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Every series of this metric, with its labels."""
        for values in product(*(values for _, values in self.labels)):
            labels = dict(zip((name for name, _ in self.labels), values, strict=True))
            written = ",".join(f"{name}={value}" for name, value in labels.items())
            yield (f"{self.name}{{{written}}}" if labels else self.name), labels

    def source(self, side: Side) -> Source | None:
        return self.prefill if side == "prefill" else self.decode


_STATES = ("connecting", "registered", "draining", "refused", "lost")
_HTTP = (("route", ROUTES), ("status", ("2xx", "4xx", "5xx", "closed")))
_OUTCOME = (("outcome", _OUTCOMES),)
_DIGESTS = (("outcome", ("equal", "different")),)

TABLE = (
    # what clients see
    Metric("handoff_http_requests_total", "counter", "front", "front", "HTTP requests by route and status", _HTTP),
    Metric("handoff_requests_started_total", "counter", None, "front", "Requests given to the engine"),
    Metric("handoff_requests_total", "counter", None, "front", "Requests ended, by outcome", _OUTCOME),
    Metric("handoff_prompt_tokens_total", "counter", None, "front", "Prompt tokens of requests with a first token"),
    Metric("handoff_completion_tokens_total", "counter", None, "front", "Tokens generated for clients"),
    Metric("handoff_time_to_first_token_seconds", "histogram", None, "front", "Request read to first token"),
    Metric("handoff_inter_token_seconds", "histogram", None, "front", "Time a token after the first"),
    Metric("handoff_engine_up", "gauge", "front", "front", "1 while /health is green"),
    # peers and control channel
    Metric("handoff_peers", "gauge", "front", "front", "Peers by state", (("state", _STATES),)),
    Metric("handoff_malformed_messages_total", "counter", "engine", "engine", "Control frames that were no message"),
    Metric("handoff_busy_sends_total", "counter", "engine", "engine", "Control messages refused by a full link"),
    # load and memory
    Metric("handoff_running_requests", "gauge", "engine", "engine", "Requests being computed"),
    Metric("handoff_waiting_requests", "gauge", "engine", "engine", "Requests accepted and not yet computed"),
    Metric("handoff_pages_usable", "gauge", "engine", "engine", "KV pages that can be owned"),
    Metric("handoff_pages_free", "gauge", "engine", "engine", "KV pages nobody owns"),
    Metric("handoff_pages_quarantined", "gauge", None, "engine", "KV pages held until their writer has stopped"),
    Metric("handoff_slots_free", "gauge", None, "engine", "Metadata slots nobody owns"),
    Metric("handoff_heartbeats_total", "counter", "engine", "engine", "Status messages from engine to front"),
    Metric("handoff_steps_total", "counter", "engine", "engine", "Forwards finished"),
    Metric("handoff_step_seconds", "histogram", "engine", "engine", "One forward"),
    # hand-overs
    Metric("handoff_attempts_started_total", "counter", "engine", None, "Hand-over attempts accepted"),
    Metric("handoff_attempts_total", "counter", "engine", None, "Hand-over attempts ended, by outcome", _OUTCOME),
    Metric("handoff_prefill_tokens_total", "counter", "engine", None, "Prompt tokens computed"),
    Metric("handoff_queue_seconds", "histogram", "engine", None, "Attempt accepted to first forward"),
    Metric("handoff_prefill_seconds", "histogram", "engine", None, "Forwards of one attempt"),
    Metric("handoff_transfer_failures_total", "counter", "engine", None, "Transfer batches that failed"),
    Metric("handoff_transfer_bytes_total", "counter", "engine", "front", "Bytes written by completed hand-overs"),
    Metric(
        "handoff_transfer_seconds",
        "histogram",
        "engine",
        "front",
        "First submit to last byte, on the slowest rank",
    ),
    Metric("handoff_transfer_exposed_seconds", "histogram", "engine", "front", "End of the forward to last byte"),
    Metric("handoff_commit_seconds", "histogram", None, "front", "Prefill asked to hand-over committed"),
    Metric("handoff_transfer_size_bytes", "histogram", "engine", "front", "Bytes of one hand-over"),
    Metric("handoff_goodput_bytes_per_second", "histogram", "engine", "front", "Bytes of one hand-over, by its writes"),
    Metric("handoff_layer_submits_total", "counter", "engine", None, "Layer groups given to the sending workers"),
    Metric("handoff_whole_sends_total", "counter", "engine", None, "Attempts sent whole, after their last forward"),
    Metric("handoff_stopped_total", "counter", "engine", None, "Attempts stopped by an operator"),
    Metric("handoff_leases", "gauge", None, "engine", "Attempts whose landing pages are not back yet"),
    Metric("handoff_tasks", "gauge", "engine", "engine", "Tasks of the engine's loop"),
    Metric("handoff_fence_seconds", "histogram", None, "engine", "Retiring one receive session"),
    Metric("handoff_digests_total", "counter", None, "engine", "Hand-overs compared, by outcome", _DIGESTS),
    Metric("handoff_local_prefills_total", "counter", None, "engine", "Prompts that decode computed itself"),
    Metric("handoff_retries_total", "counter", None, "engine", "Hand-over attempts after a request's first"),
    Metric("handoff_aborts_total", "counter", "engine", "engine", "Attempts given up (decode) or stopped (prefill)"),
    Metric("handoff_fences_total", "counter", None, "engine", "Receive sessions retired to stop a writer"),
    Metric("handoff_bad_completions_total", "counter", None, "engine", "Completions that did not cover what was asked"),
)


def _names(side: Side, kind: Kind) -> list[str]:
    """Series that the engine of ``side`` counts."""
    ours = (metric for metric in TABLE if metric.source(side) == "engine" and metric.kind == kind)
    return [name for metric in ours for name, _ in metric.series()]


class Meter:
    """An engine's numbers between two Status messages. Plain dicts: a count costs one look-up."""

    def __init__(self, side: Side) -> None:
        self._counters = dict.fromkeys(_names(side, "counter"), 0.0)
        self._gauges = dict.fromkeys(_names(side, "gauge"), 0.0)
        self._samples: dict[str, list[float]] = {name: [] for name in _names(side, "histogram")}

    def count(self, name: str, n: float = 1.0) -> None:
        self._counters[name] += n

    def total(self, name: str, value: float) -> None:
        """A counter that is kept elsewhere: its total since the start."""
        if name not in self._counters:
            raise KeyError(name)
        self._counters[name] = value

    def gauge(self, name: str, value: float) -> None:
        if name not in self._gauges:
            raise KeyError(name)
        self._gauges[name] = value

    def sample(self, name: str, value: float) -> None:
        self._samples[name].append(value)

    def take(self) -> tuple[dict[str, float], dict[str, float], dict[str, list[float]]]:
        """Gauges, counters and samples for one Status, in the order of its fields; samples start anew."""
        samples = {name: values for name, values in self._samples.items() if values}
        for name in samples:
            self._samples[name] = []
        return dict(self._gauges), dict(self._counters), samples


class Registry:
    """A front's numbers and, through ``apply``, its engine's; its own registry, so that nothing is global."""

    def __init__(self, side: Side) -> None:
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._totals: dict[str, float] = {}
        for metric in TABLE:
            if metric.source(side) is not None:
                self._add(metric)

    def _add(self, metric: Metric) -> None:
        names = tuple(name for name, _ in metric.labels)
        match metric.kind:
            case "counter":
                counter = Counter(metric.name, metric.help, names, registry=self._registry)
                self._counters |= {key: counter.labels(**by) if by else counter for key, by in metric.series()}
            case "gauge":
                gauge = Gauge(metric.name, metric.help, names, registry=self._registry)
                self._gauges |= {key: gauge.labels(**by) if by else gauge for key, by in metric.series()}
            case "histogram":
                buckets = _SECONDS if metric.name.endswith("_seconds") else _BYTES
                self._histograms[metric.name] = Histogram(
                    metric.name, metric.help, buckets=buckets, registry=self._registry
                )

    def count(self, name: str, n: float = 1.0) -> None:
        self._counters[name].inc(n)

    def gauge(self, name: str, value: float) -> None:
        self._gauges[name].set(value)

    def sample(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def apply(self, status: Status) -> None:
        """Counters arrive as totals since the engine's start; a lower one is that of a new engine. Raises KeyError."""
        for name, value in status.gauges.items():
            self.gauge(name, value)
        for name, total in status.counters.items():
            last = self._totals.get(name, 0.0)
            self.count(name, total - last if total >= last else total)
            self._totals[name] = total
        for name, values in status.samples.items():
            for value in values:
                self.sample(name, value)
        for state in _STATES:
            self.gauge(f"handoff_peers{{state={state}}}", sum(peer.state == state for peer in status.peers))

    def render(self) -> bytes:
        """Prometheus text format 0.0.4."""
        return generate_latest(self._registry)
