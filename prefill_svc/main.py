"""``prefill-svc``: the prefill service's front and its engine."""

import os
import sys
from collections.abc import Sequence

from aiohttp import web

from prefill_svc.app import build_app
from shared.config import PrefillConfig, load
from shared.ops.front import EngineClient
from shared.ops.host import LocalSockets, run_engine
from shared.ops.lifecycle import main_guard
from shared.ops.metrics import Registry
from shared.ops.service import run_front


def engine_main(config: PrefillConfig, sockets: LocalSockets) -> None:
    """The engine process."""
    from prefill_svc.engine import PrefillEngine  # torch is loaded here, never by the front

    run_engine("prefill.engine", config, sockets, PrefillEngine)


async def _app(config: PrefillConfig, client: EngineClient, registry: Registry) -> web.Application:
    return build_app(config, client, registry)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv

    def run() -> int:
        return run_front(load(PrefillConfig, "prefill", arguments, os.environ), "prefill", engine_main, _app)

    return main_guard("prefill-svc", run)
