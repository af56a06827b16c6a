"""Prompts that decode computes itself because no prefill will: one chunk at a time, between decode steps. Pure."""

from collections import deque
from dataclasses import dataclass

from shared.ids import RequestId


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start`` … ``start + length`` of a request's prompt; the last one samples."""

    request: RequestId
    start: int
    length: int
    last: bool


class LocalPrefills:
    """First come, first served; ``chunk_tokens`` bounds how long a chunk holds up the running batch."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._queue: deque[tuple[RequestId, int, int]] = deque()
        """Request, prompt tokens, tokens a chunk."""
        self._done = 0
        """Computed tokens of the first in the queue."""

    def add(self, request: RequestId, prompt_tokens: int, at_most: int | None = None) -> None:
        """``at_most``: a smaller bound for this prompt's chunks."""
        self._queue.append((request, prompt_tokens, min(self._chunk_tokens, at_most or self._chunk_tokens)))

    def next(self) -> Chunk | None:
        if not self._queue:
            return None
        request, total, most = self._queue[0]
        length = min(most, total - self._done)
        return Chunk(request, self._done, length, self._done + length == total)

    def computed(self, chunk: Chunk) -> None:
        """That chunk's rows are in the pages."""
        if chunk.last:
            self.leave(chunk.request)
        else:
            self._done += chunk.length

    def leave(self, request: RequestId) -> None:
        """Forget a request, between its chunks. Unknown: nothing."""
        if self._queue and self._queue[0][0] == request:
            self._queue.popleft()
            self._done = 0
        else:
            self._queue = deque(item for item in self._queue if item[0] != request)
