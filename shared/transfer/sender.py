"""One worker per peer: a thread, a queue and a sending engine of its own, so that a stalled peer stalls only itself.

Hand-over sentence: ``send`` takes over the right to read the sources until its future is done; after a failure bytes
may still move until ``drain`` is done. Futures belong to their callers' loop; giving one up does not stop the worker.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from shared.errors import HandoffError, TransferFailed
from shared.transfer.engine import Blocks, TransferEngine
from shared.transfer.layers import Context, Outgoing, Work, at_once

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SendResult:
    """``write_s``: from the first submit to the last byte known to have landed. ``digest``: what ``send`` was given to
    compute."""

    sent_bytes: int
    write_s: float
    digest: int | None = None


class PeerSender:
    """Writes to one session. ``sources`` are (address, bytes) of the memory that may be sent; the engine is made by the
    worker when it is first needed, because first contact with a peer may block for seconds."""

    def __init__(
        self, make_engine: Callable[[], TransferEngine], sources: Sequence[tuple[int, int]], session: str, name: str
    ) -> None:
        self._make_engine, self._sources, self._session, self._name = make_engine, sources, session, name
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any] | None] | None] = SimpleQueue()
        self._engine: TransferEngine | None = None
        self._closed, self._interrupted = False, threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"send-{name}", daemon=True)
        self._thread.start()

    def contact(self) -> "asyncio.Future[None]":
        """Done when the session's host has answered; the future raises TransferFailed."""
        return self._put(lambda: self._open().contact(self._session))

    def send(self, batches: Sequence[Blocks], digest: Callable[[], int] | None = None) -> "asyncio.Future[SendResult]":
        """Write each batch after the one before has landed, then compute ``digest``. The future raises TransferFailed
        or ValueError."""
        return self._put(lambda: self._send(batches, digest))

    def post(self, work: Work) -> None:
        """Have something done, without an answer, after all that was asked for before. From any thread; ``work`` must
        not raise. Once closed: nothing."""
        self._jobs.put((lambda: work(self._open, self._session), None))

    def settle(
        self, outgoing: Outgoing, context: Context | None, row: Blocks | None, digest: Callable[[], int] | None
    ) -> "asyncio.Future[SendResult]":
        """The end of what went by layer: what the last ``context`` has left, then, when all of it has landed, the
        metadata row. Without a row, only the wait. The future raises as ``send``'s."""
        return self._put(lambda: self._settle(outgoing, context, row, digest))

    def interrupt(self) -> None:
        """The peer is lost: whatever waits for it, or will, fails now. From the loop."""
        self._interrupted.set()
        if (engine := self._engine) is not None:
            engine.interrupt()

    def drain(self) -> "asyncio.Future[None]":
        """Done when nothing that was sent before can still move; the next ``send`` makes a fresh engine."""
        return self._put(self._retire)

    async def close(self) -> None:
        """Drain, and end the worker; idempotent."""
        if not self._closed:
            ended = self.drain()
            self._closed = True
            self._jobs.put(None)
            await asyncio.shield(ended)

    def _put(self, job: Callable[[], Any]) -> "asyncio.Future[Any]":
        if self._closed:
            raise ValueError(f"sender {self._name} is closed")
        future: asyncio.Future[Any] = self._loop.create_future()
        self._jobs.put((job, future))
        return future

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            result, failure = None, None
            try:
                result = job()
            except HandoffError as error:
                failure = error
            except Exception as error:
                log.exception("sender %s: a job failed on a defect", self._name)
                failure = TransferFailed(f"{type(error).__name__}: {error}")
            if future is None:
                continue
            try:
                self._loop.call_soon_threadsafe(_resolve, future, result, failure)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

    def _send(self, batches: Sequence[Blocks], digest: Callable[[], int] | None) -> SendResult:
        engine = self._open()
        started_s = time.monotonic()
        for blocks in batches:
            if len(blocks):  # a rank may own none of a prompt's pages, and still send its row (S11)
                engine.wait(engine.submit(self._session, blocks))
        write_s = time.monotonic() - started_s
        return SendResult(sum(b.total_bytes for b in batches), write_s, digest() if digest is not None else None)

    def _settle(
        self, outgoing: Outgoing, context: Context | None, row: Blocks | None, digest: Callable[[], int] | None
    ) -> SendResult:
        if context is not None:
            context.sweep(at_once, self._open, self._session)
        outgoing.settle(self._open)
        if row is not None:
            outgoing.submit(self._open, self._session, row)
            outgoing.settle(self._open)
        write_s = time.monotonic() - outgoing.first_s if outgoing.first_s else 0.0
        return SendResult(outgoing.sent_bytes, write_s, digest() if digest is not None else None)

    def _open(self) -> TransferEngine:
        if self._engine is None:
            if self._interrupted.is_set():
                raise TransferFailed(f"the peer of {self._session} is lost")
            self._engine = open_engine(self._make_engine, self._sources)
            if self._interrupted.is_set():  # meanwhile
                self._engine.interrupt()
        return self._engine

    def _retire(self) -> None:
        if self._engine is not None:
            self._engine.retire()
            self._engine = None


def open_engine(make: Callable[[], TransferEngine], memory: Sequence[tuple[int, int]]) -> TransferEngine:
    """An engine with all of ``memory``, (address, bytes) each, registered; or none (S39). Raises TransferFailed."""
    engine = make()
    try:
        for base, length_bytes in memory:
            engine.register(base, length_bytes)
    except BaseException:
        engine.retire()
        raise
    return engine


def try_engine(make: Callable[[], TransferEngine], memory: Sequence[tuple[int, int]]) -> None:
    """For the start of a service, so that memory which cannot be registered ends it there. Raises TransferFailed."""
    open_engine(make, memory).retire()


def _resolve(future: "asyncio.Future[Any]", result: Any, failure: Exception | None) -> None:
    if future.cancelled():
        return
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(result)
