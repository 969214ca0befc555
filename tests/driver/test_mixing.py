"""The parts of the search by themselves: times by product, the knapsack, the judge."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sashiko.diagnostics.errors import InputError
from sashiko.driver.judge import Judge, Verdict, goal_of
from sashiko.driver.measure import regions
from sashiko.driver.mixing import Move, Rung, fewest, hull, moved, moves, worthwhile
from sashiko.quant.calibrate import call_of
from tests.driver.functions import Apply


def test_regions_hold_what_runs_before_a_product() -> None:
    assert regions(["", "a", "", "", "b", "b", ""], [1, 2, 4, 8, 16, 32, 64]) == {"a": 3, "b": 124}
    assert regions(["", ""], [1, 2]) == {}


def test_only_levels_that_are_faster_than_all_more_accurate_ones_count() -> None:
    rungs = [Rung("int8", 1.0, 9.0), Rung("rows", 2.5, 4.0), Rung("bf16", 1.99, 1.0), Rung("fp32", 2.0, 0.0)]
    assert [rung.level for rung in worthwhile(rungs)] == ["int8", "fp32"]
    assert [rung.level for rung in worthwhile([Rung("int8", 3.0, 1.0), Rung("fp32", 2.0, 0.0)])] == ["fp32"]


def test_the_hull_keeps_decreasing_gains() -> None:
    bent = (Rung("int8", 1.0, 10.0), Rung("rows", 2.0, 9.0), Rung("fp32", 3.0, 0.0))
    assert [rung.level for rung in hull(bent)] == ["int8", "fp32"]
    convex = (Rung("int8", 1.0, 10.0), Rung("rows", 2.0, 2.0), Rung("fp32", 3.0, 0.0))
    assert hull(convex) == convex
    worse = (Rung("int8", 1.0, 1.0), Rung("rows", 2.0, 2.0), Rung("fp32", 3.0, 0.0))
    assert [rung.level for rung in hull(worse)] == ["int8", "fp32"]


def test_moves_are_in_order_of_error_per_second() -> None:
    ladders = {
        "a": (Rung("int8", 1.0, 10.0), Rung("rows", 2.0, 2.0), Rung("fp32", 3.0, 0.0)),
        "b": (Rung("int8", 1.0, 5.0), Rung("fp32", 2.0, 0.0)),
    }
    steps = moves(ladders)
    assert steps == (Move("a", "rows", 1.0, 8.0), Move("b", "fp32", 1.0, 5.0), Move("a", "fp32", 1.0, 2.0))
    assert moved({"a": "int8", "b": "int8"}, steps[:2]) == {"a": "rows", "b": "fp32"}


@pytest.mark.parametrize("needed", range(1, 65))
@pytest.mark.parametrize("guess", [0, 1, 6, 32, 63, 64])
def test_galloping_finds_the_least(guess: int, needed: int) -> None:
    asked: list[int] = []

    def passes(count: int) -> bool:
        asked.append(count)
        return count >= needed

    assert fewest(64, guess, passes) == needed
    assert 64 not in asked and len(asked) == len(set(asked))
    assert len(asked) <= 2 * math.log2(1 + abs(needed - guess)) + 3


def test_a_search_that_is_stopped_returns_what_is_known_to_pass() -> None:
    verdicts = iter([True, None])
    assert fewest(16, 8, lambda count: next(verdicts)) == 8


def test_the_judge_compares_every_result_and_skips_masks() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return x, x.masked_fill(x < 0, -math.inf), x.argmax(-1)

    model = Two().eval()
    x = torch.tensor([[1.0, -2.0, 2.0]])
    judge = Judge(goal_of(None, None, 0.1), model, [call_of(model, x, 1)])
    assert judge.error(model) == 0.0
    assert judge.error(Apply(lambda x: (x, model(x)[1] * 1.25, model(x)[2]))) == pytest.approx(0.25)
    assert judge.error(Apply(lambda x: (x, x, model(x)[2]))) == math.inf
    assert judge.error(Apply(lambda x: (x, model(x)[1], model(x)[2] + 1))) == 1.0


def test_the_judge_measures_complex_results() -> None:
    class Complex(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.complex(x, 2 * x).conj()

    model, x = Complex().eval(), torch.randn(8)
    judge = Judge(goal_of(None, None, 0.01), model, [call_of(model, x, 1)])
    assert judge.error(model) == 0.0
    assert judge.error(Apply(lambda x: model(x) * 1.001)) == pytest.approx(0.001, rel=1e-2)
    assert judge.error(Apply(lambda x: model(x).conj())) == pytest.approx(math.sqrt(16 / 5))  # 2x is -2x


def test_how_much_of_the_error_meets_the_goal() -> None:
    model = nn.Linear(2, 2).eval()
    calls = [call_of(model, torch.ones(1, 2), 1)]
    judge = Judge(goal_of(lambda candidate: 1.0, 0.1, 0.2), model, calls)
    assert judge.share(Verdict(True, 0.95, 0.1)) == 1.0
    assert judge.share(Verdict(False, 0.6, 0.1)) == pytest.approx(0.25)
    assert judge.share(Verdict(False, 0.6, 0.8)) == pytest.approx(0.0625)


@pytest.mark.parametrize("score", [math.inf, -math.inf])
def test_nothing_is_judged_by_its_distance_from_infinity(score: float) -> None:
    model = nn.Linear(2, 2).eval()
    with pytest.raises(InputError, match=f"(?s)eval_fn returned {score} for the model itself.*compare with labels"):
        Judge(goal_of(lambda candidate: score if candidate is model else 20.0, 0.5, None), model, [call_of(model, torch.ones(1, 2), 1)])


def test_the_sample_is_shortened_for_the_budget() -> None:
    model = nn.Linear(4, 4).eval()
    calls = [call_of(model, torch.ones(2, 4), 1)] * 4
    assert len(Judge(goal_of(None, None, 0.1), model, calls, seconds=0.0).sample) == 1
    assert len(Judge(goal_of(None, None, 0.1), model, calls).sample) == 4
    assert len(Judge(goal_of(lambda candidate: 1.0, 0.1, None), model, calls).sample) == 1
