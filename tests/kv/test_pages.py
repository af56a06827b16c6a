"""Page ownership: allocation, quarantine, release, and what the books refuse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import IntegrityError
from shared.kv import pages as pages_module
from shared.kv.pages import PageAllocator, Pages


def ids(*values: int) -> Pages:
    return np.array(values, np.int32)


def test_s1_padding_page_is_never_given_out() -> None:
    pages = PageAllocator(4)
    taken = pages.allocate(3)
    assert taken is not None
    assert taken.tolist() == [1, 2, 3]
    assert pages.allocate(1) is None
    with pytest.raises(IntegrityError):
        pages.release(ids(0))


@pytest.mark.parametrize(
    ("free", "count", "expected"),
    [([1, 3, 5, 6, 7], 3, [5, 6, 7]), ([1, 3, 5, 7], 2, [1, 3]), ([1, 2], 3, None), ([1, 2], 0, [])],
)
def test_contiguous_pages_are_preferred(free: list[int], count: int, expected: list[int] | None) -> None:
    """The rule of S50, for device pages too: runs of pages are one block on the wire."""
    pages = PageAllocator(9)
    pages.allocate(8)
    pages.release(ids(*free))
    got = pages.allocate(count)
    assert (None if got is None else got.tolist()) == expected


def test_quarantined_pages_are_owned_counted_and_not_given_out() -> None:
    pages = PageAllocator(6)
    a, b = pages.allocate(2), pages.allocate(3)
    assert a is not None
    assert b is not None
    pages.quarantine(a)
    assert (pages.free_pages, pages.quarantined_pages) == (0, 2)
    assert pages.allocate(1) is None
    pages.check_integrity([b], [a])
    pages.release(a)
    assert (pages.free_pages, pages.quarantined_pages) == (2, 0)
    pages.check_integrity([b])


def test_books_refuse_double_release_double_quarantine_and_foreign_pages() -> None:
    pages = PageAllocator(6)
    a = pages.allocate(2)
    assert a is not None
    for wrong in (ids(3), ids(1, 1), ids(1, 4)):
        with pytest.raises(IntegrityError):
            pages.release(wrong)
    pages.quarantine(a)
    with pytest.raises(IntegrityError):
        pages.quarantine(a)
    pages.release(a)
    with pytest.raises(IntegrityError):
        pages.release(a)
    pages.check_integrity([])


def test_check_integrity_sees_leaks_thefts_and_shared_owners() -> None:
    pages = PageAllocator(8)
    a, b = pages.allocate(2), pages.allocate(2)
    assert a is not None
    assert b is not None
    with pytest.raises(IntegrityError, match="not as their owners say"):
        pages.check_integrity([a])
    with pytest.raises(IntegrityError, match="not as their owners say"):
        pages.check_integrity([a, b, ids(6)])
    with pytest.raises(IntegrityError, match="two owners"):
        pages.check_integrity([a, b, ids(2)])
    with pytest.raises(IntegrityError):
        pages.check_integrity([a], [b])


@given(st.sets(st.integers(1, 99)), st.integers(0, 12), st.integers(0, 3))
def test_s63_looking_near_first_finds_what_looking_everywhere_finds(free: set[int], count: int, before: int) -> None:
    pages = PageAllocator(100)
    pages.allocate(99)
    pages.release(ids(*free))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages_module, "_STRETCH", 3)
        left = sorted(free)
        for _ in range(before + 1):
            runs = [left[i : i + count] for i in range(len(left) - count + 1)]
            expected = next((run for run in runs if not run or run[-1] - run[0] == count - 1), left[:count])
            got = pages.allocate(count)
            assert (got.tolist() if got is not None else None) == (expected if count <= len(left) else None)
            left = [page for page in left if got is None or page not in got]


@given(st.lists(st.tuples(st.sampled_from("aqr"), st.integers(0, 7)), max_size=60))
def test_any_sequence_keeps_the_books(actions: list[tuple[str, int]]) -> None:
    pages = PageAllocator(20)
    held: list[Pages] = []
    quarantined: list[Pages] = []
    for action, n in actions:
        if action == "a" and (got := pages.allocate(n)) is not None:
            held.append(got)
        elif action == "q" and held:
            quarantined.append(held.pop(n % len(held)))
            pages.quarantine(quarantined[-1])
        elif action == "r" and (source := held if n % 2 else quarantined):
            pages.release(source.pop(n % len(source)))
        pages.check_integrity(held, quarantined)
        assert pages.free_pages == 19 - sum(map(len, held)) - sum(map(len, quarantined))
