"""OpenAI's requests: schemas, and every check that needs no tokenizer.

A known option that this service does not support is refused by name unless it is null or at the value that asks for
nothing; it is never ignored. Fields nobody knows are ignored, since routers add their own.
"""

import logging
import re
import secrets
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import msgspec

from shared.errors import RequestError
from shared.ids import RequestId
from shared.kv.layout import MAX_TOP_LOGPROBS
from shared.protocol.local import Generate, ModelInfo
from shared.protocol.messages import Sampling, pack_int32

log = logging.getLogger(__name__)

MAX_STOPS = 16
MAX_BIASES = 1024
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_NEUTRAL_BYTES = 256
"""No value that asks for nothing is written longer."""
COMPLETION_DEFAULT_TOKENS = 16

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI's; the values in brackets ask for nothing
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's and SGLang's
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "add_special_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "stop_regex": (),
    "logits_processors": ([],),
    "return_hidden_states": (False,),
}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class CommonRequest(msgspec.Struct, kw_only=True):
    """What both endpoints take. Null is the same as absent."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def logprob_count(self) -> int | None:
        """How many likeliest tokens are to be told beside each token's own log-probability; None: not even that."""
        return None

    @property
    def logged(self) -> bool:
        return self.logprob_count is not None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Everything that holds for any model. Raises RequestError naming the field."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise _bad("max_tokens", f"must be at least 1, got {self.max_tokens}")
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise _bad("temperature", f"must lie in 0 … 2, got {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise _bad("top_p", f"must be above 0 and at most 1, got {self.top_p}")
        if self.top_k is not None and self.top_k < -1:
            raise _bad("top_k", f"must be -1 or 0 (off) or positive, got {self.top_k}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise _bad("min_p", f"must lie in 0 … 1, got {self.min_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if value is not None and not -2 <= value <= 2:
                raise _bad(name, f"must lie in -2 … 2, got {value}")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty <= 2:
            raise _bad("repetition_penalty", f"must be above 0 and at most 2, got {self.repetition_penalty}")
        if self.min_tokens is not None and self.min_tokens < 0:
            raise _bad("min_tokens", f"must be at least 0, got {self.min_tokens}")
        if self.logit_bias is not None and len(self.logit_bias) > MAX_BIASES:
            raise _bad("logit_bias", f"at most {MAX_BIASES} tokens, got {len(self.logit_bias)}")
        for token, bias in (self.logit_bias or {}).items():
            if not re.fullmatch(r"\d{1,9}", token):
                raise _bad("logit_bias", f"keys are token ids, got {token[:32]!r}")
            if not -100 <= bias <= 100:
                raise _bad("logit_bias", f"a bias must lie in -100 … 100, got {bias}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise _bad("seed", "must fit in a signed 64-bit integer")
        if len(self.stops) > MAX_STOPS:
            raise _bad("stop", f"at most {MAX_STOPS} stop strings, got {len(self.stops)}")
        for stop in self.stops:
            if not 0 < len(stop) <= MAX_STOP_CHARS:
                raise _bad("stop", f"a stop string has 1 to {MAX_STOP_CHARS} characters, got {len(stop)}")
        if self.stop_token_ids is not None and len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise _bad("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}")
        if self.stream_options is not None and not self.stream:
            raise _bad("stream_options", "only allowed when stream is true")
        if self.return_token_ids and self.stream:
            raise _bad("return_token_ids", "only allowed when stream is false")


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """Which roles there are is the chat template's business."""

    role: str
    content: str | list[ContentPart]
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None


class ChatRequest(CommonRequest):
    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None

    def check(self) -> None:
        if self.max_completion_tokens is not None:
            if self.max_completion_tokens < 1:
                raise _bad("max_completion_tokens", f"must be at least 1, got {self.max_completion_tokens}")
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise _bad("max_tokens", "differs from max_completion_tokens; give one of them")
            self.max_tokens = self.max_completion_tokens
        super().check()
        if self.top_logprobs is not None:
            if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
                raise _bad("top_logprobs", f"must lie in 0 … {MAX_TOP_LOGPROBS}, got {self.top_logprobs}")
            if self.top_logprobs and not self.logprobs:
                raise _bad("top_logprobs", "only allowed when logprobs is true")
        if not self.messages:
            raise _bad("messages", "must not be empty")
        for index, message in enumerate(self.messages):
            _check_message(message, f"messages[{index}]")

    @property
    def logprob_count(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    def conversation(self) -> list[dict[str, str]]:
        """The messages as a chat template takes them; text parts are joined by line breaks."""
        turns = []
        for message in self.messages:
            content = message.content
            if not isinstance(content, str):
                content = "\n".join(part.text or "" for part in content)
            name = {"name": message.name} if message.name is not None else {}
            turns.append({"role": message.role, "content": content, **name})
        return turns


class CompletionRequest(CommonRequest):
    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs:
            raise _bad("top_logprobs", "is a chat's; a completion says logprobs: N")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise _bad("logprobs", f"must lie in 0 … {MAX_TOP_LOGPROBS}, got {self.logprobs}")
        if not self.prompt:
            raise _bad("prompt", "must not be empty")
        if not isinstance(self.prompt, str) and set(map(type, self.prompt)) != {int}:
            raise RequestError(
                "prompt: a list of prompts is not supported; send one request a prompt",
                param="prompt",
                code="unsupported_option",
            )

    @property
    def logprob_count(self) -> int | None:
        return self.logprobs

    def token_ids(self) -> list[int]:
        """A checked prompt that is a list."""
        return cast(list[int], self.prompt)


def _check_message(message: ChatMessage, where: str) -> None:
    for field in ("tool_calls", "tool_call_id", "function_call"):
        if getattr(message, field):
            raise _unsupported(f"{where}.{field}", ())
    if not isinstance(message.content, str):
        for index, part in enumerate(message.content):
            if part.type != "text":
                raise _unsupported(f"{where}.content[{index}].type", ("text",))
            if part.text is None:
                raise _bad(f"{where}.content[{index}].text", "a text part needs its text")


R = TypeVar("R", bound=CommonRequest)


def parse(body: bytes, kind: type[R]) -> R:
    """An HTTP body → a checked request. Raises RequestError, and nothing else, for whatever bytes come in.

    Nothing is built of fields that are not used, however large they are.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name in fields.keys() & UNSUPPORTED.keys():
            if not _is_neutral(fields[name], UNSUPPORTED[name]):
                raise _unsupported(name, UNSUPPORTED[name])
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), param=_field_of(str(error)), code="invalid_type") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = r"; a \u escape of half a surrogate pair is no character" if b"\\ud" in body.lower() else ""
        raise RequestError(f"the body is not valid JSON: {error}{hint}", code="invalid_json") from error
    if log.isEnabledFor(logging.DEBUG):
        log.debug("ignored fields: %s", sorted(fields.keys() - UNSUPPORTED.keys() - set(kind.__struct_fields__)))
    request.check()
    return request


def _is_neutral(raw: msgspec.Raw, accepted: Sequence[object]) -> bool:
    """The value asks for nothing: null, or one of these."""
    text = bytes(raw)
    if len(text) > MAX_NEUTRAL_BYTES:
        return False
    value = msgspec.json.decode(text)
    return value is None or any(_same(value, neutral) for neutral in accepted)


def _same(value: object, neutral: object) -> bool:
    """Equal, and not because Python takes true for 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _field_of(message: str) -> str | None:
    """The path of the field that msgspec complains about."""
    parts = re.search(r"at `\$\.([^`]*)`", message), re.search(r"missing required field `([^`]*)`", message)
    return ".".join(part[1] for part in parts if part) or None


def _bad(field: str, problem: str) -> RequestError:
    return RequestError(f"{field}: {problem}", param=field, code="invalid_value")


def _unsupported(field: str, accepted: Sequence[object]) -> RequestError:
    allowed = " or ".join(["null", *(msgspec.json.encode(value).decode() for value in accepted)])
    return RequestError(
        f"{field} is not supported; leave it out or send {allowed}", param=field, code="unsupported_option"
    )


def check_tokens(tokens: Sequence[int], field: str, vocab_size: int) -> None:
    """Raises RequestError naming the first id outside the vocabulary."""
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        index = next(i for i, token in enumerate(tokens) if not 0 <= token < vocab_size)
        problem = f"token id {tokens[index]} is outside the vocabulary of {vocab_size}"
        raise RequestError(f"{field}[{index}]: {problem}", param=field, code="invalid_token_id")


def answer_length(prompt_tokens: int, asked: int | None, default: int | None, context: int, field: str) -> int:
    """→ max_tokens. Raises RequestError where prompt and answer do not fit in ``context`` tokens; ``field`` is the
    prompt's. ``default`` is cut to what fits; None: all that fits."""
    room = context - prompt_tokens
    if room < 1 or (asked or 0) > room:
        wanted = asked or 1
        message = (
            f"the context holds {context} tokens; the request needs {prompt_tokens + wanted}: "
            f"{prompt_tokens} in the prompt and {wanted} to generate"
        )
        raise RequestError(message, param=field if room < 1 else "max_tokens", code="context_length_exceeded")
    return asked or min(default or room, room)


def generate_message(
    request: CommonRequest, request_id: RequestId, prompt: Sequence[int], max_tokens: int, info: ModelInfo
) -> Generate:
    """The request as its engine takes it. Raises RequestError for token ids outside the vocabulary, and for a minimum
    above the maximum."""
    stop_token_ids = request.stop_token_ids or []
    check_tokens(stop_token_ids, "stop_token_ids", info.vocab_size)
    bias = [(int(token), value) for token, value in (request.logit_bias or {}).items()]
    check_tokens([token for token, _ in bias], "logit_bias", info.vocab_size)
    least = request.min_tokens or 0
    if least > max_tokens:
        raise _bad("min_tokens", f"must be at most max_tokens, {max_tokens}, got {least}")
    ends = {*stop_token_ids, *([] if request.ignore_eos else info.eos_token_ids)}

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    sampling = Sampling(
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        temperature=given(request.temperature, 1.0),
        top_p=given(request.top_p, 1.0),
        top_k=min(request.top_k, info.vocab_size) if request.top_k else -1,
        min_p=given(request.min_p, 0.0),
        presence_penalty=given(request.presence_penalty, 0.0),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        repetition_penalty=given(request.repetition_penalty, 1.0),
        top_logprobs=request.logprob_count or 0,
        logit_bias=bias,
        banned=sorted(ends) if least else [],
        banned_before=len(prompt) + least if least and ends else 0,
    )
    return Generate(request_id, pack_int32(prompt), max_tokens, sampling, stop_token_ids, bool(request.ignore_eos))
