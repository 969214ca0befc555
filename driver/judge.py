"""What counts as accurate enough, and whether a model is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..diagnostics.errors import InputError
from ..graph.examples import called, first_line, restored, unchanged
from ..graph.refusals import raised_at
from ..quant.program import Call

EvalFn = Callable[[Any], Any]
DEFAULT_DROP = 0.01
DEFAULT_ERROR = 0.01
DEFAULT_BUDGET = 60.0
_WHERE = "quantize_and_compile(eval_fn=...)"


@dataclass(frozen=True)
class Goal:
    """The bound on accuracy. eval_fn: from a model to a number, higher is better; it may fall by `max_drop`, in its own unit.

    target_error: the greatest relative error of the model's results over the sample; None: no bound on it. budget: seconds to find it in.
    """

    eval_fn: EvalFn | None
    max_drop: float
    target_error: float | None
    budget: float = DEFAULT_BUDGET

    @property
    def metric(self) -> str:
        """What to call eval_fn's number: its name, if it has one."""
        name = str(getattr(self.eval_fn, "__name__", ""))
        return name if name.isidentifier() else "eval_fn"

    @property
    def text(self) -> str:
        parts = [f"{self.metric} falls by at most {self.max_drop:g}"] if self.eval_fn is not None else []
        parts += [f"relative error of at most {self.target_error:g}"] if self.target_error is not None else []
        return " and ".join(parts)


def goal_of(eval_fn: EvalFn | None, max_drop: float | None, target_error: float | None, budget: float | None = None) -> Goal:
    """The goal that a caller's arguments describe. InputError for numbers that are none, or a `max_drop` of nothing."""
    if max_drop is not None and eval_fn is None:
        raise InputError("max_drop is given without eval_fn", "quantize_and_compile", "target_error bounds the error without an eval_fn")
    drop = DEFAULT_DROP if max_drop is None else _bound("max_drop", max_drop)
    error = None if target_error is None else _bound("target_error", target_error)
    if eval_fn is None and error is None:
        error = DEFAULT_ERROR
    return Goal(eval_fn, drop, error, DEFAULT_BUDGET if budget is None else _bound("budget_s", budget))


def _bound(name: str, value: object) -> float:
    """The number. InputError for what is none, or negative."""
    try:
        found = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        found = math.nan
    if not found >= 0.0:
        raise InputError(f"{name} is {value!r:.60}", "quantize_and_compile", "give a number that is not negative")
    return found


@dataclass(frozen=True)
class Verdict:
    """score: of eval_fn, None without one. error: relative, over the judge's sample."""

    meets: bool
    score: float | None
    error: float


class Judge:
    """Compares models with the original one over a sample of calls. Each call, and eval_fn, finds parameters and buffers as they were.

    sample: as given, or only its first call when the goal has no bound on the error of the results.
    seconds: about how long the original may take over the sample, which is shortened for that; at least one call is left.
    baseline: the original's score. took: the seconds for that, about what a verdict takes.
    """

    def __init__(self, goal: Goal, model: torch.nn.Module, sample: Sequence[Call], seconds: float = math.inf) -> None:
        self.goal = goal
        self._expected: list[list[torch.Tensor]] = []
        start = time.perf_counter()
        for call in sample if goal.target_error is not None else sample[:1]:
            own = call.own()
            self._expected.append(_leaves(called(model, own.args, own.kwargs)))
            if time.perf_counter() - start >= seconds:
                break
        self.sample = tuple(sample[: len(self._expected)])
        with unchanged(model):
            self.baseline = self._score(model, "the model itself")
        if self.baseline is not None and math.isinf(self.baseline):  # as of a signal-to-noise ratio that compares it with itself
            hint = "every mix would be infinitely worse, or none; compare with labels, or bound what it returns"
            raise InputError(f"eval_fn returned {self.baseline} for the model itself", _WHERE, hint)
        self.took = time.perf_counter() - start

    def verdict(self, model: torch.nn.Module, what: str) -> Verdict:
        """Whether a model meets the goal. what: how to call it in errors. Raises InputError when eval_fn fails."""
        error = self.error(model)
        score = self._score(model, what)
        drop = 0.0 if score is None or self.baseline is None else self.baseline - score
        # 97.9 - 97.4 is a little more than 0.5 in binary.
        meets = drop <= self.goal.max_drop + 1e-9 * abs(self.baseline or 0.0)
        return Verdict(meets and (self.goal.target_error is None or error <= self.goal.target_error), score, error)

    def share(self, verdict: Verdict) -> float:
        """How much of a model's squared error meets the goal, about: 1 for one that does."""
        shares = [1.0]
        if verdict.score is not None and self.baseline is not None and self.baseline - verdict.score > self.goal.max_drop:
            shares.append(self.goal.max_drop / (self.baseline - verdict.score))
        if self.goal.target_error is not None and verdict.error > self.goal.target_error:
            shares.append((self.goal.target_error / verdict.error) ** 2)
        return min(shares)

    def error(self, model: torch.nn.Module, calls: int | None = None) -> float:
        """Relative error over the first `calls` of the sample: of the results taken apart into tensors, the worst."""
        noise: list[float] = []
        signal: list[float] = []
        for call, expected in zip(self.sample[:calls], self._expected[:calls], strict=True):
            own = call.own()
            with torch.no_grad(), restored(model):
                results = _leaves(model(*own.args, **own.kwargs))
            pairs = [_powers(real, got) for real, got in zip(expected, results, strict=True)]
            noise = [a + b for a, (b, _) in zip(noise or [0.0] * len(pairs), pairs, strict=True)]
            signal = [a + b for a, (_, b) in zip(signal or [0.0] * len(pairs), pairs, strict=True)]
        return max((_ratio(n, s) for n, s in zip(noise, signal, strict=True)), default=0.0)

    def _score(self, model: torch.nn.Module, what: str) -> float | None:
        if self.goal.eval_fn is None:
            return None
        try:
            with torch.no_grad(), restored(model), torch.random.fork_rng(devices=[]):
                result = self.goal.eval_fn(model)
        except Exception as error:
            raise InputError(f"eval_fn failed on {what}: {first_line(error)}", raised_at(error) or _WHERE) from error
        try:
            score = math.nan if isinstance(result, (bool, str, bytes)) else float(result)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            score = math.nan
        if math.isnan(score):
            shown = "NaN" if isinstance(result, float) else f"a {type(result).__name__}: {result!r:.60}"
            raise InputError(f"eval_fn returned {shown} for {what}", _WHERE, "return one number, higher is better")
        return score


def _leaves(results: Any) -> list[torch.Tensor]:
    return [r.detach().clone() for r in pytree.tree_leaves(results) if isinstance(r, torch.Tensor)]


def _powers(real: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
    """Squared error and squared norm over the elements that are finite in both; for integers the number that differ, and of all."""
    if real.is_complex():
        real, got = torch.view_as_real(real.resolve_conj()), torch.view_as_real(got.resolve_conj())
    if not real.is_floating_point():
        return float((real != got).sum()), float(real.numel())
    same = (real == got) | (real.isnan() & got.isnan())  # infinities of masks
    difference = torch.where(same, 0.0, real.double() - got.double())
    return difference.square().sum().item(), torch.where(real.isfinite(), real, 0.0).double().square().sum().item()


def _ratio(noise: float, signal: float) -> float:
    return 0.0 if noise == 0.0 else math.sqrt(noise / signal) if signal > 0.0 and noise == noise else math.inf
