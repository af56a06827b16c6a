"""/tokenize, /detokenize and a model by its name: vLLM's answers; a bad input is a refusal that names its field."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from decode_svc.app import build_app
from shared.config import DecodeConfig
from tests.front.fakes import CONTEXT, EOS, MODEL, FakeEngine, Http, byte_level_tokenizer, decode_app, served, status

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "the"}]


@pytest.fixture
async def http(engine: FakeEngine, tokenizer: Any) -> AsyncIterator[Http]:
    async with served(decode_app(engine, tokenizer)) as http:
        yield http


async def test_a_prompt(http: Http, tokenizer: Any) -> None:
    ids = tokenizer.encode("the é")
    answer = {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids, "token_strs": None}
    assert await http.post("/tokenize", {"model": MODEL, "prompt": "the é"}) == (200, answer)
    answer["token_strs"] = ["the", "Ġ", "Ã©"]
    assert await http.post("/tokenize", {"prompt": "the é", "return_token_strs": True}) == (200, answer)
    empty = {"count": 0, "max_model_len": CONTEXT, "tokens": [], "token_strs": None}
    assert await http.post("/tokenize", {"prompt": ""}) == (200, empty)


@pytest.mark.parametrize(("open_turn", "ending"), [(None, "<assistant>"), (True, "<assistant>"), (False, "")])
async def test_messages_are_tokenized_as_a_chat_would_be(
    engine: FakeEngine, http: Http, tokenizer: Any, open_turn: bool | None, ending: str
) -> None:
    code, answer = await http.post("/tokenize", {"messages": CHAT, "add_generation_prompt": open_turn})
    assert (code, answer["tokens"]) == (200, tokenizer.encode(f"<user>the{ending}"))
    if ending:
        engine.answer = [65]
        await http.post("/v1/chat/completions", {"messages": CHAT})
        assert engine.prompt() == answer["tokens"]


@pytest.mark.parametrize(
    ("body", "special"),
    [
        ({"prompt": "hi"}, True),
        ({"prompt": "hi", "add_special_tokens": False}, False),
        ({"messages": CHAT}, False),  # the template's text has its own
        ({"messages": CHAT, "add_special_tokens": True}, True),
    ],
)
async def test_special_tokens(engine: FakeEngine, body: dict[str, Any], special: bool) -> None:
    async with served(decode_app(engine, byte_level_tokenizer(bos=True))) as http:
        tokens = (await http.post("/tokenize", body))[1]["tokens"]
    assert (tokens[0] == EOS) == special


async def test_there_and_back_with_special_tokens_as_text(http: Http) -> None:
    text = "the <eos> end\n\n🙂"
    tokens = (await http.post("/tokenize", {"prompt": text}))[1]["tokens"]
    assert EOS in tokens
    assert await http.post("/detokenize", {"model": MODEL, "tokens": tokens}) == (200, {"prompt": text})
    assert await http.post("/detokenize", {"tokens": []}) == (200, {"prompt": ""})


async def test_more_than_the_context_is_counted_and_much_more_is_refused(http: Http, tokenizer: Any) -> None:
    assert (await http.post("/tokenize", {"prompt": "x" * 2 * CONTEXT}))[1]["count"] == 2 * CONTEXT
    longest = max(map(len, tokenizer.get_vocab()))
    huge = "x" * (CONTEXT * longest + 1)
    for body, field in (({"prompt": huge}, "prompt"), (_chat(huge), "messages")):
        code, answer = await http.post("/tokenize", body)
        assert (code, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert answer["error"]["param"] == field


def _chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **fields}]}


WRONG: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("/tokenize", {}, "invalid_value", "prompt"),
    ("/tokenize", {"prompt": "a", "messages": CHAT}, "invalid_value", "prompt"),
    ("/tokenize", {"prompt": 5}, "invalid_type", "prompt"),
    ("/tokenize", {"prompt": ["a"]}, "invalid_type", "prompt"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "invalid_type", "add_special_tokens"),
    ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, "invalid_type", "return_token_strs"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "invalid_value", "add_generation_prompt"),
    ("/tokenize", {"messages": []}, "invalid_value", "messages"),
    ("/tokenize", {"messages": [5]}, "invalid_type", "messages[0]"),
    ("/tokenize", _chat("a") | {"add_generation_prompt": 0}, "invalid_type", "add_generation_prompt"),
    ("/tokenize", _chat("a") | {"continue_final_message": True}, "unsupported_option", "continue_final_message"),
    ("/tokenize", _chat("a") | {"chat_template": "{{ 1 }}"}, "unsupported_option", "chat_template"),
    ("/tokenize", _chat("a") | {"tools": [{}]}, "unsupported_option", "tools"),
    ("/tokenize", _chat("a", tool_calls=[{}]), "unsupported_option", "messages[0].tool_calls"),
    ("/tokenize", {"messages": [{"role": "king", "content": "a"}]}, "chat_template_error", "messages"),
    ("/detokenize", {}, "invalid_type", "tokens"),
    ("/detokenize", {"tokens": "1"}, "invalid_type", "tokens"),
    ("/detokenize", {"tokens": [True]}, "invalid_type", "tokens[0]"),
    ("/detokenize", {"tokens": [1.0]}, "invalid_type", "tokens[0]"),
    ("/detokenize", {"tokens": [1, 264]}, "invalid_token_id", "tokens"),
    ("/detokenize", {"tokens": [-1]}, "invalid_token_id", "tokens"),
    ("/detokenize", {"tokens": [2**40]}, "invalid_token_id", "tokens"),
    ("/detokenize", {"tokens": [10**40]}, "invalid_token_id", "tokens"),
]


@pytest.mark.parametrize(("path", "body", "code", "param"), WRONG)
async def test_refusals(http: Http, path: str, body: dict[str, Any], code: str, param: str | None) -> None:
    got, answer = await http.post(path, body)
    assert (got, answer["error"]["code"], answer["error"]["param"]) == (400, code, param), answer


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
async def test_another_model_and_an_engine_that_is_not_there(
    engine: FakeEngine, http: Http, path: str, body: dict[str, Any]
) -> None:
    code, answer = await http.post(path, body | {"model": "gpt-9"})
    assert (code, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
    engine.front.on_message(status())
    assert (await http.post(path, body))[0] == 200  # no prefill is needed
    engine.front.engine_died("signal 9")
    code, answer = await http.post(path, body)
    assert (code, answer["error"]["code"], answer["error"]["retryable"]) == (503, "engine_dead", True)
    assert engine.received == []


async def test_a_model_by_its_name(engine: FakeEngine, http: Http) -> None:
    [card] = (await http.get("/v1/models"))[1]["data"]
    assert await http.get(f"/v1/models/{MODEL}") == (200, card)
    for name in ("gpt-9", "folder/tiny", "folder%2Ftiny", "tiny/"):
        code, answer = await http.get(f"/v1/models/{name}")
        assert (code, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
    assert (await http.get("/v1/models/"))[1]["error"]["code"] == "not_found"


async def test_a_model_whose_name_has_slashes(engine: FakeEngine, tokenizer: Any) -> None:
    app = build_app(DecodeConfig(model="folder/tiny"), engine.front, tokenizer, engine.registry)
    async with served(app) as http:
        for name in ("folder/tiny", "folder%2Ftiny"):
            assert (await http.get(f"/v1/models/{name}"))[1]["id"] == "folder/tiny"
        assert (await http.get("/v1/models/tiny"))[0] == 404


async def test_a_busy_tokenizer_leaves_streams_alone(
    engine: FakeEngine, http: Http, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(tokenizer, "convert_ids_to_tokens", lambda _ids: [str(release.wait(20))])
    busy = asyncio.create_task(http.post("/tokenize", {"prompt": "hi", "return_token_strs": True}))
    engine.answer = [65]
    assert (await http.events("/v1/completions", {"prompt": [1]}))[-1] == "[DONE]"
    release.set()
    assert (await busy)[1]["token_strs"] == ["True"]
