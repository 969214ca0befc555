"""Weighted sums of quantized integers, such as depthwise convolutions. With dq(x) = s (x - z):

    sum over a of (dq x) * w         = s (sum over a of x * w - z sum over a of w)             w a constant
    sum over a, c of x * (dq w)      = s_w (sum over c of dot(bytes of x along a, bytes of w along a))

The second is for processors that add up four products of bytes in each lane of 32 bits. Along the first axis that is summed over, up to
four bytes of the image become one element; windows that are neighbours along the other axes have these in common. Signed integers x are
x + 128 - 128. The sums are exact where the first rule's are rounded.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import reduce

from ...graph import attrs as A
from ...graph import build as b
from ...graph.dims import less, product
from ...graph.ir import Graph, Value, rebuild, with_inputs
from ...graph.types import QParams, f32, i8, i32, u8
from ..match import Mismatch
from ..query import is_weight
from ..rule import Match, RuleSet, rule
from .contraction import random_weight
from .quantize import per_tensor, random_integers
from .unsigned import MOST, SHIFT

_BYTES = 4  # of an element
_SIGNS = -0x7F7F7F80  # the highest bit of each byte


def _example(rng: random.Random) -> Value:
    weighted = b.mul(b.dequantize(random_integers(rng, 2, 3, 4, 5)), b.reshape(random_weight(rng, 12, 5), (3, 4, 5)))
    return b.reduce(weighted, "sum", (1, 2), rng.random() < 0.5)


@rule("reduce{r}(mul!(dequantize(x), w)) -> dequantize(sub(reduce{r}(mul(cast(x), w)), reduce{r}(w)))", ulp=256, example=_example)
def scale_after_sum(m: Match) -> Value | Mismatch:
    """One multiplication for each sum instead of one for each term. What the zero point adds to all sums alike is a constant."""
    attrs, x, w = m.attrs("r", A.ReduceAttrs), m["x"], m["w"]
    q, before = x.tensor.qparams, x.tensor.rank - w.tensor.rank
    if attrs.kind != "sum" or q is None or not per_tensor(q):
        return m.fail("it is no sum of integers that have one scale")
    if before < 0 or not is_weight(w) or any(axis < before or w.shape[axis - before] != x.shape[axis] for axis in attrs.axes):
        return m.fail("the factor is no constant, has more axes, or is the same for several terms", w)
    with b.at(m.root.origin):
        total = b.reduce(b.mul(b.cast(x, f32), w), "sum", attrs.axes, attrs.keepdim)
        if q.zero_point:
            share = b.reduce(w, "sum", tuple(axis - before for axis in attrs.axes), attrs.keepdim)
            total = b.add(total, b.mul(share, -float(q.zero_point)))
        return m.fitted(b.mul(total, q.scale[0]))


def sums_of_bytes(graph: Graph) -> Graph:
    """The graph with dot products of bytes for weighted sums of 8-bit integers over two axes or more."""

    def visit(value: Value, inputs: tuple[Value, ...]) -> Value:
        factors = _factors(value, inputs)
        if factors is None:
            return with_inputs(value, inputs)
        with b.at(value.origin):
            return _sum(value, *factors)

    return rebuild(graph, visit)


def _factors(total: Value, inputs: tuple[Value, ...]) -> tuple[Value, Value, QParams] | None:
    """(x, w, what w means) where a value is the sum of integers x times the real numbers of w, which has as many axes; None where it is
    not, or nothing is gained."""
    attrs = total.attrs
    if not isinstance(attrs, A.ReduceAttrs) or attrs.kind != "sum" or total.dtype != f32 or inputs[0].op != "mul":
        return None
    for x, w in (inputs[0].inputs, inputs[0].inputs[::-1]):
        real = w
        while real.op == "reshape":
            real = real.inputs[0]
        if x.op != "cast" or x.inputs[0].dtype not in (i8, u8) or real.op != "dequantize" or real.inputs[0].dtype != i8:
            continue
        x, q = x.inputs[0], real.inputs[0].tensor.qparams
        assert q is not None
        shape = (*[1] * (x.tensor.rank - w.tensor.rank), *w.shape)
        last = x.tensor.rank - 1
        by_channel = q.axis == real.tensor.rank - 1 and shape[last] == real.shape[-1] and last not in attrs.axes
        alike = len(shape) == x.tensor.rank and all(shape[axis] == x.shape[axis] for axis in attrs.axes)
        few = alike and less(product([x.shape[axis] for axis in attrs.axes]), MOST)
        if few and q.zero_point == 0 and (by_channel or per_tensor(q)) and len(list(_long(x, attrs.axes))) > 1:
            return x, b.reshape(b.cast(real.inputs[0], i8), shape), q
    return None


def _long(x: Value, axes: Iterable[int]) -> Iterable[int]:
    return (axis for axis in axes if x.shape[axis] != 1)


def _sum(total: Value, x: Value, w: Value, q: QParams) -> Value:
    assert isinstance(total.attrs, A.ReduceAttrs)
    axes, axis = total.attrs.axes, next(iter(_long(x, total.attrs.axes)))
    terms = x.shape[axis]
    assert isinstance(terms, int)
    x8, sums = b.cast(x, x.dtype), list[Value]()
    for first in range(0, terms, _BYTES):
        places = range(first, min(first + _BYTES, terms))
        image, weight = ([b.slice_(v, axis, place, 1) for place in places] for v in (x8, w))
        sums.append(b.reduce(_dots(image, weight), "sum", axes, total.attrs.keepdim))
    whole = reduce(b.add, sums)
    if x.dtype == i8:
        whole = b.sub(whole, b.mul(b.reduce(b.cast(w, i32), "sum", axes, total.attrs.keepdim), SHIFT))
    return b.mul(b.cast(whole, f32), b.channel_scales(QParams((1.0,)), q))


def _dots(image: list[Value], weight: list[Value]) -> Value:
    """Up to four products."""
    packed = b.pack_bytes(image)
    packed = b.xor(packed, _SIGNS) if image[0].dtype == i8 else packed
    return b.dot_bytes(packed, b.pack_bytes(weight))


RULES: RuleSet = (scale_after_sum,)
