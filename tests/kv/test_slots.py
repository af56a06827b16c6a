"""Metadata slots (S41)."""

import pytest

from shared.errors import IntegrityError
from shared.kv.layout import META_ROW, meta_row
from shared.kv.slots import SlotPool


def test_s41_fixed_rows_first_in_first_out_none_free_waits() -> None:
    slots = SlotPool(3)
    assert [slots.take() for _ in range(4)] == [0, 1, 2, None]
    slots.free(1)
    slots.free(0)
    assert [slots.take(), slots.take()] == [1, 0]


def test_s41_rows_are_views_and_freed_exactly_once() -> None:
    slots = SlotPool(2)
    slot = slots.take()
    assert slot == 0
    view = slots.rows[slot : slot + 1]
    view[:] = meta_row(7, 9, 42, -0.25)
    assert slots.rows[slot]["token"] == 42
    assert view.ctypes.data == slots.region().base
    slots.free(slot)
    with pytest.raises(IntegrityError, match="freed twice"):
        slots.free(slot)


def test_a_taken_row_is_clean_and_integrity_names_owners() -> None:
    slots = SlotPool(1)
    slot = slots.take()
    assert slot is not None
    slots.rows[slot] = meta_row(1, 2, 3, 0.5)[0]
    slots.check_integrity({slot})
    with pytest.raises(IntegrityError):
        slots.check_integrity(set())
    slots.free(slot)
    assert slots.take() == slot
    assert slots.rows[slot]["room"] == 0
    assert META_ROW.itemsize == 256
