"""Several choices and several prompts in one HTTP request: indices, streams, stops, failures, echo, prompt scores."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from decode_svc.text import TextCodec
from shared.ids import RequestId
from shared.protocol.local import Cancel, EngineError, Generate, Output, Outputs
from shared.protocol.messages import PromptLogprobs, pack_int32, unpack_int32
from tests.front.fakes import EOS, FakeEngine, Http

A, B, C, D = b"abcd"


@pytest.fixture
def codec(tokenizer: Any) -> TextCodec:
    return TextCodec(tokenizer)


@pytest.fixture
def byte(codec: TextCodec) -> Callable[[int], int]:
    """A byte → its token."""
    tokens = {codec.token_bytes(token): token for token in range(256)}
    return lambda value: tokens[bytes([value])]


async def started(engine: FakeEngine, work: Any, requests: int) -> tuple["asyncio.Task[Any]", list[Generate]]:
    engine.manual = True
    task = asyncio.ensure_future(work)
    while len(engine.generates) < requests:
        engine.arrived.clear()
        await engine.arrived.wait()
    return task, engine.generates[-requests:]


async def test_choices_keep_their_indices(engine: FakeEngine, http: Http, byte: Any) -> None:
    body = {"prompt": [1, 2], "max_tokens": 3, "n": 3, "return_token_ids": True}
    task, (message,) = await started(engine, http.post("/v1/completions", body), 1)
    assert message.choices == 3
    engine.say(message, [byte(B)], choice=1)
    engine.say(message, [byte(A)], choice=0)
    engine.say(message, [byte(C)], "length", choice=2)
    engine.say(message, [byte(B)], "length", choice=1)
    engine.say(message, [EOS], "stop", choice=0)
    status, answer = await task
    assert status == 200
    shown = [(c["index"], c["text"], c["finish_reason"], len(c["token_ids"])) for c in answer["choices"]]
    assert shown == [(0, "a", "stop", 2), (1, "bb", "length", 2), (2, "c", "length", 1)]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
    assert engine.cancels == []
    assert engine.metric('handoff_requests_total{outcome="finished"}') == 1


async def test_chat_choices_streamed(engine: FakeEngine, http: Http, byte: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "n": 2, "max_tokens": 4}
    task, (message,) = await started(engine, http.events("/v1/chat/completions", chat), 1)
    engine.say(message, [byte(A)], choice=0)
    engine.say(message, [byte(B)], choice=1)
    engine.say(message, [byte(C)], "length", choice=1)
    engine.say(message, [byte(D)], "length", choice=0)
    *events, done = await task
    assert done == "[DONE]"
    texts = {0: "", 1: ""}
    finishes = []
    for choice in (event["choices"][0] for event in events):
        texts[choice["index"]] += choice["delta"].get("content", "")
        finishes += [choice["index"]] if choice["finish_reason"] else []
    assert (texts, finishes) == ({0: "ad", 1: "bc"}, [1, 0])
    assert [e["choices"][0]["index"] for e in events if "role" in e["choices"][0]["delta"]] == [0, 1]


async def test_a_stop_string_ends_its_own_choice_alone(engine: FakeEngine, http: Http, byte: Any) -> None:
    body = {"prompt": [1], "max_tokens": 9, "n": 2, "stop": "b"}
    task, (message,) = await started(engine, http.post("/v1/completions", body), 1)
    engine.say(message, [byte(A)], choice=1)
    engine.say(message, [byte(B)], choice=1)
    while not engine.cancels:
        await asyncio.sleep(0)
    assert engine.cancels == [Cancel(message.request, 1)]
    engine.say(message, [byte(C)], choice=1)  # was on its way
    engine.say(message, [byte(C)], choice=0)
    engine.say(message, [byte(B)], choice=0)
    _, answer = await task
    assert [(c["text"], c["finish_reason"]) for c in answer["choices"]] == [("c", "stop"), ("a", "stop")]
    assert engine.cancels[1:] == [Cancel(message.request)]  # nothing of it is left to compute
    assert engine.metric('handoff_requests_total{outcome="finished"}') == 1


async def test_a_list_of_prompts(engine: FakeEngine, http: Http, byte: Any) -> None:
    body = {"prompt": ["ab", "c"], "max_tokens": 2, "n": 2}
    task, (one, two) = await started(engine, http.post("/v1/completions", body), 2)
    assert one.request != two.request
    assert [len(unpack_int32(message.prompt)) for message in (one, two)] == [2, 1]
    for message, letters in ((two, (C, D)), (one, (A, B))):
        for choice, letter in enumerate(letters):
            engine.say(message, [byte(letter)], "length", choice=choice)
    status, answer = await task
    assert status == 200
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert engine.metric("handoff_requests_started_total") == 2
    assert engine.metric('handoff_requests_total{outcome="finished"}') == 2
    assert engine.metric("handoff_prompt_tokens_total") == 3


async def test_one_prompts_failure_ends_the_answer_and_cancels_the_others(engine: FakeEngine, http: Http) -> None:
    task, (one, two) = await started(engine, http.post("/v1/completions", {"prompt": [[1], [2]]}), 2)
    engine.fail(two, EngineError("no memory", "no_memory", 507, "server_error", False))
    status, answer = await task
    assert (status, answer["error"]["code"]) == (507, "no_memory")
    assert engine.cancels == [Cancel(one.request)]
    assert engine.front.running == 0


@pytest.mark.parametrize("named", ["", "cmpl-"])
async def test_an_operator_ends_all_prompts_of_an_answer(engine: FakeEngine, http: Http, named: str) -> None:
    task, (one, _two) = await started(engine, http.post("/v1/completions", {"prompt": [[1], [2]]}), 2)
    assert await http.post("/abort_request", {"rid": named + one.request}) == (200, {"aborted": 2})
    assert (await task)[1]["error"]["code"] == "aborted"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"n": 5}, "n", "at most 4 choices"),  # rows of the batch
        ({"n": 0}, "n", "1 … 128"),
        ({"n": 129}, "n", "1 … 128"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "0 … 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
    ],
)
async def test_what_does_not_fit(engine: FakeEngine, http: Http, body: Any, param: str, words: str) -> None:
    status, answer = await http.post("/v1/completions", {"prompt": [1], "max_tokens": 2} | body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert words in answer["error"]["message"]
    assert engine.generates == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [[1], [264]]}, "prompt[1]"),
        ({"prompt": [[1], [1] * 70]}, "prompt[1]"),
        ({"prompt": [[1]] * 100, "n": 2}, "n"),
        ({"prompt": [[1] * 60] * 32, "n": 4, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": [[1] * 60] * 32, "n": 4, "logprobs": 20, "echo": True}, "prompt_logprobs"),
    ],
)
async def test_a_list_that_cannot_be_answered_names_what_is_wrong(
    engine: FakeEngine, http: Http, body: Any, param: str
) -> None:
    status, answer = await http.post("/v1/completions", {"max_tokens": 2} | body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert param.removesuffix("[1]") in answer["error"]["message"]
    assert engine.generates == []


async def test_stop_strings_are_looked_for_after_min_tokens(engine: FakeEngine, http: Http, byte: Any) -> None:
    body = {"prompt": [1], "max_tokens": 6, "min_tokens": 3, "stop": "b"}
    task, (message,) = await started(engine, http.post("/v1/completions", body), 1)
    for letter in (A, B, A, C, B, D):
        engine.say(message, [byte(letter)])
    choice = (await task)[1]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abac", "stop")


async def test_choices_that_no_pool_holds(engine: FakeEngine, http: Http) -> None:
    engine.ready(num_pages=5)
    body = {"prompt": [1], "max_tokens": 32, "n": 3}
    status, answer = await http.post("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "n")
    assert "need 6 pages together; there are 4" in answer["error"]["message"]
    engine.answer = [65]
    assert (await http.post("/v1/completions", {"prompt": [1], "max_tokens": 32}))[0] == 200


def scores(tokens: int, top: int) -> PromptLogprobs:
    own = np.arange(1, tokens, dtype="<f4") / -10
    ids = np.arange((tokens - 1) * top)
    return PromptLogprobs(top, own.tobytes(), pack_int32(np.arange(1, tokens)), pack_int32(ids), bytes(4 * len(ids)))


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs(engine: FakeEngine, http: Http, byte: Any, stream: bool) -> None:
    body = {"prompt": "abc", "max_tokens": 2, "echo": True, "logprobs": 1}
    ask = http.events("/v1/completions", body) if stream else http.post("/v1/completions", body)
    task, (message,) = await started(engine, ask, 1)
    assert message.prompt_logprobs == 1
    output = Output(message.request, [byte(D)], [-2.0], None, prompt=scores(3, 1), top=[[(byte(D), -2.0)]])
    engine.front.on_message(Outputs([output]))
    engine.say(message, [EOS], "stop", top=[[]])
    answer = await task
    if stream:
        parts = [event["choices"][0] for event in answer[:-1]]
        text = "".join(part["text"] for part in parts)
        shown = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        logprobs = {key: [x for part in shown for x in part[key]] for key in shown[0]}
    else:
        text, logprobs = answer[1]["choices"][0]["text"], answer[1]["choices"][0]["logprobs"]
    assert text == "abcd"
    assert logprobs["tokens"] == ["a", "b", "c", "d", "<eos>"]
    assert logprobs["token_logprobs"] == [None, pytest.approx(-0.1), pytest.approx(-0.2), -2.0, 0.0]
    assert logprobs["top_logprobs"][0] is None
    assert [len(top) for top in logprobs["top_logprobs"][1:4]] == [1, 1, 1]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]


async def test_echo_with_no_likeliest_tokens_and_of_one_token(engine: FakeEngine, http: Http, byte: Any) -> None:
    for prompt in ("abc", "a"):
        body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 0}
        task, (message,) = await started(engine, http.post("/v1/completions", body), 1)
        told = scores(len(prompt), 0)
        engine.front.on_message(Outputs([Output(message.request, [byte(D)], [-2.0], "length", prompt=told)]))
        _, answer = await task
        assert answer["choices"][0]["logprobs"]["tokens"] == [*prompt, "d"]
        assert answer["choices"][0]["logprobs"]["top_logprobs"][1:] == [{}] * len(prompt)
        engine.received.clear()


async def test_echo_of_token_ids_for_each_choice(engine: FakeEngine, http: Http, byte: Any) -> None:
    body = {"prompt": [byte(A), byte(B)], "max_tokens": 1, "echo": True, "n": 2}
    task, (message,) = await started(engine, http.post("/v1/completions", body), 1)
    assert message.prompt_logprobs is None
    engine.say(message, [byte(C)], "length", choice=0)
    engine.say(message, [byte(D)], "length", choice=1)
    _, answer = await task
    assert [choice["text"] for choice in answer["choices"]] == ["abc", "abd"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_prompt_logprobs_as_vllm_shows_them(
    engine: FakeEngine, http: Http, codec: TextCodec, byte: Any, path: str
) -> None:
    prompt = {"prompt": "ab"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": ""}]}
    task, (message,) = await started(engine, http.post(path, {**prompt, "max_tokens": 1, "prompt_logprobs": 2}), 1)
    tokens = unpack_int32(message.prompt).tolist()
    output = Output(message.request, [byte(C)], [0.0], "length", prompt=scores(len(tokens), 2))
    engine.front.on_message(Outputs([output]))
    first, second, *_ = (await task)[1]["choices"][0]["prompt_logprobs"]
    assert first is None
    text = codec.token_bytes(tokens[1]).decode()
    assert second[str(tokens[1])] == {"logprob": pytest.approx(-0.1), "rank": 1, "decoded_token": text}
    assert second["1"] == {"logprob": 0.0, "rank": 2, "decoded_token": codec.token_bytes(1).decode(errors="replace")}
    assert set(second) == {str(tokens[1]), "0", "1"}


async def test_a_prompts_scores_are_the_same_for_each_choice(engine: FakeEngine, http: Http, byte: Any) -> None:
    body = {"prompt": "ab", "max_tokens": 1, "n": 2, "prompt_logprobs": 1, "echo": True, "logprobs": 1}
    task, (message,) = await started(engine, http.post("/v1/completions", body), 1)
    output = Output(message.request, [byte(C)], [0.0], "length", prompt=scores(2, 1))
    engine.front.on_message(Outputs([output]))
    engine.say(message, [byte(D)], "length", choice=1)
    one, two = (await task)[1]["choices"]
    assert one["prompt_logprobs"] == two["prompt_logprobs"] != [None]
    assert [c["logprobs"]["tokens"] for c in (one, two)] == [["a", "b", "c"], ["a", "b", "d"]]
    assert [c["logprobs"]["text_offset"] for c in (one, two)] == [[0, 1, 2]] * 2


async def test_abort_of_one_id_leaves_another_answers_second_prompt(engine: FakeEngine, http: Http) -> None:
    task, (one,) = await started(engine, http.post("/v1/completions", {"prompt": [1]}), 1)
    assert engine.front.abort(RequestId("x." + one.request)) == 0
    engine.say(one, [EOS], "stop")
    assert (await task)[0] == 200
