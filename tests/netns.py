"""Two machines of a test's own: network namespaces joined by one cable whose speed the test sets. Needs root."""

import ctypes
import os
import shutil
import socket
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def enter(name: str) -> None:
    """This thread's sockets are made in that namespace from now on; "" changes nothing."""
    if name:
        _set(Path("/run/netns", name))


def _set(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        if _libc.setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")
    finally:
        os.close(fd)


def socket_factory(name: str) -> Callable[[Any], socket.socket]:
    """For an HTTP client that stays where it is and reaches into a namespace: a socket belongs to the one it was made
    in."""

    def make(address: Any) -> socket.socket:
        family, kind, protocol, _, _ = address
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            enter(name)
            return socket.socket(family, kind, protocol)
        finally:
            if _libc.setns(home, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot come back from the namespace")
            os.close(home)

    return make


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()} (network namespaces need root)"


class Cable:
    """``hosts``: (namespace, address) of its two ends."""

    def __init__(self) -> None:
        for tool in ("ip", "tc"):
            assert shutil.which(tool), f"{tool} is missing (Debian: iproute2)"
        tag = uuid.uuid4().hex[:6]
        self.hosts = [(f"handoff-{tag}-{i}", f"10.211.0.{i + 1}") for i in range(2)]
        self._ends = [f"ho{tag}{i}" for i in range(2)]

    def plug(self) -> None:
        for name, _ in self.hosts:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        one, two = self._ends
        _run(
            "ip", "link", "add", one, "netns", self.hosts[0][0], "type", "veth", "peer", two, "netns", self.hosts[1][0]
        )
        for (name, address), end in zip(self.hosts, self._ends, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            _run("ip", "-n", name, "link", "set", end, "up")

    def limit(self, rate: str, end: int = 0) -> None:
        """What that end sends goes at no more than, say, "40mbit"."""
        name, device = self.hosts[end][0], self._ends[end]
        shape = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
        _run("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", device, *shape)

    def sent_bytes(self, end: int = 0) -> int:
        """By that end, so far."""
        name, device = self.hosts[end][0], self._ends[end]
        shown = subprocess.run(
            ["ip", "netns", "exec", name, "cat", f"/sys/class/net/{device}/statistics/tx_bytes"],
            capture_output=True,
            text=True,
            check=True,
        )
        return int(shown.stdout)

    def cut(self) -> None:
        for name, _ in self.hosts:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextmanager
def cable() -> Iterator[Cable]:
    """Plugged in, and gone afterwards."""
    one = Cable()
    try:
        one.plug()
        yield one
    finally:
        one.cut()
