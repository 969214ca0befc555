"""Views: which element goes where. They cost nothing alone, but hide what stands behind them from other rules.

    permute p (permute q x) = permute (q o p) x              permute by the identity = x
    reshape s (reshape t x) = reshape s x                    reshape, expand, slice, pad to the same elements = x
    expand s (expand t x) = expand s x                       slice (slice x) = slice x on one axis; concat of one x = x
    a permute that moves only axes of size 1 = a reshape
    reshape s (permute (reshape x)) = reshape s (permute x)   when the inner one only merges axes
    any view of one repeated number = that number in the view's shape

Elementwise operations broadcast by themselves, so an expanded operand is replaced by what was expanded; the result is expanded
instead where it shrinks by that (less work, and the expand meets the next operation):

    f(expand x) = expand (f x)      g(expand x, y) = g(x, y)      where(expand c, x, y) = where(c, x, y)
    g(reshape x, y) = g(x, y), when the reshape only puts axes of size 1 in front

All are exact.
"""

from __future__ import annotations

import random

from ...graph import attrs as A
from ...graph import build as b
from ...graph.dims import product
from ...graph.ir import Value
from ...graph.ops import make
from ...graph.shapes import reshape_groups
from ...graph.types import f32
from ..match import Mismatch
from ..rule import Match, RuleSet, equation, rule
from ..template import full


@rule("permute{p}(x) -> x", example=lambda rng: make("permute", b.input_(0, f32, (2, 3)), attrs=A.PermuteAttrs((0, 1))))
def identity_permute(m: Match) -> Value | Mismatch:
    """Equal shapes are not enough: a square matrix may be transposed."""
    order = m.attrs("p", A.PermuteAttrs).order
    return m["x"] if order == tuple(range(len(order))) else m.fail(f"{order} moves axes")


@rule("permute{p}(permute{q}(x)) -> permute{r}(x)")
def merge_permutes(m: Match) -> Value | Mismatch:
    """r[i] = q[p[i]]"""
    outer, inner = m.attrs("p", A.PermuteAttrs).order, m.attrs("q", A.PermuteAttrs).order
    return m.make("permute", m["x"], attrs=A.PermuteAttrs(tuple(inner[axis] for axis in outer)))


@rule("permute{p}(x) -> reshape{s}(x)", example=lambda rng: b.permute(b.input_(0, f32, (rng.randint(2, 4), 1, 3)), (1, 0, 2)))
def permute_of_units(m: Match) -> Value | Mismatch:
    """The axes with more than one element keep their order, so the elements do."""
    order = m.attrs("p", A.PermuteAttrs).order
    moving = [axis for axis in order if m["x"].shape[axis] != 1]
    if moving != sorted(moving):
        return m.fail("axes with several elements change places")
    return m.make("reshape", m["x"], attrs=A.ShapeAttrs(m.root.shape))


def _merged_between(rng: random.Random) -> Value:
    n = rng.randint(1, 3)
    merged = b.reshape(b.input_(0, f32, (2, n, 4, 5)), (2 * n, 4, 5))
    return b.reshape(b.permute(merged, rng.choice(((1, 0, 2), (2, 0, 1), (1, 2, 0)))), (20, 2 * n))


@rule("reshape{s}(permute{p}(r@reshape!(x))) -> reshape{s}(permute(x))", example=_merged_between)
def reshape_of_permuted_reshape(m: Match) -> Value | Mismatch:
    """Fewer views, whose axes can meet those of a view behind."""
    x, shape = m["x"], m["r"].shape
    places = {axis: list[int]() for axis in range(-1, len(shape))}  # which axes of x are merged to an axis; to none, if of size 1
    for axes, parts in reshape_groups(shape, x.shape):
        solid = [axis for axis in axes if shape[axis] != 1]
        if len(solid) > 1 or product(shape[axis] for axis in axes) != product(x.shape[part] for part in parts):
            return m.fail("the inner reshape splits axes", m["r"])
        places[solid[0] if solid else -1] += parts
    moved = b.permute(x, [part for axis in (-1, *m.attrs("p", A.PermuteAttrs).order) for part in places[axis]])
    return b.reshape(moved, m.root.shape)


@rule("reshape(x) | expand(x) -> x", example=lambda rng: make("reshape", b.input_(0, f32, (2, 3)), attrs=A.ShapeAttrs((2, 3))))
def identity_shape(m: Match) -> Value | Mismatch:
    """Both keep the order of elements, so equal shapes are enough."""
    return m["x"] if m["x"].type == m.root.type else m.fail(f"{m['x'].shape} is not {m.root.shape}")


@rule("expand{s}(reshape!{t}(x)) -> expand{s}(x)", example=lambda rng: b.expand(b.reshape(b.input_(0, f32, (3,)), (1, 1, 3)), (2, 4, 3)))
def expand_of_leading_units(m: Match) -> Value | Mismatch:
    """expand puts axes in front by itself."""
    return m.right() if _puts_units_in_front(m["x"], m.attrs("t", A.ShapeAttrs)) else m.fail("the reshape does more than that", m["x"])


def _puts_units_in_front(x: Value, attrs: A.ShapeAttrs) -> bool:
    extra = len(attrs.shape) - x.tensor.rank
    return extra >= 0 and attrs.shape == (1,) * extra + x.shape


def _nested_slices(rng: random.Random) -> Value:
    x = b.input_(0, f32, (2, 20))
    return b.slice_(b.slice_(x, 1, rng.randint(0, 3), 8, rng.choice((1, 2))), 1, rng.randint(0, 2), 3, rng.choice((1, 2)))


@rule("slice{a}(slice{c}(x)) -> slice{d}(x)", example=_nested_slices)
def merge_slices(m: Match) -> Value | Mismatch:
    """element i of the outer = element a.start + a.step * i of the inner = element c.start + c.step * (that) of x"""
    outer, inner = m.attrs("a", A.SliceAttrs), m.attrs("c", A.SliceAttrs)
    if outer.axis != inner.axis:
        return m.fail(f"axis {outer.axis} is not axis {inner.axis}")
    attrs = A.SliceAttrs(outer.axis, inner.start + outer.start * inner.step, outer.length, inner.step * outer.step)
    return m.make("slice", m["x"], attrs=attrs)


@rule("slice{a}(x) -> x", example=lambda rng: make("slice", b.input_(0, f32, (2, 3)), attrs=A.SliceAttrs(1, 0, 3)))
def identity_slice(m: Match) -> Value | Mismatch:
    """All elements, forwards."""
    a = m.attrs("a", A.SliceAttrs)
    everything = a.start == 0 and a.step == 1 and a.length == m["x"].shape[a.axis]
    return m["x"] if everything else m.fail("it drops or reverses elements")


@rule("pad{a}(x) -> x", example=lambda rng: make("pad", b.input_(0, f32, (2, 3)), attrs=A.PadAttrs(((0, 0), (0, 0)), 1.0)))
def identity_pad(m: Match) -> Value | Mismatch:
    """Nothing is added."""
    adds = any(amount != (0, 0) for amount in m.attrs("a", A.PadAttrs).amounts)
    return m.fail("it adds elements") if adds else m["x"]


@rule("view(full{f}()) -> full{f}()")
def view_of_number(m: Match) -> Value | Mismatch:
    """The right side has the view's shape."""
    return full(m.attrs("f", A.FullAttrs).value, m.root.dtype, m.root.shape, m.root.origin)


@rule("binary(r@reshape(x), y) | binary(x, r@reshape(y)) -> binary(x, y)",
      example=lambda rng: b.mul(b.reshape(b.input_(0, f32, (4,)), (1, 1, 4)), b.input_(1, f32, (2, rng.randint(1, 3), 4))))
def operand_with_leading_units(m: Match) -> Value | Mismatch:
    """Broadcasting aligns shapes on the right, so axes of size 1 in front say nothing."""
    view = m["r"]
    attrs = view.attrs
    if not isinstance(attrs, A.ShapeAttrs) or not _puts_units_in_front(view.inputs[0], attrs):
        return m.fail("the reshape does more than put axes in front", view)
    result = m.right()
    if isinstance(result, Value) and result.op == "expand":
        return m.fail("the result would lose axes", view)
    return result


MOVES: RuleSet = (
    identity_permute, merge_permutes, permute_of_units, reshape_of_permuted_reshape, identity_shape,
    equation("reshape{s}(reshape(x)) -> reshape{s}(x)", name="merge_reshapes"),
    equation("expand{s}(expand(x)) -> expand{s}(x)", name="merge_expands"),
    expand_of_leading_units, merge_slices, identity_slice, identity_pad,
    equation("concat(x) -> x", name="concat_of_one"),
    view_of_number,
)

BROADCASTS: RuleSet = (
    equation("unary(expand{s}(x)) -> expand{s}(unary(x))", name="unary_of_expand"),
    equation("cast{d}(expand{s}(x)) -> expand{s}(cast{d}(x))", name="cast_of_expand"),
    equation("binary(expand(x), y) | binary(x, expand(y)) -> binary(x, y)", name="binary_of_expand"),
    equation("where(expand(c), x, y) | where(c, expand(x), y) | where(c, x, expand(y)) -> where(c, x, y)", name="where_of_expand"),
    operand_with_leading_units,
)

RULES: RuleSet = (*MOVES, *BROADCASTS)
