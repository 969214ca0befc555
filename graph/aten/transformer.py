"""The fused operations that `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` call in inference, spelled out as ATen computes them.

torch.export and training do not meet them; Dynamo, which runs the modules' own Python, does.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Dim, floordiv
from ..ir import Value
from ..types import boolean, f32
from .call import Call, Row
from .normalization import affine, normalized
from .pointwise import gelu
from .reductions import mean_of, softmax_of

aten = torch.ops.aten


def _projected(inputs: tuple[Value, Value, Value], w: Value, bias: Value) -> tuple[Value, ...]:
    """Queries, keys and values [B, L, E] by w[3 * E, E]: one product where they are made from one tensor."""
    size = floordiv(w.shape[0], 3)
    if inputs[0] is inputs[1] is inputs[2]:
        both = b.linear(inputs[0], w, bias)
        return tuple(b.slice_(both, 2, n * size, size) for n in range(3))
    return tuple(b.linear(x, b.slice_(w, 0, n * size, size), b.slice_(bias, 0, n * size, size)) for n, x in enumerate(inputs))


def _kept(mask: Value, kind: int | None, scores: Value) -> Value:
    """Which scores count. mask: true where one does not; kind 0: [L, S], 1: [B, S], 2: of all scores."""
    wanted = {0: scores.shape[2:], 1: (scores.shape[0], scores.shape[3]), 2: scores.shape}.get(2 if kind is None else kind)
    if mask.shape != wanted:
        raise Unsupported(f"an attention mask of {mask.type} and kind {kind} for scores of {scores.type}")
    mask = b.reshape(mask, (scores.shape[0], 1, 1, scores.shape[3])) if kind == 1 else mask
    return b.logical_not(b.cast(mask, boolean))


def attention(c: Call, query: Value, key: Value, value: Value, size: Dim, heads: int, w: Value, bias: Value, out: Value, out_bias: Value,
              mask: Value | None = None, weights: bool = True, average: bool = True, kind: int | None = None) -> tuple[Value | None, ...]:
    """_native_multi_head_attention of query[B, L, E], key and value[B, S, E]: (result, weights). Rows in which no score counts are NaN."""
    if query.dtype != f32 or any(v.dtype != f32 for v in (key, value, w, bias, out, out_bias)):
        raise Unsupported(f"fused attention over {query.dtype}")
    if not isinstance(size, int):
        raise Unsupported(f"fused attention over {size} columns, an unknown number")
    per_head = size // heads
    parts = _projected((query, key, value), w, bias)
    q, k, v = (b.permute(b.reshape(x, (*x.shape[:2], heads, per_head)), (0, 2, 1, 3)) for x in parts)
    scores = b.matmul(b.mul(q, 1.0 / math.sqrt(per_head)), b.permute(k, (0, 1, 3, 2)))
    if mask is not None:
        scores = b.where(_kept(mask, kind, scores), scores, -math.inf)
    shares = softmax_of(scores, 3)
    together = b.reshape(b.permute(b.matmul(shares, v), (0, 2, 1, 3)), query.shape)
    seen = None if not weights else mean_of(shares, (1,)) if average else shares
    return b.linear(together, out, out_bias), seen


def encoder_layer(c: Call, x: Value, size: int, heads: int, w: Value, bias: Value, out: Value, out_bias: Value, use_gelu: bool,
                  norm_first: bool, eps: float, scale1: Value, shift1: Value, scale2: Value, shift2: Value, up: Value, up_bias: Value,
                  down: Value, down_bias: Value, mask: Value | None = None, kind: int | None = None) -> Value:
    """Attention and a feed-forward network, each with a residual; layer norms before (`norm_first`) or behind them."""

    def first(y: Value) -> Value:
        return affine(normalized(y, (2,), eps)[0], scale1, shift1)

    def second(y: Value) -> Value:
        return affine(normalized(y, (2,), eps)[0], scale2, shift2)

    inner = first(x) if norm_first else x
    seen = attention(c, inner, inner, inner, size, heads, w, bias, out, out_bias, mask, False, True, kind)[0]
    assert seen is not None
    middle = b.add(seen, x) if norm_first else first(b.add(seen, x))
    wide = b.linear(second(middle) if norm_first else middle, up, up_bias)
    result = b.add(b.linear(gelu(wide) if use_gelu else b.relu(wide), down, down_bias), middle)
    return result if norm_first else second(result)


ROWS: dict[Any, Row] = {
    aten._native_multi_head_attention.default: attention,
    aten._transformer_encoder_layer_fwd.default: encoder_layer,
}
