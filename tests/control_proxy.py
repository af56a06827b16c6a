"""A man in the middle of the control channel: decode speaks to it, and it passes on to the real prefill what a test
lets through. Prefill answers decode directly."""

import asyncio
from collections.abc import Callable
from types import TracebackType

import msgspec
import zmq
import zmq.asyncio

from shared.protocol import messages as m
from shared.protocol.codec import Codec, encode

Change = Callable[[m.ToPrefill], list[msgspec.Struct]]


def unchanged(message: m.ToPrefill) -> list[msgspec.Struct]:
    return [message]


class ControlProxy:
    """``change`` says what becomes of each message; ``seen`` holds those that came."""

    def __init__(self) -> None:
        self.change: Change = unchanged
        self.seen: list[m.ToPrefill] = []
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self.address = f"127.0.0.1:{self._inbox.bind_to_random_port('tcp://127.0.0.1')}"
        self._out = self._context.socket(zmq.PUSH)
        self._task: asyncio.Task[None]

    def connect(self, prefill: str) -> None:
        self._out.connect(f"tcp://{prefill}")
        self._task = asyncio.ensure_future(self._run())

    async def send(self, messages: list[msgspec.Struct]) -> None:
        """Something of the test's own making."""
        for message in messages:
            await self._out.send_multipart(encode(message))

    async def _run(self) -> None:
        codec: Codec[m.ToPrefill] = Codec(m.ToPrefill)
        while True:
            message = codec.decode(await self._inbox.recv_multipart())
            self.seen.append(message)
            await self.send(self.change(message))

    async def __aenter__(self) -> "ControlProxy":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)
