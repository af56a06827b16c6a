"""What the hand-over costs besides its bytes: the control plane alone, a fence, an abort, a digest, page allocation."""

import asyncio
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from decode_svc import effects as d
from decode_svc.intake import Intake
from decode_svc.peers import PeerBook
from prefill_svc import effects as p
from prefill_svc.handoff import Handoff
from prefill_svc.peers import DecodePeers
from shared.ids import PeerAddress, RequestId, new_epoch
from shared.kv.digest import digest
from shared.kv.layout import META, META_ROW, Buffer, Layout
from shared.kv.pages import PageAllocator
from shared.kv.slots import SlotPool
from shared.protocol import messages as m
from shared.protocol.codec import Codec
from shared.protocol.local import Generate, Output
from shared.signal.outbox import Outbox
from shared.signal.zmq_channel import open_channel
from shared.transfer.mooncake_engine import MooncakeEngine
from shared.transfer.plan import blocks_for, runs_of
from shared.transfer.sender import PeerSender
from tests.bench.goodput import ITEM_BYTES, LAYERS, PAGE_SIZE, _receive, _regions

LAYOUT = Layout(PAGE_SIZE, tuple(Buffer("kv", layer, (2, 3, 64), "bfloat16") for layer in range(LAYERS)))
TOKENS, PAGES = 512, 4096
FINGERPRINT = LAYOUT.fingerprint()
HANDOVERS = 4000
SENT_BYTES = TOKENS // PAGE_SIZE * LAYERS * ITEM_BYTES + META_ROW.itemsize


def _memory(slots: int) -> list[m.Region]:
    return [*_regions(1 << 40, PAGES), m.Region(META, 0, 1 << 46, META_ROW.itemsize, slots)]


async def _prefill(pipe: Connection) -> None:
    """Everything but forwards and bytes: what is asked for is there at once."""
    epoch = new_epoch()
    outbox: Outbox
    handoff: Handoff

    def do(effects: list[p.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, p.Send):
                outbox.send(effect.address, effect.message)
            elif isinstance(effect, p.OpenSender):
                handoff.met(effect.sender)
            elif isinstance(effect, p.Stream):
                effect.pairing.blocks(effect.runs)  # the addresses of all layers
            elif isinstance(effect, p.Finish):
                do(handoff.written(effect.key, SENT_BYTES, 0.001, None, time.monotonic()))

    def on_message(message: m.ToPrefill) -> None:
        do(handoff.on_message(message, time.monotonic()))
        pieces, effects = handoff.next_forward(TOKENS, 16, time.monotonic())
        do(effects)
        if pieces:
            do(handoff.computed([(1, 0.0, ())] * len(pieces), time.monotonic()))

    channel = await open_channel("tcp://127.0.0.1:0", Codec[m.ToPrefill](m.ToPrefill), on_message, name="control")
    outbox = Outbox(channel, lambda address: None)
    peers = DecodePeers(
        epoch=epoch, reply_to=PeerAddress(channel.address), layout=LAYOUT, regions=_regions(1 << 41, PAGES),
        rows=m.Region(META, 0, 1 << 46, META_ROW.itemsize, 64), fingerprint=FINGERPRINT,
        capacity=m.Capacity(TOKENS),
    )  # fmt: skip
    handoff = Handoff(
        epoch=epoch, layout=LAYOUT, regions=_regions(1 << 41, PAGES), pages=PageAllocator(PAGES), slots=SlotPool(64),
        peers=peers, max_prompt_tokens=TOKENS, vocab_size=1000,
    )  # fmt: skip
    pipe.send(channel.address)
    while not pipe.poll():
        do(handoff.tick(False, time.monotonic()))
        await asyncio.sleep(0.25)
    await outbox.close()
    await channel.close()


def _prefill_process(pipe: Connection) -> None:
    asyncio.run(_prefill(pipe))


async def handovers(window: int) -> float:
    """Hand-overs a second of 512 tokens, ``window`` at a time: Prefill, Completed, Ack, and both sides' books."""
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_prefill_process, args=(theirs,), daemon=True)
    process.start()
    address = PeerAddress(mine.recv())
    slots, epoch = SlotPool(64), new_epoch()
    prompt = m.pack_int32(np.arange(TOKENS))
    started = ended = 0
    done = asyncio.Event()
    outbox: Outbox
    intake: Intake

    def submit() -> None:
        nonlocal started
        started += 1
        spec = Generate(RequestId(str(started)), prompt, 8, m.Sampling(seed=1), [], False)
        do(intake.submit(spec, 60.0, time.monotonic()))

    def do(effects: list[d.Effect]) -> None:
        nonlocal ended
        for effect in effects:
            match effect:
                case d.Send(to, message):
                    outbox.send(to, message)
                case d.OpenSession(peer, registration):
                    intake.peers.session_ready(peer, registration, "nowhere:1")
                case d.Prebuild(request):
                    intake.prebuilt(request)
                    do(intake.finish(Output(request, [1], [0.0], "stop"), time.monotonic()))
                case d.Ended():
                    ended += 1
                    if started < HANDOVERS:
                        submit()
                    elif ended == HANDOVERS:
                        done.set()

    channel = await open_channel(
        "tcp://127.0.0.1:0", Codec[m.ToDecode](m.ToDecode),
        lambda message: do(intake.on_message(message, time.monotonic())), name="control",
    )  # fmt: skip
    outbox = Outbox(channel, lambda gone: None)
    reply = PeerAddress(channel.address)
    book = PeerBook([address], epoch=epoch, reply_to=reply, fingerprint=FINGERPRINT, regions=_memory(64))
    intake = Intake(epoch=epoch, reply_to=reply, layout=LAYOUT, pages=PageAllocator(PAGES), slots=slots, peers=book)
    do(book.start(time.monotonic()))
    while not book.hopeful(TOKENS, time.monotonic()):
        do(intake.tick(time.monotonic()))
        await asyncio.sleep(0.01)
    start_s = time.perf_counter()
    for _ in range(window):
        submit()
    while not done.is_set():
        do(intake.tick(time.monotonic()))
        await asyncio.wait([asyncio.ensure_future(done.wait())], timeout=0.25)
    took_s = time.perf_counter() - start_s
    intake.check_integrity()
    mine.send("stop")
    await outbox.close()
    await channel.close()
    process.join()
    return HANDOVERS / took_s


async def fences(count: int = 10) -> dict[str, Any]:
    """Retiring a receive session that is being written to: how long it takes, and how long the loop stands still."""
    size = 256 << 20
    target, source = np.zeros(size, np.uint8), np.zeros(32 << 20, np.uint8)
    walls: list[float] = []
    stalls: list[float] = []
    for _ in range(count):
        receiver = MooncakeEngine("127.0.0.1")
        receiver.register(target.ctypes.data, size)
        sender = PeerSender(
            lambda: MooncakeEngine("127.0.0.1"), [(source.ctypes.data, source.nbytes)], receiver.session, "bench"
        )
        runs = runs_of(np.zeros(1, np.int32), np.zeros(1, np.int32))
        here = [m.Region("kv", 0, source.ctypes.data, source.nbytes, 1)]
        there = [m.Region("kv", 0, target.ctypes.data, source.nbytes, 1)]
        blocks = blocks_for(runs, here, there)
        await sender.send([blocks])
        writing = sender.send([blocks] * 20)
        await asyncio.sleep(0.02)
        worst, last_s = 0.0, time.perf_counter()
        fence = asyncio.get_running_loop().run_in_executor(None, receiver.retire)
        start_s = last_s
        while not fence.done():
            await asyncio.sleep(0)
            now_s = time.perf_counter()
            worst, last_s = max(worst, now_s - last_s), now_s
        walls.append(time.perf_counter() - start_s)
        stalls.append(worst)
        await asyncio.gather(writing, return_exceptions=True)
        await sender.close()
    return {
        "fences": count,
        "wall_ms_p50": round(1e3 * statistics.median(walls), 1),
        "wall_ms_max": round(1e3 * max(walls), 1),
        "loop_stall_ms_p50": round(1e3 * statistics.median(stalls), 1),
        "loop_stall_ms_max": round(1e3 * max(stalls), 1),
    }


async def aborts(count: int = 15) -> dict[str, Any]:
    """From an abort in mid-transfer to the last byte: a hand-over of 70.8 MB that is let run to its end."""
    pages = 3072 // PAGE_SIZE * 2
    size = LAYERS * pages * ITEM_BYTES
    source = np.zeros(size, np.uint8)
    mine, theirs = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=_receive, args=(theirs, size), daemon=True)
    receiver.start()
    session, target, _ = mine.recv()
    here = np.arange(pages // 2, dtype=np.int32)
    blocks = blocks_for(runs_of(here, here), _regions(source.ctypes.data, pages), _regions(target, pages))
    sender = PeerSender(lambda: MooncakeEngine("127.0.0.1"), [(source.ctypes.data, size)], session, "bench")
    await sender.send([blocks])
    whole_s = (await sender.send([blocks])).write_s
    lasts = []
    for i in range(count):
        sending = sender.send([blocks])
        await asyncio.sleep(whole_s * (i + 0.5) / count)
        aborted_s = time.perf_counter()
        await sending
        lasts.append(time.perf_counter() - aborted_s)
    await sender.close()
    receiver.kill()
    receiver.join()
    return {"whole_ms": round(1e3 * whole_s, 1), "abort_to_last_byte_ms_p50": round(1e3 * statistics.median(lasts), 1),
            "abort_to_last_byte_ms_max": round(1e3 * max(lasts), 1)}  # fmt: skip


def digests(megabytes: int = 189) -> dict[str, Any]:
    """Seconds a gigabyte of comparing content, one side."""
    pages = megabytes * 10**6 // (LAYERS * ITEM_BYTES)
    data = np.random.default_rng(1).integers(0, 255, (LAYERS, pages, ITEM_BYTES), np.uint8)

    def read(component: str, layer: int, chosen: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        content: npt.NDArray[np.uint8] = data[layer, chosen]
        return content

    every = np.arange(pages, dtype=np.int32)
    start_s = time.perf_counter()
    digest(LAYOUT, read, every, np.arange(pages), pages * PAGE_SIZE)
    return {"digest_s_per_gb": round((time.perf_counter() - start_s) / (data.nbytes / 1e9), 2)}


def allocations() -> list[dict[str, Any]]:
    """S63: a request's pages out of a pool worth about 220 GB (600,000 pages of 368 kB), whole and in pieces."""
    rows = []
    for name, keep in (("empty", 0), ("every other page taken", 2), ("nine in ten taken", 10)):
        pool = PageAllocator(600_000)
        if keep:
            pool.allocate(599_999)
            free = np.arange(1, 600_000, keep, dtype=np.int32)
            pool.release(free)
        times = []
        for _ in range(50):
            start_s = time.perf_counter()
            pages = pool.allocate(256)
            times.append(time.perf_counter() - start_s)
            assert pages is not None
            pool.release(pages)
        rows.append({"pool": name, "allocate_256_us_p50": round(1e6 * statistics.median(times)),
                     "max": round(1e6 * max(times))})  # fmt: skip
    return rows


def run() -> dict[str, Any]:
    return {
        "handovers_per_s": {str(w): round(asyncio.run(handovers(w))) for w in (1, 8, 32)},
        "fence": asyncio.run(fences()),
        "abort": asyncio.run(aborts()),
        "digest": digests(),
        "allocations": allocations(),
    }
