"""The seeded random walk: both services' real decisions against a hostile link, engine, and sudden death."""

import pytest

from tests.walk.world import World


@pytest.mark.parametrize("seed", range(20))
def test_no_page_is_reused_while_written_each_request_ends_once_books_balance(seed: int) -> None:
    world = World(seed)
    for _ in range(1200):
        world.step()
    world.settle()
    assert world.outcomes["finished"] > 5
    assert world.outcomes["failed"] + world.outcomes["cancelled"] > 5
