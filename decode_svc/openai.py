"""OpenAI's requests: schemas, and every check that needs no tokenizer.

A known option that this service does not support is refused by name unless it is null or at the value that asks for
nothing; it is never ignored. Fields nobody knows are ignored, since routers add their own.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, cast

import msgspec

from shared.errors import RequestError
from shared.kv.layout import MAX_TOP_LOGPROBS

log = logging.getLogger(__name__)

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_BIASES = 1024
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_NEUTRAL_BYTES = 256
"""No value that asks for nothing is written longer."""
COMPLETION_DEFAULT_TOKENS = 16

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI's; the values in brackets ask for nothing
    "best_of": (1,),
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


class Checked(Protocol):
    """A request struct that says what holds for any model, and which known options it refuses."""

    __struct_fields__: ClassVar[tuple[str, ...]]
    refused: ClassVar[Mapping[str, tuple[Any, ...]]]

    def check(self) -> None: ...


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class CommonRequest(msgspec.Struct, kw_only=True):
    """What both endpoints take. Null is the same as absent."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED
    model: str | None = None
    n: int | None = None
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
    prompt_logprobs: int | None = None
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
    def choices(self) -> int:
        return self.n or 1

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """How many likeliest tokens are wanted in each place of the prompt; None: not even its own tokens'."""
        return self.prompt_logprobs

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Everything that holds for any model. Raises RequestError naming the field."""
        if self.n is not None and not 1 <= self.n <= MAX_CHOICES:
            raise bad("n", f"must lie in 1 … {MAX_CHOICES}, got {self.n}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise bad("max_tokens", f"must be at least 1, got {self.max_tokens}")
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise bad("temperature", f"must lie in 0 … 2, got {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise bad("top_p", f"must be above 0 and at most 1, got {self.top_p}")
        if self.top_k is not None and self.top_k < -1:
            raise bad("top_k", f"must be -1 or 0 (off) or positive, got {self.top_k}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise bad("min_p", f"must lie in 0 … 1, got {self.min_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if value is not None and not -2 <= value <= 2:
                raise bad(name, f"must lie in -2 … 2, got {value}")
        if self.repetition_penalty is not None and not 0.01 <= self.repetition_penalty <= 2:
            raise bad("repetition_penalty", f"must lie in 0.01 … 2, got {self.repetition_penalty}")
        if self.min_tokens is not None and self.min_tokens < 0:
            raise bad("min_tokens", f"must be at least 0, got {self.min_tokens}")
        if self.logit_bias is not None and len(self.logit_bias) > MAX_BIASES:
            raise bad("logit_bias", f"at most {MAX_BIASES} tokens, got {len(self.logit_bias)}")
        for token, bias in (self.logit_bias or {}).items():
            if not re.fullmatch(r"\d{1,9}", token):
                raise bad("logit_bias", f"keys are token ids, got {token[:32]!r}")
            if not -100 <= bias <= 100:
                raise bad("logit_bias", f"a bias must lie in -100 … 100, got {bias}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise bad("seed", "must fit in a signed 64-bit integer")
        if len(self.stops) > MAX_STOPS:
            raise bad("stop", f"at most {MAX_STOPS} stop strings, got {len(self.stops)}")
        for stop in self.stops:
            if not 0 < len(stop) <= MAX_STOP_CHARS:
                raise bad("stop", f"a stop string has 1 to {MAX_STOP_CHARS} characters, got {len(stop)}")
        if self.stop_token_ids is not None and len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise bad("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}")
        if self.stream_options is not None and not self.stream:
            raise bad("stream_options", "only allowed when stream is true")
        if self.return_token_ids and self.stream:
            raise bad("return_token_ids", "only allowed when stream is false")
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= MAX_TOP_LOGPROBS:
            raise bad("prompt_logprobs", f"must lie in 0 … {MAX_TOP_LOGPROBS}, got {self.prompt_logprobs}")
        if self.prompt_logprobs is not None and self.stream:
            raise bad("prompt_logprobs", "only allowed when stream is false")


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
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {**UNSUPPORTED, "echo": (False,)}
    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None

    def check(self) -> None:
        if self.max_completion_tokens is not None:
            if self.max_completion_tokens < 1:
                raise bad("max_completion_tokens", f"must be at least 1, got {self.max_completion_tokens}")
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise bad("max_tokens", "differs from max_completion_tokens; give one of them")
            self.max_tokens = self.max_completion_tokens
        super().check()
        if self.top_logprobs is not None:
            if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
                raise bad("top_logprobs", f"must lie in 0 … {MAX_TOP_LOGPROBS}, got {self.top_logprobs}")
            if self.top_logprobs and not self.logprobs:
                raise bad("top_logprobs", "only allowed when logprobs is true")
        if not self.messages:
            raise bad("messages", "must not be empty")
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
    echo: bool | None = None
    logprobs: int | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs:
            raise bad("top_logprobs", "is a chat's; a completion says logprobs: N")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise bad("logprobs", f"must lie in 0 … {MAX_TOP_LOGPROBS}, got {self.logprobs}")
        if not self.prompt or not all(self.prompts()):
            raise bad("prompt", "must not be empty")
        if not isinstance(self.prompt, str) and len(set(map(type, self.prompt))) > 1:
            raise bad("prompt", "must be a text, token ids, a list of texts, or a list of lists of token ids")
        if len(self.prompts()) * self.choices > MAX_CHOICES:
            problem = f"at most {MAX_CHOICES} choices of all prompts, asked for {len(self.prompts()) * self.choices}"
            raise bad("prompt" if self.choices == 1 else "n", problem)

    @property
    def logprob_count(self) -> int | None:
        return self.logprobs

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        return max((count for count in (echoed, self.prompt_logprobs) if count is not None), default=None)

    def prompts(self) -> list[str | list[int]]:
        """A checked request's prompts, one or many."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [cast(str | list[int], self.prompt)]
        return cast(list[str | list[int]], self.prompt)


def _check_message(message: ChatMessage, where: str) -> None:
    for field in ("tool_calls", "tool_call_id", "function_call"):
        if getattr(message, field):
            raise _unsupported(f"{where}.{field}", ())
    if not isinstance(message.content, str):
        for index, part in enumerate(message.content):
            if part.type != "text":
                what, problem = f"{where}.content[{index}].type", "only text parts are supported"
                raise RequestError(f"{what}: {problem}", param=what, code="unsupported_option")
            if part.text is None:
                raise bad(f"{where}.content[{index}].text", "a text part needs its text")


R = TypeVar("R", bound=Checked)


def parse(body: bytes, kind: type[R]) -> R:
    """An HTTP body → a checked request. Raises RequestError, and nothing else, for whatever bytes come in.

    Nothing is built of fields that are not used, however large they are.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name in fields.keys() & kind.refused.keys():
            if not _is_neutral(fields[name], kind.refused[name]):
                raise _unsupported(name, kind.refused[name])
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), param=_field_of(str(error)), code="invalid_type") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = r"; a \u escape of half a surrogate pair is no character" if b"\\ud" in body.lower() else ""
        raise RequestError(f"the body is not valid JSON: {error}{hint}", code="invalid_json") from error
    if log.isEnabledFor(logging.DEBUG):
        log.debug("ignored fields: %s", sorted(fields.keys() - kind.refused.keys() - set(kind.__struct_fields__)))
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


def bad(field: str, problem: str) -> RequestError:
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
