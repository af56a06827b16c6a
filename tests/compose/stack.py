"""A pair of containers of this repository's compose files, and what a test does to it."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.pair import Client, Side

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "handoff:test"
MODEL = "smollm2-135m-instruct"
SIDES: tuple[Side, Side] = ("prefill", "decode")
PROBE_S = 2.0
START_S = 90.0

_SIGNAL_ENGINE = """
import os, sys, signal
for pid in filter(str.isdigit, os.listdir("/proc")):
    if b"multiprocessing.spawn" in open(f"/proc/{pid}/cmdline", "rb").read():
        os.kill(int(pid), signal.Signals[sys.argv[1]])
        break
else:
    sys.exit("no engine here")
"""


def run(*command: str, limit_s: float = 60.0, **environ: str) -> str:
    """Its stdout. Raises AssertionError with all that it said where it fails."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def compose_command() -> list[str]:
    """Version 2 where it is, else version 1."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0
    assert plugin or shutil.which("docker-compose"), "neither docker compose nor docker-compose is here"
    return ["docker", "compose"] if plugin else ["docker-compose"]


def _free_ports(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Stack:
    """One compose project with a name and ports of its own."""

    def __init__(self, *files: str, **environ: str) -> None:
        http_p, http_d, control_p, control_d = _free_ports(4)
        self.urls = {"prefill": f"http://127.0.0.1:{http_p}", "decode": f"http://127.0.0.1:{http_d}"}
        self.environ = {
            "IMAGE": IMAGE,
            "PREFILL_PORT": http_p,
            "PREFILL_CONTROL_PORT": control_p,
            "DECODE_PORT": http_d,
            "DECODE_CONTROL_PORT": control_d,
            "PREFILL": f"127.0.0.1:{control_p}",
            "PROBE_INTERVAL": f"{PROBE_S:g}s",
            "HANDOFF_DTYPE": "float32",
            "HANDOFF_THREADS": "1",
            "HANDOFF_MAX_MODEL_LEN": "512",
        } | environ
        self._project = f"handoff-test-{uuid.uuid4().hex[:8]}"
        self._files = [part for file in files for part in ("-f", file)]
        self._containers: dict[Side, str] = {}

    def compose(self, *arguments: str, limit_s: float = 120.0) -> str:
        command = [*compose_command(), "-p", self._project, *self._files, *arguments]
        return run(*command, limit_s=limit_s, **self.environ)

    def container(self, side: Side) -> str:
        if side not in self._containers:
            self._containers[side] = self.compose("ps", "-a", "-q", side).strip()
        return self._containers[side]

    def inspect(self, side: Side) -> Any:
        return json.loads(run("docker", "inspect", self.container(side)))[0]

    def health(self, side: Side) -> str:
        """What Docker says: starting, healthy or unhealthy; or how the container ended."""
        state = self.inspect(side)["State"]
        return str(state["Health"]["Status"] if state["Running"] else f"exit status {state['ExitCode']}")

    def log(self, side: Side) -> str:
        """Since its last start."""
        command = ["docker", "logs", "--since", self.inspect(side)["State"]["StartedAt"], self.container(side)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    def inside(self, side: Side, code: str, *arguments: str) -> str:
        """Run Python in the container, as the service's user."""
        return run("docker", "exec", self.container(side), "python", "-c", code, *arguments)

    async def signal_engine(self, side: Side, name: str) -> None:
        await asyncio.to_thread(self.inside, side, _SIGNAL_ENGINE, name)

    @asynccontextmanager
    async def frozen(self, side: Side) -> AsyncIterator[None]:
        await self.signal_engine(side, "SIGSTOP")
        try:
            yield
        finally:
            await self.signal_engine(side, "SIGCONT")

    async def up(self, *sides: Side) -> None:
        """Start what does not run; until Docker calls both healthy and decode has its prefill."""
        await asyncio.to_thread(self.compose, "up", "-d", "--no-build", *sides)
        self._containers.clear()
        for side in SIDES:
            await self.until_health(side, "healthy", START_S)
        async with Client(self.urls["decode"]) as decode:
            end_s = time.monotonic() + 20
            while (await decode.get("/ready"))[0] != 200:
                assert time.monotonic() < end_s, self.log("decode")[-3000:]
                await asyncio.sleep(0.1)

    async def until_health(self, side: Side, wanted: str, limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        while (health := await asyncio.to_thread(self.health, side)) != wanted:
            assert time.monotonic() < end_s, f"{side} is {health}, not {wanted}:\n{self.log(side)[-3000:]}"
            assert not health.startswith("exit"), f"{side} ended: {health}\n{self.log(side)[-3000:]}"
            await asyncio.sleep(0.3)

    async def stop(self, *sides: Side) -> None:
        """As with the engine's own grace time: after ten seconds the rest is killed, which makes exit status 137."""
        await asyncio.to_thread(self.compose, "stop", "--timeout", "10", *sides)


@asynccontextmanager
async def stack(*files: str, **environ: str) -> AsyncIterator[Stack]:
    """Not yet up; gone afterwards, with its networks and volumes, whatever happened."""
    made = Stack(*files, **environ)
    try:
        yield made
    finally:
        await asyncio.to_thread(made.compose, "down", "--volumes", "--timeout", "1")
