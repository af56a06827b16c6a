"""Pairs of real services. The session's are shared; a test that kills or restarts one starts its own."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.pair import Forks, Pair, start_pair
from tests.reference import Reference
from tests.tiny_models import save_tiny_llama

PAGE_SIZE = 16


@pytest.fixture(scope="session")
def forks() -> Forks:
    return Forks()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_reference(tiny: Path) -> Reference:
    return Reference(tiny)


@pytest.fixture(scope="session")
async def pair(forks: Forks, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """A tiny pair: page 16, chunks of 64, context 256."""
    async with AsyncExitStack() as stack:
        flags = ("--page-size", str(PAGE_SIZE), "--max-model-len", "256", "--chunked-prefill-size", "64")
        yield await start_pair(
            stack, forks, tmp_path_factory.mktemp("pair"), tiny, *flags, "--served-model-name", "tiny"
        )
