"""Text ↔ tokens: prompts in, and answers out piece by piece, so that joined pieces equal the whole decoded at once."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from shared.errors import ConfigError, RequestError
from shared.protocol.local import FinishReason

REPLACEMENT = "\ufffd"


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes stand for themselves, the others for the characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


class TextCodec:
    """One model's tokenizer. ``encode`` and ``render`` may run on another thread than ``decode``.

    It works on the tokenizer's Rust backend: a quarter of the cost per decoded token, and no clean-up of spaces,
    which would change text that has already been sent.
    """

    def __init__(self, tokenizer: Any) -> None:
        """``tokenizer``: a transformers tokenizer with a backend. Raises ConfigError without one."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"tokenizer {type(tokenizer).__name__} has no fast backend")
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer, self._backend = tokenizer, backend
        self._byte_level = "ByteLevel" in str(backend.decoder)
        self._added = frozenset(backend.get_added_tokens_decoder())
        self.skipped = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        """Special tokens: never part of the text."""
        pieces = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self.byte_tokens = frozenset(piece for piece in pieces if piece is not None)
        """SentencePiece's byte pieces. A run of them is text only as a whole: one bad byte spoils all of it."""
        self.longest_token = max((len(token) for token in backend.get_vocab()), default=1)
        """In characters; so a text has at least ``len(text) / longest_token`` tokens."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for; a part of a character where it is split over tokens."""
        piece = self._backend.id_to_token(token) or ""
        if match := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
            return bytes([int(match[1], 16)])
        if self._byte_level and token not in self._added and all(c in _BYTE_OF for c in piece):
            return bytes(_BYTE_OF[c] for c in piece)
        text: str = self._backend.decode([token], skip_special_tokens=False)
        return text.encode()

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The chat template's prompt. Raises RequestError with the template's own words where it refuses."""
        if not self._tokenizer.chat_template:
            raise RequestError("this model has no chat template; use /v1/completions", code="no_chat_template")
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template is a program and fails in its own ways, each caused by the messages
            message = f"the chat template refused the messages: {error}"
            raise RequestError(message, param="messages", code="chat_template_error") from error
        return text


class Detokenizer:
    """Tokens of one answer → text as soon as it is final.

    A character split over tokens is held back until its last byte has come; ``flush`` returns what is left. Text is
    the difference of two decodes that start at the last token group whose text was final, since a decoder may treat
    its first token in a special way.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._known = 0
        """The first so many of ``_ids`` decode to ``_text``, which was returned before."""
        self._text = ""

    def push(self, tokens: Sequence[int]) -> str:
        new = [token for token in tokens if token not in self._codec.skipped]
        self._ids += new
        if not new or new[-1] in self._codec.byte_tokens:
            return ""
        text = self._codec.decode(self._ids)
        if len(text) <= len(self._text) or text.endswith(REPLACEMENT):
            return ""
        delta = text[len(self._text) :]
        del self._ids[: self._known]
        self._known = len(self._ids)
        self._text = self._codec.decode(self._ids)
        return delta

    def flush(self) -> str:
        """What no further token can change any more. Call once, at the end."""
        return self._codec.decode(self._ids)[len(self._text) :] if len(self._ids) > self._known else ""


class StopStrings:
    """Cuts a text before the first stop string that completes in it, and holds back what may still become one.

    «First» is the one whose last character comes first, so that the cut does not depend on how the text was split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """→ (text that is final, whether a stop string was met; after that nothing more may be pushed)."""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0


class Stops(NamedTuple):
    """Stop strings, and how many tokens come before they are looked for (min_tokens)."""

    strings: Sequence[str]
    least: int = 0


class Assembler:
    """One answer's tokens → its text, in pieces; the same for streamed and whole answers.

    ``stopped``: a stop string was met. ``tokens``: counted up to and including the one that completed it.
    """

    def __init__(self, codec: TextCodec, stops: Stops) -> None:
        self.stopped = False
        self.tokens = 0
        self._detokenizer = Detokenizer(codec)
        self._least = stops.least
        self._stops = StopStrings(stops.strings) if stops.strings else None

    def feed(self, tokens: Sequence[int], finish: FinishReason | None) -> str:
        """Text that is final now; all that is left where the engine finished with these tokens. With "stop" the last
        one is an end-of-text or stop token: it counts, and is no text."""
        text_tokens = tokens[:-1] if finish == "stop" else tokens
        text = self._feed(text_tokens, finish is not None)
        self.tokens += len(tokens) - len(text_tokens) if not self.stopped else 0
        return text

    def _feed(self, tokens: Sequence[int], last: bool) -> str:
        if self._stops is None:
            self.tokens += len(tokens)
            text = self._detokenizer.push(tokens)
            return text + self._detokenizer.flush() if last else text
        pieces = []
        for token in tokens:
            self.tokens += 1
            text = self._detokenizer.push([token])
            pieces.append(self._match(self._stops, text) if self.tokens > self._least else text)
            if self.stopped:
                return "".join(pieces)
        if last:
            text = self._detokenizer.flush()
            pieces.append(self._match(self._stops, text) if self.tokens > self._least else text)
            if not self.stopped:
                pieces.append(self._stops.flush())
        return "".join(pieces)

    def _match(self, stops: StopStrings, text: str) -> str:
        if not text:
            return ""
        final, self.stopped = stops.push(text)
        return final
