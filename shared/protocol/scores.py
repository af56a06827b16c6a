"""Log-probabilities of prompt tokens, chunk by chunk, for requests that ask for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shared.protocol.messages import PromptLogprobs, pack_int32

SCORED_CHUNK_TOKENS = 512
"""A prompt that is scored is computed in chunks of so many tokens: each of them costs a row of logits."""


class Scores(NamedTuple):
    """Of some tokens of a prompt: their own log-probabilities and ranks ``[n]``, the likeliest tokens in their places
    and those tokens' log-probabilities ``[n, top]``."""

    own: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_values: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Scored:
    """What one chunk is to score: ``next_tokens`` follow its first, second … token (nothing follows a prompt's last);
    the result is appended to ``into``."""

    next_tokens: npt.NDArray[np.int32]
    top: int
    into: list[Scores]


def packed(scores: Sequence[Scores]) -> PromptLogprobs:
    """All chunks' scores as one part of a message."""
    own, ranks, ids, values = (np.concatenate(parts) for parts in zip(*scores, strict=True))
    floats = np.dtype("<f4")
    top = ids.shape[1], own.astype(floats).tobytes()
    return PromptLogprobs(*top, pack_int32(ranks), pack_int32(ids.ravel()), values.astype(floats).tobytes())
