"""A decode peer of a test's own: real control messages and real Mooncake memory, and no model. So a test sees what a
prefill service writes, byte for byte."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType

import numpy as np
import numpy.typing as npt

from shared.ids import Epoch, PeerAddress, RequestId, Room, Ticket, new_epoch
from shared.kv.digest import digest
from shared.kv.layout import META, META_ROW, Layout
from shared.protocol import messages as m
from shared.protocol.codec import Codec
from shared.signal.outbox import Outbox
from shared.signal.zmq_channel import open_channel
from shared.transfer.mooncake_engine import MooncakeEngine

Bytes = npt.NDArray[np.uint8]
SLOTS = 64


class FakeDecode:
    """``memory`` is [buffers, pages, item bytes]; all buffers of ``layout`` have items of one size."""

    def __init__(self, prefill: str, layout: Layout, pages: int, host: str = "127.0.0.1") -> None:
        self.layout, self._prefill = layout, PeerAddress(f"tcp://{prefill}")
        self.memory: Bytes = np.zeros((len(layout.buffers), pages, layout.item_bytes(layout.buffers[0])), np.uint8)
        self.rows = np.zeros(SLOTS, META_ROW)
        self.epoch = new_epoch()
        self.peer_epoch = Epoch(0)
        self._host, self._engine = host, MooncakeEngine(host)
        self._waiting: dict[Ticket, asyncio.Future[m.Completed | m.Failed]] = {}
        self._registered: asyncio.Future[m.Registered | m.Refused]
        self._stack = AsyncExitStack()
        self._tickets = 0

    async def __aenter__(self) -> "FakeDecode":
        for array in (self.memory, self.rows):
            self._engine.register(array.ctypes.data, array.nbytes)
        self._stack.callback(self._engine.retire)
        codec: Codec[m.ToDecode] = Codec(m.ToDecode)
        channel = await open_channel(f"tcp://{self._host}:0", codec, self._on_message, name="control")
        self._stack.push_async_callback(channel.close)
        self._outbox = Outbox(channel, lambda address: None)
        self._stack.push_async_callback(self._outbox.close)
        self._address = PeerAddress(channel.address)
        refused = await self._register({})
        assert isinstance(refused, m.Refused)  # which tells its fingerprint
        answer = await self._register({d.field: d.prefill for d in refused.differences if d.prefill != "(missing)"})
        assert isinstance(answer, m.Registered), answer
        self.peer_epoch = answer.epoch
        beating = asyncio.ensure_future(self._beat())
        self._stack.callback(beating.cancel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def prefill(
        self, tokens: Sequence[int], pages: Sequence[int], slot: int, *, digest: bool = True
    ) -> m.Completed:
        """The completion of one attempt that lands in ``pages``, acknowledged."""
        self._tickets += 1
        room, ticket = Room(self._tickets), Ticket(self._tickets)
        self._waiting[ticket] = asyncio.get_running_loop().create_future()
        message = m.Prefill(
            self.epoch, self.peer_epoch, self._address, 2, room, ticket, RequestId(str(ticket)), m.pack_int32(tokens),
            0, m.pack_int32(pages), slot, m.Sampling(seed=1, temperature=0.0), 120_000, digest,
        )  # fmt: skip
        self._outbox.send(self._prefill, message)
        answer = await asyncio.wait_for(self._waiting[ticket], 120)
        assert isinstance(answer, m.Completed), answer
        return answer

    def digest_of(self, tokens: Sequence[int], pages: Sequence[int]) -> int:
        """Of what is in these pages now."""

        def read(component: str, layer: int, chosen: npt.NDArray[np.int32]) -> Bytes:
            content: Bytes = self.memory[[b.layer for b in self.layout.buffers].index(layer), chosen]
            return content

        return digest(self.layout, read, np.array(pages, np.int32), np.arange(len(pages)), len(tokens))

    async def _register(self, fingerprint: dict[str, str]) -> m.Registered | m.Refused:
        registration = 2 if fingerprint else 1
        regions = [
            m.Region(b.component, b.layer, self.memory[i].ctypes.data, self.memory.shape[2], self.memory.shape[1])
            for i, b in enumerate(self.layout.buffers)
        ]
        regions.append(m.Region(META, 0, self.rows.ctypes.data, META_ROW.itemsize, SLOTS))
        self._registered = asyncio.get_running_loop().create_future()
        message = m.Register(
            self.epoch, Epoch(0), self._address, registration, self._engine.session, fingerprint, regions
        )
        self._outbox.send(self._prefill, message)
        return await asyncio.wait_for(self._registered, 20)

    async def _beat(self) -> None:
        number = 0
        while True:
            number += 1
            beat = m.Heartbeat(self.epoch, self.peer_epoch, self._address, 2, number, 0, 0, False, b"")
            self._outbox.send(self._prefill, beat)
            await asyncio.sleep(0.5)

    def _on_message(self, message: m.ToDecode) -> None:
        match message:
            case m.Registered() | m.Refused():
                if not self._registered.done():
                    self._registered.set_result(message)
            case m.Completed() | m.Failed():
                self._outbox.send(self._prefill, m.Ack(self.epoch, message.epoch, message.room, message.ticket))
                if (future := self._waiting.pop(message.ticket, None)) is not None:
                    future.set_result(message)
