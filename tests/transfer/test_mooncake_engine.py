"""What is Mooncake's alone: how it is loaded, its ports, its threads, and a peer that stands still."""

import multiprocessing
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from shared.errors import ConfigError, EngineMissing, TransferFailed
from shared.transfer import mooncake_engine
from shared.transfer.mooncake_engine import PORTS, WINDOW, MooncakeEngine, port_window
from tests.transfer.test_contract import blocks, memory

MB = 1 << 20


class Unloadable(MetaPathFinder):
    """``import mooncake.engine`` raises."""

    def __init__(self, error: ImportError) -> None:
        self.error = error

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname.startswith("mooncake"):
            raise self.error


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), r"install handoff\[cpu\]"),
        (ImportError("libibverbs.so.1: cannot open shared object file"), "libibverbs.*apt-get install libibverbs1"),
        (ImportError("libcurl.so.4: cannot open shared object file"), "libcurl.*apt-get install .*libcurl4"),
        (ImportError("libcudart.so.12: cannot open shared object file"), r"libcudart.so.12.*install handoff\[cpu\]"),
    ],
)
def test_a_library_that_cannot_be_loaded_says_what_to_install(
    error: ImportError, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Unloadable(error), *sys.meta_path])
    with pytest.raises(EngineMissing, match=advice):
        MooncakeEngine("127.0.0.1")


def test_s16_a_library_without_the_asynchronous_calls_is_named_with_the_version_that_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = SimpleNamespace(batch_transfer_async_write=None, transfer_submit_write=None, transfer_check_status=None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", SimpleNamespace(TransferEngine=old))
    with pytest.raises(EngineMissing, match=r"has no get_batch_transfer_status; 0\.3\.13\.post1 has"):
        MooncakeEngine.require()


def test_the_calls_that_end_the_process_on_a_failed_transfer_are_not_used() -> None:
    assert mooncake_engine.__file__ is not None
    with open(mooncake_engine.__file__, encoding="utf-8") as source:
        assert "on_cuda" not in source.read()


def test_unacknowledged_writes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(ConfigError, match="MC_TCP_PROTO"):
        MooncakeEngine.require()


def test_processes_that_follow_each_other_within_a_minute_share_no_port() -> None:
    starts = [port_window(1_000_000_000.9 + second) for second in range(60)]
    assert len(set(starts)) == 60
    assert all((start - PORTS.start) % WINDOW == 0 for start in starts)
    assert PORTS.start <= min(starts)
    assert max(starts) + WINDOW <= 32768  # above it Mooncake ignores the range


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_retire_ends_the_library_even_while_its_error_is_kept() -> None:
    """A reference to the library's engine in an error's frames would keep its threads and connections alive."""
    MooncakeEngine("127.0.0.1").retire()  # the first one also starts threads that stay
    before = _threads()
    source = memory(4096, seed=1)
    engine = MooncakeEngine("127.0.0.1")
    engine.register(source.ctypes.data, source.nbytes)
    assert _threads() > before
    with pytest.raises(TransferFailed) as refused:
        engine.submit("127.0.0.1:14999", blocks(source, source.ctypes.data, [(0, 0, 8), (8, 8, 8)]))
    with pytest.raises(ValueError, match="not registered") as wrong:
        engine.submit("127.0.0.1:14999", blocks(source, source.ctypes.data, [(4096, 0, 8)]))
    engine.retire()
    assert _threads() == before
    assert refused.value.code == "transfer_failed"
    assert "is not registered" in str(wrong.value)


def test_s66_the_ports_of_a_retired_engine_stay_taken_and_deaf() -> None:
    """Whoever still writes to it must find nobody, least of all this process's next engine over the same memory."""
    before = {port for port, _ in mooncake_engine._listening()}
    engine = MooncakeEngine("127.0.0.1")
    ports = {port for port, _ in mooncake_engine._listening()} - before
    assert len(ports) == 2  # handshake and data
    engine.retire()
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("0.0.0.0", port))


def _receive(pipe: Connection) -> None:
    target = memory(40 * MB)
    engine = MooncakeEngine("127.0.0.1")
    engine.register(target.ctypes.data, target.nbytes)
    pipe.send((engine.session, target.ctypes.data))
    pipe.recv()


def _send(pipe: Connection, session: str, base: int) -> None:
    os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] = "1"
    source = memory(40 * MB, seed=1)
    engine = MooncakeEngine("127.0.0.1")
    engine.register(source.ctypes.data, source.nbytes)
    engine.wait(engine.submit(session, blocks(source, base, [(0, 0, MB)])))
    pipe.send("connected")
    pipe.recv()
    ends = []
    for _ in range(2):
        try:
            engine.wait(engine.submit(session, blocks(source, base, [(i * MB, i * MB, MB) for i in range(40)])))
            ends.append("landed")
        except TransferFailed as error:
            ends.append(error.message)
    engine.retire()
    pipe.send(ends)


@pytest.fixture
def children() -> Iterator[list[multiprocessing.process.BaseProcess]]:
    started: list[multiprocessing.process.BaseProcess] = []
    yield started
    for child in started:
        child.kill()
        child.join()


def test_a_peer_that_stands_still_fails_a_batch_once_not_once_a_block(
    children: list[multiprocessing.process.BaseProcess],
) -> None:
    """Each of the forty blocks would run into the time-out of a second by itself, and whatever came behind them too."""
    spawn = multiprocessing.get_context("spawn")

    def start(target: Any, *args: Any) -> tuple[int, Connection]:
        mine, theirs = spawn.Pipe()
        child = spawn.Process(target=target, args=(theirs, *args), daemon=True)
        child.start()
        children.append(child)
        assert child.pid is not None
        return child.pid, mine

    receiver_pid, receiver = start(_receive)
    assert receiver.poll(30)
    session, base = receiver.recv()
    _, sender = start(_send, session, base)
    assert sender.poll(30)
    assert sender.recv() == "connected"
    os.kill(receiver_pid, signal.SIGSTOP)
    sender.send("go")
    assert sender.poll(20)
    first, second = sender.recv()
    assert first == "Mooncake failed part 1 of 1 of a batch of 40 blocks"
    assert "retire this engine" in second


def test_a29_a_failed_registration_names_the_limit_its_value_and_the_need() -> None:
    """Registered twice, since TCP pins nothing and no limit makes it fail."""
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    held = memory(MB)
    engine = MooncakeEngine("127.0.0.1")
    try:
        engine.register(held.ctypes.data, held.nbytes)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, limits[1]))
        with pytest.raises(TransferFailed, match=r"memlock\) is 65536 bytes, less than the 1048576 needed"):
            engine.register(held.ctypes.data, held.nbytes)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)
        engine.retire()
