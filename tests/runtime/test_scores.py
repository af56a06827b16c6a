"""Log-probabilities of a prompt's tokens, in chunks and packed with other prompts, against one plain forward."""

from pathlib import Path

import numpy as np
import pytest
import torch

from shared.protocol.messages import unpack_float32, unpack_int32
from shared.protocol.scores import Scored, Scores, packed
from shared.runtime.runner import PrefillBatch
from tests.runtime.rig import GREEDY, PAGE_SIZE, Rig, prompt_of, reference_model
from tests.tiny_models import save_tiny_llama


@pytest.mark.parametrize("chunk", [PAGE_SIZE, 3 * PAGE_SIZE, 10**6])
def test_scores_equal_one_forward(tmp_path: Path, chunk: int) -> None:
    folder = save_tiny_llama(tmp_path)
    rig, length, top = Rig(folder), 4 * PAGE_SIZE + 3, 3
    prompt, other = np.array(prompt_of(length), np.int32), np.array(prompt_of(5), np.int32)
    pages, other_pages = rig.lease(length), rig.lease(5)
    scores: list[Scores] = []
    for start in range(0, length, chunk):
        piece = prompt[start : start + chunk]
        after = prompt[start + 1 : start + len(piece) + 1]
        last = GREEDY if start + len(piece) == length else None
        batch = PrefillBatch(
            tokens=np.concatenate([other, piece]),
            q_lens=[5, len(piece)],
            starts=[0, start],
            pages=[other_pages, pages],
            sampling=[GREEDY, last],
            scored=[None, Scored(after, top, scores)],
        )
        samples = rig.runner.prefill(batch)
    told = packed(scores)

    with torch.inference_mode():
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        logprobs = reference_model(folder)(input_ids=ids).logits[0].log_softmax(-1)
    own = logprobs[:-1].gather(1, ids[0, 1:, None])
    likely = logprobs[:-1].topk(top, -1)
    assert told.fits(length - 1, top)
    np.testing.assert_allclose(unpack_float32(told.own), own[:, 0].numpy(), atol=2e-5)
    assert unpack_int32(told.ranks).tolist() == ((logprobs[:-1] > own).sum(-1) + 1).tolist()
    assert unpack_int32(told.top_ids).tolist() == likely.indices.ravel().tolist()
    np.testing.assert_allclose(unpack_float32(told.top_values), likely.values.ravel().numpy(), atol=2e-5)
    assert samples[1] is not None
    assert samples[1].token == int(logprobs[-1].argmax())
    assert len(set(unpack_int32(told.ranks).tolist())) > 5, "all ranks alike prove nothing"
