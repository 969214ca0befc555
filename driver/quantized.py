"""`quantize_and_compile`: calibration, quantization and compilation in one verb, with or without a search for the precisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..diagnostics.errors import InputError
from ..graph.examples import arguments
from ..platforms.host import host
from ..platforms.host import resolve as resolve_target
from ..platforms.target import Target
from ..quant import QuantizedModule, Scheme, calibrate
from ..quant.calibrate import check_transform
from ..quant.presets import AUTO, resolve
from ..quant.program import Call
from ..quant.record import Metric
from ..quant.scheme import Operation, Where
from .build import Options
from .captures import captured_of
from .found import SearchResult
from .judge import EvalFn, Goal, Judge, goal_of
from .levels import Compile, Lab
from .measure import Example, HostTimer, Timer
from .model import CompiledModel, build_model
from .pipeline import check_settings
from .reasons import choices
from .search import Budget, Search

_SAMPLE_SHARE = 0.02
"""Of the budget, for one run of the model over the sample; the simulation of a mix takes some times as long."""
_PRODUCTS: tuple[Operation, ...] = ("linear", "convolution", "recurrence", "experts", "matmul", "attention")


def quantize_and_compile(
    model: torch.nn.Module,
    batches: Iterable[Any],
    *,
    preset: str | Scheme = "int8",
    eval_fn: EvalFn | None = None,
    max_drop: float | None = None,
    target_error: float | None = None,
    budget_s: float | None = None,
    dynamic_shapes: Any = None,
    precision: str = "auto",
    target: Target | str | None = None,
    strict: bool = False,
    exclude: Where | Iterable[Where] = (),
    transform: Callable[[Any], Any] | None = None,
    mask: str | Literal[False] | None = None,
    max_batches: int | None = None,
    progress: bool | None = None,
) -> CompiledModel:
    """Calibrate a model on `batches`, quantize it and compile the result: `quantize` and `compile` in one verb.

    The first batch serves as the example inputs. The result has the simulation as `quantized`. With preset "auto", or with a bound on
    accuracy, the precision of every operation is searched for: the fastest mix on this machine, at the shapes of the first batch, that
    keeps the bound; at worst fp32. What was tried is in the result's `search` and in its explanation.

    preset: a name of `PRESETS` or a Scheme; where the search begins. eval_fn: from something that is called as the model is to a number,
    higher is better; the result's may be lower than the model's by `max_drop` (0.01), an absolute number. target_error: the greatest
    relative error of the results over the first batches; 0.01 when there is no eval_fn. budget_s: seconds for the search (60); a few
    evaluations and compilations are done in any case. precision: "fp32" keeps bf16 out of the search. All else as in `quantize` and
    `compile`.

    Raises what these do, and InputError when eval_fn fails or returns no number, for a search where `target` is another machine, and for
    `budget_s` without a search.
    """
    check_settings(precision, strict=strict)
    scheme = resolve(preset)
    searched = preset == AUTO or any(bound is not None for bound in (eval_fn, max_drop, target_error))
    goal = goal_of(eval_fn, max_drop, target_error, budget_s)
    if budget_s is not None and not searched:
        hint = f"give preset={AUTO!r} or a bound on accuracy, or leave it out"
        raise InputError("budget_s is given without a search", "quantize_and_compile", hint)
    machine = measurable(target) if searched else resolve_target(target)
    first = _First(transform)
    calibration = calibrate(
        model, batches, _with_products(scheme) if searched else scheme,
        exclude=exclude, transform=first, mask=mask, max_batches=max_batches, target=machine, progress=progress,
    )
    options = Options(machine, precision, strict, name=type(model).__name__)
    assert first.batch is not None
    maker = _Maker(Example(first.batch.args, first.batch.kwargs), dynamic_shapes, options)
    if not searched:
        small = calibration.build()
        fast = maker.capture(small)(precision, frozenset())
        fast.quantized = small
        return fast
    quantized = frozenset(s.name for s in calibration.placement.sites if s.operation in scheme.operations and s.scheme.quantized)
    return find(Lab(calibration, maker.capture, quantized), model, goal, HostTimer(maker.example), narrow=precision != "fp32")


def measurable(target: Target | str | None) -> Target:
    """The machine that a search is for. InputError where this one does not run its code."""
    machine = resolve_target(target)
    reason = machine.why_not_on(host())
    if reason:
        hint = "choose a preset that is not searched for, without a bound on accuracy, or take quantize(target=...)"
        raise InputError(f"a search measures on this machine, and the target is another: {reason}", hint=hint)
    return machine


def find(lab: Lab, model: torch.nn.Module, goal: Goal, timer: Timer, narrow: bool = True) -> CompiledModel:
    """The search by itself: the fastest mix that keeps `goal`, as code, with `quantized` and `search`.

    timer: where the times come from. narrow: whether bf16 may be used.
    """
    budget = Budget(goal.budget)
    judge = Judge(goal, model, lab.calibration.sample, _SAMPLE_SHARE * goal.budget)
    found = Search(lab, judge, timer, budget, narrow).run()
    sites = choices(found, lab)
    result = SearchResult(
        goal.text, judge.baseline, found.score, found.chosen, found.candidates, found.trials, sites, found.notes, budget.spent
    )
    fast = lab.compiled(found.mix)
    fast.search, fast.quantized = result, _told(lab.simulated(found.mix), result, goal.metric)
    return fast


def _told(module: QuantizedModule, result: SearchResult, metric_name: str) -> QuantizedModule:
    """The module with what the search measured in its record."""
    sites = {site.name: site for site in result.sites}
    record = module.record
    results = tuple(
        replace(item, error_db=sites[item.site.name].error_db, seconds=dict(sites[item.site.name].seconds)) for item in record.sites
    )
    left = tuple(replace(item, reason=sites[item.name].reason) if item.name in sites else item for item in record.left_out)
    metric = None if result.baseline is None or result.score is None else Metric(metric_name, result.baseline, result.score)
    notes = (*record.notes, f"searched for: {result.bound}", *result.notes)
    module.record = replace(record, sites=results, left_out=left, notes=notes, metric=metric)
    return module


def _with_products(scheme: Scheme) -> Scheme:
    """The scheme for all products, so that each is a site with precisions to choose from; only its own are quantized."""
    return replace(scheme, operations=tuple(dict.fromkeys((*scheme.operations, *_PRODUCTS))))


@dataclass
class _First:
    """A `transform` that remembers the call that its first result stands for; what the data gives may be used again for the next. own: the
    caller's."""

    own: Callable[[Any], Any] | None
    batch: Call | None = None
    _seen: bool = False

    def __post_init__(self) -> None:
        check_transform(self.own)

    def __call__(self, item: Any) -> Any:
        batch = item if self.own is None else self.own(item)
        if not self._seen:
            found = arguments(batch)  # calibration refuses what is none
            self.batch, self._seen = found and Call(*found).own(), True
        return batch


@dataclass(frozen=True)
class _Maker:
    """Compiles modules for calls like the example."""

    example: Example
    dynamic_shapes: Any
    options: Options

    def capture(self, module: QuantizedModule) -> Compile:
        """Captures a module, once for all precisions of its floating point. Raises what `compile` raises."""
        captured = captured_of(module, self.example.args, self.example.kwargs, self.dynamic_shapes)

        def compile(precision: str, wide: frozenset[str]) -> CompiledModel:
            return build_model(captured, replace(self.options, precision=precision, wide=wide))

        return compile
