"""How fast bytes cross between two processes: our path, the bare library with the same blocks and the same wait, and
what a memory copy and a plain socket do on this machine. Interleaved; medians."""

import asyncio
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from shared.protocol.messages import Region
from shared.transfer.engine import Blocks
from shared.transfer.mooncake_engine import MooncakeEngine
from shared.transfer.plan import blocks_for, runs_of
from shared.transfer.sender import PeerSender

LAYERS, PAGE_SIZE, ROW_BYTES = 30, 16, 768
"""SmolLM2-135M's cache in bfloat16: 2 · 3 heads · 64 · 2 bytes a token and layer."""
ITEM_BYTES = PAGE_SIZE * ROW_BYTES
ROUNDS = 15


def _receive(pipe: Connection, size: int) -> None:
    """The other process: memory for the library, and a socket that swallows."""
    target = np.zeros(size, np.uint8)
    engine = MooncakeEngine("127.0.0.1")
    engine.register(target.ctypes.data, size)
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send((engine.session, target.ctypes.data, server.getsockname()[1]))
        connection, _ = server.accept()
        with connection:
            while head := connection.recv(8, socket.MSG_WAITALL):
                length = int.from_bytes(head, "little")
                view = target.data[:length]
                while len(view):
                    view = view[connection.recv_into(view) :]
                connection.sendall(b"!")
    engine.retire()


def _regions(base: int, pages: int) -> list[Region]:
    return [Region("kv", layer, base + layer * pages * ITEM_BYTES, ITEM_BYTES, pages) for layer in range(LAYERS)]


class _Raw:
    """The library itself: the same blocks, the last one by itself and polled, as our engine waits."""

    def __init__(self, base: int, size: int) -> None:
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        assert self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert self._engine.register_memory(base, size) == 0

    def send(self, session: str, blocks: Blocks) -> None:
        src, dst, length = blocks.src.tolist(), blocks.dst.tolist(), blocks.length.tolist()
        batch = self._engine.batch_transfer_async_write(session, src[:-1], dst[:-1], length[:-1])
        last = self._engine.transfer_submit_write(session, src[-1], dst[-1], length[-1])
        while (state := self._engine.transfer_check_status(last)) == 0:
            time.sleep(100e-6)
        assert state == 1
        assert self._engine.get_batch_transfer_status([batch]) == 0


def _gb_s(total_bytes: int, seconds: list[float]) -> float:
    return total_bytes / statistics.median(seconds) / 1e9


async def measure(tokens: int, fragmented: bool = False) -> dict[str, Any]:
    """GB/s of each way for a prompt of so many tokens."""
    pages = -(-tokens // PAGE_SIZE)
    size = LAYERS * 2 * pages * ITEM_BYTES
    source = np.random.default_rng(1).integers(0, 255, size, np.uint8)
    scratch = np.zeros_like(source)
    mine, theirs = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=_receive, args=(theirs, size), daemon=True)
    receiver.start()
    session, target, port = mine.recv()
    here = np.arange(pages, dtype=np.int32) * (2 if fragmented else 1)
    blocks = blocks_for(runs_of(here, here), _regions(source.ctypes.data, 2 * pages), _regions(target, 2 * pages))
    sender = PeerSender(lambda: MooncakeEngine("127.0.0.1"), [(source.ctypes.data, size)], session, "bench")
    await sender.send([blocks])
    raw = _Raw(source.ctypes.data, size)
    total = blocks.total_bytes
    with socket.create_connection(("127.0.0.1", port)) as plain:

        def through_socket() -> None:
            plain.sendall(total.to_bytes(8, "little"))
            plain.sendall(source[:total].data)
            plain.recv(1)

        def copy() -> None:
            scratch[:total] = source[:total]

        ways: dict[str, Callable[[], None]] = {
            "raw": lambda: raw.send(session, blocks),
            "socket": through_socket,
            "memcpy": copy,
        }
        seconds: dict[str, list[float]] = {name: [] for name in ("ours", *ways)}
        for _ in range(ROUNDS):
            started = time.perf_counter()
            await sender.send([blocks])
            seconds["ours"].append(time.perf_counter() - started)
            for name, way in ways.items():
                started = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - started)
    await sender.close()
    receiver.kill()
    receiver.join()
    found = {name: round(_gb_s(total, times), 3) for name, times in seconds.items()}
    ratios = [a / b for a, b in zip(seconds["raw"], seconds["ours"], strict=True)]
    return {
        "mb": round(total / 1e6, 1),
        "blocks": len(blocks),
        **{f"{name}_gb_s": value for name, value in found.items()},
        "ours_to_raw": round(statistics.median(ratios), 3),
    }


def run() -> list[dict[str, Any]]:
    return [
        asyncio.run(measure(512)),
        asyncio.run(measure(512, fragmented=True)),
        asyncio.run(measure(3072)),
    ]
