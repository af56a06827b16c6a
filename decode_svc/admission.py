"""A checked request against the model and the memory that are there, and as the engine takes it."""

import secrets
from collections.abc import Sequence

from decode_svc.choices import PageNeed
from decode_svc.openai import CommonRequest, bad, check_tokens
from shared.errors import RequestError
from shared.ids import RequestId
from shared.protocol.local import Generate, ModelInfo
from shared.protocol.messages import Sampling, pack_int32

MAX_SCORES = 1 << 17
"""Log-probabilities of prompt tokens in one answer; about 8 MB of JSON, and as much on the way from prefill."""


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


def check_size(request: CommonRequest, prompt_tokens: int, max_tokens: int, info: ModelInfo) -> None:
    """Raises RequestError where the choices never have room together."""
    if request.choices > info.max_num_seqs:
        raise bad("n", f"at most {info.max_num_seqs} choices run at a time, got {request.choices}")
    wanted = PageNeed.of(prompt_tokens, max_tokens, request.choices, info.page_size).total
    if wanted > info.num_pages - 1:
        raise bad("n", f"{request.choices} choices need {wanted} pages together; there are {info.num_pages - 1}")


def check_scores(request: CommonRequest, prompt_tokens: int) -> None:
    """Raises RequestError where the log-probabilities of all prompts together, told with each choice, are too many: one
    client's answer may not be a gigabyte in the front."""
    if (top := request.wanted_prompt_logprobs) is not None:
        entries = prompt_tokens * request.choices * (top + 1)
        if entries > MAX_SCORES:
            problem = f"at most {MAX_SCORES} (tokens × choices × (1 + likeliest tokens)), asked for {entries}"
            raise bad("prompt_logprobs", problem)


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
        raise bad("min_tokens", f"must be at most max_tokens, {max_tokens}, got {least}")
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
    return Generate(
        request_id,
        pack_int32(prompt),
        max_tokens,
        sampling,
        stop_token_ids,
        bool(request.ignore_eos),
        request.choices,
        request.wanted_prompt_logprobs,
    )
