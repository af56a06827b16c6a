"""S8, S12, S13, S32, S67: page lists → byte ranges → proof."""

import numpy as np
import pytest

from shared.errors import DestinationRefused, LayoutMismatch, PageCountMismatch
from shared.protocol.messages import Coverage, Region, pack_int32
from shared.transfer.plan import (
    Pages,
    blocks_for,
    check_coverage,
    check_page_count,
    coverage,
    one_item,
    runs_of,
    summary,
)


def ids(*values: int) -> Pages:
    return np.array(values, np.int32)


def regions(base: int, items: int = 100, layers: int = 2) -> list[Region]:
    return [Region("kv", layer, base + layer * 100_000, 10, items) for layer in range(layers)]


@pytest.mark.parametrize(("source", "destination", "ok"), [(3, 3, True), (3, 2, False), (2, 3, False), (0, 0, True)])
def test_s8_exact_page_count(source: int, destination: int, ok: bool) -> None:
    pages = np.arange(1, 4, dtype=np.int32)
    if ok:
        check_page_count(7, 1, pages[:source], pages[:destination])
    else:
        with pytest.raises(PageCountMismatch, match=f"room 7 rank 1: {source} source pages for {destination} dest"):
            check_page_count(7, 1, pages[:source], pages[:destination])


def test_s8_the_summary_shows_the_count_and_eight_ids_at_each_end() -> None:
    assert summary(ids(4, 5)) == "2:[4, 5]"
    text = summary(np.arange(1000, dtype=np.int32))
    assert text == "1000:[0, 1, 2, 3, 4, 5, 6, 7 … 992, 993, 994, 995, 996, 997, 998, 999]"


def test_s12_runs_are_cut_where_either_list_jumps() -> None:
    runs = runs_of(ids(13, 2, 3, 5, 1), ids(64, 72, 73, 74, 80))
    assert (runs.src.tolist(), runs.dst.tolist(), runs.length.tolist()) == (
        [13, 2, 5, 1],
        [64, 72, 74, 80],
        [1, 2, 1, 1],
    )
    assert runs_of(ids(), ids()).length.size == 0
    assert runs_of(ids(4, 5, 6), ids(7, 8, 9)).length.tolist() == [3]
    with pytest.raises(ValueError, match="2 source pages, 1 destination"):
        runs_of(ids(1, 2), ids(1))


def test_s13_block_addresses() -> None:
    """(src_base + first·item, dst_base + first·item, item·len), layer after layer."""
    blocks = blocks_for(runs_of(ids(2, 3, 9), ids(5, 6, 1)), regions(1_000_000), regions(2_000_000))
    assert blocks.src.tolist() == [1_000_020, 1_000_090, 1_100_020, 1_100_090]
    assert blocks.dst.tolist() == [2_000_050, 2_000_010, 2_100_050, 2_100_010]
    assert blocks.length.tolist() == [20, 10, 20, 10]
    assert blocks.total_bytes == 60


def test_s13_layers_are_matched_by_id_not_by_order() -> None:
    """A rank that holds layer 1 only sends layer 1, wherever it stands in the destination's list."""
    run = runs_of(ids(0), ids(0))
    blocks = blocks_for(run, regions(1_000_000)[1:], list(reversed(regions(2_000_000))))
    assert blocks.dst.tolist() == [2_100_000]
    with pytest.raises(LayoutMismatch, match="kv layer 1: expected items of 10 bytes, destination has nothing"):
        blocks_for(run, regions(1_000_000), regions(2_000_000, layers=1))
    other = [Region("kv", 0, 2_000_000, 20, 100)]
    with pytest.raises(LayoutMismatch, match="destination has items of 20 bytes"):
        blocks_for(run, regions(1_000_000, layers=1), other)


@pytest.mark.parametrize(
    ("source", "destination", "side"), [([99, 100], [1, 2], "source"), ([1, 2], [99, 100], "destin")]
)
def test_nothing_leaves_a_region(source: list[int], destination: list[int], side: str) -> None:
    run = runs_of(ids(*source), ids(*destination))
    with pytest.raises(DestinationRefused, match=rf"{side}\w* has items 0 … 99, asked for 99 … 100"):
        blocks_for(run, regions(1_000_000), regions(2_000_000))


@pytest.mark.parametrize("base", [0, -8, 2**63 - 900, 2**64 - 1])
def test_a_destination_that_is_no_range_of_addresses_is_refused(base: int) -> None:
    run = runs_of(ids(0), ids(0))
    with pytest.raises(DestinationRefused, match="no range of addresses"):
        blocks_for(run, regions(1_000_000, layers=1), [Region("kv", 0, base, 10, 100)])


def test_a_metadata_row_is_a_batch_of_its_own() -> None:
    blocks = blocks_for(one_item(3, 5), [Region("meta", 0, 500, 64, 4)], [Region("meta", 0, 9_000, 64, 8)])
    assert (blocks.src.tolist(), blocks.dst.tolist(), blocks.length.tolist()) == ([692], [9_320], [64])


PAGE_BYTES = {"kv": 20, "index": 5}


def part(rank: int, positions: list[int], **changed: int) -> Coverage:
    sent = {name: len(positions) * size for name, size in PAGE_BYTES.items()}
    return Coverage(rank, pack_int32(positions), sent | changed)


def test_s67_exactly_what_was_asked_for_is_proof() -> None:
    assert check_coverage([part(0, [0, 1, 2])], np.arange(3), PAGE_BYTES) is None
    assert check_coverage([part(1, [1]), part(0, [0, 2])], np.arange(3), PAGE_BYTES, ranks=2) is None


@pytest.mark.parametrize(
    ("parts", "ranks", "wrong"),
    [
        ([part(0, [0, 1])], 1, "positions 2"),
        ([part(0, [0, 1, 2, 3])], 1, "positions 4"),
        ([part(0, [0, 1, 1])], 1, "positions 3"),
        ([part(0, [0, 1, 2], kv=40)], 1, "wrote"),
        ([part(0, [0, 1, 2], index=0)], 1, "wrote"),
        ([Coverage(0, pack_int32([0, 1, 2]), {"kv": 60})], 1, "wrote"),
        ([part(0, [0, 1, 2])], 2, "2 ranks"),
        ([part(0, [0, 1]), part(0, [2])], 2, "ranks"),
        ([part(0, [0, 1]), part(1, [1, 2])], 2, "positions 4"),
        ([], 1, "1 ranks"),
        ([Coverage(0, b"123", {"kv": 0, "index": 0})], 1, "3 bytes of positions"),
    ],
)
def test_s67_anything_else_is_not(parts: list[Coverage], ranks: int, wrong: str) -> None:
    reason = check_coverage(parts, np.arange(3), PAGE_BYTES, ranks)
    assert reason is not None
    assert wrong in reason


def test_s32_s67_coverage_counts_what_was_sent() -> None:
    """3 positions on two layers of 10 bytes; a layer that was not sent is not counted."""
    assert coverage(0, [0, 1, 2], regions(1, layers=2)).bytes_by_component == {"kv": 60}
    assert coverage(0, [0, 1, 2], regions(1, layers=1)).bytes_by_component == {"kv": 30}
