"""Logits → tokens. Each draw's randomness is a pure function of (seed, choice, position), so that a request goes on
with the same draws in another process and in any batch."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shared.kv.layout import MAX_TOP_LOGPROBS, TopLogprobs
from shared.protocol.messages import Sampling

GREEDY_BELOW = 1e-5
"""Temperatures below this are 0: dividing by them would overflow, and they leave no choice."""

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]


class Sampled(NamedTuple):
    """``logprob`` is the model's own: of the unscaled, unfiltered distribution. NaN where the model computed NaN."""

    token: int
    logprob: float
    top: TopLogprobs = ()


class History(NamedTuple):
    """The tokens before the one that is drawn: ``[prompt]`` and ``[output]``."""

    prompt: Ids
    output: Ids


def sample(
    logits: torch.Tensor,
    sampling: Sequence[Sampling],
    positions: Sequence[int],
    choices: Sequence[int],
    histories: Sequence[History | None] = (),
) -> list[Sampled]:
    """One token for each row of ``logits`` [batch, vocabulary].

    ``positions[i]`` is the index in the whole sequence of the token that is drawn; ``histories[i]`` is needed where
    penalties are. Greedy takes the lowest of equally likely tokens.
    """
    logits = logits.float()
    best = logits.argmax(-1)
    tokens = best.tolist()
    for i, how in enumerate(sampling):
        changed = how.needs_history or how.logit_bias or positions[i] < how.banned_before
        if how.temperature < GREEDY_BELOW and not changed:
            continue
        row = logits[i].cpu().numpy()
        if changed:
            row = adjusted(row, how, positions[i], histories[i] if histories else None)
        if how.temperature < GREEDY_BELOW:
            tokens[i] = int(row.argmax())
        else:
            tokens[i] = draw(row, how, uniform(how.seed, choices[i], positions[i]))
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, chosen)[:, 0].tolist()
    return [
        Sampled(token, logprob, _likeliest(logprobs[i], how.top_logprobs))
        for i, (token, logprob, how) in enumerate(zip(tokens, own, sampling, strict=True))
    ]


def _likeliest(logprobs: torch.Tensor, count: int) -> TopLogprobs:
    if not count:
        return ()
    values, ids = logprobs.topk(min(count, MAX_TOP_LOGPROBS, len(logprobs)))
    return list(zip(ids.tolist(), values.tolist(), strict=True))


def adjusted(logits: Floats, how: Sampling, position: int, history: History | None) -> Floats:
    """A copy of ``logits`` [vocabulary] after repetition, frequency and presence penalties, bias and ban, in vLLM's
    order. The first penalty is over prompt and output, the others over the output alone, as OpenAI's."""
    row = logits.copy()
    if history is not None:
        if how.repetition_penalty != 1:
            seen = np.unique(np.concatenate(history))
            row[seen] = np.where(row[seen] > 0, row[seen] / how.repetition_penalty, row[seen] * how.repetition_penalty)
        produced, counts = np.unique(history.output, return_counts=True)
        row[produced] -= (how.frequency_penalty * counts + how.presence_penalty).astype(np.float32)
    for token, bias in how.logit_bias:
        row[token] += bias
    if position < how.banned_before:
        row[how.banned] = -np.inf
    return row


def uniform(seed: int, choice: int, position: int) -> float:
    """In [0, 1), 53 bits. Seeds are taken modulo 2**64."""
    bits = np.random.Philox(key=seed % 2**64, counter=[position, choice, 0, 0]).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


def draw(logits: Floats, how: Sampling, u: float) -> int:
    """The token at ``u`` of the distribution that temperature, then min_p, top_k and top_p leave of ``logits``
    [vocabulary].

    Ties at the edge of top_k or top_p go to the lower token. ``top_k`` ≤ 0, ``top_p`` ≥ 1 and ``min_p`` 0 are off.
    """
    peak = logits.max()
    if not np.isfinite(peak):  # no distribution: whoever caused it gets a token, and the rest of its batch theirs
        return int(np.where(np.isnan(logits), -np.inf, logits).argmax())
    weights = np.exp((logits - peak) / np.float32(how.temperature))
    if how.min_p > 0:  # the likeliest token's weight is 1
        weights[weights < how.min_p] = 0
    tokens: npt.NDArray[np.intp] | None = None
    """The tokens that are left, likeliest first; None: all of them, in their own order."""
    if 0 < how.top_k < len(logits):
        edge = np.partition(logits, -how.top_k)[-how.top_k]
        tokens = _likeliest_first(logits, np.flatnonzero(logits >= edge))[: how.top_k]
        weights = weights[tokens]
    if how.top_p < 1:
        total = weights.sum(dtype=np.float64)
        if tokens is None:
            # All tokens below this weight together have less than 1 − top_p of the mass, so none of them is needed.
            needed = np.flatnonzero(weights >= (1 - how.top_p) * total / len(weights))
            tokens = _likeliest_first(logits, needed)
            weights = weights[tokens]
        kept = int(np.searchsorted(np.cumsum(weights, dtype=np.float64), how.top_p * total)) + 1
        tokens, weights = tokens[:kept], weights[:kept]
    mass = np.cumsum(weights, dtype=np.float64)
    index = min(int(np.searchsorted(mass, u * mass[-1], side="right")), len(mass) - 1)
    return int(index if tokens is None else tokens[index])


def _likeliest_first(logits: Floats, tokens: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    return tokens[np.argsort(-logits[tokens], kind="stable")]
