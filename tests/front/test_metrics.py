"""Metrics: one table, totals applied as deltas, nothing negative, unknown names refused (A31)."""

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.ops.metrics import TABLE, Meter, Registry, Side
from shared.protocol.local import Status
from tests.front.fakes import FakeEngine, status


def take(meter: Meter) -> Status:
    gauges, counters, samples = meter.take()
    sent = status(gauges=gauges, counters=counters, samples=samples)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Status)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engine_speaks_and_its_front_shows(side: Side) -> None:
    meter, engine = Meter(side), FakeEngine(side=side)
    meter.count("handoff_steps_total", 3)
    meter.gauge("handoff_pages_free", 17)
    meter.sample("handoff_step_seconds", 0.02)
    engine.front.on_message(take(meter))
    meter.total("handoff_steps_total", 5)
    meter.sample("handoff_step_seconds", 0.2)
    engine.front.on_message(take(meter))
    engine.front.on_message(take(meter))
    assert engine.metric("handoff_steps_total") == 5
    assert engine.metric("handoff_pages_free") == 17
    assert engine.metric("handoff_step_seconds_count") == 2
    assert engine.metric("handoff_step_seconds_sum") == pytest.approx(0.22)
    assert engine.metric('handoff_step_seconds_bucket{le="0.025"}') == 1


def test_samples_are_sent_once() -> None:
    meter = Meter("decode")
    meter.sample("handoff_step_seconds", 1.0)
    assert take(meter).samples == {"handoff_step_seconds": [1.0]}
    assert take(meter).samples == {}


def test_a_lower_total_is_a_new_engines() -> None:
    engine = FakeEngine()
    for total in (7.0, 2.0, 3.0):
        engine.front.on_message(status(counters={"handoff_steps_total": total}))
    assert engine.metric("handoff_steps_total") == 10


def test_labelled_series_are_there_from_the_start() -> None:
    meter, engine = Meter("prefill"), FakeEngine(side="prefill")
    assert engine.metric('handoff_attempts_total{outcome="failed"}') == 0
    meter.count("handoff_attempts_total{outcome=failed}")
    engine.front.on_message(take(meter))
    assert engine.metric('handoff_attempts_total{outcome="failed"}') == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda meter: meter.count("handoff_nonsense_total"),
        lambda meter: meter.total("handoff_nonsense_total", 1),
        lambda meter: meter.gauge("handoff_nonsense", 1),
        lambda meter: meter.sample("handoff_nonsense_seconds", 1),
        lambda meter: meter.count("handoff_pages_free"),
        lambda meter: meter.count("handoff_requests_started_total"),  # the front's
        lambda meter: meter.gauge("handoff_slots_free", 1),  # decode's
        lambda meter: meter.count("handoff_attempts_total{outcome=maybe}"),
    ],
)
def test_unknown_names_are_refused_by_the_meter(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(KeyError):
        call(Meter("prefill"))


@pytest.mark.parametrize("field", [{"gauges": {"x": 1.0}}, {"counters": {"x": 1.0}}, {"samples": {"x": [1.0]}}])
def test_unknown_names_are_refused_by_the_registry(field: dict[str, dict[str, float]]) -> None:
    with pytest.raises(KeyError):
        Registry("decode").apply(status(**field))


def test_registries_are_apart_and_show_only_their_side() -> None:
    one, two = Registry("decode"), Registry("decode")
    one.count("handoff_retries_total", 3)
    assert b"handoff_retries_total 3.0" in one.render()
    assert b"handoff_retries_total 0.0" in two.render()
    families = {family.name for family in text_string_to_metric_families(Registry("prefill").render().decode())}
    assert "handoff_retries" not in families
    assert "handoff_attempts" in families


def test_the_table_is_well_formed() -> None:
    names = [metric.name for metric in TABLE]
    assert len(set(names)) == len(names)
    for metric in TABLE:
        assert metric.prefill or metric.decode
        assert metric.name.startswith("handoff_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        units = ("_seconds", "_bytes", "_bytes_per_second")
        assert metric.name.endswith(units) == (metric.kind == "histogram")
