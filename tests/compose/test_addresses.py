"""Which address a container tells its peers (A28): its own, the operator's, and never loopback to another host."""

import asyncio
import re
import subprocess

import pytest

from tests.compose.stack import MODEL, Stack, stack
from tests.pair import Client

pytestmark = pytest.mark.compose

REFUSED_S = 30.0
NETWORKS = ("compose/compose.yaml", "tests/compose/two_networks.yaml")
SENT = """
import fcntl, os, socket, struct
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for name in os.listdir("/sys/class/net"):
    if name != "lo":
        packed = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
        print(socket.inet_ntoa(packed[20:24]), open(f"/sys/class/net/{name}/statistics/tx_bytes").read().strip())
"""


async def test_a28_loopback_is_refused_towards_a_remote_peer(image: str) -> None:
    named = ["--network", "bridge", "--add-host", "this-host:127.0.1.1", image, "decode_svc"]
    alone = ["--network", "none", image, "decode_svc"]
    commands = (
        [*named, "--host", "0.0.0.0", "--advertise-host", "this-host"],
        [*named, "--host", "this-host"],
        [*alone, "--host", "0.0.0.0"],  # nothing but loopback to choose
    )
    done = await asyncio.gather(*(asyncio.to_thread(refused, command) for command in commands))
    for said, address in zip(done, ("this-host", "this-host", "127.0.0.1"), strict=True):
        assert said.startswith("decode-svc: error: peer 192.0.2.77 is on another host but would be told to reach")
        assert f" at {address}: " in said
        assert "--advertise-host" in said


def refused(command: list[str]) -> str:
    """Its last words."""
    done = subprocess.run(
        ["docker", "run", "--rm", *command, "--prefill", "192.0.2.77:8998"],
        capture_output=True,
        text=True,
        timeout=REFUSED_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr.strip().splitlines()[-1]


async def test_a28_between_two_networks_the_operators_word_wins(image: str) -> None:
    """Without it, the address on the way to prefill is taken, and logged. Bytes go where was said, both times."""
    async with stack(*NETWORKS, PREFILL="prefill-control:8998", PREFILL_CONTROL_PORT="8998") as pair:
        await pair.up()
        chosen = re.search(r"advertising (\S+) ", pair.log("decode"))
        assert chosen is not None
        assert chosen[1] == address(pair, "decode-control")
        assert await sent_while_asking(pair, "control") > 8 * await sent_while_asking(pair, "data")

        pair.environ["DECODE_ADVERTISE_HOST"] = "decode-data"
        await pair.up()
        assert "advertising decode-data" in pair.log("decode")
        assert await sent_while_asking(pair, "data") > 8 * await sent_while_asking(pair, "control")


def address(pair: Stack, name: str) -> str:
    """What prefill finds under that name."""
    return pair.inside("prefill", f"import socket; print(socket.gethostbyname('{name}'))").strip()


async def sent_while_asking(pair: Stack, network: str) -> int:
    """Bytes that prefill sent on that network while one prompt was handed over."""
    own = address(pair, f"prefill-{network}")

    async def sent() -> int:
        lines = await asyncio.to_thread(pair.inside, "prefill", SENT)
        return int(dict(line.split() for line in lines.splitlines())[own])

    before = await sent()
    async with Client(pair.urls["decode"]) as decode:
        body = {"model": MODEL, "prompt": [7] * 100, "max_tokens": 2, "temperature": 0}
        assert (await decode.post("/v1/completions", body))[0] == 200
    return await sent() - before
