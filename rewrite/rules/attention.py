"""Attention spelled in primitive operations becomes the operation `attention`, which never stores the scores.

    s = q @ k^T                      e = exp(s' - max s')            attention(q, k, v, mask; scale)
    s' = s * scale + mask            p = e / sum e                     = softmax(q @ k^T * scale + mask) @ v
    result = p @ v

The scale may multiply or divide s, q, k, or several of them; the mask may be added or chosen with where(keep, s, low). A `low` of -inf
becomes a bool mask, a finite one of at most -1e9 the added mask where(keep, 0, low): beside it a score is lost in rounding, as it is
when it is replaced. Scores of one to four axes of batch and head are covered; with fewer than four, axes of size 1 come in front.

Both sides round differently (the order of the sums, scale applied before or after the product): `ulp=64` of the largest result.
One difference is not rounding: a row whose keys are all masked by -inf is NaN when spelled out, and 0 in torch's attention and here.

Keys and values that several query heads share need not be repeated:

    attention(q, repeat k, repeat v) = attention(q, k, v)       repeat [B, G, S, D] = reshape [B, G*R, S, D] (expand [B, G, R, S, D])
"""

from __future__ import annotations

import random

from ...graph import attrs as A
from ...graph import build as b
from ...graph.ir import Value
from ...graph.types import boolean, f32
from ..equation import parse_pattern
from ..match import Mismatch
from ..query import last_axes_swapped
from ..rule import Match, RuleSet, rule
from ..template import full

_SCALED = "(t@matmul(q, k) | mul(t@matmul(q, k), $times) | div(t@matmul(q, k), $over))"
_SCORES = f"({_SCALED} | add({_SCALED}, mask) | where(keep, {_SCALED}, $low) | where(drop, $low, {_SCALED}))"
_EXP = f"e@exp(sub(s@{_SCORES}, reduce{{m, kind=max}}(s)))"
_SOFTMAX = f"(div!({_EXP}, reduce{{n, kind=sum}}(e)) | mul!({_EXP}, reciprocal(reduce{{n, kind=sum}}(e))))"
_FACTOR = parse_pattern("mul(x, $times) | div(x, $over)")

# What masked scores may become: above the first, some weight would be left for them. The attention adds a number instead, the second at
# most, beside which every score is lost: queries that see no key weigh all alike.
_HIGHEST_MASK, _HIDDEN = -1e9, -1e30
_LEAST_DIVISOR = 2.0**-126  # of which the inverse is no infinity in f32


def _example(rng: random.Random) -> Value:
    """One of the spellings, for the automatic test."""
    batch = rng.choice(((2, 3), (3,), ()))
    rows, keys, depth = rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 4)
    sizes = ((rows, depth), (keys, depth), (keys, rng.randint(1, 4)))
    q, k, v = (b.input_(i, f32, (*batch, *size)) for i, size in enumerate(sizes))
    scale = rng.choice((None, "scores", "over", "both"))
    transposed = b.permute(k, last_axes_swapped(k.tensor.rank))
    s = b.matmul(b.mul(q, 0.5), b.mul(transposed, 0.5)) if scale == "both" else b.matmul(q, transposed)
    s = b.mul(s, 0.3) if scale == "scores" else b.div(s, 1.7) if scale == "over" else s
    mask = rng.choice(("none", "added", "keep", "drop"))
    if mask == "added":
        s = b.add(s, b.input_(3, f32, rng.choice((s.shape, (rows, keys), (1, keys)))))
    elif mask != "none":
        # The first key is seen by every query: see the note on rows without any key.
        seen = b.or_(b.input_(3, boolean, (rows, keys)), b.eq(b.iota(keys, f32), 0.0))
        low = rng.choice((float("-inf"), -3.4028234663852886e38))
        s = b.where(seen, s, low) if mask == "keep" else b.where(b.logical_not(seen), low, s)
    e = b.exp(b.sub(s, b.reduce(s, "max", -1, keepdim=True)))
    total = b.reduce(e, "sum", -1, keepdim=True)
    return b.matmul(b.div(e, total) if rng.random() < 0.5 else b.mul(e, b.reciprocal(total)), v)


@rule(f"matmul({_SOFTMAX}, v) -> attention{{a}}(q, k, v, mask?)", ulp=64, example=_example)
def attention(m: Match) -> Value | Mismatch:
    """The scores' matmul must have the scores' shape, and q, k and v the same batch and head axes."""
    scores, rank = m["s"], m.root.tensor.rank
    for name in ("m", "n"):
        reduction = m.attrs(name, A.ReduceAttrs)
        if reduction.axes != (scores.tensor.rank - 1,) or not reduction.keepdim:
            return m.fail(f"softmax over axes {reduction.axes} of {scores.tensor.rank}, not over the keys", scores)
    if m["t"].shape != scores.shape:
        return m.fail(f"the mask stretches the scores {m['t'].type} to {scores.type}", scores)
    if rank > 4:
        return m.fail(f"{rank - 2} axes of batch and head, more than two")
    mask, scale = _mask(m), _scale(m)
    if isinstance(mask, Mismatch):
        return mask
    if scale is None:
        return m.fail(f"the inverse of {m.number('over')} is infinite", scores)
    q, q_scale = _unscaled(m, m["q"])
    kt, k_scale = _unscaled(m, m["k"])
    k, v = b.permute(kt, last_axes_swapped(kt.tensor.rank)), m["v"]
    if not (q.shape[:-2] == k.shape[:-2] == v.shape[:-2]):
        return m.fail(f"q {q.type}, k {k.type} and v {v.type} differ in batch or heads", m["t"])
    if not (q.dtype == k.dtype == v.dtype == m.root.dtype):
        return m.fail(f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype} with a result of {m.root.dtype}", m["t"])
    front = (1,) * (4 - rank)
    operands = [b.reshape(x, (*front, *x.shape)) for x in (q, k, v)]
    attrs = A.AttentionAttrs(scale * q_scale * k_scale, causal=False)
    result = m.make("attention", *operands, *(() if mask is None else (mask,)), attrs=attrs)
    return m.fitted(b.reshape(result, m.root.shape))


def _scale(m: Match) -> float | None:
    """The factor in this match; None for the inverse of 0, or of a number so small that it is infinite."""
    divisor = float(m.bindings.numbers.get("over", 1.0))
    return float(m.bindings.numbers.get("times", 1.0)) / divisor if abs(divisor) >= _LEAST_DIVISOR else None


def _unscaled(m: Match, operand: Value) -> tuple[Value, float]:
    """(x, c) with operand == x * c; views in between stay outside, where other rules find them."""
    if operand.op == "permute":
        inner, inside = _unscaled(m, operand.inputs[0])
        attrs = operand.attrs
        assert isinstance(attrs, A.PermuteAttrs)
        return (operand, 1.0) if inner is operand.inputs[0] else (b.permute(inner, attrs.order), inside)
    found = m.find(_FACTOR, operand)
    factor = None if found is None or found["x"].shape != operand.shape else _scale(found)
    return (operand, 1.0) if found is None or factor is None else (found["x"], factor)


def _mask(m: Match) -> Value | Mismatch | None:
    """The mask operand of attention: bool to keep, or f32 to add."""
    added = m.get("mask")
    if added is not None or "low" not in m.bindings.numbers:
        return added
    low = float(m.number("low"))
    drop = m.get("drop")
    if low == float("-inf"):
        return m["keep"] if drop is None else m.make("logical_not", drop)
    if not low <= _HIGHEST_MASK:
        return m.fail(f"masked scores become {low}, which does not hide them", m["s"])
    zero, hidden = (full(x, m.root.dtype, (), m.root.origin) for x in (0.0, min(low, _HIDDEN)))
    return m.make("where", m["keep"], zero, hidden) if drop is None else m.make("where", drop, hidden, zero)


def _grouped_example(rng: random.Random) -> Value:
    groups, repeats, keys = rng.randint(1, 3), rng.randint(2, 3), rng.randint(1, 5)
    q = b.input_(0, f32, (2, groups * repeats, 3, 4))

    def repeated(index: int, depth: int) -> Value:
        wide = b.expand(b.unsqueeze(b.input_(index, f32, (2, groups, keys, depth)), 2), (2, groups, repeats, keys, depth))
        return b.reshape(wide, (2, groups * repeats, keys, depth))

    return b.attention(q, repeated(1, 4), repeated(2, 5), scale=0.5)


_REPEATED = "reshape{{{0}r}}(expand{{{0}e}}(reshape{{{0}u}}({0})))"


@rule(f"attention{{a}}(q, {_REPEATED.format('k')}, {_REPEATED.format('v')}, mask?) -> attention{{a}}(q, k, v, mask?)", ulp=64,
      example=_grouped_example)
def grouped_attention(m: Match) -> Value | Mismatch:
    """Head h of the query reads group h // R."""
    for name in "kv":
        shape = m[name].shape
        split, wide, merged = (m.attrs(f"{name}{view}", A.ShapeAttrs).shape for view in "uer")
        if len(shape) != 4 or len(wide) != 5 or split != (*shape[:2], 1, *shape[2:]):
            return m.fail("heads are not repeated one after another", m[name])
        if wide != (*shape[:2], wide[2], *shape[2:]) or merged != (shape[0], shape[1] * wide[2], *shape[2:]):
            return m.fail("more than heads is repeated", m[name])
    return m.right()


RULES: RuleSet = (attention, grouped_attention)
