"""Real services in real processes on loopback: fronts forked from a preloaded server, each with its own engine."""

import asyncio
import ctypes
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import aiohttp
import psutil

from tests import netns

Side = Literal["prefill", "decode"]
START_S = 60.0
_PR_SET_PDEATHSIG = 1


def _serve(side: Side, argv: list[str], log_path: str, namespace: str) -> None:
    """The front process: its output goes to a file, and it does not outlive the tests."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    netns.enter(namespace)
    if side == "prefill":
        from prefill_svc.main import main
    else:
        from decode_svc.main import main
    sys.exit(main(argv))


class Forks:
    """The fork server. Started once, before this process has made any transfer engine."""

    def __init__(self) -> None:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # read when torch is imported, there
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.preload"])


@dataclass
class Service:
    """One running service. ``flags`` are its command line; a restart may reuse its ports."""

    forks: Forks
    side: Side
    flags: list[str]
    log_path: Path
    namespace: str = ""
    """The network namespace that it lives in; empty: the test's own."""
    process: Any = None
    url: str = ""
    control: str = ""
    _read: int = field(default=0, repr=False)

    def start(self) -> "Service":
        self._read = self.log_path.stat().st_size if self.log_path.exists() else 0
        args = (self.side, self.flags, str(self.log_path), self.namespace)
        self.process = self.forks.context.Process(target=_serve, args=args)
        self.process.start()
        return self

    def log(self) -> str:
        """What it has written since its last start."""
        with self.log_path.open() as file:
            file.seek(self._read)
            return file.read()

    def wait_ready(self) -> "Service":
        """Until it says so. Raises AssertionError with its log where it ends or takes too long."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self.process.exitcode is None:
            if self.log_path.exists() and (ready := re.search(r"ready: (\S+), control tcp://(\S+),", self.log())):
                self.url, self.control = ready[1], ready[2]
                return self
            time.sleep(0.02)
        raise AssertionError(f"{self.side} is not ready (exit status {self.process.exitcode}):\n{self.log()}")

    def wait_exit(self, timeout_s: float = 20.0) -> int:
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, f"{self.side} still runs:\n{self.log()}"
        return int(self.process.exitcode)

    def engine(self) -> psutil.Process:
        """The engine process, a child of the front."""
        children = psutil.Process(self.process.pid).children()
        assert len(children) == 1, children
        return children[0]

    def terminate(self, timeout_s: float = 20.0) -> int:
        self.process.terminate()
        return self.wait_exit(timeout_s)

    def kill(self) -> None:
        """Front and engine, without a word."""
        if self.process is not None and self.process.exitcode is None:
            for child in psutil.Process(self.process.pid).children():
                child.kill()
            self.process.kill()
            self.process.join()


class Client:
    """HTTP against one service. ``post`` and ``stream`` return parsed JSON."""

    def __init__(self, url: str, namespace: str = "") -> None:
        self.url = url
        connector = aiohttp.TCPConnector(socket_factory=netns.socket_factory(namespace)) if namespace else None
        self.session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120))

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.session.close()

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if is_json else text

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Every event of a streamed answer, [DONE] excepted. Raises AssertionError where the status is not 200."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            async for event in self.events(response):
                yield event

    @staticmethod
    async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
        async for line in response.content:
            text = line.decode().strip()
            if text.startswith("data: ") and text != "data: [DONE]":
                yield json.loads(text.removeprefix("data: "))

    async def metric(self, series: str) -> float:
        """One value of /metrics, by its name with labels as Prometheus writes them."""
        _, text = await self.get("/metrics")
        return float(next(line.rsplit(" ", 1)[1] for line in text.splitlines() if line.rsplit(" ", 1)[0] == series))


@dataclass
class Pair:
    """Prefills and decodes that are registered with each other."""

    prefills: list[Service]
    decodes: list[Service]
    clients: list[Client]

    @property
    def prefill(self) -> Service:
        return self.prefills[0]

    @property
    def decode(self) -> Service:
        return self.decodes[0]

    @property
    def client(self) -> Client:
        return self.clients[0]

    async def wait_registered(self, count: int | None = None, timeout_s: float = 20.0) -> None:
        """Every decode has ``count`` registered prefills (default: all)."""
        wanted = len(self.prefills) if count is None else count
        end_s = time.monotonic() + timeout_s
        for client in self.clients:
            while await client.metric('handoff_peers{state="registered"}') != wanted:
                assert time.monotonic() < end_s, "not registered:\n" + self.decode.log()[-3000:]
                await asyncio.sleep(0.05)

    async def check_books(self, timeout_s: float = 10.0) -> None:
        """At rest both sides own every page and slot again, and nothing waits. Raises AssertionError if not."""
        end_s = time.monotonic() + timeout_s
        services = [*self.prefills, *self.decodes]
        before = [(await _values(s))["handoff_heartbeats_total"] for s in services]
        while problems := [p for s, b in zip(services, before, strict=True) for p in _books(s, await _values(s), b)]:
            assert time.monotonic() < end_s, problems
            await asyncio.sleep(0.05)


async def _values(service: Service) -> dict[str, float]:
    async with Client(service.url, service.namespace) as client:
        _, text = await client.get("/metrics")
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#"]
    return {name: float(value) for name, value in lines}


def _books(service: Service, values: dict[str, float], heartbeats_before: float) -> list[str]:
    """What does not balance, in numbers that the engine has sent since."""
    if values["handoff_heartbeats_total"] == heartbeats_before:
        return [f"{service.side}: no heartbeat"]
    usable = values["handoff_pages_usable"]
    wanted = {"handoff_pages_free": usable, "handoff_pages_quarantined": 0, "handoff_running_requests": 0}
    wanted |= {"handoff_waiting_requests": 0}
    return [f"{service.side}: {k} is {values[k]}, expected {v}" for k, v in wanted.items() if values.get(k, v) != v]


async def start_pair(
    stack: AsyncExitStack,
    forks: Forks,
    folder: Path,
    model: Path | str,
    *flags: str,
    prefills: int = 1,
    decodes: int = 1,
    prefill_flags: tuple[str, ...] = (),
    decode_flags: tuple[str, ...] = (),
) -> Pair:
    """Start, wait until registered, and stop with the stack (SIGKILL: tests of clean ends end theirs themselves)."""
    common = [
        "--model",
        str(model),
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--port",
        "0",
        "--control-port",
        "0",
        *flags,
    ]
    first = [
        Service(forks, "prefill", [*common, *prefill_flags], folder / f"prefill{i}.log").start()
        for i in range(prefills)
    ]
    for service in first:
        stack.callback(service.kill)
        service.wait_ready()
    peers = [x for service in first for x in ("--prefill", service.control)]
    second = [
        Service(forks, "decode", [*common, *peers, *decode_flags], folder / f"decode{i}.log").start()
        for i in range(decodes)
    ]
    clients = []
    for service in second:
        stack.callback(service.kill)
        service.wait_ready()
        clients.append(await stack.enter_async_context(Client(service.url)))
    pair = Pair(first, second, clients)
    await pair.wait_registered()
    return pair
