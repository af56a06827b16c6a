"""A decode engine's figures, read from its books once a heartbeat."""

from decode_svc.intake import Intake
from shared.ops.metrics import Meter
from shared.protocol.machine import RequestState


def measure(meter: Meter, intake: Intake) -> None:
    counts = intake.counts
    meter.count("handoff_heartbeats_total")
    meter.total("handoff_retries_total", counts.retries)
    meter.total("handoff_aborts_total", counts.aborts)
    meter.total("handoff_fences_total", counts.fences)
    meter.total("handoff_bad_completions_total", counts.bad_completions)
    meter.total("handoff_digests_total{outcome=equal}", counts.digests - counts.digest_mismatches)
    meter.total("handoff_digests_total{outcome=different}", counts.digest_mismatches)
    meter.total("handoff_local_prefills_total", counts.local_prefills)
    meter.gauge("handoff_leases", len(intake.leases.open))
    running = sum(request.state is RequestState.RUNNING for request in intake.requests.values())
    meter.gauge("handoff_running_requests", running)
    meter.gauge("handoff_waiting_requests", len(intake.requests) - running)
    meter.gauge("handoff_pages_usable", intake.pages.usable_pages)
    meter.gauge("handoff_pages_free", intake.pages.free_pages)
    meter.gauge("handoff_pages_quarantined", intake.pages.quarantined_pages)
    meter.gauge("handoff_slots_free", intake.slots.free_slots)
