"""Functions of one number whose result is rounded to few digits are read from a table of polynomials.

    quantize(f(x))             = piecewise(x)
    quantize(f(x) * c)         = piecewise(x, c)     c: constants, such as a number for each channel
    i8(clamp(round(f(x))))     = piecewise(x)
    quantize(f(x) / of_row)    = quantize(piecewise(x) / of_row)

f is any chain of elementwise operations on one f32 value and on scalar constants that holds an expensive function: GELU with its
scale, a sigmoid, a tanh. What comes before x, such as the scales and biases of channels, stays.

Rounded to 8 bits with a known scale, the polynomials are off by less than `pieces.ERROR` of a step before they are rounded, and give what
the chain gives for NaN and infinities; where so few cannot do that, the chain stays. With factors c the polynomials have so small an
error that it is small with the largest factor, too. Constants of the model may change after it was compiled: `bounded` sees to it that
the factors stay among those that the polynomials are good for.

Rounded to 8 bits with a scale that is known only when its row is, the result of the table is in f32, and its error is small beside each
number, or beside that of the chain itself in f32. What is rounded to bf16 is left to the short functions (`short.py`), whose error is small
beside each number, however near to 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from ...graph import attrs as A
from ...graph import build as b
from ...graph.dims import product
from ...graph.interpret import ELEMENTWISE, run, within
from ...graph.ir import Graph, Value, with_inputs
from ...graph.ops import OPS, TRANSCENDENTAL, make
from ...graph.simplify import FOLD_LIMIT
from ...graph.types import boolean, f32
from .digits import Demands
from .pieces import SPREAD, Digits, Goal, Rounding, fit

_LONGEST = 64  # operations of a chain
_ROUNDING = ("round", "maximum", "minimum", "relu", "add")


def tabulate(graph: Graph, pieces: int) -> Graph:
    """The graph with tables for the functions that so many pieces can follow."""
    if not any(v.op in TRANSCENDENTAL for v in graph.order):
        return graph
    tables = _Search(graph, pieces).tables()
    new: dict[Value, Value] = {v: v for v in graph.inputs}
    for value in graph.order:
        if value not in new:
            found = tables.get(value)
            if found is None:
                new[value] = with_inputs(value, [new[v] for v in value.inputs])
            else:
                operands = new[found.chain.source], *found.factors
                table = make("piecewise", *operands, attrs=found.attrs, origin=value.origin, name=value.name)
                with b.at(value.origin):
                    new[value] = b.expand(table, value.shape)  # bounds of more axes than what they bound stretch it
    return Graph(graph.inputs, tuple(new[v] for v in graph.outputs), graph.name)


@dataclass(frozen=True)
class _Table:
    """What a value is a function of, the factors it is multiplied by where there are any, and the function."""

    chain: _Chain
    factors: tuple[Value, ...]
    attrs: A.PiecewiseAttrs


class _Search:
    """Looks for the values that tables can stand for."""

    def __init__(self, graph: Graph, pieces: int) -> None:
        self._graph, self._pieces = graph, pieces
        self._position = {v: n for n, v in enumerate(graph.order)}
        self._demands = Demands(graph, floats=False)
        self._expensive: set[Value] = set()  # what elementwise operations compute from functions
        for value in graph.order:
            if value.op in TRANSCENDENTAL or (value.op in ELEMENTWISE and not self._expensive.isdisjoint(value.inputs)):
                self._expensive.add(value)
        self._fitted: dict[object, A.PiecewiseAttrs | None] = {}

    def tables(self) -> dict[Value, _Table]:
        """By the value that each replaces, of two where one computes the other that one."""
        found: dict[Value, _Table] = {}
        inside: set[Value] = set()
        for value in reversed(self._graph.order):
            table = self._table(value) if value not in inside else None
            if table is not None:
                found[value] = table
                inside.update(table.chain.values)
        return found

    def _table(self, value: Value) -> _Table | None:
        end = _quantized(value) or _clamped(self._graph, value) or self._short(value)
        if end is None or end.of not in self._expensive:
            return None
        end = _without_factors(self._graph, end)
        for chain in _chains(self._graph, self._position, end):
            key = end.goal, end.scale, end.zero, chain.form
            if key not in self._fitted:
                self._fitted[key] = fit(partial(_in_steps, chain, end), end.goal, self._pieces)
            attrs = self._fitted[key]
            if attrs is not None:
                return _Table(chain, end.factors, attrs)
        return None

    def _short(self, value: Value) -> _End | None:
        if value not in self._expensive or value.dtype != f32 or not self._demands.few_digits(value):
            return None
        return _End(value, 1.0, 0, Digits())


@dataclass(frozen=True)
class _End:
    """What is wanted: `of`, or integers of `of` * scale + zero, with factors (one value or none) of `of` * scale * factor + zero."""

    of: Value
    scale: float
    zero: int
    goal: Goal
    factors: tuple[Value, ...] = ()


def _quantized(value: Value) -> _End | None:
    if value.op != "quantize" or value.dtype.bits != 8 or value.inputs[0].dtype != f32:
        return None
    assert isinstance(value.attrs, A.QuantizeAttrs)
    q = value.attrs.qparams
    if len(q.scale) != 1:
        return None
    return _End(value.inputs[0], 1.0 / q.scale[0], q.zero_point, Rounding(value.dtype, value.tensor.qparams, q.qmin, q.qmax, True))


def _clamped(graph: Graph, value: Value) -> _End | None:
    """cast(clamp(round(x) + zero)), in any order of the clamps and the sum; the clamps may also come first."""
    if value.op != "cast" or value.dtype.kind not in ("int", "uint") or value.dtype.bits != 8:
        return None
    bounds: dict[str, float] = {}
    rounded, zero, at = False, 0, value.inputs[0]
    while at.op in _ROUNDING and at.dtype == f32 and len(graph.users[at]) == 1 and not graph.is_output(at):
        if at.op == "round":
            rounded, at = True, at.inputs[0]
            continue
        if rounded and at.op == "add":
            break
        number = 0 if at.op == "relu" else next((v.attrs.value for v in at.inputs if isinstance(v.attrs, A.FullAttrs)), 0.5)
        op = "maximum" if at.op == "relu" else at.op
        if not math.isfinite(number) or number != round(number) or op in bounds:
            return None
        if op == "add":
            zero += int(number)
        else:
            bounds[op] = number + zero
        at = next(v for v in at.inputs if not isinstance(v.attrs, A.FullAttrs))
    least, greatest = bounds.get("maximum", -math.inf), bounds.get("minimum", math.inf)
    low, high = (0, 255) if value.dtype.kind == "uint" else (-128, 127)
    if not rounded or not low <= least < greatest <= high:
        return None
    return _End(at, 1.0, zero, Rounding(value.dtype, None, int(least), int(greatest), False))


def _without_factors(graph: Graph, end: _End) -> _End:
    """The same end without the constants that a function is multiplied or divided by last, if they are more than one number."""
    found, at, factor = end, end.of, None
    if not isinstance(end.goal, Rounding) or not end.goal.nan:
        return end
    while at.op in ("mul", "div") and at.dtype == f32 and len(graph.users[at]) == 1 and not graph.is_output(at):
        x, c = at.inputs if at.op == "div" or _is_fixed(at.inputs[1]) else at.inputs[::-1]
        if not _is_fixed(c) or x.shape != at.shape:
            break
        c = make("reciprocal", c) if at.op == "div" else c
        at, factor = x, c if factor is None else make("mul", factor, c)
        if c.op != "full":
            found = replace(end, of=at, factors=(factor,))
    return _bounded(found) or end


def _is_fixed(value: Value, depth: int = 4) -> bool:
    """Whether a value is an expression of constants, and a small one."""
    if value.op in ("full", "constant"):
        return value.tensor.qparams is None
    return depth > 0 and OPS[value.op].group in ("elementwise", "view") and all(_is_fixed(v, depth - 1) for v in value.inputs)


def _bounded(end: _End) -> _End | None:
    """An end with its factors held to what the polynomials will be good for. None where those are few, or zero, or of too many sizes."""
    rounding = end.goal
    if not end.factors or not isinstance(rounding, Rounding) or not rounding.least <= end.zero <= rounding.greatest:
        return None
    [factor] = end.factors
    count = product(factor.shape)
    if not isinstance(count, int) or not 0 < count <= FOLD_LIMIT:
        return None
    numbers = run(Graph((), (factor,)), [])[0]
    top = float(numbers.abs().max())
    if not 0 < top < math.inf:
        return None
    largest = 2.0 ** math.ceil(math.log2(top))
    bounds = A.BoundedAttrs(largest / SPREAD, largest)
    if not within(numbers, bounds.least, bounds.greatest):
        return None
    held = make("bounded", factor, attrs=bounds, name=factor.name)
    return replace(end, factors=(held,), goal=replace(rounding, largest=largest, zero=end.zero), zero=0)


@dataclass(frozen=True)
class _Chain:
    """Values from `source`, which is not among them, to the last one, operands first."""

    source: Value
    values: tuple[Value, ...]

    @property
    def form(self) -> tuple[object, ...]:
        """The same for chains that compute the same function."""
        known: dict[Value, object] = {v: n for n, v in enumerate((self.source, *self.values))}
        return tuple((v.op, v.attrs, *(known.get(each, each.attrs) for each in v.inputs)) for v in self.values)


def _chains(graph: Graph, position: dict[Value, int], wanted: _End) -> Iterator[_Chain]:
    """The chains of one source that end there and that nothing else needs the functions of, the longest first."""
    end = wanted.of
    found: list[_Chain] = []
    passed: list[Value] = []
    frontier = {end}
    while frontier and len(passed) < _LONGEST:
        last = max(frontier, key=lambda v: position[v])
        if len(frontier) == 1 and last.dtype == f32 and last.shape == end.shape:
            found.append(_Chain(last, tuple(reversed(passed))))
        if last.op not in ELEMENTWISE or any(v.dtype not in (f32, boolean) for v in (last, *last.inputs)):
            break
        passed.append(last)
        frontier = (frontier | {v for v in last.inputs if v.op != "full"}) - {last}
    shared = isinstance(wanted.goal, Digits)
    return (chain for chain in reversed(found) if _replaceable(graph, chain, end, shared))


def _replaceable(graph: Graph, chain: _Chain, end: Value, shared: bool) -> bool:
    """Whether the chain computes an expensive function, for nothing but its end, which is the table's result itself where `shared`."""
    inside = set(chain.values)
    expensive: set[Value] = set()
    for value in chain.values:
        if value.op in TRANSCENDENTAL or not expensive.isdisjoint(value.inputs):
            expensive.add(value)
            alone = shared or len(graph.users[value]) == 1 if value is end else inside.issuperset(graph.users[value])
            if not alone or graph.is_output(value):
                return False
    return bool(expensive)


def _in_steps(chain: _Chain, end: _End, x: torch.Tensor) -> torch.Tensor:
    """What is rounded, for tensors of f32 or f64."""
    known = {chain.source: x}
    for value in chain.values:
        operands = [known[v] if v in known else _number(v, x.dtype) for v in value.inputs]
        known[value] = ELEMENTWISE[value.op](*operands)
    y = known[end.of]
    scale = torch.tensor(end.scale, dtype=torch.float32).to(x.dtype)
    return y * scale + end.zero


def _number(full: Value, dtype: torch.dtype) -> torch.Tensor:
    assert isinstance(full.attrs, A.FullAttrs)
    rounded = torch.tensor(full.attrs.value, dtype=full.dtype.torch)
    return rounded.to(dtype) if full.dtype == f32 else rounded
