"""The transfer engine over Mooncake's Transfer Engine. The only file that knows it.

The library reads its configuration once in a process, so a process speaks one protocol and takes the ports of all its
engines from one range.
"""

import bisect
import importlib.metadata
import os
import resource
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import numpy as np

from shared.errors import ConfigError, EngineMissing, TransferFailed
from shared.transfer.engine import Batch, Blocks

Protocol = Literal["tcp", "rdma"]

MAX_OUTSTANDING = 1000
"""Blocks in the library's hands. Past its own limit it fails blocks, and may then never serve that peer again."""
PART_BLOCKS = 64
"""A large batch goes over in parts of so many blocks: one moves while the next is prepared."""
MIN_POLL_S, MAX_POLL_S = 50e-6, 5e-3
PROGRESS_S = 10
"""A block that does not move for so long has failed."""
PORTS = range(15000, 32768)
WINDOW = 256
KEPT_PORTS = 64

_EXTRAS = "handoff[cpu] where there is no CUDA, handoff[cuda12] or handoff[cuda13] where there is"
_WHEELS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
_CALLS = ("batch_transfer_async_write", "get_batch_transfer_status", "transfer_submit_write", "transfer_check_status")

_making = threading.Lock()
"""Held while an engine is made: the sockets that begin to listen meanwhile are taken for its own."""
_kept_ports: deque[int] = deque()
"""Descriptors that keep the ports of this process's retired engines bound, oldest first."""


@dataclass
class _Part:
    """A stretch of a batch: the library's ids of all blocks but the last (0: there are none, or they are done), and
    of the last."""

    session: str
    body: int
    last: int
    blocks: int
    ok: bool | None = None


class MooncakeEngine:
    """``advertise_host`` is the address at which peers reach this machine; the data and handshake ports listen on all
    interfaces whatever it says. Raises EngineMissing, ConfigError, and TransferFailed if the engine cannot start."""

    def __init__(self, advertise_host: str, protocol: Protocol = "tcp") -> None:
        library = _load(protocol)
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._in_order: list[int] = []
        self._batches: dict[Batch, list[_Part]] = {}
        self._moving: deque[_Part] = deque()
        self._stalled: set[str] = set()
        self._interrupted = False
        self._ids = count(1)
        self._stall_s = float(os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"]) + 0.5
        with _making:
            before = {port for port, _ in _listening()}
            self._engine = library()
            code = self._engine.initialize(advertise_host, "P2PHANDSHAKE", protocol, "")
            self._listeners = [os.dup(fd) for port, fd in _listening() if port not in before]
        self._port: int = 0 if code else self._engine.get_rpc_port()  # asking an engine that did not start is fatal
        self.session = f"{advertise_host}:{self._port}"
        if code != 0:
            self.retire()
            raise TransferFailed(f"Mooncake cannot start an engine for host {advertise_host!r}: it says {code}")

    @staticmethod
    def require(protocol: Protocol = "tcp") -> None:
        """Can an engine be made here? Raises EngineMissing saying what to install, or ConfigError."""
        _load(protocol)

    def register(self, base: int, length_bytes: int) -> None:
        if base <= 0 or length_bytes <= 0:
            raise ValueError(f"cannot register {length_bytes} bytes at {base:#x}")
        # The batch call lets other threads run; pinning gigabytes for RDMA takes seconds.
        if code := self._alive().batch_register_memory([base], [length_bytes]):
            problem = f"cannot register {length_bytes} bytes at {base:#x}: Mooncake says {code}"
            raise TransferFailed(problem + _memory_limits(length_bytes))
        at = bisect.bisect(self._starts, base)
        self._starts.insert(at, base)
        self._ends.insert(at, base + length_bytes)
        self._in_order.append(base)

    def contact(self, session: str) -> None:
        """A write of no bytes: it makes the handshake, and unlike the library's other calls that do, lets other threads
        run meanwhile."""
        engine = self._alive()
        self._check_interrupted()
        if not self._starts:
            raise ValueError("no source is registered")
        handle = engine.transfer_submit_write(session, self._starts[0], 0, 0)
        while handle and (state := engine.transfer_check_status(handle)) == 0:
            self._check_interrupted()
            time.sleep(MAX_POLL_S)
        if not handle or state != 1:
            raise TransferFailed(f"Mooncake cannot reach {session}: is that engine still there?")

    def submit(self, session: str, blocks: Blocks) -> Batch:
        self._alive()
        self._check(blocks)
        self._check_stalled(session)
        src, dst, length = blocks.src.tolist(), blocks.dst.tolist(), blocks.length.tolist()
        parts = []
        for start in range(0, len(src), PART_BLOCKS):
            part = slice(start, start + PART_BLOCKS)
            while sum(p.blocks for p in self._moving) > MAX_OUTSTANDING - PART_BLOCKS:
                self._finish(self._moving[0])
                self._check_stalled(session)
            parts.append(self._start(session, src[part], dst[part], length[part]))
        batch = Batch(next(self._ids))
        self._batches[batch] = parts
        return batch

    def wait(self, batch: Batch) -> None:
        parts = self._batches.pop(batch, None)
        if parts is None:
            raise ValueError(f"batch {batch} is unknown, or was waited for already")
        for at, part in enumerate(parts):
            self._check_interrupted()
            if part.ok is None and part.session not in self._stalled:  # else its turn to fail comes minutes later
                self._finish(part)
            if not part.ok:  # to wait for the others too could take a time-out for each of their blocks
                self._moving = deque(moving for moving in self._moving if moving not in parts)
                blocks = sum(part.blocks for part in parts)
                raise TransferFailed(f"Mooncake failed part {at + 1} of {len(parts)} of a batch of {blocks} blocks")

    def interrupt(self) -> None:
        self._interrupted = True

    def retire(self) -> None:
        if self._engine is None:
            return
        for base in reversed(self._in_order):
            self._engine.unregister_memory(base)
        self._wake_listener()
        self._batches.clear()
        self._moving.clear()
        self._engine = None  # the one reference: the library's destructor ends its threads and connections
        for fd in self._listeners:
            _keep_bound(fd)

    def _alive(self) -> Any:
        if self._engine is None:
            raise ValueError(f"engine {self.session} is retired")
        return self._engine

    def _check_interrupted(self) -> None:
        if self._interrupted:
            raise TransferFailed(f"engine {self.session} was interrupted: retire it")

    def _check_stalled(self, session: str) -> None:
        self._check_interrupted()
        if session in self._stalled:
            raise TransferFailed(f"{session} has stalled, and what it was sent is still queued: retire this engine")

    def _check(self, blocks: Blocks) -> None:
        """The library copies whatever is mapped, takes empty blocks for done, and reads shorter lists to their end."""
        if not len(blocks) or not len(blocks.src) == len(blocks.dst) == len(blocks.length):
            raise ValueError(f"{len(blocks.src)} sources, {len(blocks.dst)} targets, {len(blocks.length)} lengths")
        if blocks.length.min() <= 0:
            raise ValueError(f"a block of {blocks.length.min()} bytes")
        region = np.searchsorted(np.array(self._starts, np.int64), blocks.src, side="right") - 1
        ends = np.array([*self._ends, 0], np.int64)[region]  # region -1, before the first one, ends at 0
        outside = np.flatnonzero(blocks.src + blocks.length > ends)
        if outside.size:
            at = outside[0]
            raise ValueError(f"source {blocks.src[at]:#x} + {blocks.length[at]} bytes is not registered")

    def _start(self, session: str, src: list[int], dst: list[int], length: list[int]) -> _Part:
        """All but the last block as one batch, then the last by itself: only a single block's state can be looked at
        without waiting for it."""
        body, last = 1, 0
        if len(src) > 1:
            body = self._engine.batch_transfer_async_write(session, src[:-1], dst[:-1], length[:-1])
        if body:
            last = self._engine.transfer_submit_write(session, src[-1], dst[-1], length[-1])
        if not last:
            raise TransferFailed(f"Mooncake refused {len(src)} blocks to {session}: is that engine still there?")
        part = _Part(session, body if len(src) > 1 else 0, last, len(src))
        self._moving.append(part)
        return part

    def _finish(self, part: _Part) -> None:
        """Wait for a part and note how it ended.

        The library's wait for a batch burns a core until it is done, so we poll its last block first; with one lane
        the blocks before it are done by then and the wait returns at once. Where that order does not hold (RDMA) the
        wait is longer, not wrong. A stalled peer fails the blocks one after the other, each after ``PROGRESS_S``, but
        the batch as soon as one has failed: that is when we look at it early. An id is dead after it was answered, and
        a second call with it ends the process; what is not answered after a failure goes with the engine.
        """
        started_s, waited_s = time.monotonic(), 0.0
        while (state := self._engine.transfer_check_status(part.last)) == 0 and part.ok is None:
            self._check_interrupted()
            time.sleep(min(max(MIN_POLL_S, waited_s / 16), MAX_POLL_S))
            waited_s = time.monotonic() - started_s
            if part.body and waited_s > self._stall_s:
                self._finish_body(part)
        if state == 1 and part.body:
            self._finish_body(part)
        if part.ok is None:
            part.ok = state == 1
        if state == 0:
            self._stalled.add(part.session)
        self._moving.remove(part)

    def _finish_body(self, part: _Part) -> None:
        if self._engine.get_batch_transfer_status([part.body]) != 0:
            part.ok = False
        part.body = 0

    def _wake_listener(self) -> None:
        """The destructor joins a thread that sits in accept() for up to a second, and holds the interpreter lock all
        the while. Shorten that wait and end the present one; then it takes milliseconds."""
        for fd in self._listeners:
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as listener:
                if listener.getsockname()[1] == self._port:
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1000))
                    socket.create_connection(("127.0.0.1", self._port), timeout=0.1).close()


def _memory_limits(needed: int) -> str:
    """What may have kept a card from pinning so much, "" for nothing."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return ""
    return f"; the limit of locked memory (ulimit -l, memlock) is {limit} bytes, less than the {needed} needed"


def port_window(now_s: float) -> int:
    """First port of a process that starts now. Those that start 1 … 68 s apart get ranges of their own, so that a late
    write to a dead process does not find its successor at the old address."""
    return PORTS.start + int(now_s) % (len(PORTS) // WINDOW) * WINDOW


def _listening() -> Iterator[tuple[int, int]]:
    """(port, descriptor) of every listening TCP socket of this process."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as copy:
                    inet = copy.family in (socket.AF_INET, socket.AF_INET6)
                    if inet and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        yield copy.getsockname()[1], fd


def _keep_bound(fd: int) -> None:
    """Stop listening but keep the port, so that no later engine of this process gets it: whoever still writes to the
    retired one must find nobody. The oldest are let go to stay within the range of ports."""
    with socket.socket(fileno=fd) as listener:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        _kept_ports.append(listener.detach())
    if len(_kept_ports) > KEPT_PORTS:
        os.close(_kept_ports.popleft())


def _load(protocol: str) -> Any:
    """The library's engine class, made ready for one protocol."""
    _prepare(protocol)
    try:
        from mooncake.engine import TransferEngine
    except ModuleNotFoundError as error:
        raise EngineMissing(f"Mooncake is not installed ({error}): install {_EXTRAS}") from error
    except ImportError as error:
        wheel = f"this is a wheel for CUDA, and there is none: install {_EXTRAS}"
        system = "install that system library (Debian, Ubuntu: apt-get install libibverbs1 libnuma1 libcurl4)"
        raise EngineMissing(f"cannot load Mooncake: {error}; {wheel if 'libcud' in str(error) else system}") from error
    missing = [call for call in _CALLS if not hasattr(TransferEngine, call)]
    if missing:
        raise EngineMissing(f"Mooncake {_version()} has no {', '.join(missing)}; 0.3.13.post1 has: install {_EXTRAS}")
    return TransferEngine


def _prepare(protocol: str) -> None:
    """Settings that our use of the library needs, and better defaults for others."""
    environ = os.environ
    if environ.get("MC_TCP_PROTO") == "1":
        raise ConfigError("MC_TCP_PROTO=1 calls writes done that are not visible yet: unset it")
    environ["MC_TCP_LANES_PER_PEER"] = "1"
    environ["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] = environ["MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER"] = "65535"
    if protocol == "tcp":
        environ["MC_FORCE_TCP"] = "1"  # without it any RDMA device that is found gets used
    environ.setdefault("MC_LOG_LEVEL", "ERROR")
    environ.setdefault("MC_TRANSFER_TIMEOUT", "300")  # on top of the time-out without progress
    environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", str(PROGRESS_S))
    if not environ.keys() & {"MC_MIN_PRC_PORT", "MC_MIN_RPC_PORT"}:
        first = port_window(time.time())
        environ["MC_MIN_PRC_PORT"], environ["MC_MAX_PRC_PORT"] = str(first), str(first + WINDOW - 1)


def _version() -> str:
    for name in _WHEELS:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "(unknown version)"
