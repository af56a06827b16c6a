"""Several choices of one request: which pages they share, how they join the batch, and when the request is over."""

import numpy as np
import pytest

from decode_svc.choices import PageNeed
from decode_svc.scheduler import Scheduler
from shared.ids import RequestId
from shared.protocol import messages as m
from shared.protocol.local import Generate, Output
from tests.decode.rig import P0, Rig, endings, messages

PROMPT = [7, 8, 9, 10, 11, 12]


def spec(name: str = "r", choices: int = 3, max_tokens: int = 4) -> Generate:
    return Generate(RequestId(name), m.pack_int32(PROMPT), max_tokens, m.Sampling(seed=1), [], False, choices)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "need"),
    [
        (
            6,
            4,
            (2, 1, 3, 7),
        ),  # 9 rows of 4 a page; the page of tokens 5 and 6 is copied, and what lies behind it is own
        (8, 1, (2, 1, 2, 4)),  # a prompt that ends with its page: that page is copied too
        (9, 4, (3, 2, 3, 5)),
        (1, 1, (1, 0, 1, 3)),
    ],
)
def test_pages_of_three_choices(prompt: int, max_tokens: int, need: tuple[int, ...]) -> None:
    found = PageNeed.of(prompt, max_tokens, 3, page_size=4)
    assert (found.landing, found.shared, found.each, found.total) == need
    pages = np.arange(100, 100 + found.total, dtype=np.int32)
    lists = [found.of_choice(pages, choice).tolist() for choice in range(3)]
    assert [len(mine) for mine in lists] == [found.each] * 3
    assert all(mine[: found.shared] == lists[0][: found.shared] for mine in lists)
    own = [page for mine in lists for page in mine[found.shared :]]
    assert len(set(own)) == len(own)
    assert sorted({*own, *lists[0]}) == pages.tolist()


def test_a_choice_joins_with_a_copy_and_the_prompts_last_token() -> None:
    scheduler = Scheduler(4, 8, 4, frozenset({0}))
    scheduler.fork(spec(), 1, np.array([1, 5, 6]), 2)
    step = scheduler.prebuilt(spec(), 20, -0.5, (), np.array([1, 2, 3]))
    assert (step.choice, step.finish) == (0, None)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.rows == (("r", 1), ("r", 0))
    assert (plan.tokens.tolist(), plan.lengths.tolist()) == ([PROMPT[-1], 20], [6, 7])
    assert plan.copies == [(2, 5)]
    steps = scheduler.apply(plan, [(30, -1.0, ()), (0, -1.0, ())])
    assert [(s.choice, s.token, s.finish) for s in steps] == [(1, 30, None), (0, 0, "stop")]
    plan = scheduler.plan()
    assert plan is not None
    assert (plan.rows, plan.tokens.tolist(), plan.lengths.tolist(), plan.copies) == ((("r", 1),), [30], [7], [])


def test_each_choice_counts_its_own_tokens() -> None:
    scheduler = Scheduler(4, 8, 4, frozenset())
    scheduler.fork(spec(choices=2, max_tokens=2), 1, np.array([1, 5]), 2)
    assert scheduler.prebuilt(spec(choices=2, max_tokens=2), 20, 0.0, (), np.array([1, 2])).finish is None
    finishes = []
    while (plan := scheduler.plan()) is not None:
        finishes += [(s.choice, s.finish) for s in scheduler.apply(plan, [(9, 0.0, ())] * len(plan.rows))]
    assert finishes == [(1, None), (0, "length"), (1, "length")]


def test_leaving_takes_one_choice_or_all() -> None:
    scheduler = Scheduler(8, 8, 4, frozenset())
    for name in ("a", "b"):
        for choice in (1, 2):
            scheduler.fork(spec(name), choice, np.array([1, 5, 6]), 2)
    assert scheduler.leave(RequestId("a"), 1) == 1
    assert scheduler.leave(RequestId("a"), 1) == 0
    assert scheduler.leave(RequestId("b")) == 2
    plan = scheduler.plan()
    assert plan is not None
    assert plan.rows == (("a", 2),)
    assert scheduler.free_rows == 7


def test_pages_go_back_with_the_last_choice() -> None:
    rig = Rig(P0)
    rig.intake.submit(spec(), 60.0, rig.now_s)
    free = rig.pages.free_pages
    rig.take(rig.completed(1))
    rig.intake.prebuilt(RequestId("r"))
    assert rig.pages.free_pages == free == rig.pages.usable_pages - 7
    assert [rig.intake.choice_ended(RequestId("r")) for _ in range(3)] == [False, False, True]
    ended = rig.intake.finish(Output(RequestId("r"), [5], [0.0], "stop", choice=2), rig.now_s)
    assert endings(list(ended)) == [("finished", "")]
    rig.intake.check_integrity()
    assert rig.pages.free_pages == rig.pages.usable_pages


def test_a_completion_without_the_scores_that_were_asked_for_does_not_commit() -> None:
    wanted = Generate(RequestId("r"), m.pack_int32(PROMPT), 3, m.Sampling(seed=1), [], False, 1, 2)
    for prompt in (None, m.PromptLogprobs(2, b"", b"", b"", b""), m.PromptLogprobs(1, *[bytes(20)] * 4)):
        rig = Rig(P0)
        rig.intake.submit(wanted, 60.0, rig.now_s)
        again = messages(rig.take(rig.completed(1, prompt=prompt)), m.Prefill)
        assert [(p.ticket, p.prompt_logprobs) for p in again] == [(2, 2)]
        assert rig.intake.counts.bad_completions == 1
    rig = Rig(P0)
    rig.intake.submit(wanted, 60.0, rig.now_s)
    told = m.PromptLogprobs(2, bytes(20), bytes(20), bytes(40), bytes(40))
    rig.take(rig.completed(1, prompt=told))
    assert rig.intake.requests[RequestId("r")].prompt == told
