"""Who pairs with whom, and over what."""

from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from shared.kv.layout import META_ROW
from tests.e2e.conftest import PAGE_SIZE
from tests.pair import Client, Forks, Pair, Service, start_pair
from tests.tiny_models import save_tiny_llama

COMMON = ("--dtype", "float32", "--threads", "1", "--port", "0", "--control-port", "0", "--max-model-len", "128")


async def test_the_bytes_cross_between_two_processes_over_mooncake(pair: Pair) -> None:
    """S32: counted from what was written: whole pages of every layer, and one metadata row a request."""
    async with Client(pair.prefill.url) as prefill:
        _, info = await prefill.get("/server_info")
        page_bytes = info["capacity"]["kv_bytes_per_token"] * PAGE_SIZE
        await pair.check_books()
        before = await prefill.metric("handoff_transfer_bytes_total")
        seen = await pair.client.metric("handoff_transfer_bytes_total")
        for length in (1, PAGE_SIZE, PAGE_SIZE + 1, 100):
            status, _ = await pair.client.post(
                "/v1/completions", {"model": "tiny", "prompt": [7] * length, "max_tokens": 2}
            )
            assert status == 200
        await pair.check_books()
        pages = 1 + 1 + 2 + 7
        assert (
            await prefill.metric("handoff_transfer_bytes_total") - before == pages * page_bytes + 4 * META_ROW.itemsize
        )
        assert await pair.client.metric("handoff_transfer_bytes_total") - seen == pages * page_bytes

    engines = [pair.prefill.engine(), pair.decode.engine()]
    assert engines[0].pid != engines[1].pid
    for engine in engines:
        assert any("mooncake" in m.path for m in engine.memory_maps()), "Mooncake is not loaded"
    listening = {c.laddr.port for c in engines[1].net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    written_to = {c.raddr.port for c in engines[0].net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED}
    control = int(pair.decode.control.rsplit(":", 1)[1])
    assert (written_to & listening) - {control}, "no data connection from prefill's engine to decode's"


async def test_several_prefills_and_several_decodes(forks: Forks, tmp_path: Path, tiny: Path) -> None:
    async with AsyncExitStack() as stack:
        pair = await start_pair(
            stack, forks, tmp_path, tiny, "--max-model-len", "128", "--served-model-name", "m", prefills=2, decodes=2
        )
        answers = []
        for client in pair.clients:
            for i in range(6):
                body = {"model": "m", "prompt": [10 + i] * 20, "max_tokens": 4, "temperature": 0}
                status, answer = await client.post("/v1/completions", body)
                assert status == 200
                answers.append(answer["choices"][0]["text"])
        assert answers[:6] == answers[6:]
        await pair.check_books()


async def test_one_of_two_prefills_dies_and_the_other_serves(forks: Forks, tmp_path: Path, tiny: Path) -> None:
    async with AsyncExitStack() as stack:
        pair = await start_pair(
            stack, forks, tmp_path, tiny, "--served-model-name", "m", "--max-model-len", "128", prefills=2
        )
        pair.prefills[0].kill()
        await pair.wait_registered(1)
        for i in range(4):
            status, _ = await pair.client.post("/v1/completions", {"model": "m", "prompt": [i] * 9, "max_tokens": 2})
            assert status == 200
        pair.prefills.pop(0)
        await pair.check_books()


async def test_a9_s45_page_sizes_differ_refused_on_both_sides_then_repaired(
    forks: Forks, tmp_path: Path, tiny: Path
) -> None:
    async with AsyncExitStack() as stack:
        prefill = Service(forks, "prefill", ["--model", str(tiny), *COMMON], tmp_path / "p.log").start()
        stack.callback(prefill.kill)
        prefill.wait_ready()
        flags = ["--model", str(tiny), *COMMON, "--prefill", prefill.control, "--served-model-name", "m"]
        decode = Service(forks, "decode", [*flags, "--page-size", "32"], tmp_path / "d.log").start()
        stack.callback(decode.kill)
        decode.wait_ready()
        client = await stack.enter_async_context(Client(decode.url))
        pair = Pair([prefill], [decode], [client])
        while await client.metric('handoff_peers{state="refused"}') != 1:
            pass
        status, answer = await client.post("/v1/completions", {"model": "m", "prompt": [1], "max_tokens": 1})
        assert (status, answer["error"]["code"]) == (503, "no_prefill")
        assert "page_size: prefill has '16', decode has '32'" in answer["error"]["message"]
        async with Client(prefill.url) as http:
            _, info = await http.get("/server_info")
        refused = [p for p in info["peers"] if p["state"] == "refused"]
        assert {"field": "page_size", "prefill": "16", "decode": "32"} in refused[0]["differences"]
        for service in (prefill, decode):
            assert "page_size: prefill has '16', decode has '32'" in service.log()

        decode.kill()
        decode.flags = [*flags, "--page-size", "16"]
        decode.start().wait_ready()
        pair.clients = [await stack.enter_async_context(Client(decode.url))]
        await pair.wait_registered()
        status, answer = await pair.client.post("/v1/completions", {"model": "m", "prompt": [1] * 40, "max_tokens": 3})
        assert status == 200
        await pair.check_books()


async def test_s45_other_weights_of_the_same_shape_are_refused(forks: Forks, tmp_path: Path, tiny: Path) -> None:
    other = save_tiny_llama(tmp_path / "other", seed=1)
    async with AsyncExitStack() as stack:
        prefill = Service(forks, "prefill", ["--model", str(other), *COMMON], tmp_path / "p.log").start()
        stack.callback(prefill.kill)
        prefill.wait_ready()
        flags = ["--model", str(tiny), *COMMON, "--prefill", prefill.control, "--served-model-name", "m"]
        decode = Service(forks, "decode", flags, tmp_path / "d.log").start()
        stack.callback(decode.kill)
        decode.wait_ready()
        client = await stack.enter_async_context(Client(decode.url))
        while await client.metric('handoff_peers{state="refused"}') != 1:
            pass
        status, answer = await client.post("/v1/completions", {"model": "m", "prompt": [1], "max_tokens": 1})
        assert status == 503
        assert "weights: prefill has" in answer["error"]["message"]
        assert "layers" not in answer["error"]["message"]


async def test_a3_the_longest_prompt_that_prefill_takes_and_the_next(forks: Forks, tmp_path: Path, tiny: Path) -> None:
    async with AsyncExitStack() as stack:
        smaller, larger = ("--max-model-len", "65"), ("--max-model-len", "128")
        name = ("--served-model-name", "m")
        pair = await start_pair(stack, forks, tmp_path, tiny, *name, prefill_flags=smaller, decode_flags=larger)
        body = {"model": "m", "max_tokens": 1}
        status, _ = await pair.client.post("/v1/completions", {**body, "prompt": [1] * 64})
        assert status == 200
        for excess in (1, 50):
            status, answer = await pair.client.post("/v1/completions", {**body, "prompt": [1] * (64 + excess)})
            assert (status, answer["error"]["code"]) == (400, "prefill_capacity_exceeded")
            assert f"{64 + excess} tokens; the largest prefill service takes 64" in answer["error"]["message"]
        await pair.check_books()


async def test_without_a_prefill_the_answer_is_503_at_once(forks: Forks, tmp_path: Path, tiny: Path) -> None:
    async with AsyncExitStack() as stack:
        flags = ["--model", str(tiny), *COMMON, "--prefill", "127.0.0.1:1", "--served-model-name", "m"]
        decode = Service(forks, "decode", flags, tmp_path / "d.log").start()
        stack.callback(decode.kill)
        decode.wait_ready()
        client = await stack.enter_async_context(Client(decode.url))
        status, answer = await client.post("/v1/completions", {"model": "m", "prompt": [1], "max_tokens": 1})
        assert (status, answer["error"]["code"]) == (503, "no_prefill")
        assert (await client.get("/health"))[0] == 200


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "/nowhere"], "--model /nowhere"),
        (["--page-size", "48", "--chunked-prefill-size", "100"], "page"),
        (["--num-pages", "4", "--max-model-len", "128"], "--num-pages 4"),
        (["--max-model-len", "100000"], "--max-model-len 100000"),
        (["--device", "cuda"], "--device cuda"),
        (["--num-pages", "1000000000"], "cannot allocate a KV pool of 1000000000 pages of 16 tokens"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_2(
    forks: Forks, tmp_path: Path, tiny: Path, flags: list[str], message: str
) -> None:
    service = Service(forks, "prefill", ["--model", str(tiny), *COMMON, *flags], tmp_path / "p.log").start()
    assert service.wait_exit() == 2
    errors = [line for line in service.log().splitlines() if line.startswith("prefill-svc: error: ")]
    assert len(errors) == 1, service.log()
    assert message in errors[0]
    assert "Traceback" not in service.log()


@pytest.mark.parametrize("port", ["--port", "--control-port"])
def test_a_port_in_use_is_one_line_and_exit_2(forks: Forks, tmp_path: Path, tiny: Path, pair: Pair, port: str) -> None:
    taken = (pair.decode.url if port == "--port" else pair.decode.control).rsplit(":", 1)[1]
    service = Service(forks, "decode", ["--model", str(tiny), *COMMON, port, taken], tmp_path / "d.log").start()
    assert service.wait_exit() == 2
    errors = [line for line in service.log().splitlines() if line.startswith("decode-svc: error: ")]
    assert len(errors) == 1, service.log()
    assert taken in errors[0]
    assert "Traceback" not in service.log()
