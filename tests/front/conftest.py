from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.front.fakes import FakeEngine, Http, byte_level_tokenizer, decode_app, registered, served, status


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_level_tokenizer()


@pytest.fixture
async def engine() -> FakeEngine:
    """Ready, with one registered prefill, answering "hello"."""
    engine = FakeEngine()
    engine.ready()
    engine.front.on_message(status(registered()))
    return engine


@pytest.fixture
async def http(engine: FakeEngine, tokenizer: Any) -> AsyncIterator[Http]:
    engine.answer = tokenizer.encode("hello")
    async with served(decode_app(engine, tokenizer)) as http:
        yield http
