"""Sums over what was put together are sums of sums, and no element is asked which part it is from.

    sum over a of concat along a of x, y, ...        = sum x + sum y + ...
    sum over a of (concat along a of x, y, ...) * w  = sum (x * part of w) + sum (y * part of w) + ...

Also where a reshape joins the axis with those behind it, as `torch.stack(...).flatten(...)` does before the weighted sum over the levels
and points of deformable attention. Along the last axis a kernel goes from part to part by itself: those sums stay. The terms are added
in another order, hence `ulp`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import reduce

from ...graph import attrs as A
from ...graph import build as b
from ...graph.dims import Dim, floordiv, product
from ...graph.ir import Value
from ...graph.shapes import reshape_groups
from ...graph.types import f32
from ..match import Mismatch
from ..rule import Match, RuleSet, rule

_MOST = 32  # parts: each is a sum of its own


def _weighted(rng: random.Random) -> Value:
    n, points = rng.randint(2, 3), rng.randint(1, 3)
    parts = [b.input_(i, f32, (2, 1, points, 5)) for i in range(n)]
    joined = b.reshape(b.concat(parts, 1), (2, n * points, 5)) if rng.random() < 0.7 else b.concat(parts, 1)
    weight = b.input_(n, f32, (*joined.shape[:-1], 1) if rng.random() < 0.7 else (1, 5))
    return b.reduce(b.mul(joined, weight) if rng.random() < 0.8 else joined, "sum", 1, rng.random() < 0.5)


@rule(
    "reduce{r}(mul!(j@reshape!(concat!(x, rest...)), w)) | reduce{r}(mul!(j@concat!(x, rest...), w))"
    " | reduce{r}(j@reshape!(concat!(x, rest...))) | reduce{r}(j@concat!(x, rest...)) -> add(reduce{r}(x), reduce{r}(x))",
    ulp=8, example=_weighted,
)
def sum_of_parts(m: Match) -> Value | Mismatch:
    """The right side has as many terms as there are parts."""
    attrs, joined, source = m.attrs("r", A.ReduceAttrs), m["j"], m.root.inputs[0]
    if attrs.kind != "sum" or len(attrs.axes) != 1 or (source.dtype.is_float and source.dtype.bits < 32):
        return m.fail("it is no sum over one axis, or one that is rounded as a whole")
    axis = attrs.axes[0]
    if all(extent == 1 for extent in source.shape[axis + 1 :]) or len(m.rest("rest")) >= _MOST:
        return m.fail("its axis is the last one, or the parts are many")
    if joined.tensor.rank != source.tensor.rank or joined.shape[axis] != source.shape[axis] or not _joins(joined, axis):
        return m.fail("the parts do not lie one after another along it", joined)
    with b.at(m.root.origin):
        return reduce(b.add, (b.reduce(term, "sum", axis, attrs.keepdim) for term in _terms(joined, axis, m.get("w"))))


def _joins(joined: Value, axis: int) -> bool:
    """Whether `joined` is a concatenation along `axis`, or one whose axis is the outermost of those that became `axis`."""
    inner = joined if joined.op == "concat" else joined.inputs[0]
    assert isinstance(inner.attrs, A.AxisAttrs)
    along = inner.attrs.axis
    for left, right in reshape_groups(joined.shape, inner.shape):
        if along in right:
            first = all(inner.shape[n] == 1 for n in right if n < along)
            return first and axis in left and all(joined.shape[n] == 1 for n in left if n != axis)
    return False


def _terms(joined: Value, axis: int, weight: Value | None) -> Iterator[Value]:
    """Each part in the shape that it has in `joined`, times its part of the weight."""
    inner = joined if joined.op == "concat" else joined.inputs[0]
    others = product(extent for n, extent in enumerate(joined.shape) if n != axis)
    behind = joined.tensor.rank - axis
    start: Dim = 0
    for part in inner.inputs:
        length = floordiv(product(part.shape), others)
        term = b.reshape(part, (*joined.shape[:axis], length, *joined.shape[axis + 1 :]))
        if weight is None:
            yield term
        else:
            varies = weight.tensor.rank >= behind and weight.shape[-behind] != 1
            yield b.mul(term, b.slice_(weight, -behind, start, length) if varies else weight)
        start = start + length


RULES: RuleSet = (sum_of_parts,)
