"""OpenAI's responses: the objects that go back."""

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
class CompletionShape:
    """The objects of one answer. ``with_usage``: chunks carry "usage", null in all but the last. ``with_tokens``: the
    choice of a whole answer carries "token_ids"."""

    id: str
    model: str
    created: int
    with_usage: bool
    with_tokens: bool

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first text."""
        return []

    def piece(self, text: str) -> dict[str, Any]:
        return self._chunk([self._choice({"text": text}, None)])

    def ending(self, finish: FinishReason) -> dict[str, Any]:
        return self._chunk([self._choice({"text": ""}, finish)])

    def total(self, total: dict[str, int]) -> dict[str, Any]:
        """The chunk after the ending, where usage was asked for."""
        return {**self._chunk([]), "usage": total}

    def whole(self, text: str, finish: FinishReason, total: dict[str, int], token_ids: list[int]) -> dict[str, Any]:
        """The answer that is not streamed."""
        choice = self._choice({"text": text}, finish) | self._tokens(token_ids)
        return {**self._object("text_completion", [choice]), "usage": total}

    def _tokens(self, token_ids: list[int]) -> dict[str, Any]:
        return {"token_ids": token_ids} if self.with_tokens else {}

    def _chunk(self, choices: list[dict[str, Any]], name: str = "text_completion") -> dict[str, Any]:
        body = self._object(name, choices)
        return {**body, "usage": None} if self.with_usage else body

    def _object(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}

    @staticmethod
    def _choice(content: dict[str, Any], finish: FinishReason | None) -> dict[str, Any]:
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish}


class ChatShape(CompletionShape):
    """The same frame with messages and deltas in it."""

    def opening(self) -> list[dict[str, Any]]:
        return [self._chunk([self._choice({"delta": {"role": "assistant", "content": ""}}, None)])]

    def piece(self, text: str) -> dict[str, Any]:
        return self._chunk([self._choice({"delta": {"content": text}}, None)])

    def ending(self, finish: FinishReason) -> dict[str, Any]:
        return self._chunk([self._choice({"delta": {}}, finish)])

    def whole(self, text: str, finish: FinishReason, total: dict[str, int], token_ids: list[int]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = self._choice({"message": message}, finish) | self._tokens(token_ids)
        return {**self._object("chat.completion", [choice]), "usage": total}

    def _chunk(self, choices: list[dict[str, Any]], name: str = "chat.completion.chunk") -> dict[str, Any]:
        return super()._chunk(choices, name)
