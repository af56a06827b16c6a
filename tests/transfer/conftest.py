"""Engines of both kinds for the contract tests; each test's engines are retired with it."""

from collections.abc import Callable, Iterator

import pytest

from shared.transfer.engine import TransferEngine
from shared.transfer.memory_engine import MemoryEngine, MemoryNetwork
from shared.transfer.mooncake_engine import MooncakeEngine

MakeEngine = Callable[[], TransferEngine]


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture(params=["memory", "mooncake"])
def make(request: pytest.FixtureRequest, network: MemoryNetwork) -> Iterator[MakeEngine]:
    made: list[TransferEngine] = []

    def one() -> TransferEngine:
        engine: TransferEngine = MemoryEngine(network) if request.param == "memory" else MooncakeEngine("127.0.0.1")
        made.append(engine)
        return engine

    yield one
    for engine in made:
        engine.retire()
