"""A tiny model behind a runner, with a pool full of other requests' leavings, next to transformers' own generate."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from shared.kv.layout import KV
from shared.kv.pool import KVPool
from shared.protocol.messages import Sampling
from shared.runtime.model import layout_for, load_model
from shared.runtime.runner import DecodeBatch, ModelRunner, PrefillBatch
from shared.runtime.sampler import Sampled

GREEDY = Sampling(seed=0, temperature=0.0)
PAGE_SIZE = 8

Int32s = npt.NDArray[np.int32]


class Rig:
    """``seed`` decides the order in which physical pages are given out, and the leavings in them."""

    def __init__(self, folder: Path, *, num_pages: int = 96, page_size: int = PAGE_SIZE, seed: int = 0) -> None:
        self.loaded = load_model(str(folder), "auto", "cpu", threads=1)
        self.pool = KVPool(layout_for(self.loaded.config, page_size, self.loaded.dtype), num_pages, "cpu")
        self.runner = ModelRunner(self.loaded, self.pool)
        self.page_size = page_size
        self.random = np.random.default_rng(seed)
        self._free = self.random.permutation(np.arange(1, num_pages)).astype(np.int32)
        generator = torch.Generator().manual_seed(seed)
        for buffer in self.pool.layout.buffers:
            self.pages(buffer.layer).normal_(std=30.0, generator=generator)

    def pages(self, layer: int) -> torch.Tensor:
        return self.pool.pages(KV, layer)

    def lease(self, tokens: int) -> Int32s:
        """Pages for so many tokens, in no order."""
        count = -(-tokens // self.page_size)
        leased, self._free = self._free[:count], self._free[count:]
        assert len(leased) == count
        return leased

    def prefill(
        self, prompts: list[list[int]], pages: list[Int32s], sampling: list[Sampling], chunk: int = 10**6
    ) -> list[Sampled]:
        """All prompts side by side, each in chunks of ``chunk`` tokens, so that forwards mix pasts of any length."""
        first: dict[int, Sampled] = {}
        starts = dict.fromkeys(range(len(prompts)), 0)
        while starts:
            q_lens = {i: min(chunk, len(prompts[i]) - start) for i, start in starts.items()}
            last = {i: start + q_lens[i] == len(prompts[i]) for i, start in starts.items()}
            batch = PrefillBatch(
                tokens=np.array([t for i, s in starts.items() for t in prompts[i][s : s + q_lens[i]]], np.int32),
                q_lens=list(q_lens.values()),
                starts=list(starts.values()),
                pages=[pages[i] for i in starts],
                sampling=[sampling[i] if last[i] else None for i in starts],
            )
            for i, sampled in zip(list(starts), self.runner.prefill(batch), strict=True):
                assert (sampled is not None) == last[i]
                if sampled is not None:
                    first[i] = sampled
                starts[i] += q_lens[i]
            starts = {i: start for i, start in starts.items() if not last[i]}
        return [first[i] for i in range(len(prompts))]

    def table(self, pages: list[Int32s], lengths: list[int]) -> Int32s:
        """A page table wider than needed; what lies past each sequence's length points anywhere (S58)."""
        junk = [-1, 10**6, 0, *np.concatenate(pages).tolist()]
        table = self.random.choice(junk, (len(pages), max(map(len, pages)) + 2)).astype(np.int32)
        for row, owned, length in zip(table, pages, lengths, strict=True):
            used = -(-length // self.page_size)
            row[:used] = owned[:used]
        return table

    def decode(
        self, pages: list[Int32s], lengths: list[int], tokens: list[int], sampling: list[Sampling]
    ) -> list[Sampled]:
        table = self.table(pages, lengths)
        rows = np.array(tokens, np.int32), np.array(lengths, np.int32)
        return self.runner.decode(DecodeBatch(*rows, table, sampling, [0] * len(tokens)))

    def generate(
        self, prompts: list[list[int]], count: int, *, chunk: int = 10**6, sampling: list[Sampling] | None = None
    ) -> list[list[Sampled]]:
        """``count`` tokens after each prompt, all prompts together."""
        sampling = sampling or [GREEDY] * len(prompts)
        pages = [self.lease(len(prompt) + count) for prompt in prompts]
        answers = [[sampled] for sampled in self.prefill(prompts, pages, sampling, chunk)]
        for step in range(1, count):
            lengths = [len(prompt) + step for prompt in prompts]
            drawn = self.decode(pages, lengths, [answer[-1].token for answer in answers], sampling)
            for answer, sampled in zip(answers, drawn, strict=True):
                answer.append(sampled)
        return answers


def reference_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """transformers' greedy answer, of full length."""
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def prompt_of(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed + 1000 * length).integers(0, 256, length).tolist()
    return tokens


def tokens_of(answer: list[Sampled]) -> list[int]:
    return [sampled.token for sampled in answer]
