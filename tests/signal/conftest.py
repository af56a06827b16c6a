from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.signal.nets import MemoryNet, Net, ZmqNet


@pytest.fixture(params=["tcp", "ipc", "memory"])
async def net(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Net]:
    kind: str = request.param
    made: Net = MemoryNet() if kind == "memory" else ZmqNet(tmp_path, kind)
    yield made
    await made.close()


@pytest.fixture
async def tcp(tmp_path: Path) -> AsyncIterator[ZmqNet]:
    made = ZmqNet(tmp_path, "tcp")
    yield made
    await made.close()
