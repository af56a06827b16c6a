"""The outputs of one client's running engine requests, from the engine's messages to the handler that waits."""

import asyncio
from collections.abc import Callable, Sequence

from shared.errors import HandoffError
from shared.ids import RequestId
from shared.protocol.local import Cancel, EngineError, Generate, Output


class EngineFailure(HandoffError):
    """A request that its engine (or its engine's death) ended with an error."""

    def __init__(self, error: EngineError) -> None:
        super().__init__(error.message, code=error.code)
        self.http_status, self.type, self.retryable = error.http_status, error.type, error.retryable


class RequestStream:
    """Outputs in the order they came. Each choice's last one carries ``finish``; an error is raised instead.

    ``cancel`` tells the engine that it need not go on. ``outcomes``: how each request ended, as far as it has.
    """

    def __init__(self, messages: Sequence[Generate], client_id: str, cancel: Callable[[Cancel], None]) -> None:
        self.client_id = client_id
        self.outcomes = {message.request: "aborted" for message in messages}
        self._cancel = cancel
        self._queue: asyncio.Queue[Output] = asyncio.Queue()
        choices = [(message.request, choice) for message in messages for choice in range(message.choices)]
        self._unheard, self._unread = set(choices), set(choices)
        """Choices whose end the engine has not told; whose end the handler has not seen."""

    def put(self, output: Output) -> bool:
        """→ Does the engine have no more to say of this request?"""
        if output.error is not None:
            self._unheard = {key for key in self._unheard if key[0] != output.request}
        elif output.finish is not None:
            self._unheard.discard((output.request, output.choice))
        self._queue.put_nowait(output)
        return not self._computed(output.request)

    def stop(self, request: RequestId, choice: int) -> None:
        """A choice's answer is complete although the engine did not end it: its text met a stop string."""
        self._read(request, choice)
        if (request, choice) in self._unheard:
            self._unheard.discard((request, choice))
            self._cancel(Cancel(request, choice if self._computed(request) else None))

    def _computed(self, request: RequestId) -> bool:
        return any(of == request for of, _ in self._unheard)

    def _read(self, request: RequestId, choice: int) -> None:
        self._unread.discard((request, choice))
        if not any(of == request for of, _ in self._unread):
            self.outcomes[request] = "finished"

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> Output:
        """Raises EngineFailure where a request ended with an error."""
        while self._unread:
            output = await self._queue.get()
            if output.error is not None:
                self.outcomes[output.request] = "failed"
                self._unread.clear()
                raise EngineFailure(output.error)
            if (output.request, output.choice) not in self._unread:
                continue  # it was on its way when the choice was stopped
            if output.finish is not None:
                self._read(output.request, output.choice)
            return output
        raise StopAsyncIteration
