"""Attention spelled in primitive operations becomes the operation `attention`, which never stores the scores.

    s = q @ k^T                      e = exp(s' - max s')            attention(q, k, v, mask; scale)
    s' = s * scale + mask            p = e / sum e                     = softmax(q @ k^T * scale + mask) @ v
    result = p @ v

The scale may multiply or divide s, q, k, or several of them; products may be capped, c tanh(s / c) (Bello et al., 2017; Gemma 2); masks may
be added or chosen, one after another (`scores.py`). Scores of one to four axes of batch and head are covered; with fewer than four, axes of
size 1 come in front.

Both sides round differently (the order of the sums, scale applied before or after the product, scores that the model rounds to narrow
floats): `ulp=64` of the largest result. One difference is not rounding: a row whose keys are all masked by -inf is NaN when spelled out,
and 0 in torch's attention and here.

Keys and values that several query heads share need not be repeated:

    attention(q, repeat k, repeat v) = attention(q, k, v)       repeat [B, G, S, D] = reshape [B, G*R, S, D] (expand [B, G, R, S, D])
"""

from __future__ import annotations

import random
from dataclasses import replace

from ...graph import attrs as A
from ...graph import build as b
from ...graph.dims import less
from ...graph.ir import Value
from ...graph.positions import HIGHEST_MASK
from ...graph.types import DType, boolean, f32
from ..match import Mismatch
from ..query import last_axes_swapped
from ..rule import Match, RuleSet, rule
from .scores import Scores, factor_of, scores_of
from .sinks import sunk

_LARGEST = 2.0**127  # factors of scores: beyond f32 one is infinite, and no number times a score of 0
_EXP = "e@exp(sub(s, reduce{m, kind=max}(s)))"
_SOFTMAX = f"(div!({_EXP}, reduce{{n, kind=sum}}(e)) | mul!({_EXP}, reciprocal(reduce{{n, kind=sum}}(e))))"
_ALL_HIDDEN = "reduce{hidden, kind=all}(eq(s, -inf))"  # of rows that are 0, which those of attention are
_OR_NOTHING = f"({_SOFTMAX} | where!({_ALL_HIDDEN}, 0, {_SOFTMAX}))"
_ROUNDED = f"({_OR_NOTHING} | cast!({_OR_NOTHING}))"
_PROBABILITIES = f"({_ROUNDED} | reshape!({_ROUNDED}) | slice!{{kept}}({_ROUNDED}))"


def _example(rng: random.Random) -> Value:
    """One of the spellings, for the automatic test."""
    batch = rng.choice(((2, 3), (3,), ()))
    rows, keys, depth = rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 4)
    sizes = ((rows, depth), (keys, depth), (keys, rng.randint(1, 4)))
    q, k, v = (b.input_(i, f32, (*batch, *size)) for i, size in enumerate(sizes))
    scale = rng.choice((None, "scores", "over", "both"))
    capped = rng.random() < 0.3
    transposed = b.permute(k, last_axes_swapped(k.tensor.rank))
    s = b.matmul(b.mul(q, 0.5), b.mul(transposed, 0.5)) if scale == "both" else b.matmul(q, transposed)
    s = b.mul(s, 0.3) if scale == "scores" else b.div(s, 1.7) if scale == "over" else s
    s = b.mul(b.tanh(s), 2.3) if capped else s
    for index, mask in enumerate(rng.sample(("added", "taken", "keep", "drop", "scaled"), rng.randint(0, 3)), 3):
        s = _masked(rng, s, mask, index)
    if rng.random() < 0.3:
        s = b.concat((s, b.expand(b.input_(6, f32, (1,) * s.tensor.rank), (*s.shape[:-1], 1))), s.tensor.rank - 1)
    e = b.exp(b.sub(s, b.reduce(s, "max", -1, keepdim=True)))
    total = b.reduce(e, "sum", -1, keepdim=True)
    p = b.div(e, total) if rng.random() < 0.5 else b.mul(e, b.reciprocal(total))
    return b.matmul(b.slice_(p, p.tensor.rank - 1, 0, keys), v)


def _masked(rng: random.Random, s: Value, mask: str, index: int) -> Value:
    rows, keys = s.shape[-2:]
    if mask == "scaled":
        return b.mul(s, 0.7)
    if mask in ("added", "taken"):
        other = b.input_(index, f32, rng.choice((s.shape, (rows, keys), (1, keys))))
        return b.add(s, other) if mask == "added" else b.sub(s, other)
    # The first key is seen by every query: see the note on rows without any key.
    seen = b.or_(b.input_(index, boolean, (rows, keys)), b.eq(b.iota(keys, f32), 0.0))
    low = rng.choice((float("-inf"), -1.7014118346046923e38))
    return b.where(seen, s, low) if mask == "keep" else b.where(b.logical_not(seen), low, s)


@rule(f"matmul({_PROBABILITIES}, v) -> attention{{a}}(s, s, v, s)", ulp=64, example=_example)
def attention(m: Match) -> Value | Mismatch:
    """Queries, keys and mask are those of the scores; q, k and v must have the same batch and head axes."""
    s, rank = m["s"], m["s"].tensor.rank
    for name in ("m", "n", *(["hidden"] if "hidden" in m.bindings.attrs else [])):
        reduction = m.attrs(name, A.ReduceAttrs)
        if reduction.axes != (rank - 1,) or not reduction.keepdim:
            return m.fail(f"softmax over axes {reduction.axes} of {rank}, not over the keys", s)
    if rank > 4:
        return m.fail(f"{rank - 2} axes of batch and head, more than two")
    if m.root.inputs[0].shape[-2:] != s.shape[-2:] and "kept" not in m.bindings.attrs:
        return m.fail("the probabilities are reshaped, and not in batch and head alone", s)
    scores, sink = _scores_and_sink(m, s)
    if isinstance(scores, Mismatch):
        return scores
    if scores.low > HIGHEST_MASK:
        return m.fail(f"masked scores become {scores.low}, which does not hide them", s)
    if scores.narrowed and m["v"].dtype == f32:
        return m.fail("the scores are rounded to narrow floats, and the values are not", s)
    found = _operands(m, scores)
    if isinstance(found, Mismatch):
        return found
    (*operands, mask), scale = found
    others = [operand for operand in (mask, sink) if operand is not None]
    if not max(abs(scale), abs(scores.cap or 0.0)) < _LARGEST:
        return m.fail("the scores are multiplied by more than f32 holds", s)
    attrs = A.AttentionAttrs(scale, cap=scores.cap, sink=sink is not None)
    result = m.make("attention", *operands, *others, attrs=attrs)
    return m.fitted(b.cast(b.reshape(result, m.root.shape), m.root.dtype))


def _scores_and_sink(m: Match, s: Value) -> tuple[Scores | Mismatch, Value | None]:
    if "kept" not in m.bindings.attrs:
        return scores_of(m, s), None
    found = sunk(m, s, m.attrs("kept", A.SliceAttrs))
    if isinstance(found, Mismatch):
        return found, None
    scores = scores_of(m, found.scores, 1)
    if isinstance(scores, Scores):
        scores = replace(scores, narrowed=scores.narrowed or found.narrowed)
    return scores, b.reshape(found.sink, (1,) * (4 - s.tensor.rank) + found.sink.shape)


def _operands(m: Match, scores: Scores) -> tuple[tuple[Value, Value, Value, Value | None], float] | Mismatch:
    """(q, k, v, mask) of an attention, and its scale."""
    s, v = m["s"], m["v"]
    (q, q_scale), (kt, k_scale) = (_factor(m, operand, v.dtype) for operand in scores.product.inputs)
    k = b.permute(kt, last_axes_swapped(kt.tensor.rank))
    if not (q.shape[:-2] == k.shape[:-2] == scores.product.shape[:-2] and v.shape[:-2] == m.root.shape[:-2]):
        return m.fail(f"q {q.type}, k {k.type} and v {v.type} differ in batch or heads", scores.product)
    if not (q.dtype == k.dtype == v.dtype) or v.dtype not in (m.root.dtype, _wanted(m)):
        return m.fail(f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype} with a result of {m.root.dtype}", s)
    batch = (1,) * (4 - s.tensor.rank) + s.shape[:-2]
    q, k, v = (b.reshape(x, (*batch, *x.shape[-2:])) for x in (q, k, v))
    if scores.rows is not None and (q.dtype != f32 or scores.rows.dtype != f32 or not less(q.shape[-1], k.shape[-2])):
        return m.fail("a factor for each query is for f32, and for more keys than there is depth", s)
    q = q if scores.rows is None else b.mul(q, scores.rows)
    return (q, k, v, scores.mask), scores.scale * q_scale * k_scale


def _wanted(m: Match) -> DType:
    """The type that the result is cast to, where nothing else reads it: the model's own, of which products are sums in f32."""
    value = m.root
    while len(users := m.graph.users[value]) == 1 and not m.graph.is_output(value):
        (value,) = users
        if value.op not in ("reshape", "permute"):
            break
    return value.dtype if value.op == "cast" else m.root.dtype


def _factor(m: Match, operand: Value, dtype: DType) -> tuple[Value, float]:
    """(x, c) with operand == x * c, or that was cast from x of this type; views in between stay outside, where other rules find them."""
    if isinstance(operand.attrs, A.PermuteAttrs):
        inner, inside = _factor(m, operand.inputs[0], dtype)
        return (operand, 1.0) if inner is operand.inputs[0] else (b.permute(inner, operand.attrs.order), inside)
    if operand.op == "cast" and operand.dtype == f32 and operand.inputs[0].dtype == dtype:
        return operand.inputs[0], 1.0
    return factor_of(m, operand) or (operand, 1.0)


def _grouped_example(rng: random.Random) -> Value:
    groups, repeats, keys = rng.randint(1, 3), rng.randint(2, 3), rng.randint(1, 5)
    q = b.input_(0, f32, (2, groups * repeats, 3, 4))

    def repeated(index: int, depth: int) -> Value:
        wide = b.expand(b.unsqueeze(b.input_(index, f32, (2, groups, keys, depth)), 2), (2, groups, repeats, keys, depth))
        return b.reshape(wide, (2, groups * repeats, keys, depth))

    return b.attention(q, repeated(1, 4), repeated(2, 5), scale=0.5)


_REPEATED = "reshape{{{0}r}}(expand{{{0}e}}(reshape{{{0}u}}({0})))"


@rule(f"attention{{a}}(q, {_REPEATED.format('k')}, {_REPEATED.format('v')}, mask?, sink?) -> attention{{a}}(q, k, v, mask?, sink?)", ulp=64,
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
