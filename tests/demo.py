"""``make demo``: both services on loopback, a few questions, and how each hand-over went. Exit status 0 only if every
question was answered and both services stopped cleanly."""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

MODEL = "smollm2-135m-instruct"
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Explain in two sentences why the sky is blue, as if to a child who has never seen a prism.",
)
START_S = 180.0
FLAGS = ("--max-model-len", "1024", "--max-num-seqs", "4", "--port", "0", "--control-port", "0")


class Service:
    """One service as a user starts it; its log goes to a file."""

    def __init__(self, module: str, log: Path, *flags: str) -> None:
        self.name, self._log = module, log
        self._process = subprocess.Popen([sys.executable, "-m", module, *FLAGS, *flags], stderr=log.open("w"))

    def wait_ready(self) -> tuple[str, str]:
        """→ (URL, control address)."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self._process.poll() is None:
            if ready := re.search(r"ready: (\S+), control tcp://(\S+),", self._log.read_text()):
                return ready[1], ready[2]
            time.sleep(0.1)
        raise SystemExit(f"{self.name} did not start:\n{self._log.read_text()}")

    def stop(self) -> int:
        self._process.terminate()
        try:
            return self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


async def wait_registered(http: aiohttp.ClientSession, url: str) -> None:
    for _ in range(300):
        async with http.get(url + "/metrics") as response:
            if 'handoff_peers{state="registered"} 1.0' in await response.text():
                return
        await asyncio.sleep(0.1)
    raise SystemExit("decode and prefill did not register with each other")


async def ask(http: aiohttp.ClientSession, url: str, question: str) -> bool:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 48,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    print(f"\n> {question}")
    sent_s = time.monotonic()
    stamps: list[float] = []
    usage: dict[str, int] = {}
    finish = ""
    async with http.post(url + "/v1/chat/completions", json=body) as response:
        if response.status != 200:
            print(f"  {response.status}: {await response.text()}")
            return False
        timing = response.headers["Server-Timing"]
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                print(f"  {event['error']}")
                return False
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                finish = choice["finish_reason"] or finish
                if text := choice["delta"].get("content"):
                    stamps.append(time.monotonic())
                    print(text, end="", flush=True)
    print()
    report(timing, usage, sent_s, stamps)
    return finish in ("stop", "length") and bool(stamps)


def report(timing: str, usage: dict[str, int], sent_s: float, stamps: list[float]) -> None:
    ms = {name: float(value) for name, value in re.findall(r"(\w+);dur=([\d.]+)", timing)}
    size = int(re.findall(r'desc="(\d+) bytes"', timing)[0])
    speed = size / 1e6 / ms["transfer"] if ms["transfer"] else 0.0
    between = 1e3 * (stamps[-1] - stamps[0]) / max(1, len(stamps) - 1)
    print(
        f"  {usage['prompt_tokens']} prompt tokens · first token {1e3 * (stamps[0] - sent_s):.0f} ms "
        f"(prefill {ms['prefill']:.0f}) · hand-over {size / 1e6:.2f} MB at {speed:.2f} GB/s, "
        f"{ms['exposed']:.1f} ms exposed · {usage['completion_tokens']} tokens, one every {between:.0f} ms"
    )


async def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        print("starting prefill and decode …", flush=True)
        prefill = Service("prefill_svc", Path(folder, "prefill.log"))
        decode: Service | None = None
        answered = False
        try:
            _, control = prefill.wait_ready()
            decode = Service("decode_svc", Path(folder, "decode.log"), "--prefill", control)
            url, _ = decode.wait_ready()
            async with aiohttp.ClientSession() as http:
                await wait_registered(http, url)
                answered = all([await ask(http, url, question) for question in QUESTIONS])
        finally:
            codes = [service.stop() for service in (decode, prefill) if service is not None]
        print(f"\nstopped; exit statuses {codes}")
        return 0 if answered and codes == [0, 0] else 1


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(asyncio.run(main()))
