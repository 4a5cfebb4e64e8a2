"""What calls are believed to cost, and how many guesses are looked at for it."""

from __future__ import annotations

import pytest

from onnxlm.runtime.draft_policy import DraftPolicy, StepCosts
from onnxlm.runtime.prompt_lookup import LONGEST_MATCH, NGRAM, Draft

STEP = 0.010
SURE = Draft(list(range(10)), LONGEST_MATCH)


def measured(slope: float, jump: float = 0.0, calls: int = 30) -> StepCosts:
    """After many calls on a machine where one costs `jump` steps more, and each further token `slope`."""
    costs = StepCosts()
    for tokens in [1, 2, 5, 11] * calls:
        costs.add(1, tokens, STEP * (1 + (tokens > 1) * jump + slope * (tokens - 1)))
    return costs


@pytest.mark.parametrize(("slope", "jump"), [(0.05, 0.0), (0.3, 0.0), (1.2, 0.0), (0.15, 1.0)])
def test_calls_of_any_length_tell_what_one_costs(slope: float, jump: float) -> None:
    costs = measured(slope, jump)
    assert costs.ratio(1, 1) == 1
    for tokens in (3, 8, 11):
        assert costs.ratio(1, tokens) == pytest.approx(1 + jump + slope * (tokens - 1), rel=0.01)


def test_batches_of_other_sizes_are_told_apart() -> None:
    costs = measured(1.2)
    assert costs.ratio(2, 2) == StepCosts().ratio(2, 2)


def test_one_bad_moment_moves_the_estimate_by_less_than_a_third() -> None:
    costs = measured(0.25)
    costs.add(1, 2, STEP * 100)
    assert 0.25 < costs.ratio(1, 2) - 1 < 0.25 * 4 / 3


def test_a_machine_that_was_busy_is_tried_again() -> None:
    costs = measured(3.0)  # every call was slow
    policy = DraftPolicy(costs)
    for _ in range(30):
        policy.learn(LONGEST_MATCH, 10, ended=False)  # guesses that are right, all of them
    refused = 0
    while policy.count([SURE]) == 0:
        refused += 1
    assert 10 < refused < 300


def test_nothing_is_forgotten_of_what_is_cheap() -> None:
    costs = measured(0.05)
    costs.forget(1)
    assert costs.ratio(1, 11) == pytest.approx(1.5, rel=0.01)


def test_guesses_that_never_come_true_are_given_up() -> None:
    policy = DraftPolicy(measured(0.2))
    for match in range(NGRAM, LONGEST_MATCH + 1):
        for _ in range(30):
            policy.learn(match, 0, ended=True)
    assert policy.count([SURE]) == 0
    assert policy.count([None]) == 0


def test_guesses_inside_a_draft_lengthen_the_match_of_those_behind_them() -> None:
    policy = DraftPolicy(measured(0.3))
    for _ in range(60):  # the first comes true; the second, behind one token more, never
        policy.learn(NGRAM, 1, ended=True)
    assert policy.count([Draft(list(range(10)), NGRAM)]) == 1
    assert policy.count([Draft(list(range(10)), NGRAM + 1)]) == 0
