"""The seeded random walk: both services' real decisions against a hostile link, engine, and sudden death.

It plays the core of A1, A4, A5, A16, A18, A19, A21 and A25 in every order, thousands of times.
"""

import pytest

from tests.walk.world import World


def walk(seed: int, steps: int) -> World:
    world = World(seed)
    for _ in range(steps):
        world.step()
    world.settle()
    return world


FOUND_DEFECTS = (1023, 1030)


@pytest.mark.parametrize("seed", [*range(14), *FOUND_DEFECTS])
def test_no_page_is_reused_while_written_each_request_ends_once_books_balance(seed: int) -> None:
    """64,000 steps in all."""
    world = walk(seed, 4000)
    assert world.outcomes["finished"] > 5
    assert world.outcomes["failed"] + world.outcomes["cancelled"] > 5


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_a_long_walk(seed: int) -> None:
    walk(seed, 4000)
