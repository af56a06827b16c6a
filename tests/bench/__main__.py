"""``make bench``: tables of what this machine does, the last line JSON. Figures are reported, never asserted."""

import argparse
import asyncio
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

PARTS = ("control", "front", "goodput", "overlap", "resident", "serving")


def machine() -> dict[str, Any]:
    import torch

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in info.splitlines() if "model name" in line]
    return {
        "cpu": (names or [platform.processor()])[0],
        "cores": len(os.sched_getaffinity(0)),
        "flags": [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in info.split()],
        "torch": torch.__version__,
    }


def table(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    names = list(rows[0])
    widths = [max(len(n), *(len(str(r[n])) for r in rows)) for n in names]
    for cells in (names, *([str(r[n]) for n in names] for r in rows)):
        print("  " + "  ".join(c.rjust(w) for c, w in zip(cells, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.bench", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help=",".join(PARTS))
    parser.add_argument("--dtypes", default="float32", help="float32,bfloat16: each is a run of the serving part")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="compute threads of each engine"
    )
    parser.add_argument(
        "--requests", type=int, default=24, help="requests a round at concurrency 8; a sixth of it at 1"
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine()}
    print(result["machine"])
    if "control" in options.parts:
        from tests.bench import control

        found = result["control"] = control.run()
        table("Hand-overs a second without bytes, by window", [found["handovers_per_s"]])
        table("Fence of a session that is being written to", [found["fence"]])
        table("Abort in mid-transfer, 70.8 MB", [found["abort"]])
        table("Digest, one side", [found["digest"]])
        table("Pages out of 600,000", found["allocations"])
    if "front" in options.parts:
        from tests.bench import front

        with tempfile.TemporaryDirectory() as folder:
            felt = result["front"] = asyncio.run(front.run(Path(folder), options.threads))
        table("/health each 20 ms while streams burst", felt["health"])
        table("Between two tokens of four streams, tiny model", felt["gaps"])
        print(f"  front {felt['front_us_per_token']} µs a streamed token; pair ready in {felt['start_to_ready_s']} s")
    if "goodput" in options.parts:
        from tests.bench import goodput

        result["goodput"] = goodput.run()
        table("Bytes between two processes (GB/s, medians)", result["goodput"])
    if "overlap" in options.parts:
        from tests.bench import overlap

        with tempfile.TemporaryDirectory() as folder:
            overlapped = result["overlap"] = overlap.run(options.rounds, options.threads, Path(folder))
        table("Left to wait for after the forward, 512 tokens, by layer and whole", overlapped["links"])
        table("The layers' callback, eight requests in a step", [overlapped["callback"]])
        table("Owner filter, 1024 pages of 8 ranks", [overlapped["filters"]])
    if "resident" in options.parts:
        from tests.bench import resident

        with tempfile.TemporaryDirectory() as folder:
            result["resident"] = asyncio.run(resident.run(Path(folder)))
        table(f"Memory over {resident.REQUESTS} requests on a tiny model", result["resident"])
    if "serving" in options.parts:
        from tests.bench import serving

        result["serving"] = []
        for dtype in options.dtypes.split(","):
            counts = {1: max(1, options.requests // 6), 8: options.requests}
            with tempfile.TemporaryDirectory() as folder:
                served = asyncio.run(serving.run(dtype, options.threads, counts, options.rounds, Path(folder)))
            result["serving"].append(served)
            table(f"Hand-over of a 512-token prompt, {dtype}", [served["handover"]])
            for concurrency in counts:
                at = served[f"c{concurrency}"]
                rows = [{"": side, **at[side]} for side in ("pair", "bare")]
                table(f"512 in, 64 out, {dtype}, concurrency {concurrency}, {at['requests']} requests a round", rows)
                print(f"  tokens/s pair to bare {at['tok_s_ratio']}, time to first token {at['ttft_ratio']}")
    print()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
