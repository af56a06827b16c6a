"""``decode-svc``: the decode service's front and its engine."""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from aiohttp import web

from decode_svc.app import build_app
from shared.config import DecodeConfig, load
from shared.ops.front import EngineClient
from shared.ops.host import LocalSockets, run_engine
from shared.ops.lifecycle import main_guard
from shared.ops.metrics import Registry
from shared.ops.service import run_front
from shared.runtime.tokenizer import load_tokenizer

log = logging.getLogger(__name__)


def engine_main(config: DecodeConfig, sockets: LocalSockets) -> None:
    """The engine process."""
    from decode_svc.engine import DecodeEngine  # torch is loaded here, never by the front

    run_engine("decode.engine", config, sockets, DecodeEngine)


async def _app(config: DecodeConfig, client: EngineClient, registry: Registry) -> web.Application:
    if not config.prefill and config.on_prefill_loss != "local":
        log.warning("no prefill service is configured (--prefill HOST:CONTROL_PORT): requests will be refused")
    tokenizer = await asyncio.to_thread(load_tokenizer, config.model)
    return build_app(config, client, tokenizer, registry)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv

    def run() -> int:
        return run_front(load(DecodeConfig, "decode", arguments, os.environ), "decode", engine_main, _app)

    return main_guard("decode-svc", run)
