"""One HTTP request's answer: its choices' tokens in, final pieces of text out, with the metrics on the way."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from decode_svc.scored import ScoredPrompt, noted, scored_prompt
from decode_svc.shapes import Finished, TokenLogprob, usage
from decode_svc.text import Assembler, Stops, TextCodec
from shared.ids import RequestId
from shared.ops.metrics import Registry
from shared.ops.stream import RequestStream
from shared.protocol.local import FinishReason, Generate, Handover, Output
from shared.protocol.messages import PromptLogprobs


@dataclass(frozen=True)
class Job:
    """One checked HTTP request, and how its answer is to look. Each of its prompts is one request to the engine."""

    messages: Sequence[Generate]
    stops: Stops
    logprobs: bool
    prompt_logprobs: int | None
    arrived_s: float
    echoes: Sequence[str] | None
    """Each prompt's text, where its choices' texts are to begin with it."""


@dataclass(frozen=True)
class Piece:
    """More text of one choice, possibly none; ``finish`` on its last."""

    choice: "Choice"
    text: str
    finish: FinishReason | None


class Choice:
    """One choice's text so far."""

    def __init__(self, index: int, message: Generate, job: Job, codec: TextCodec, echo: str | None) -> None:
        self.index = index
        self.token_ids: list[int] = []
        """Those that count: up to the one that ended the answer."""
        self.pieces: list[str] = []
        self.finish: FinishReason | None = None
        self.prompt_logprobs: list[Any] | None = None
        self.last_s: float | None = None
        self.prompt_tokens = len(message.prompt) // 4
        self._message, self._job, self._codec, self._echo = message, job, codec, echo
        self._text = Assembler(codec, job.stops)
        self._logprobs: list[TokenLogprob] = []
        self._offset = 0

    @property
    def stopped(self) -> bool:
        return self._text.stopped

    def feed(self, output: Output, prompt: ScoredPrompt | None) -> tuple[str, int]:
        """→ (text that is final now, tokens that counted). ``prompt``: the request's, where it was asked for."""
        first = self.last_s is None
        before = self._text.tokens
        text = self._text.feed(output.tokens, output.finish)
        counted = self._text.tokens - before
        self.token_ids += output.tokens[:counted]
        if first and self._echo is not None:
            text = self._echo + text
        if first and prompt is not None:
            self._logprobs += prompt.echoed
            self._offset, self.prompt_logprobs = prompt.characters, prompt.listed
        if self._job.logprobs:
            tops = output.top or [[]] * counted
            found = noted(self._codec, output.tokens[:counted], output.logprobs, tops, self._offset)
            self._offset += sum(len(token.text) for token in found)
            self._logprobs += found
        self.finish = "stop" if self._text.stopped else output.finish
        return text, counted

    def logprobs(self) -> Sequence[TokenLogprob] | None:
        """Of the tokens that counted since the last call, where they were asked for."""
        taken, self._logprobs = self._logprobs, []
        return taken if self._job.logprobs else None

    def finished(self) -> Finished:
        assert self.finish is not None
        text = "".join(self.pieces)
        return Finished(self.index, text, self.finish, self.token_ids, self.logprobs(), self.prompt_logprobs)


class Answer:
    """All choices of a running job. ``now``: monotonic seconds. ``off_loop`` does what would hold up the loop."""

    def __init__(
        self,
        job: Job,
        stream: RequestStream,
        codec: TextCodec,
        registry: Registry,
        now: Callable[[], float],
        off_loop: Callable[[Callable[[], ScoredPrompt]], Awaitable[ScoredPrompt]],
    ) -> None:
        self.handover: Handover | None = None
        """The first that arrived."""
        self.choices: list[Choice] = []
        self._job, self._stream, self._registry, self._now = job, stream, registry, now
        self._codec, self._off_loop = codec, off_loop
        self._first: dict[RequestId, int] = {}
        self._prompts: dict[RequestId, ScoredPrompt] = {}
        echoes: Sequence[str | None] = job.echoes or [None] * len(job.messages)
        for message, echo in zip(job.messages, echoes, strict=True):
            first = self._first[message.request] = len(self.choices)
            self.choices += [Choice(first + i, message, job, codec, echo) for i in range(message.choices)]

    async def next(self) -> Piece | None:
        """The next piece; None once every choice has had its last. Raises EngineFailure."""
        output = await anext(self._stream, None)
        if output is None:
            return None
        request, choice = output.request, self.choices[self._first[output.request] + output.choice]
        if output.prompt is not None:
            self._prompts[request] = await self._scored(request, output.prompt)
        text, counted = choice.feed(output, self._prompts.get(request))
        self._measure(output, choice, counted)
        if choice.stopped:
            self._stream.stop(request, output.choice)
        return Piece(choice, text, choice.finish)

    async def _scored(self, request: RequestId, scores: PromptLogprobs) -> ScoredPrompt:
        message = next(message for message in self._job.messages if message.request == request)
        echoed = message.sampling.top_logprobs if self._job.logprobs and self._job.echoes is not None else None
        codec, listed = self._codec, self._job.prompt_logprobs
        return await self._off_loop(partial(scored_prompt, message.prompt, scores, codec, echoed, listed))

    def usage(self) -> dict[str, int]:
        prompts = sum(len(message.prompt) // 4 for message in self._job.messages)
        return usage(prompts, sum(len(choice.token_ids) for choice in self.choices))

    def _measure(self, output: Output, choice: Choice, tokens: int) -> None:
        now_s, registry, handover = self._now(), self._registry, output.handover
        if choice.last_s is not None:
            if tokens:
                registry.sample("handoff_inter_token_seconds", (now_s - choice.last_s) / tokens)
        elif output.choice == 0:
            registry.sample("handoff_time_to_first_token_seconds", now_s - self._job.arrived_s)
            registry.count("handoff_prompt_tokens_total", choice.prompt_tokens)
        registry.count("handoff_completion_tokens_total", tokens)
        choice.last_s = now_s
        if handover is None:
            return
        self.handover = self.handover or handover
        registry.sample("handoff_commit_seconds", handover.commit_s)
        if sent_bytes := handover.bytes_sent:
            registry.count("handoff_transfer_bytes_total", sent_bytes)
            registry.sample("handoff_transfer_seconds", handover.slowest_write_s)
            registry.sample("handoff_transfer_exposed_seconds", handover.timings.exposed_s)
            registry.sample("handoff_transfer_size_bytes", sent_bytes)
            registry.sample("handoff_goodput_bytes_per_second", sent_bytes / max(handover.slowest_write_s, 1e-9))
