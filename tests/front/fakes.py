"""An engine that answers by script, tokenizers built in code, and a front that serves on loopback."""

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from decode_svc.app import build_app
from shared.config import DecodeConfig
from shared.ids import Epoch
from shared.ops.front import EngineClient
from shared.ops.http import serve
from shared.ops.metrics import Registry
from shared.protocol.local import (
    Cancel,
    EngineError,
    FinishReason,
    Generate,
    Handover,
    ModelInfo,
    Output,
    Outputs,
    PeerStatus,
    Ready,
    Status,
    ToEngine,
)
from shared.protocol.messages import Difference, Timings, unpack_int32

MODEL = "tiny"
CONTEXT = 64
EOS = 263
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_level_tokenizer(*, bos: bool = False) -> Any:
    """One token a byte, some longer ones, ``<eos>`` special and ``<tool>`` added but not special. With ``bos`` it puts
    ``<eos>`` before each text that is to have special tokens."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ċ", "Ċ"), ("ð", "Ł"), ("Ã", "©")]
    pieces += [left + right for left, right in merges]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    assert tokenizer.eos_token_id == EOS
    if bos:
        backend = tokenizer.backend_tokenizer
        backend.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", EOS)])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def handover(bytes_sent: int = 4200) -> Handover:
    return Handover("tcp://127.0.0.1:8998", 1, bytes_sent, 0.25, Timings(0.001, 0.2, 0.004, 0.05), 0, 0.05)


def registered(address: str = "tcp://127.0.0.1:8998", max_prompt_tokens: int = 0) -> PeerStatus:
    return PeerStatus(address, "registered", Epoch(7), max_prompt_tokens)


def refused() -> PeerStatus:
    return PeerStatus("tcp://127.0.0.1:8997", "refused", Epoch(0), differences=[Difference("page_size", "32", "16")])


def status(*peers: PeerStatus, **fields: Any) -> Status:
    return Status(
        0, False, list(peers), fields.get("gauges", {}), fields.get("counters", {}), fields.get("samples", {})
    )


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class FakeEngine:
    """Receives what the front sends; unless ``manual``, answers each Generate with ``answer`` and end-of-text."""

    def __init__(self, clock: Callable[[], float] | None = None, side: Any = "decode") -> None:
        self.registry = Registry(side)
        self.front = EngineClient(self.send, self.registry, clock or time.monotonic)
        self.received: list[ToEngine] = []
        self.arrived = asyncio.Event()
        self.manual = False
        self.answer: list[int] = []
        self.tokens_per_output = 1
        self.refusal: Exception | None = None

    def ready(self, *, context: int = CONTEXT, num_pages: int = 65, vocab_size: int = 264) -> None:
        info = ModelInfo(vocab_size, context, 4, 16, num_pages, "float32", 1536, [EOS])
        self.front.on_message(Ready(Epoch(5), "tcp://127.0.0.1:8999", info))

    def send(self, message: ToEngine) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.received.append(message)
        self.arrived.set()
        if isinstance(message, Generate) and not self.manual:
            asyncio.get_running_loop().call_soon(self._answer, message)

    def _answer(self, message: Generate) -> None:
        tokens = [*self.answer, EOS][: message.max_tokens]
        size = self.tokens_per_output
        groups = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        for group in groups[:-1]:
            self.say(message, group)
        self.say(message, groups[-1], "stop" if tokens[-1] == EOS else "length")

    def say(self, message: Generate, tokens: list[int], finish: FinishReason | None = None, **fields: Any) -> None:
        self.front.on_message(Outputs([Output(message.request, tokens, [0.0] * len(tokens), finish, **fields)]))

    def fail(self, message: Generate, error: EngineError) -> None:
        self.front.on_message(Outputs([Output(message.request, [], [], error=error)]))

    async def generate(self) -> Generate:
        """The last Generate, once there is one."""
        while not self.generates:
            self.arrived.clear()
            await self.arrived.wait()
        return self.generates[-1]

    @property
    def generates(self) -> list[Generate]:
        return [message for message in self.received if isinstance(message, Generate)]

    @property
    def cancels(self) -> list[Cancel]:
        return [message for message in self.received if isinstance(message, Cancel)]

    def prompt(self) -> list[int]:
        return [int(token) for token in unpack_int32(self.generates[-1].prompt)]

    def metric(self, line: str) -> float:
        """The value of one line of /metrics, named as Prometheus writes it."""
        lines = dict(x.rsplit(" ", 1) for x in self.registry.render().decode().splitlines() if x[0] != "#")
        return float(lines[line])


class Http:
    """A client of one served app."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self.session, self.port = session, port

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.get(path, **options) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(path, data=io.BytesIO(data), **options) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The parsed events of a stream; its last is the string "[DONE]"."""
        async with self.session.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream"
            text = (await response.read()).decode()
        blocks = text.split("\n\n")
        assert blocks.pop() == ""
        assert all(block.startswith("data: ") for block in blocks)
        return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[Http]:
    runner, port = await serve(app, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            yield Http(session, port)
    finally:
        await runner.cleanup()


def decode_app(engine: FakeEngine, tokenizer: Any) -> web.Application:
    config = DecodeConfig(model="folder/tiny", served_model_name=MODEL, prefill=("127.0.0.1:8998",))
    return build_app(config, engine.front, tokenizer, engine.registry)
