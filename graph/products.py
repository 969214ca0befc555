"""Products: their types, and what they compute, in PyTorch.

Functions named `..._type` say what type a product of some operands has, and raise InvalidGraph where they do not fit. The others are
what the interpreter computes; they get the value, the sizes of the call and the operands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..diagnostics.errors import InvalidGraph
from . import attrs as A
from .dims import Shape, evaluate, floordiv, mod
from .ir import Value
from .shapes import broadcast
from .types import TensorType, Type, f32, i8, i32, i64

Env = Mapping[str, int]


def transposed(matrices: Value) -> Value | None:
    """What a permute exchanges the last two axes of, if it does only that."""
    rank = matrices.tensor.rank
    order = matrices.attrs.order if isinstance(matrices.attrs, A.PermuteAttrs) else ()
    return matrices.inputs[0] if order == (*range(rank - 2), rank - 1, rank - 2) else None


def column_groups(x: Shape, w: Shape) -> int:
    """How many groups of neighbouring columns linear(x[..., G * K], w[N, K]) has, each of which multiplies a part of x of its own."""
    k, n = w[1], w[0]
    parts = x[-1] // k if isinstance(x[-1], int) and isinstance(k, int) and k and x[-1] % k == 0 else 1
    return parts if parts and isinstance(n, int) and n % parts == 0 else 1


def linear_type(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    x, w = types[0], types[1]
    fits = w.rank == 2 and x.rank > 0 and x.shape[-1] == column_groups(x.shape, w.shape) * w.shape[1]
    if not fits or (len(types) == 3 and types[2].shape != (w.shape[0],)):
        raise InvalidGraph(f"linear: {', '.join(map(str, types))} do not fit x[..., G * K], w[N, K], b[N], N a multiple of G")
    wide = x.dtype.bits < 32
    return TensorType(f32 if wide else x.dtype, x.shape[:-1] + (w.shape[0],))


def dequantize_groups_type(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    w, scales = types
    if w.dtype != i8 or scales.dtype != f32 or w.rank != 2 or scales.rank != 2 or mod(w.shape[1], scales.shape[1]) != 0:
        raise InvalidGraph(f"dequantize_groups: {w} and {scales} do not fit w[N, K], scales[N, G] with K a multiple of G")
    return TensorType(f32, w.shape)


def group_linear_type(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    weight = dequantize_groups_type(types[1:], attrs)
    assert isinstance(weight, TensorType)
    if types[0].rank and types[0].shape[-1] != weight.shape[1]:
        raise InvalidGraph(f"group_linear: {types[0]} does not fit {weight}")
    return linear_type((types[0], weight), attrs)


def routed_linear_type(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    x, w, ends = types[:3]
    if len(types) == 4:
        dequantize_groups_type((w, types[3]), attrs)
    fits = x.rank == w.rank == 2 and ends.rank == 1 and x.shape[1] == w.shape[1] and ends.dtype == i64
    if not fits or ends.shape == (0,) or mod(w.shape[0], ends.shape[0]) != 0:
        raise InvalidGraph(f"routed_linear: {x}, {w} and {ends} do not fit x[S, K], w[E * N, K], ends[E] of i64")
    wide = f32 if x.dtype.is_float and x.dtype.bits < 32 else x.dtype if x.dtype.is_float else i32
    if not x.dtype.is_float and (x.dtype.bits != 8 or w.dtype.bits != 8):
        raise InvalidGraph(f"routed_linear: {x} and {w} are neither floats nor 8-bit integers")
    return TensorType(wide, (x.shape[0], floordiv(w.shape[0], ends.shape[0])))


def int_linear_type(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    result = linear_type(types, attrs)
    if types[0].dtype.bits != 8 or types[1].dtype.bits != 8 or not isinstance(result, TensorType):
        raise InvalidGraph(f"int_linear: {types[0]} and {types[1]} are not 8-bit integers")
    return TensorType(i32, result.shape)


def matmul_type(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    a, b = types
    if a.rank < 2 or b.rank < 2 or a.shape[-1] != b.shape[-2]:
        raise InvalidGraph(f"matmul: {a} and {b} do not fit [..., M, K], [..., K, N]")
    batch = broadcast((a.shape[:-2], b.shape[:-2]))
    return TensorType(f32 if a.dtype.bits < 32 else a.dtype, batch + (a.shape[-2], b.shape[-1]))


def int_matmul_type(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    result = matmul_type(types, attrs)
    if types[0].dtype.bits != 8 or types[1].dtype.bits != 8 or not isinstance(result, TensorType):
        raise InvalidGraph(f"int_matmul: {types[0]} and {types[1]} are not 8-bit integers")
    return TensorType(i32, result.shape)


def attention_type(types: tuple[TensorType, ...], attrs: A.Attrs) -> Type:
    q, k, v = types[:3]
    if not (q.rank == k.rank == v.rank == 4) or q.shape[-1] != k.shape[-1] or k.shape[:3] != v.shape[:3]:
        raise InvalidGraph(f"attention: {q}, {k}, {v} do not fit q[B,H,M,D], k[B,G,S,D], v[B,G,S,E]")
    assert isinstance(attrs, A.AttentionAttrs)
    if (attrs.dtype is None) != (attrs.qparams is None) or (attrs.dtype is not None and attrs.dtype.bits != 8):
        raise InvalidGraph(f"attention: a result is quantized to 8 bits with parameters, not to {attrs.dtype} with {attrs.qparams}")
    sink = attrs.besides(types)[1]
    if sink is not None and (sink.rank != 4 or any(n not in (1, m) for n, m in zip(sink.shape, (*q.shape[:3], 1)))):
        raise InvalidGraph(f"attention: {sink} is no sink of {q}")
    return TensorType(attrs.dtype or q.dtype, q.shape[:3] + (v.shape[-1],), attrs.qparams)


def accumulator(x: Tensor) -> Tensor:
    """Operands as the accumulator sees them: narrow floats in f32, integers exactly in i64."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x if x.is_floating_point() else x.long()


def matmul(v: Value, env: Env, x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(accumulator(x), accumulator(y)).to(v.dtype.torch)


def dequantize_groups(v: Value, env: Env, w: Tensor, scales: Tensor) -> Tensor:
    return (w.float().reshape(*scales.shape, -1) * scales.unsqueeze(2)).flatten(1)


def group_linear(v: Value, env: Env, x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    return linear(v, env, x, dequantize_groups(v, env, w, scales))


def _grouped(x: Tensor, w: Tensor) -> Tensor:
    """x[..., G * K] times w[N, K], group by group of the columns."""
    if (groups := x.shape[-1] // max(1, w.shape[1])) < 2:
        return torch.matmul(x, w.t())
    parts = x.reshape(*x.shape[:-1], groups, 1, w.shape[1])
    return torch.matmul(parts, w.reshape(groups, -1, w.shape[1]).transpose(1, 2)).flatten(-3)


def linear(v: Value, env: Env, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    if x.is_floating_point() and x.dtype != w.dtype:  # integer weights, or bf16 and f32
        x, w = (t if t.dtype == torch.float64 else t.float() for t in (x, w))
    if x.is_floating_point() and x.shape[-1] == w.shape[1]:
        return F.linear(accumulator(x), accumulator(w), None if b is None else accumulator(b)).to(v.dtype.torch)
    out = _grouped(accumulator(x), accumulator(w)).to(v.dtype.torch)
    return out if b is None else out + b.to(out.dtype)


def qlinear(v: Value, env: Env, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    xq, wq = v.inputs[0].tensor.qparams, v.inputs[1].tensor.qparams
    if xq is None or wq is None or wq.axis not in (None, 0) or xq.axis is not None:
        raise InvalidGraph("qlinear needs x quantized per tensor and w per tensor or per output channel")
    total = _grouped(x.long() - xq.zero_point, w.long() - wq.zero_point)
    out = total.float() * (torch.tensor(xq.scale, dtype=torch.float32) * torch.tensor(wq.scale, dtype=torch.float32))
    return out if b is None else out + b.float()


def routed_linear(v: Value, env: Env, x: Tensor, w: Tensor, ends: Tensor, scales: Tensor | None = None) -> Tensor:
    w = w if scales is None else dequantize_groups(v, env, w, scales)
    stops = [*ends.clamp(0, len(x)).cummax(0).values.tolist()[:-1], len(x)]
    matrices = w.reshape(len(ends), -1, w.shape[1])
    one = linear if x.is_floating_point() else int_linear
    return torch.cat([one(v, env, x[a:z], m) for a, z, m in zip([0, *stops], stops, matrices)])


def int_linear(v: Value, env: Env, x: Tensor, w: Tensor) -> Tensor:
    return _grouped(x.long(), w.long()).to(torch.int32)


def int_matmul(v: Value, env: Env, x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(x.long(), y.long()).to(torch.int32)


def attention(v: Value, env: Env, *operands: Tensor) -> Tensor:
    """In f32 where it is quantized after that."""
    a, (q, k, value) = v.attrs, operands[:3]
    assert isinstance(a, A.AttentionAttrs)
    mask, sink = a.besides(operands)
    groups = q.shape[1] // k.shape[1]
    if groups != 1:
        k, value = k.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if a.before is not None or a.after is not None:
        past = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
        keep = torch.ones_like(past, dtype=torch.bool)
        keep = keep if a.before is None else keep & (past >= -evaluate(a.before, env))
        keep = keep if a.after is None else keep & (past <= evaluate(a.after, env))
        added = mask is not None and mask.dtype != torch.bool
        hidden = torch.zeros(keep.shape, dtype=torch.float32).masked_fill(~keep, -math.inf) if added else keep
        mask = hidden if mask is None else mask & keep if mask.dtype == torch.bool else mask.float() + hidden
    if a.qparams is not None or (mask is not None and mask.dtype not in (torch.bool, q.dtype)):
        q, k, value = q.float(), k.float(), value.float()
        mask = mask if mask is None or mask.dtype == torch.bool else mask.float()
    if a.cap is None and sink is None:
        found = F.scaled_dot_product_attention(q, k, value, attn_mask=mask, scale=a.scale)
    else:
        found = _spelled(q, k, value, mask, sink, a)
    return found if a.qparams is not None else found.to(v.dtype.torch)


def _spelled(q: Tensor, k: Tensor, value: Tensor, mask: Tensor | None, sink: Tensor | None, a: A.AttentionAttrs) -> Tensor:
    scores = accumulator(q) @ accumulator(k).mT * a.scale
    scores = scores if a.cap is None else a.cap * torch.tanh(scores)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if sink is not None:
        scores = torch.cat((scores, sink.to(scores.dtype).expand(*scores.shape[:-1], 1)), -1)
    weights = torch.softmax(scores, -1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    return weights[..., : k.shape[2]] @ accumulator(value)
