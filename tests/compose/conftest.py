"""The image, built once, and a pair under the tightest limits that a container may have."""

from collections.abc import AsyncIterator

import pytest

from tests.compose.stack import IMAGE, Stack, run, stack

BUILD_S = 1200.0
HOSTNET = "compose/compose.hostnet.yaml"


@pytest.fixture(scope="session")
def image() -> str:
    """Built as an operator builds it: by a compose file."""
    Stack(HOSTNET).compose("build", limit_s=BUILD_S)
    assert run("docker", "image", "inspect", "--format", "{{.Config.User}}", IMAGE).strip() == "1000:1000"
    return IMAGE


@pytest.fixture(scope="module")
async def pair(image: str) -> AsyncIterator[Stack]:
    """On loopback. Each test brings up what an earlier one stopped."""
    async with stack(HOSTNET, "tests/compose/limits.yaml") as made:
        yield made
