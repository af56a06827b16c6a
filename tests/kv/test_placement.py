"""S1–S3, S5, S7, S9–S11: where a page lives, which of them a rank sends, and where to."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.kv.placement import Pages, capacity_pages, destinations, owned, owner, physical_slot, send_range, share


def ids(*values: int) -> Pages:
    return np.array(values, np.int32)


def test_s1_ownership_depends_on_the_page_alone() -> None:
    assert owner(27, 8) == (3, 3)
    assert [owner(page, 8) for page in range(8, 16)] == [(rank, 1) for rank in range(8)]


@given(st.integers(1, 16), st.integers(0, 10_000))
def test_s1_is_a_bijection(ranks: int, page: int) -> None:
    rank, physical = owner(page, ranks)
    assert physical * ranks + rank == page
    assert 0 <= rank < ranks


def test_s2_slots() -> None:
    expected = {64: (1, 0), 576: (1, 64), 600: (1, 88), 8191: (7, 1023)}
    assert {slot: physical_slot(slot, 8, 64) for slot in expected} == expected


def test_s3_capacity() -> None:
    assert capacity_pages(1000, 8) == 8000


def test_s5_owner_filter() -> None:
    pages, positions = owned(np.arange(100, 107, dtype=np.int32), 20, 4, 8)
    assert (pages.tolist(), positions.tolist()) == ([12], [20])
    pages, positions = owned(ids(27, 3, 40, 16, 9), 0, 3, 8)
    assert (pages.tolist(), positions.tolist()) == ([3, 0], [0, 1])


@given(st.lists(st.integers(1, 500), unique=True, max_size=40), st.integers(1, 8), st.integers(0, 50))
def test_s5_the_union_over_ranks_is_every_position_once(pages: list[int], ranks: int, start: int) -> None:
    found: list[tuple[int, int]] = []
    for rank in range(ranks):
        physical, positions = owned(np.array(pages, np.int32), start, rank, ranks)
        found += [(int(p), int(f) * ranks + rank) for f, p in zip(physical, positions, strict=True)]
    assert sorted(found) == [(start + i, page) for i, page in enumerate(pages)]


def test_s7_destination_by_position_not_by_chunk() -> None:
    """The incident: with a constant 0 chunk 1 would overwrite chunk 0's pages."""
    dst = ids(50, 51, 52, 53)
    sent = []
    for start, chunk in ((0, ids(10, 11)), (2, ids(12, 13))):
        physical, positions = owned(chunk, start, 0, 2)
        sent += list(zip(physical.tolist(), destinations(dst, 0, positions).tolist(), strict=True))
    assert sent == [(5, 50), (6, 52)]


def test_s7_positions_before_decodes_cached_prefix_are_refused() -> None:
    assert destinations(ids(52, 53), 2, np.array([2, 3])).tolist() == [52, 53]
    for positions in ([1, 2], [3, 4]):
        with pytest.raises(ValueError, match="positions"):
            destinations(ids(52, 53), 2, np.array(positions))


@given(st.lists(st.integers(1, 300), unique=True, min_size=1, max_size=30), st.integers(1, 4), st.data())
def test_s7_the_chunks_pairs_are_the_requests_pairs(pages: list[int], ranks: int, data: st.DataObject) -> None:
    source = np.array(pages, np.int32)
    dst = np.arange(1000, 1000 + len(pages), dtype=np.int32)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(pages)), max_size=4)) | {0, len(pages)})
    for rank in range(ranks):
        whole, positions = owned(source, 0, rank, ranks)
        expected = list(zip(whole.tolist(), destinations(dst, 0, positions).tolist(), strict=True))
        got = []
        for start, end in itertools.pairwise(cuts):
            part, at = owned(source[start:end], start, rank, ranks)
            got += list(zip(part.tolist(), destinations(dst, 0, at).tolist(), strict=True))
        assert got == expected


def test_s9_the_tail_page_is_sent_by_its_owner_alone() -> None:
    """130 tokens, page 64: pages 0, 1, 2; nothing is padded to a multiple of the ranks."""
    first, end = send_range(0, 130, True, 64)
    pages = -(-(end - first) // 64)
    assert pages == 3
    senders = [owned(np.arange(8, 8 + pages, dtype=np.int32), 0, rank, 8)[0].size for rank in range(8)]
    assert senders == [1, 1, 1, 0, 0, 0, 0, 0]


def test_s10_send_ranges() -> None:
    assert send_range(0, 8200, False, 64) == (0, 8192)
    assert send_range(8192, 8200, True, 64) == (8192, 8200)
    assert send_range(64, 100, False, 64) == (64, 64)


def test_s11_a_final_chunk_without_pages_of_this_rank_is_empty_and_legal() -> None:
    pages, positions = owned(ids(4, 9, 12), 0, 2, 4)
    assert (pages.size, positions.size) == (0, 0)
    assert destinations(ids(7, 8, 9), 0, positions).size == 0


@pytest.mark.parametrize(
    ("pages", "ranks", "expected"),
    [
        (list(range(7)), 3, [[0, 1, 2], [3, 4], [5, 6]]),
        ([5, 9, 20], 3, [[5], [9], [20]]),
        (list(range(100, 106)), 3, [[100, 101], [102, 103], [104, 105]]),
        ([4], 3, [[4], [], []]),
        ([], 2, [[], []]),
    ],
)
def test_s6_ranks_that_all_hold_everything_share_by_position(
    pages: list[int], ranks: int, expected: list[list[int]]
) -> None:
    parts = [share(np.array(pages, np.int32), rank, ranks) for rank in range(ranks)]
    assert [part.tolist() for part, _ in parts] == expected
    assert [p for _, positions in parts for p in positions.tolist()] == list(range(len(pages)))
