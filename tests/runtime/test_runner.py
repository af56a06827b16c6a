"""The runner against transformers' own generate, and what it promises about pages, rows and callbacks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from shared.protocol.messages import Sampling
from shared.runtime.model import FAMILIES
from shared.runtime.paged_cache import PagedCache
from shared.runtime.runner import PrefillBatch
from tests.runtime.rig import GREEDY, PAGE_SIZE, Rig, prompt_of, reference_model, reference_tokens, tokens_of
from tests.tiny_models import save_tiny, save_tiny_llama, save_tiny_mha, save_tiny_qwen3

LENGTHS = [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 5 * PAGE_SIZE + 3]
MAKERS = {"llama": save_tiny_llama, "qwen3": save_tiny_qwen3, "mha": save_tiny_mha}
FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None, "num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


@pytest.fixture(scope="module", params=MAKERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"), layers=3)


@pytest.mark.parametrize("chunk", [10**6, PAGE_SIZE, 11, 1], ids=lambda chunk: f"chunk{chunk}")
def test_equals_generate_alone_and_together(folder: Path, chunk: int) -> None:
    rig, reference = Rig(folder, num_pages=192), reference_model(folder)
    prompts = [prompt_of(length) for length in LENGTHS]
    expected = [reference_tokens(reference, prompt, 20) for prompt in prompts]
    assert max(len(set(answer)) for answer in expected) > 5, "a model that repeats itself proves nothing"

    together = rig.generate(prompts, 20, chunk=chunk)
    alone = [rig.generate([prompt], 20, chunk=chunk)[0] for prompt in prompts]

    assert [tokens_of(answer) for answer in together] == expected
    assert [tokens_of(answer) for answer in alone] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_supported_family_equals_generate(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path, **FAMILY_FIELDS.get(family, {}))
    prompts = [prompt_of(1), prompt_of(2 * PAGE_SIZE + 3)]
    reference = reference_model(tmp_path)

    answers = Rig(tmp_path).generate(prompts, 12, chunk=7)

    assert [tokens_of(answer) for answer in answers] == [reference_tokens(reference, p, 12) for p in prompts]


def test_logprobs_are_those_of_the_raw_distribution(llama: Path) -> None:
    prompt, how = prompt_of(10), Sampling(seed=3, temperature=0.7, top_k=20)
    answer = Rig(llama).generate([prompt], 6, sampling=[how])[0]
    with torch.inference_mode():
        logits = reference_model(llama)(torch.tensor([prompt + tokens_of(answer)])).logits[0]
    raw = logits.log_softmax(-1)
    expected = [raw[len(prompt) - 1 + i, sampled.token].item() for i, sampled in enumerate(answer)]
    assert [sampled.logprob for sampled in answer] == pytest.approx(expected, abs=1e-4)


def test_sampling_goes_on_elsewhere_with_the_same_draws(llama: Path) -> None:
    """The hand-over in small: B gets A's pages at other physical places and goes on in a batch with strangers."""
    how, prompt, total = Sampling(seed=11, temperature=1.0, top_p=0.95), prompt_of(19), 12
    whole = tokens_of(Rig(llama, seed=1).generate([prompt], total, sampling=[how])[0])
    assert len(set(whole)) > 3

    a, b = Rig(llama, seed=2), Rig(llama, seed=3)
    pages_a, pages_b = a.lease(len(prompt)), b.lease(len(prompt) + total)
    first = a.prefill([prompt], [pages_a], [how])[0]
    for buffer in a.pool.layout.buffers:
        b.pages(buffer.layer)[pages_b[: len(pages_a)]] = a.pages(buffer.layer)[pages_a]
    others = [prompt_of(5), prompt_of(40)]
    pages = [*(b.lease(len(other) + total) for other in others), pages_b]
    tokens = [s.token for s in b.prefill(others, pages[:2], [GREEDY, GREEDY])] + [first.token]
    answer = [first.token]
    for step in range(1, total):
        lengths = [len(p) + step for p in (*others, prompt)]
        tokens = [s.token for s in b.decode(pages, lengths, tokens, [GREEDY, GREEDY, how])]
        answer.append(tokens[2])

    assert answer == whole


def test_rows_land_exactly_once_at_their_slots_and_nowhere_else(llama: Path) -> None:
    rig, reference = Rig(llama), reference_model(llama)
    prompts = [prompt_of(13), prompt_of(PAGE_SIZE)]
    pages = [rig.lease(30), rig.lease(30)]
    before = [rig.pages(b.layer).clone() for b in rig.pool.layout.buffers]

    first = rig.prefill(prompts, pages, [GREEDY, GREEDY], chunk=5)
    rig.decode(pages, [14, PAGE_SIZE + 1], [s.token for s in first], [GREEDY, GREEDY])

    cache = [DynamicCache(), DynamicCache()]
    with torch.inference_mode():
        for prompt, sampled, kept in zip(prompts, first, cache, strict=True):
            reference(torch.tensor([[*prompt, sampled.token]]), cache=kept)
    for layer, old in enumerate(before):
        rows, expected = rig.pages(layer).flatten(0, 1), old.flatten(0, 1)
        for owned, kept in zip(pages, cache, strict=True):
            keys, values = kept.layers[layer].keys[0], kept.layers[layer].values[0]
            for position in range(keys.shape[1]):
                slot = int(owned[position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE
                expected[slot] = torch.stack((keys[:, position], values[:, position]))
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)
        untouched = torch.ones(rig.pool.num_pages, dtype=torch.bool)
        untouched[np.concatenate(pages)] = False
        assert torch.equal(rig.pages(layer)[untouched], old[untouched])


def test_layer_callback_fires_once_in_order_when_the_rows_are_final(llama: Path) -> None:
    rig = Rig(llama)
    owned = rig.lease(20)
    seen: list[tuple[int, torch.Tensor]] = []
    batch = PrefillBatch(np.array(prompt_of(20), np.int32), [20], [0], [owned], [GREEDY])

    rig.runner.prefill(batch, on_layer=lambda layer: seen.append((layer, rig.pages(layer).clone())))

    assert [layer for layer, _ in seen] == [0, 1, 2]
    for layer, rows in seen:
        assert torch.equal(rows, rig.pages(layer))
    rig.runner.prefill(batch)
    assert len(seen) == 3, "the callback is of one call only"


def test_logits_are_computed_for_last_chunks_only(llama: Path) -> None:
    rig = Rig(llama)
    widths: list[int] = []
    rig.loaded.model.lm_head.register_forward_hook(lambda _, args, __: widths.append(args[0].shape[1]))
    tokens = np.array([*prompt_of(9), *prompt_of(6), *prompt_of(3)], np.int32)
    pages = [rig.lease(9), rig.lease(6), rig.lease(3)]

    samples = rig.runner.prefill(PrefillBatch(tokens, [9, 6, 3], [0, 0, 0], pages, [GREEDY, None, GREEDY]))
    assert [sampled is None for sampled in samples] == [False, True, False]
    rig.runner.prefill(PrefillBatch(tokens, [9, 6, 3], [0, 0, 0], pages, [None, None, None]))
    assert widths == [2, 0]


def test_a_request_that_computed_nan_does_not_reach_the_next_owner_of_its_pages(llama: Path) -> None:
    expected = tokens_of(Rig(llama).generate([prompt_of(3)], 10)[0])
    rig = Rig(llama)
    cache = PagedCache(rig.pool)
    cache.slots = torch.arange(rig.pool.num_pages * PAGE_SIZE)
    poison = torch.full((1, 2, len(cache.slots), 16), float("nan"))
    poison[..., ::2] = float("inf")
    for layer in range(3):
        cache.update(poison, -poison, layer)
        assert rig.pages(layer).isfinite().all()

    assert tokens_of(rig.generate([prompt_of(3)], 10)[0]) == expected
