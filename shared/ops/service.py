"""A service's front process, from its configuration to its exit: starts the engine, serves HTTP, drains, reaps."""

import asyncio
import fcntl
import logging
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar

from aiohttp import web

from shared.config import ServiceConfig
from shared.ops import logs
from shared.ops.front import EngineClient
from shared.ops.host import LocalSockets
from shared.ops.http import serve
from shared.ops.lifecycle import run_service
from shared.ops.metrics import Registry
from shared.ops.supervise import EngineProcess, pick_start_method
from shared.protocol.codec import Codec
from shared.protocol.local import ToFront
from shared.signal.channel import Channel
from shared.signal.zmq_channel import open_channel

log = logging.getLogger(__name__)
C = TypeVar("C", bound=ServiceConfig)

_PREFIX = "handoff-"
DRAIN_MARGIN_S = 1.5
"""On top of the grace time: for the last answers to be written and the engine to exit."""


def run_front(
    config: C,
    side: Literal["prefill", "decode"],
    engine_main: Callable[[C, LocalSockets], object],
    make_app: Callable[[C, EngineClient, Registry], Awaitable[web.Application]],
) -> int:
    """Returns the exit status. Raises ConfigError for what the operator can mend, the engine's own words included."""
    logs.setup(side, config.log_level, config.log_format)
    with _private_folder() as folder:
        sockets = LocalSockets(f"ipc://{Path(folder, 'front')}", f"ipc://{Path(folder, 'engine')}")
        # before the loop exists, so that a process forked from a preloaded one may fork its engine in turn
        process = EngineProcess.start(engine_main, (config, sockets), method=pick_start_method())
        try:
            return asyncio.run(_front(config, side, process, sockets, make_app))
        finally:
            process.kill()


@contextmanager
def _private_folder() -> Iterator[str]:
    """For the sockets between front and engine; readable by this user alone. A lock tells it from those that killed
    fronts left behind, which are removed here."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/lock"):
        with suppress(OSError), lock.open() as left:  # another user's, or gone meanwhile
            fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder, Path(folder, "lock").open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield folder


async def _front(
    config: C,
    side: Literal["prefill", "decode"],
    process: EngineProcess,
    sockets: LocalSockets,
    make_app: Callable[[C, EngineClient, Registry], Awaitable[web.Application]],
) -> int:
    registry = Registry(side)
    client: EngineClient
    channel: Channel[ToFront] = await open_channel(
        sockets.front, Codec[ToFront](ToFront), lambda message: client.on_message(message), name="engine"
    )
    send = (await channel.connect(sockets.engine)).send
    client = EngineClient(send, registry, step_limit_s=config.step_limit_s)

    async def watch() -> None:
        end = await process.died()
        if not client.draining:
            log.warning("the engine ended: %s", end)
        client.engine_died(str(end))

    async with AsyncExitStack() as stack:
        stack.push_async_callback(channel.close)
        watcher = asyncio.create_task(watch())
        stack.callback(watcher.cancel)

        async def start() -> None:
            runner, port = await serve(await make_app(config, client, registry), config.host, config.port)
            stack.push_async_callback(runner.cleanup)
            ready = await client.started()
            log.info("ready: http://%s:%d, control %s, model %s", config.host, port, ready.control, config.model)

        async def drain() -> None:
            if client.ready is None:  # still loading, or a start that failed: there is nothing to wait for
                client.draining = True
                process.kill()
                return
            client.drain(config.drain_s)
            try:
                await client.drained.wait()
            except asyncio.CancelledError:  # a second signal, or the limit: clients still hear how it ended
                client.stopped()
                raise
            await process.terminate(1.0)

        return await run_service(start, drain, limit_s=config.drain_s + DRAIN_MARGIN_S)
