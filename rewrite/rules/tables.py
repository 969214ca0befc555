"""Functions of one number whose result is rounded to 8 bits are read from a table of polynomials.

    quantize(f(x))             = piecewise(x)
    i8(clamp(round(f(x))))     = piecewise(x)

f is any chain of elementwise operations on one f32 value and on scalar constants that holds an expensive function: GELU with its
scale, a sigmoid, a tanh. What comes before x, such as the scales and biases of channels, stays. The polynomials are off by less than
`pieces.ERROR` of a step before they are rounded, and give what the chain gives for NaN and infinities; where so few cannot do
that, the chain stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import inf

import torch

from ...graph import attrs as A
from ...graph.interpret import ELEMENTWISE
from ...graph.ir import Graph, Value, with_inputs
from ...graph.ops import TRANSCENDENTAL, make
from ...graph.types import boolean, f32
from .pieces import Rounding, fit

_LONGEST = 64  # operations of a chain
_ROUNDING = ("round", "maximum", "minimum", "relu", "add")


def tabulate(graph: Graph, pieces: int) -> Graph:
    """The graph with tables for the functions that so many pieces can follow."""
    if not any(v.op in TRANSCENDENTAL for v in graph.order):
        return graph
    position = {v: n for n, v in enumerate(graph.order)}
    new: dict[Value, Value] = {v: v for v in graph.inputs}
    for value in graph.order:
        if value not in new:
            found = _table(graph, position, value, pieces)
            if found is None:
                new[value] = with_inputs(value, [new[v] for v in value.inputs])
            else:
                new[value] = make("piecewise", new[found[0]], attrs=found[1], origin=value.origin, name=value.name)
    return Graph(graph.inputs, tuple(new[v] for v in graph.outputs), graph.name)


def _table(graph: Graph, position: dict[Value, int], value: Value, pieces: int) -> tuple[Value, A.PiecewiseAttrs] | None:
    """What `value` is a function of, and the function."""
    end = _quantized(value) or _clamped(graph, value)
    if end is None:
        return None
    fits = ((chain.source, fit(partial(_in_steps, chain, end), end.rounding, pieces)) for chain in _chains(graph, position, end.of))
    return next(((source, attrs) for source, attrs in fits if attrs is not None), None)


@dataclass(frozen=True)
class _End:
    """What rounds: integers of `of` * scale + zero."""

    of: Value
    scale: float
    zero: int
    rounding: Rounding


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
        if number != round(number) or op in bounds:
            return None
        if op == "add":
            zero += int(number)
        else:
            bounds[op] = number + zero
        at = next(v for v in at.inputs if not isinstance(v.attrs, A.FullAttrs))
    least, greatest = bounds.get("maximum", -inf), bounds.get("minimum", inf)
    low, high = (0, 255) if value.dtype.kind == "uint" else (-128, 127)
    if not rounded or not low <= least < greatest <= high:
        return None
    return _End(at, 1.0, zero, Rounding(value.dtype, None, int(least), int(greatest), False))


@dataclass(frozen=True)
class _Chain:
    """Values from `source`, which is not among them, to the last one, operands first."""

    source: Value
    values: tuple[Value, ...]


def _chains(graph: Graph, position: dict[Value, int], end: Value) -> Iterator[_Chain]:
    """The chains of one source that end in `end` and that nothing else needs the functions of, the longest first."""
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
    return (chain for chain in reversed(found) if _replaceable(graph, chain, end))


def _replaceable(graph: Graph, chain: _Chain, end: Value) -> bool:
    """Whether the chain computes an expensive function, for nothing but its end."""
    inside = set(chain.values)
    expensive: set[Value] = set()
    for value in chain.values:
        if value.op in TRANSCENDENTAL or not expensive.isdisjoint(value.inputs):
            expensive.add(value)
            alone = len(graph.users[value]) == 1 if value is end else inside.issuperset(graph.users[value])
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
