"""Prefill's front: health, metrics, server_info, and nothing else."""

from collections.abc import AsyncIterator

import pytest

from prefill_svc.app import build_app
from shared.config import PrefillConfig
from tests.front.fakes import FakeEngine, Http, refused, served, status


@pytest.fixture
async def engine() -> FakeEngine:
    return FakeEngine(side="prefill")


@pytest.fixture
async def http(engine: FakeEngine) -> AsyncIterator[Http]:
    async with served(build_app(PrefillConfig(model="folder/tiny"), engine.front, engine.registry)) as http:
        yield http


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info(engine: FakeEngine, http: Http, path: str) -> None:
    code, body = await http.get(path)
    assert (code, body["error"]["code"]) == (503, "starting")
    engine.ready()
    code, body = await http.get(path)
    assert code == 200
    assert body == {
        "model": "folder/tiny",
        "served_model_name": "folder/tiny",
        "dtype": "float32",
        "page_size": 16,
        "capacity": {"max_model_len": 64, "max_num_seqs": 4, "num_pages": 65, "kv_bytes_per_token": 1536},
        "control": "tcp://127.0.0.1:8999",
        "epoch": 5,
        "peers": [],
    }
    engine.front.on_message(status(refused()))
    _, body = await http.get(path)
    assert body["peers"] == [
        {
            "address": "tcp://127.0.0.1:8997",
            "state": "refused",
            "epoch": 0,
            "max_prompt_tokens": 0,
            "differences": [{"field": "page_size", "prefill": "32", "decode": "16"}],
        }
    ]


async def test_health_and_metrics(engine: FakeEngine, http: Http) -> None:
    assert await http.get("/health") == (503, {"status": "unhealthy", "reasons": ["starting"]})
    engine.ready()
    assert await http.get("/health") == (200, {"status": "ok", "reasons": []})
    async with http.session.get("/metrics") as response:
        text = await response.text()
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "handoff_engine_up 1.0" in text
    assert 'handoff_http_requests_total{route="/health",status="5xx"} 1.0' in text
    engine.front.engine_died("signal 9")
    assert (await http.get("/health"))[0] == 503


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/", "/generate"])
async def test_nothing_else(http: Http, path: str) -> None:
    code, body = await http.post(path, {})
    assert code == 404
    assert body["error"] == {
        "message": f"no such path: {path!r}",
        "type": "invalid_request_error",
        "param": None,
        "code": "not_found",
        "retryable": False,
    }
