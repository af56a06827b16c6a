"""Counter-based draws: the same in any batch and process, and of the distribution that was asked for."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from shared.protocol.messages import Sampling
from shared.runtime.sampler import History, adjusted, draw, sample, uniform

PROBS = np.array([0.1, 0.5, 0.15, 0.25])
LOGITS = np.log(PROBS).astype(np.float32)


def reachable(how: Sampling, logits: npt.NDArray[np.float32] = LOGITS) -> set[int]:
    return {draw(logits, how, u) for u in np.linspace(0, 1, 1001, endpoint=False)}


def how(**fields: float) -> Sampling:
    return Sampling(seed=0, **fields)  # type: ignore[arg-type]


def test_draws_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 300)
    asked = [
        Sampling(seed=1),
        Sampling(seed=1, temperature=0.0),
        Sampling(seed=2, top_k=5),
        Sampling(seed=3, top_p=0.5),
        Sampling(seed=3, temperature=2.0, top_k=50, top_p=0.9),
        Sampling(seed=-4),
    ]
    positions, choices = [7, 8, 9, 10, 11, 12], [0, 0, 1, 0, 2, 0]
    together = sample(logits, asked, positions, choices)
    backwards = sample(logits.flip(0), asked[::-1], positions[::-1], choices[::-1])
    alone = [sample(logits[i : i + 1], [asked[i]], [positions[i]], [choices[i]])[0] for i in range(6)]
    assert [s.token for s in together] == [s.token for s in backwards[::-1]] == [s.token for s in alone]
    assert [s.logprob for s in together] == pytest.approx([s.logprob for s in alone], abs=1e-5)


def test_randomness_is_pinned() -> None:
    """Both sides of a hand-over must agree on these, whatever they run on."""
    assert uniform(0, 0, 0) == 0.011546754286331562
    assert uniform(2**63, 3, 4095) == 0.37116400026180774
    assert uniform(-1, 0, 1) == uniform(2**64 - 1, 0, 1)
    assert (
        len({uniform(seed, choice, position) for seed in range(4) for choice in range(4) for position in range(9)})
        == 144
    )


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(2, 50_000)
    logits[0, [40_000, 123, 7_000]] = 3.0
    drawn = sample(logits, [how(temperature=0.0), how(temperature=1e-9)], [1, 1], [0, 0])
    assert [s.token for s in drawn] == [123, 0]
    assert drawn[1].logprob == pytest.approx(-math.log(50_000))


def test_logprob_ignores_temperature_and_filters() -> None:
    drawn = sample(torch.from_numpy(LOGITS)[None], [how(temperature=0.2, top_k=1)], [5], [0])[0]
    assert drawn.token == 1
    assert drawn.logprob == pytest.approx(math.log(0.5))


@pytest.mark.parametrize(
    ("top_k", "left"), [(1, {1}), (2, {1, 3}), (3, {1, 2, 3}), (4, {0, 1, 2, 3}), (99, {0, 1, 2, 3}), (0, {0, 1, 2, 3})]
)
def test_top_k(top_k: int, left: set[int]) -> None:
    assert reachable(how(top_k=top_k)) == left


@pytest.mark.parametrize(
    ("top_p", "left"),
    [(1e-9, {1}), (0.0, {1}), (0.49, {1}), (0.51, {1, 3}), (0.74, {1, 3}), (0.76, {1, 2, 3}), (1.0, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_smallest_set_with_that_mass(top_p: float, left: set[int]) -> None:
    assert reachable(how(top_p=top_p)) == left


def test_top_p_counts_what_top_k_left() -> None:
    # Of 0.5 and 0.25, renormalised, the first alone has two thirds.
    assert reachable(how(top_k=2, top_p=0.66)) == {1}
    assert reachable(how(top_k=2, top_p=0.67)) == {1, 3}


def test_ties_at_an_edge_go_to_the_lower_token() -> None:
    flat = np.zeros(10, np.float32)
    assert reachable(how(top_k=3), flat) == {0, 1, 2}
    assert reachable(how(top_p=0.25), flat) == {0, 1, 2}


def test_top_p_equals_a_full_sort() -> None:
    random = np.random.default_rng(5)
    for top_p in (0.05, 0.5, 0.9, 0.999):
        logits = random.normal(0, 3, 2000).astype(np.float32)
        probs = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
        order = np.argsort(-probs, kind="stable")
        kept = order[: int(np.searchsorted(np.cumsum(probs[order]), top_p)) + 1]
        drawn = [draw(logits, how(top_p=top_p), u) for u in np.linspace(0, 1 - 1e-12, 400)]
        assert drawn[0] == kept[0]
        assert drawn[-1] == kept[-1]
        assert set(drawn) <= set(kept.tolist())


@pytest.mark.parametrize(
    "asked", [how(), how(temperature=0.5), how(top_k=3), how(top_p=0.76, temperature=2.0)], ids=str
)
def test_frequencies_are_those_of_the_distribution(asked: Sampling) -> None:
    draws = 4000
    counts = np.bincount([draw(LOGITS, asked, uniform(9, 0, i)) for i in range(draws)], minlength=4)
    expected = PROBS ** (1 / asked.temperature)
    expected /= expected.sum()
    expected[[i for i in range(4) if i not in reachable(asked)]] = 0
    expected /= expected.sum()
    assert counts / draws == pytest.approx(expected, abs=4 * 0.5 / math.sqrt(draws))
    assert (counts[expected == 0] == 0).all()


def test_extreme_draws_stay_inside() -> None:
    logits = np.array([-np.inf, 5.0, -np.inf], np.float32)
    assert draw(logits, how(), 0.0) == 1
    assert draw(logits, how(), 1 - 2**-53) == 1
    assert draw(logits, how(temperature=100.0, top_p=0.9999), 1 - 2**-53) == 1


def test_min_p_leaves_what_is_likely_enough_beside_the_likeliest() -> None:
    assert reachable(how(min_p=0.5)) == {1, 3}
    assert reachable(how(min_p=0.19)) == {0, 1, 2, 3}
    assert reachable(how(min_p=1.0)) == {1}
    assert reachable(how(min_p=0.31, temperature=0.5)) == {1}  # after temperature: 0.25² / 0.5² is 0.25


HISTORY = History(np.array([0, 2, 2], np.int32), np.array([2, 3, 3], np.int32))


def change(logits: list[float], position: int = 0, **fields: Any) -> list[float]:
    row = np.array(logits, np.float32)
    changed = adjusted(row, Sampling(seed=0, **fields), position, HISTORY)
    assert row.tolist() == logits  # a copy
    return [round(float(x), 4) for x in changed]


def test_penalties_are_those_of_vllm() -> None:
    """Repetition over prompt and output, the others over the output alone."""
    assert change([2.0, 2.0, -2.0, 4.0], repetition_penalty=2.0) == [1.0, 2.0, -4.0, 2.0]
    assert change([1.0, 1.0, 1.0, 1.0], presence_penalty=0.5) == [1.0, 1.0, 0.5, 0.5]
    assert change([1.0, 1.0, 1.0, 1.0], frequency_penalty=0.5) == [1.0, 1.0, 0.5, 0.0]
    assert change([1.0, 1.0, 1.0, 1.0], frequency_penalty=0.5, presence_penalty=-1.0) == [1.0, 1.0, 1.5, 1.0]


def test_bias_is_added_and_bans_hold_up_to_their_position() -> None:
    assert change([1.0, 1.0, 1.0, 1.0], logit_bias=[(0, 5.0), (3, -100.0)]) == [6.0, 1.0, 1.0, -99.0]
    ban: dict[str, Any] = {"banned": [1, 2], "banned_before": 7}
    assert change([1.0, 1.0, 1.0, 1.0], position=6, **ban) == [1.0, -math.inf, -math.inf, 1.0]
    assert change([1.0, 1.0, 1.0, 1.0], position=7, **ban) == [1.0] * 4


def test_greedy_obeys_them_too_and_the_logprob_is_the_models_own() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    biased = sample(logits, [how(temperature=0.0, logit_bias=[(0, 100.0)])], [1], [0])[0]  # type: ignore[arg-type]
    assert biased.token == 0
    assert biased.logprob == pytest.approx(float(logits[0].log_softmax(-1)[0]))
    penalised = sample(logits, [how(temperature=0.0, presence_penalty=2.0)], [1], [0], [HISTORY])[0]
    assert penalised.token == 1
    assert sample(logits, [how(temperature=0.0, banned_before=2, banned=[1])], [1], [0])[0].token == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan], ids=str)
@pytest.mark.parametrize("how", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("everywhere", [False, True])
def test_logits_that_are_no_distribution_cost_nobody_else_a_token(
    bad: float, how: dict[str, Any], everywhere: bool
) -> None:
    """The rows of a batch are sampled one by one: one that fails would take all others along."""
    logits = np.linspace(-1, 1, 16, dtype=np.float32)
    logits[slice(None) if everywhere else 5] = bad
    assert 0 <= draw(logits, Sampling(seed=1, **how), 0.5) < 16
    rows = torch.from_numpy(np.stack([logits, np.linspace(-1, 1, 16, dtype=np.float32)]))
    _, other = sample(rows, [Sampling(seed=1, **how), Sampling(seed=1, temperature=0.0)], [4, 4], [0, 0])
    assert other.token == 15


def test_the_smallest_repetition_penalty_leaves_numbers() -> None:
    logits = np.array([3e38, -3e38, 1.0, 0.0], np.float32)
    seen = np.arange(4, dtype=np.int32)
    with np.errstate(over="ignore"):
        row = adjusted(logits, Sampling(seed=1, repetition_penalty=0.01), 4, History(seen, seen[:0]))
    assert 0 <= draw(row, Sampling(seed=1), 0.5) < 4
