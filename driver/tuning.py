"""`tune=True`: the products of a model measured in their places, by every way of computing them that could be the fastest.

The estimates of the kernel table and of the blocking are right for most machines and shapes, not for all. Here the model is compiled
several times, each time with other choices for all its products, and the steps of these models are timed in turns with the arguments
of a call. What was found is kept beside the compiled objects, for this processor, so that it is measured once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..cpu_codegen import cache
from ..diagnostics.errors import InputError
from ..graph.captured import Captured
from ..graph.encode import Json
from ..kernels.alternatives import alternatives
from ..kernels.spec import Choice, GemmSpec
from ..platforms.host import cpu_model, host
from .build import Options
from .measure import Example
from .model import CompiledModel, build_model
from .recall import spelled
from .specs import Choices

SECONDS = 10.0
"""What `tune=True` may take."""
_WORTH = 0.97  # of the time: what takes more is not worth another kernel
_LEAST_TURNS, _MOST_TURNS = 3, 12
_TURN_SECONDS = 0.05


@dataclass(frozen=True)
class Finding:
    """What measuring a product has shown. ratio: the time of `choice` over that of what is estimated to be the fastest. complete: whether
    there was time for everything that could be faster."""

    choice: Choice
    ratio: float
    complete: bool = True

    @property
    def told(self) -> str:
        what = "as estimated is the fastest" if self.choice == Choice() else f"{self.choice}: {self.ratio:.2f} of the time"
        return what if self.complete else f"{what}, as far as there was time"


def tuned(captured: Captured, options: Options, example: Example, seconds: float) -> CompiledModel:
    """The model with the products computed as fast as measuring finds within about so many seconds; as estimated, where all that was found
    together is not faster.

    Raises InputError where the target is another machine than this one.
    """
    if options.target != host():
        raise InputError(f"tune=... measures on this machine, the target is {options.target.name}", hint="leave out target or tune")
    deadline = time.perf_counter() + seconds
    usual = build_model(captured, options)
    sizes = _sizes(example)
    assert usual.built is not None
    products = tuple(dict.fromkeys(spec for spec in usual.built.measurable if spec is not None))
    known = {spec: found for spec in products if (found := _recalled(spec, options, sizes)) is not None}
    unknown = [spec for spec in products if spec not in known]
    new = _measured(captured, options, example, usual, unknown, deadline) if unknown else {}
    findings = known | new
    choices = {spec: found.choice for spec, found in findings.items() if found.choice != Choice()}
    best = build_model(captured, replace(options, choices=choices)) if choices else usual
    if choices and new:
        best = _faster(example, usual, best, deadline)
    in_vain = bool(choices) and best is usual
    for spec, found in new.items():
        if found.complete:
            _remember(spec, options, sizes, Finding(Choice(), 1.0) if in_vain else found)
    assert best.built is not None
    best.built.tuning = _told(products, findings, in_vain)
    return best


def _faster(example: Example, usual: CompiledModel, other: CompiledModel, deadline: float) -> CompiledModel:
    before, after = map(sum, _step_times((usual, other), example, deadline))
    return other if after < before else usual


# -- measuring ------------------------------------------------------------------------------------------------------
def _measured(
    captured: Captured, options: Options, example: Example, usual: CompiledModel, products: Sequence[GemmSpec], deadline: float
) -> dict[GemmSpec, Finding]:
    """The fastest way for each product. Half of the time is for compiling."""
    begin = time.perf_counter()
    ways = {spec: alternatives(options.target, spec) for spec in products}
    rounds: list[Choices] = [{}]
    models = [usual]
    for number in range(max(map(len, ways.values()), default=0)):
        started = time.perf_counter()
        rounds.append({spec: each[number] for spec, each in ways.items() if number < len(each)})
        models.append(build_model(captured, replace(options, choices=rounds[-1])))
        now = time.perf_counter()
        if 2 * now - started > (begin + deadline) / 2:
            break
    times = _step_times(models, example, deadline)
    found = {spec: _best(spec, rounds, models, times) for spec in products}
    return {spec: replace(each, complete=len(ways[spec]) < len(models)) for spec, each in found.items()}


def _step_times(models: Sequence[CompiledModel], example: Example, deadline: float) -> list[list[float]]:
    """The shortest time of every step of each model; the models take turns. Nothing is written to their buffers or the arguments."""

    def turn(model: CompiledModel, repeat: int) -> list[float]:
        return [t.seconds for t in model.times(*example.args, repeat=repeat, **example.kwargs)]

    found = [turn(model, 2) for model in models]
    repeat = max(1, min(20, int(_TURN_SECONDS / max(1e-6, *map(sum, found)))))
    for number in range(_MOST_TURNS):
        if number >= _LEAST_TURNS and time.perf_counter() > deadline:
            break
        found = [[min(pair) for pair in zip(taken, turn(model, repeat), strict=True)] for model, taken in zip(models, found, strict=True)]
    return found


def _best(spec: GemmSpec, rounds: Sequence[Choices], models: Sequence[CompiledModel], times: Sequence[list[float]]) -> Finding:
    taken = {
        choices.get(spec, Choice()): _taken(spec, model, seconds)
        for choices, model, seconds in zip(rounds, models, times, strict=True)
        if spec in choices or not choices
    }
    usual = taken[Choice()]
    choice = min(taken, key=lambda each: taken[each])
    return Finding(choice, taken[choice] / usual) if taken[choice] < _WORTH * usual else Finding(Choice(), 1.0)


def _taken(spec: GemmSpec, model: CompiledModel, seconds: Sequence[float]) -> float:
    assert model.built is not None
    return sum(taken for each, taken in zip(model.built.measurable, seconds, strict=True) if each == spec)


# -- what is kept ---------------------------------------------------------------------------------------------------
def _sizes(example: Example) -> str:
    """The shapes of the call, which times of products with symbolic sizes depend on."""
    leaves = torch.utils._pytree.tree_leaves((example.args, dict(example.kwargs)))
    return ";".join("x".join(map(str, leaf.shape)) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)


def _name(spec: GemmSpec, options: Options, sizes: str) -> str:
    place = f"{cpu_model()}, {torch.get_num_threads()} threads, {sizes}"
    return cache.key(f"choice for {spelled(spec, options.target)} on {place}", options.target)


def _recalled(spec: GemmSpec, options: Options, sizes: str) -> Finding | None:
    def understood(note: Json) -> Finding:
        return Finding(Choice(note["row"], note["tiles"], note["pieces"]), note["ratio"])

    return cache.noted(_name(spec, options, sizes), understood)


def _remember(spec: GemmSpec, options: Options, sizes: str, found: Finding) -> None:
    choice = found.choice
    cache.note(_name(spec, options, sizes), {"row": choice.row, "tiles": choice.tiles, "pieces": choice.pieces, "ratio": found.ratio})


def _told(products: Sequence[GemmSpec], findings: Mapping[GemmSpec, Finding], in_vain: bool) -> tuple[str, ...]:
    lines = ["products that were measured:"]
    for spec in products:
        what = f"  {spec.m} x {spec.n} x {spec.k} of {spec.lhs} and {spec.rhs}"
        lines.append(f"{what}: {findings[spec].told}")
    if in_vain:
        lines.append("  all of them together made the model no faster, so they were left as estimated")
    return tuple(lines)
