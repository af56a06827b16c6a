"""Noise, floods and shortage against real services: those who behave notice nothing (A21, A24)."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from shared.ids import Epoch, PeerAddress, Room, Ticket
from shared.protocol import messages as m
from shared.protocol.codec import HEADER, encode
from tests.pair import Forks, Pair, start_pair

NOISE: list[list[bytes]] = [
    [b""],
    [b"", b""],
    [b"x"],
    [HEADER],
    [HEADER, b""],
    [HEADER, b"\x81"],
    [HEADER, b"\xc1" * 100],
    [HEADER, msgspec.msgpack.encode({"type": "Abort"})],
    [HEADER, msgspec.msgpack.encode({"type": "Completed", "epoch": "x", "to_epoch": []})],
    [HEADER, msgspec.msgpack.encode([1, 2, 3]), b"more"],
    [b"HO\xff\xff", b"\x80"],
    [b"\x00" * 65536, b"\xff" * 65536],
    encode(m.Register(Epoch(1), Epoch(0), PeerAddress("tcp://127.0.0.1:9"), 1, "h:1", {"model": "x" * (1 << 20)}, [])),
    encode(m.Refused(Epoch(1), Epoch(2), 1, [m.Difference("model", "x" * (1 << 20), "y")])),
    encode(m.Abort(Epoch(1), Epoch(2), PeerAddress("tcp://127.0.0.1:9"), 1, Room(1), Ticket(2**63), "x")),
]


def flood(pair: Pair) -> list[list[bytes]]:
    """Well-formed messages of peers that nobody knows, for attempts that nobody has."""
    nobody, someone = Epoch(1), PeerAddress("tcp://127.0.0.1:9")
    messages: list[msgspec.Struct] = []
    for i in range(400):
        messages.append(m.Abort(nobody, Epoch(2), someone, 1, Room(i), Ticket(i), "x"))
        messages.append(m.Heartbeat(nobody, Epoch(2), someone, 1, 1, 1, 0, False, b""))
        messages.append(m.Ack(nobody, Epoch(2), Room(i), Ticket(i)))
        messages.append(m.Register(Epoch(i), Epoch(0), someone, i, "nowhere:1", {"page_size": "3"}, []))
        messages.append(m.AbortAck(nobody, Epoch(2), Room(i), Ticket(i), True))
        messages.append(m.Failed(nobody, Epoch(2), Room(i), Ticket(i), "x", "x", True, True))
        messages.append(m.Heartbeat(nobody, Epoch(2), someone, 1, 1, 1, 0, False, b"123"))
    return [encode(message) for message in messages]


async def send(addresses: list[str], batches: list[list[bytes]]) -> None:
    context = zmq.Context()
    sockets = []
    for address in addresses:
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 2000)
        socket.connect(f"tcp://{address}")
        sockets.append(socket)
    for frames in batches:
        for socket in sockets:
            socket.send_multipart(frames, copy=True)
        await asyncio.sleep(0)
    for socket in sockets:
        socket.close()
    await asyncio.to_thread(context.term)


async def ask(pair: Pair, count: int, max_tokens: int = 20) -> list[Any]:
    async def one(i: int) -> Any:
        body = {"model": "tiny", "prompt": [i + 1] * 40, "max_tokens": max_tokens, "temperature": 0}
        status, answer = await pair.client.post("/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["text"]

    return list(await asyncio.gather(*(one(i) for i in range(count))))


async def test_a24_noise_on_both_control_ports_is_counted_and_disturbs_nobody(pair: Pair) -> None:
    alone = await ask(pair, 6)
    before = await pair.client.metric("handoff_malformed_messages_total")
    ports = [pair.decode.control, pair.prefill.control]
    noise = asyncio.ensure_future(send(ports, NOISE * 20))
    assert await ask(pair, 6) == alone
    await noise
    assert await ask(pair, 6) == alone
    await pair.check_books()
    assert await pair.client.metric("handoff_malformed_messages_total") - before >= 200
    lines = [line for line in pair.decode.log().splitlines() if "WARNING" in line]
    assert len(lines) < 40, lines[-10:]


async def test_a21_floods_about_attempts_that_nobody_has_leave_memory_flat(pair: Pair) -> None:
    alone = await ask(pair, 4)
    ports = [pair.decode.control, pair.prefill.control]
    await send(ports, flood(pair))
    engines: list[psutil.Process] = [pair.decode.engine(), pair.prefill.engine()]
    before = [e.memory_info().rss for e in engines]
    for _ in range(3):
        await send(ports, flood(pair))
    assert await ask(pair, 4) == alone
    await pair.check_books()
    after = [e.memory_info().rss for e in engines]
    assert all(b - a < 8 << 20 for a, b in zip(before, after, strict=True)), (before, after)


async def test_a24_a32_what_strangers_send_costs_few_lines(pair: Pair) -> None:
    """Addresses that cannot be reached, and fingerprints that all differ: well-formed, and answered by nothing."""
    alone = await ask(pair, 4)
    messages: list[msgspec.Struct] = []
    for i in range(1500):
        nowhere, someone = PeerAddress(f"bad {i}"), PeerAddress(f"tcp://127.0.0.1:{20000 + i % 200}")
        messages.append(m.Abort(Epoch(1), Epoch(2), nowhere, 1, Room(i), Ticket(i), "x"))
        messages.append(m.Register(Epoch(i + 1), Epoch(0), someone, i, "nowhere:1", {"page_size": str(i)}, []))
        messages.append(m.Refused(Epoch(i), Epoch(i), i, [m.Difference("page_size", str(i), "16")]))
    before = [len(service.log().splitlines()) for service in (pair.decode, pair.prefill)]
    await send([pair.decode.control, pair.prefill.control], [encode(message) for message in messages])
    assert await ask(pair, 4) == alone
    await pair.check_books()
    after = [len(service.log().splitlines()) for service in (pair.decode, pair.prefill)]
    assert after[0] - before[0] < 20, pair.decode.log()[-2000:]
    assert after[1] - before[1] < 260, pair.prefill.log()[-2000:]  # one for each address


async def test_a_prefill_that_is_named_twice_is_one_peer(forks: Forks, tmp_path: Path, tiny: Path) -> None:
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, tiny, "--served-model-name", "tiny", "--max-model-len", "128")
        alone = await ask(pair, 2)
        pair.decode.kill()
        port = pair.prefill.control.rsplit(":", 1)[1]
        pair.decode.flags += ["--port", pair.decode.url.rsplit(":", 1)[1], "--prefill", f"localhost:{port}"]
        await asyncio.to_thread(lambda: pair.decode.start().wait_ready())
        await pair.wait_registered(1)
        for _ in range(10):
            assert await ask(pair, 2) == alone
            await asyncio.sleep(0.2)
        assert await pair.client.metric("handoff_fences_total") <= 1
        assert await pair.client.metric('handoff_peers{state="refused"}') == 1
        await pair.check_books()


async def test_a_burst_far_beyond_pages_and_slots_is_served_in_turn(forks: Forks, tmp_path: Path, tiny: Path) -> None:
    """Room for one request at a time on either side, a page of one token, a chunk of one page."""
    async with AsyncExitStack() as stack:
        flags = ("--served-model-name", "tiny", "--max-model-len", "64", "--max-num-seqs", "2", "--num-pages", "66")
        pages = ("--page-size", "1", "--chunked-prefill-size", "1")
        pair = await start_pair(stack, forks, tmp_path, tiny, *flags, *pages)
        answers = await ask(pair, 12, max_tokens=24)
        assert answers == [(await ask(pair, i + 1, max_tokens=24))[i] for i in (0, 1, 2)] + answers[3:]
        await pair.check_books()


async def test_a19_decode_restarts_on_its_address_again_and_again(forks: Forks, tmp_path: Path, tiny: Path) -> None:
    async with AsyncExitStack() as stack:
        pair = await start_pair(stack, forks, tmp_path, tiny, "--served-model-name", "tiny", "--max-model-len", "128")
        alone = await ask(pair, 2)
        port = pair.decode.url.rsplit(":", 1)[1]
        pair.decode.flags += ["--port", port, "--control-port", pair.decode.control.rsplit(":", 1)[1]]
        for _ in range(4):
            busy = asyncio.ensure_future(asyncio.gather(ask(pair, 4), return_exceptions=True))
            await asyncio.sleep(0.05)
            pair.decode.kill()
            await busy
            await asyncio.to_thread(lambda: pair.decode.start().wait_ready())
            await pair.wait_registered()
            assert await ask(pair, 2) == alone
        await pair.check_books()
