"""What both engines stand on: one loop, one compute thread, a socket to the front and one to the peers.

The loop owns every decision and never blocks; whatever blocks (forwards, transfers, session set-up) runs in a thread
and comes back to the loop as one call. What a background task raises ends the engine: its front then answers for it.
"""

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec

from shared.config import ServiceConfig
from shared.errors import ConfigError, HandoffError, IntegrityError, MessageError, PeerBusy, StateError
from shared.ops import logs
from shared.protocol.codec import Codec
from shared.protocol.local import StartFailed, Status, ToEngine
from shared.signal.channel import Channel, Link
from shared.signal.outbox import Outbox
from shared.signal.zmq_channel import open_channel

log = logging.getLogger(__name__)
T = TypeVar("T")
C = TypeVar("C", bound=ServiceConfig)


@dataclass(frozen=True)
class LocalSockets:
    """The two ipc addresses between a front and its engine."""

    front: str
    engine: str


class Host:
    """One engine's loop-side surroundings. ``stopped`` resolves when the engine is to exit, or raises what ended it."""

    def __init__(self, front_link: Link, front_inbox: Channel[ToEngine], on_front: Callable[[ToEngine], None]) -> None:
        self._front, self._inbox, self._on_front = front_link, front_inbox, on_front
        self._unsent: deque[msgspec.Struct] = deque()
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._blocking = ThreadPoolExecutor(8, thread_name_prefix="blocking")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._control: Channel[Any] | None = None
        self.outbox: Outbox
        self.stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, sockets: LocalSockets, on_front: Callable[[ToEngine], None]) -> "Host":
        """Listen to the front and connect to it; ``on_front`` may be replaced once by ``take_front``."""
        host: Host

        def deliver(message: ToEngine) -> None:
            host._on_front(message)

        inbox: Channel[ToEngine] = await open_channel(sockets.engine, Codec[ToEngine](ToEngine), deliver, name="front")
        host = cls(await inbox.connect(sockets.front), inbox, on_front)
        return host

    def take_front(self, on_front: Callable[[ToEngine], None]) -> None:
        """From now on the front's messages go here."""
        self._on_front = self._guarded(on_front)

    async def open_control(
        self, address: str, codec: Codec[T], handler: Callable[[T], None], on_disconnect: Callable[[str], None]
    ) -> str:
        """Bind the control socket; returns its address with the real port. Raises ConfigError where it is in use."""
        self._control = await open_channel(address, codec, self._guarded(handler), name="control")
        self.outbox = Outbox(self._control, on_disconnect)
        return self._control.address

    def _guarded(self, handler: Callable[[T], None]) -> Callable[[T], None]:
        """A peer's bad message is the channel's to count; a wrong state or book is our defect, and ends the engine."""

        def guarded(message: T) -> None:
            try:
                handler(message)
            except (StateError, IntegrityError, AssertionError) as error:
                if not self.stopped.done():
                    self.stopped.set_exception(error)
                raise

        return guarded

    @property
    def malformed_messages(self) -> int:
        return self._control.counters.malformed if self._control else 0

    @property
    def tasks(self) -> int:
        """All tasks of this loop."""
        return len(asyncio.all_tasks())

    @staticmethod
    def now_s() -> float:
        return time.monotonic()

    def post(self, message: msgspec.Struct) -> None:
        """To the front, in order, nothing lost: what a stalled front cannot take now is kept for the next call."""
        self._unsent.append(message)
        try:
            while self._unsent:
                self._front.send(self._unsent[0])
                self._unsent.popleft()
        except PeerBusy:
            log.debug("the front is slow: %d messages wait", len(self._unsent))
        except MessageError:
            if not isinstance(self._unsent.popleft(), Status):
                raise  # an ending that can never be told: the front tells it, when this engine is gone
            log.exception("a status was dropped")

    def compute(self, function: Callable[..., T], *args: object) -> Awaitable[T]:
        """Run in the one compute thread, after what runs there already."""
        return asyncio.get_running_loop().run_in_executor(self._compute, function, *args)

    def blocking(self, function: Callable[..., T], *args: object) -> Awaitable[T]:
        """Run in a thread of its own kind; for what may block for seconds and is no compute."""
        return asyncio.get_running_loop().run_in_executor(self._blocking, function, *args)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A background task; an exception in it ends the engine."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self.stopped.done():
            self.stopped.set_exception(error)

    async def close(self) -> None:
        """Cancel the tasks and close the sockets; threads that block are left to the exit of the process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._control is not None:
            await self.outbox.close()
            await self._control.close()
        await self._inbox.close()
        self._compute.shutdown(wait=False, cancel_futures=True)
        self._blocking.shutdown(wait=False, cancel_futures=True)


class Engine(Protocol):
    """What ``run_engine`` runs: ``start`` loads and listens, ``on_front`` takes the front's messages."""

    async def start(self) -> None: ...

    def on_front(self, message: ToEngine) -> None: ...


def run_engine(name: str, config: C, sockets: LocalSockets, make: Callable[[C, Host], Engine]) -> NoReturn:
    """An engine process from its first line to its exit, which is immediate: threads that block in a transfer library
    do not hold it up. Exit status 2 where it could not start; the front has been told why."""
    logs.setup(name, config.log_level, config.log_format)
    status = asyncio.run(_run_engine(config, sockets, make))
    logging.shutdown()
    os._exit(status)


async def _run_engine(config: C, sockets: LocalSockets, make: Callable[[C, Host], Engine]) -> int:
    asyncio.get_running_loop().set_exception_handler(_end_on_defect)
    early: list[ToEngine] = []
    host = await Host.open(sockets, early.append)
    status = 0
    try:
        engine = make(config, host)
        try:
            await engine.start()
        except HandoffError as error:
            host.post(StartFailed(error.message))
            return 2
        host.take_front(engine.on_front)
        for message in early:
            engine.on_front(message)
        await host.stopped
    except Exception:
        log.exception("the engine ended on a defect")
        status = 1
    finally:
        await host.close()
    return status


def _end_on_defect(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An event whose callback raised is lost, and with it perhaps a hand-over's end: better no engine than one that
    waits for ever. Its front answers for it."""
    log.critical("%s", context["message"], exc_info=context.get("exception"))
    logging.shutdown()
    os._exit(1)


def advertised_host(configured: str, bind_host: str, peers: list[str]) -> str:
    """The address that peers reach this host at: the configured one, else the bound one, else the source address of
    the route to the first peer. Raises ConfigError where a remote peer would be told a loopback address."""
    host = configured or (bind_host if bind_host not in ("0.0.0.0", "::", "*") else _route_source(peers))
    remote = [p for p in peers if not _is_loopback(p)]
    if remote and _is_loopback(host):
        raise ConfigError(
            f"peer {remote[0]} is on another host but would be told to reach this one at {host}: set --host and "
            "--advertise-host to an address that it can reach"
        )
    log.info("advertising %s%s", host, "" if configured else " (set --advertise-host to choose another)")
    return host


def _route_source(peers: list[str]) -> str:
    """A peer that has not started may not have a name yet either; then the way to anywhere tells."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for target in (*peers[:1], "192.0.2.1"):
            with suppress(OSError):
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def _is_loopback(host: str) -> bool:
    try:
        return socket.gethostbyname(host).startswith("127.")
    except OSError:
        return False
