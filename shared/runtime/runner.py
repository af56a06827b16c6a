"""Forwards: a batch described by plain arrays goes in, sampled tokens come out. Called by one compute thread only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shared.kv.pool import KVPool
from shared.protocol.messages import Sampling
from shared.protocol.scores import Scored, Scores
from shared.runtime.attention import BatchedDecode, PackedPrefill, PageReader, View
from shared.runtime.model import LoadedModel
from shared.runtime.paged_cache import LayerCallback, PagedCache
from shared.runtime.sampler import History, Sampled, sample

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PrefillBatch:
    """Chunks of one or more prompts. All lists have one entry a sequence."""

    tokens: Int32s
    """[Σ q_lens]: the chunks' tokens, one sequence after the other."""
    q_lens: list[int]
    starts: list[int]
    """Tokens of each sequence that are in its pages already; the chunk's first token has this position."""
    pages: list[Int32s]
    """Each sequence's pages in order, at least enough for its start and chunk together."""
    sampling: list[Sampling | None]
    """None: not the prompt's last chunk, so nothing is sampled."""
    histories: Sequence[History | None] = ()
    """Of sequences whose sampling needs one; may be left out where none does."""
    scored: Sequence[Scored | None] = ()
    """Chunks whose tokens' log-probabilities are wanted; may be left out where none are."""


@dataclass(frozen=True)
class DecodeBatch:
    """The last token of each running sequence, not yet in its pages."""

    tokens: Int32s
    """[batch]"""
    lengths: Int32s
    """[batch]: tokens of each sequence, this one included; it is written at position ``length − 1``."""
    page_table: Int32s
    """[batch, ≥ pages of the longest]; entries past a sequence's length may hold anything (S58)."""
    sampling: list[Sampling]
    choices: list[int]
    """[batch]: which of its request's choices each sequence is."""
    histories: Sequence[History | None] = ()
    """See PrefillBatch."""
    copies: Sequence[tuple[int, int]] = ()
    """(page, its copy), made before the forward."""


class ModelRunner:
    """Runs a loaded model on a pool whose layout is that model's (``layout_for``)."""

    def __init__(self, loaded: LoadedModel, pool: KVPool) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._pool, self._page_size = pool, pool.layout.page_size
        self._cache = PagedCache(pool)
        self._reader = PageReader(pool)

    def prefill(self, batch: PrefillBatch, on_layer: LayerCallback | None = None) -> list[Sampled | None]:
        """Write the chunks' rows and sample the first token after each last chunk; None for the other sequences.

        ``on_layer`` is called in this thread as soon as a layer's rows are written, in layer order.
        """
        positions = np.concatenate(
            [np.arange(start, start + n) for start, n in zip(batch.starts, batch.q_lens, strict=True)]
        )
        pages = np.concatenate(
            [
                owned[np.arange(start, start + n) // self._page_size]
                for owned, start, n in zip(batch.pages, batch.starts, batch.q_lens, strict=True)
            ]
        )
        view = PackedPrefill(self._reader, batch.q_lens, batch.starts, batch.pages)
        last = [i for i, how in enumerate(batch.sampling) if how is not None]
        scored = {i: wanted for i, wanted in enumerate(batch.scored) if wanted is not None}
        ends = np.cumsum(batch.q_lens)
        firsts = {i: int(ends[i]) - batch.q_lens[i] for i in scored}
        rows = [np.arange(first, first + len(scored[i].next_tokens)) for i, first in firsts.items()]
        keep = np.unique(np.concatenate([ends[last] - 1, *rows]))
        logits = self._forward(batch.tokens[None], positions[None], pages, view, on_layer, keep)[0]
        for wanted, mine in zip(scored.values(), rows, strict=True):
            wanted.into.append(_scores(logits[torch.from_numpy(np.searchsorted(keep, mine))], wanted))
        samples: list[Sampled | None] = [None] * len(batch.q_lens)
        if last:
            at = logits[torch.from_numpy(np.searchsorted(keep, ends[last] - 1))]
            lengths = [batch.starts[i] + batch.q_lens[i] for i in last]
            histories = [batch.histories[i] for i in last] if batch.histories else ()
            drawn = sample(at, [how for how in batch.sampling if how is not None], lengths, [0] * len(last), histories)
            for i, sampled in zip(last, drawn, strict=True):
                samples[i] = sampled
        return samples

    def decode(self, batch: DecodeBatch, on_layer: LayerCallback | None = None) -> list[Sampled]:
        """Write each sequence's last token's rows and sample the token after it."""
        for original, copy in batch.copies:
            self._pool.copy(original, copy)
        positions = batch.lengths.astype(np.int64) - 1
        pages = batch.page_table[np.arange(len(positions)), positions // self._page_size]
        view = BatchedDecode(self._reader, batch.page_table, batch.lengths)
        logits = self._forward(batch.tokens[:, None], positions[:, None], pages, view, on_layer, np.zeros(1, np.int64))
        return sample(logits[:, 0], batch.sampling, batch.lengths.tolist(), batch.choices, batch.histories)

    @torch.inference_mode()
    def _forward(
        self,
        tokens: Int32s,
        positions: Int64s,
        pages: Int32s,
        view: View,
        on_layer: LayerCallback | None,
        keep: Int64s,
    ) -> torch.Tensor:
        """tokens, positions [batch, length], each token's page [batch · length] → logits [batch, kept, vocabulary]."""
        cache = self._cache
        slots = pages.astype(np.int64) * self._page_size + positions.reshape(-1) % self._page_size
        cache.slots, cache.on_layer = torch.from_numpy(slots).to(self._device), on_layer
        output = self._model(
            input_ids=torch.from_numpy(tokens.astype(np.int64)).to(self._device),
            position_ids=torch.from_numpy(positions).to(self._device),
            cache=cache,
            logits_to_keep=torch.from_numpy(keep).to(self._device),
            paged=view,
        )
        logits: torch.Tensor = output.logits
        return logits


def _scores(logits: torch.Tensor, wanted: Scored) -> Scores:
    """``logits`` [n, vocabulary]: those that each of the ``n`` next tokens would be drawn from."""
    logprobs = logits.float().log_softmax(-1)
    chosen = torch.from_numpy(wanted.next_tokens.astype(np.int64)).to(logits.device)
    values, ids = logprobs.topk(min(wanted.top, logprobs.shape[-1]), -1)
    own = logprobs.gather(1, chosen[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    return Scores(own[:, 0].cpu().numpy(), ranks.int().cpu().numpy(), ids.int().cpu().numpy(), values.cpu().numpy())
