"""OpenAI's responses: the objects that go back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.protocol.local import FinishReason


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclass(frozen=True)
class TokenLogprob:
    """One token of an answer: its bytes, log-probability, the likeliest ones in its place, and where its text begins
    (in characters of the tokens' texts, one after the other). None: an echoed prompt's first, before which is nothing.
    """

    content: bytes
    logprob: float | None
    top: list[tuple[bytes, float]] | None
    offset: int

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


Logprobs = Sequence[TokenLogprob] | None
"""Of the tokens since the last chunk; None: not asked for."""


@dataclass(frozen=True)
class Finished:
    """One whole choice."""

    index: int
    text: str
    finish: FinishReason
    token_ids: list[int]
    logprobs: Logprobs
    prompt_logprobs: list[Any] | None


def _written(content: bytes) -> str:
    """A token as the key of an object: a part of a character as OpenAI writes it, so that two parts stay two keys."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


@dataclass(frozen=True)
class CompletionShape:
    """The objects of one answer. ``with_usage``: chunks carry "usage", null in all but the last. ``with_tokens``: the
    choice of a whole answer carries "token_ids"."""

    id: str
    model: str
    created: int
    with_usage: bool
    with_tokens: bool

    def opening(self, index: int) -> list[dict[str, Any]]:
        """A choice's chunks before its first text."""
        return []

    def piece(self, index: int, text: str, logprobs: Logprobs) -> dict[str, Any]:
        return self._chunk([self._choice(index, {"text": text}, None, logprobs)])

    def ending(self, index: int, finish: FinishReason, logprobs: Logprobs) -> dict[str, Any]:
        return self._chunk([self._choice(index, {"text": ""}, finish, logprobs)])

    def total(self, total: dict[str, int]) -> dict[str, Any]:
        """The chunk after the endings, where usage was asked for."""
        return {**self._chunk([]), "usage": total}

    def whole(self, choices: Sequence[Finished], total: dict[str, int]) -> dict[str, Any]:
        """The answer that is not streamed."""
        shown = [self._whole_choice(choice, {"text": choice.text}) for choice in choices]
        return {**self._object("text_completion", shown), "usage": total}

    def _whole_choice(self, choice: Finished, content: dict[str, Any]) -> dict[str, Any]:
        shown = self._choice(choice.index, content, choice.finish, choice.logprobs)
        if self.with_tokens:
            shown["token_ids"] = choice.token_ids
        if choice.prompt_logprobs is not None:
            shown["prompt_logprobs"] = choice.prompt_logprobs
        return shown

    def _chunk(self, choices: list[dict[str, Any]], name: str = "text_completion") -> dict[str, Any]:
        body = self._object(name, choices)
        return {**body, "usage": None} if self.with_usage else body

    def _object(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}

    def _choice(
        self, index: int, content: dict[str, Any], finish: FinishReason | None, logprobs: Logprobs = None
    ) -> dict[str, Any]:
        shown = self._logprobs(logprobs) if logprobs is not None else None
        return {"index": index, **content, "logprobs": shown, "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "tokens": [_written(token.content) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                None if token.top is None else {_written(content): value for content, value in token.top}
                for token in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }


class ChatShape(CompletionShape):
    """The same frame with messages and deltas in it."""

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [self._chunk([self._choice(index, {"delta": {"role": "assistant", "content": ""}}, None)])]

    def piece(self, index: int, text: str, logprobs: Logprobs) -> dict[str, Any]:
        return self._chunk([self._choice(index, {"delta": {"content": text}}, None, logprobs)])

    def ending(self, index: int, finish: FinishReason, logprobs: Logprobs) -> dict[str, Any]:
        return self._chunk([self._choice(index, {"delta": {}}, finish, logprobs)])

    def whole(self, choices: Sequence[Finished], total: dict[str, int]) -> dict[str, Any]:
        shown = [
            self._whole_choice(choice, {"message": {"role": "assistant", "content": choice.text, "refusal": None}})
            for choice in choices
        ]
        return {**self._object("chat.completion", shown), "usage": total}

    def _chunk(self, choices: list[dict[str, Any]], name: str = "chat.completion.chunk") -> dict[str, Any]:
        return super()._chunk(choices, name)

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        def entry(content: bytes, logprob: float | None) -> dict[str, Any]:
            return {"token": content.decode(errors="replace"), "logprob": logprob, "bytes": list(content)}

        shown = [
            {**entry(t.content, t.logprob), "top_logprobs": [entry(content, value) for content, value in t.top or ()]}
            for t in tokens
        ]
        return {"content": shown, "refusal": None}
