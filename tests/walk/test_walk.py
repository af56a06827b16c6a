"""The seeded random walk: both services' real decisions against a hostile link, engine, and sudden death.

It plays the core of A1, A4, A5, A16, A18, A19, A21 and A25 in every order, thousands of times.
"""

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
