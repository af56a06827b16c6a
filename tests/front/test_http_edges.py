"""What is hardly HTTP: an answer or a closed connection, a line in the log, and nobody else notices."""

import asyncio
import gzip
import json
import logging

import pytest

from tests.front.fakes import FakeEngine, Http

BODY = b'{"prompt": [1], "max_tokens": 2}'


async def raw(http: Http, text: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    try:
        writer.write(text)
        answer = b""
        async with asyncio.timeout(5):
            while not answer.endswith(b"}") and (more := await reader.read(4096)):
                answer += more  # an object is the whole answer, though aiohttp waits for the rest of the body
        return answer
    finally:
        writer.close()


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "nonsense"])
async def test_a_compressed_body_is_refused_before_it_is_unpacked(
    engine: FakeEngine, http: Http, encoding: str
) -> None:
    bomb = gzip.compress(b" " * (50 << 20))
    headers = {"Content-Encoding": encoding}
    async with http.session.post("/v1/completions", data=bomb, headers=headers) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (415, "unsupported_encoding")
    assert engine.generates == []
    assert (await http.post("/v1/completions", json.loads(BODY)))[0] == 200


EDGES = [
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: banana\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\nzz\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 9000 + b"\r\n\r\n",
    b"B\x01D / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://[::bad/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64 + b"\r\n\r\n",
]


@pytest.mark.parametrize("text", EDGES, ids=["expect", "chunk", "header", "method", "url", "tls"])
async def test_a_refusal_and_one_line_without_a_traceback(
    engine: FakeEngine, http: Http, caplog: pytest.LogCaptureFixture, text: bytes
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            answer = await raw(http, text)
            assert answer.split(b" ")[1][:1] == b"4", answer
            assert b"Traceback" not in answer
    assert len(caplog.records) <= 1
    assert not any(record.exc_info for record in caplog.records)
    assert (await http.post("/v1/completions", json.loads(BODY)))[0] == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/abort_request"])
async def test_a_body_that_does_not_come_is_not_waited_for(
    engine: FakeEngine, http: Http, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("shared.ops.http.BODY_LIMIT_S", 0.2)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nConnection: close\r\n\r\n".encode()
    answer = await raw(http, head + b'{"prompt":')
    assert answer.startswith(b"HTTP/1.1 408 "), answer
    assert b'"request_timeout"' in answer
    assert engine.generates == []
