"""Tokens with their log-probabilities as answers show them. A prompt's are made once, for all of its choices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decode_svc.shapes import TokenLogprob
from decode_svc.text import TextCodec
from shared.protocol.messages import PromptLogprobs, unpack_float32, unpack_int32

Top = Sequence[tuple[int, float]]


def noted(
    codec: TextCodec,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[Top | None],
    offset: int,
) -> list[TokenLogprob]:
    """``offset``: characters before the first token's text."""
    of, found = codec.token_bytes, []
    for token, logprob, top in zip(tokens, logprobs, tops, strict=False):
        likely = None if top is None else [(of(other), value) for other, value in top]
        found.append(TokenLogprob(of(token), logprob, likely, offset))
        offset += len(found[-1].text)
    return found


@dataclass(frozen=True)
class ScoredPrompt:
    """``echoed``: as the beginning of an echoing choice's logprobs. ``listed``: as vLLM's prompt_logprobs."""

    echoed: list[TokenLogprob]
    listed: list[Any] | None

    @property
    def characters(self) -> int:
        return self.echoed[-1].offset + len(self.echoed[-1].text) if self.echoed else 0


def scored_prompt(
    prompt: bytes, scores: PromptLogprobs, codec: TextCodec, echoed_top: int | None, listed_top: int | None
) -> ScoredPrompt:
    """``prompt``: packed int32 ids. So many likeliest tokens in each place are shown in the one form and in the other;
    None: that form is not wanted. The first token has nothing before it, and so no log-probability. Takes a second for
    a hundred thousand of them: not for a loop."""
    tokens = unpack_int32(prompt).tolist()
    own, ranks = unpack_float32(scores.own).tolist(), unpack_int32(scores.ranks).tolist()
    ids = unpack_int32(scores.top_ids).reshape(len(own), scores.top).tolist()
    values = unpack_float32(scores.top_values).reshape(len(own), scores.top).tolist()
    tops = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
    echoed: list[TokenLogprob] = []
    if echoed_top is not None:
        echoed = noted(codec, tokens, [None, *own], [None, *(top[:echoed_top] for top in tops)], 0)
    if listed_top is None:
        return ScoredPrompt(echoed, None)

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        text = codec.token_bytes(token).decode(errors="replace")
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    listed: list[Any] = [None]
    for token, logprob, rank, top in zip(tokens[1:], own, ranks, tops, strict=True):
        likely = {str(other): entry(other, value, place) for place, (other, value) in enumerate(top[:listed_top], 1)}
        listed.append({str(token): entry(token, logprob, rank)} | likely)
    return ScoredPrompt(echoed, listed)
