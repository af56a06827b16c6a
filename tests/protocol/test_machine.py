"""The tables themselves: what they may never contain, and what they must."""

import pytest

from shared.errors import StateError
from shared.protocol.machine import (
    LEASE,
    REQUEST,
    SENDER,
    Do,
    LeaseEvent,
    LeaseState,
    RequestEvent,
    RequestState,
    SenderEvent,
    SenderState,
)

PROOFS = {LeaseEvent.DISCARD, LeaseEvent.STOPPED, LeaseEvent.FENCED, LeaseEvent.RELEASE}


def test_a_request_ends_exactly_once() -> None:
    final = {RequestState.DONE, RequestState.FAILED}
    for state, row in REQUEST.rows.items():
        for after, todo in row.values():
            assert (Do.END in todo) == (after in final), (state, after)
    assert all(not REQUEST.rows[state] for state in final)


def test_every_open_request_can_be_cancelled_and_can_fail() -> None:
    for state, row in REQUEST.rows.items():
        if row:
            assert RequestEvent.CANCEL in row, state
            assert RequestEvent.FAIL in row, state


def test_s66_a_lease_is_freed_only_on_proof() -> None:
    for row in LEASE.rows.values():
        for event, (after, todo) in row.items():
            assert (Do.FREE in todo) == (after is LeaseState.FREE)
            if Do.FREE in todo:
                assert event in PROOFS
    assert LEASE.rows[LeaseState.QUARANTINED].keys() & {LeaseEvent.RELEASE, LeaseEvent.PROVE} == set()
    assert LeaseEvent.RELEASE not in LEASE.rows[LeaseState.EXPOSED]


def test_s66_a_digest_is_compared_only_of_what_its_writer_has_ended() -> None:
    """So that DISCARD needs no further proof."""
    leading = [
        (s, e) for s, row in LEASE.rows.items() for e, (after, _) in row.items() if after is LeaseState.VERIFYING
    ]
    assert {e for s, e in leading if s is not LeaseState.VERIFYING} == {LeaseEvent.VERIFY}


def test_s31_giving_up_frees_nothing() -> None:
    for row in SENDER.rows.values():
        for _, (_, todo) in row.items():
            assert not {Do.SEND_GIVEN_UP, Do.FREE} <= set(todo)


def test_s19_what_ends_before_its_row_waits_for_the_layers_under_way() -> None:
    """No way out of a forward, or of the pause between two, frees anything by itself."""
    for state in (SenderState.COMPUTING, SenderState.PARTIAL):
        assert not any(Do.FREE in todo for _, todo in SENDER.rows[state].values())
    for state in (SenderState.FAILING, SenderState.ABORTING):
        for event in (SenderEvent.CHUNK, SenderEvent.COMPUTED, SenderEvent.COMPUTE_FAILED):
            assert SENDER.rows[state][event] == (state, (Do.DROP,))


def test_a_failed_write_is_drained_before_its_pages_are_freed() -> None:
    for row in SENDER.rows.values():
        if SenderEvent.WRITE_FAILED in row:
            after, todo = row[SenderEvent.WRITE_FAILED]
            assert todo == (Do.DRAIN,)
            assert SenderEvent.DRAINED in SENDER.rows[after]


def test_s31_abort_is_answered_only_when_nothing_runs() -> None:
    for state in set(SenderState) - {SenderState.QUEUED, SenderState.ANNOUNCED, SenderState.RELEASED}:
        after, todo = SENDER.step(state, SenderEvent.ABORT)
        assert after is SenderState.ABORTING
        assert not {Do.FREE, Do.SEND_ABORT_ACK} & set(todo)
    for state in (SenderState.QUEUED, SenderState.ANNOUNCED):
        assert Do.SEND_ABORT_ACK in SENDER.step(state, SenderEvent.ABORT)[1]


def test_what_a_state_does_not_list_is_an_error_that_names_both() -> None:
    with pytest.raises(StateError, match="sender: 'acknowledged' cannot happen in state 'writing'"):
        SENDER.step(SenderState.WRITING, SenderEvent.ACK)


@pytest.mark.parametrize("table", [REQUEST, LEASE, SENDER], ids=lambda t: t.name)
def test_every_state_can_be_reached_and_left(table: object) -> None:
    rows = table.rows  # type: ignore[attr-defined]
    first = next(iter(rows))
    reached, todo = {first}, [first]
    while todo:
        for after, _ in rows[todo.pop()].values():
            if after not in reached:
                reached.add(after)
                todo.append(after)
    assert reached == set(rows)
    assert all(rows[s] for s in rows if s.name not in ("DONE", "FAILED", "FREE", "RELEASED"))


def test_the_diagrams_of_the_documentation_are_those_of_the_tables() -> None:
    from pathlib import Path

    text = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text()
    for table in (REQUEST, LEASE, SENDER):
        assert f"```mermaid\n{table.diagram()}\n```" in text, table.name
