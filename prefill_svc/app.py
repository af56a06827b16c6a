"""Prefill's HTTP front: health, metrics, and what this server is."""

import msgspec
from aiohttp import web

from shared.config import PrefillConfig
from shared.errors import Unavailable
from shared.ops.front import EngineClient
from shared.ops.http import abort_target, base_app, json_response, overload
from shared.ops.metrics import Registry


def build_app(config: PrefillConfig, engine: EngineClient, registry: Registry) -> web.Application:
    """/health, /ready, /metrics, /server_info (also as /get_server_info), /abort_request; nothing else."""

    async def server_info(_request: web.Request) -> web.Response:
        ready = engine.ready
        if ready is None:
            raise Unavailable("the engine is starting", code="starting")
        info = ready.info
        status = engine.status
        body = {
            "model": config.model,
            "served_model_name": config.served_model_name or config.model,
            "dtype": info.dtype,
            "page_size": info.page_size,
            "capacity": {
                "max_model_len": info.max_model_len,
                "max_num_seqs": info.max_num_seqs,
                "num_pages": info.num_pages,
                "kv_bytes_per_token": info.kv_bytes_per_token,
            },
            "control": ready.control,
            "epoch": ready.epoch,
            "peers": msgspec.to_builtins(status.peers) if status is not None else [],
        }
        return json_response(body)

    async def abort(request: web.Request) -> web.Response:
        engine.stop(await abort_target(request))
        return json_response({"status": "stopping"}, 202)

    app = base_app(engine, registry, lambda status: overload(status, config.max_waiting))
    app.router.add_post("/abort_request", abort)
    app.router.add_get("/server_info", server_info)
    app.router.add_get("/get_server_info", server_info)
    return app
