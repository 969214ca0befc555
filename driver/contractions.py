"""Contractions as kernels want them: strides of operands as (batch, row, column)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..graph import attrs as A
from ..graph.dims import Dim, Shape, evaluate, floordiv, product
from ..graph.ir import Value
from ..graph.types import DType, bf16, f32, i4, i8, u8
from ..kernels.attention_spec import AttentionSpec, HeadStrides
from ..kernels.packing import packed_group
from ..kernels.spec import BATCH, GemmSpec, Pieces, Strides
from ..rewrite.query import is_weight
from ..stitch.program import ContractionItem, Strided
from ..stitch.views import delinearize, unmerged

GEMM_TYPES: tuple[tuple[DType, DType], ...] = ((f32, f32), (bf16, bf16), (i8, i8), (u8, i8))
WEIGHT_TYPES: tuple[tuple[DType, DType], ...] = ((f32, i8), (bf16, i8))  # for constant weights


def has_kernel(value: Value) -> bool:
    """Whether the kernel table takes a contraction of these types; others are spelled out in loops."""
    types = tuple(v.dtype for v in value.inputs)
    if value.op == "attention":
        depth, width = value.inputs[0].shape[-1], value.inputs[2].shape[-1]
        return types[0] in (f32, bf16) and types[0] == types[1] == types[2] and isinstance(depth, int) and isinstance(width, int)
    return types[:2] in GEMM_TYPES or (types[:2] in WEIGHT_TYPES and is_weight(value.inputs[1]))


def gemm_spec(item: ContractionItem, constants: set[Value]) -> GemmSpec:
    """The product behind a linear, int_linear, matmul or int_matmul item."""
    return _matmul_spec(item) if item.anchor.op in ("matmul", "int_matmul") else _linear_spec(item, constants)


def _matmul_spec(item: ContractionItem) -> GemmSpec:
    x, y = item.anchor.inputs
    left, right = item.pointers
    *batch, m, n = item.anchor.shape
    lhs = Strides(_batched(left.strides[:-2], x.shape[:-2], batch), left.strides[-2], left.strides[-1])
    rhs = Strides(_batched(right.strides[:-2], y.shape[:-2], batch), right.strides[-1], right.strides[-2])
    return GemmSpec(x.dtype, y.dtype, m, n, x.shape[-1], lhs, item.epilogue, product(batch), False, rhs, item.params)


def _linear_spec(item: ContractionItem, constants: set[Value]) -> GemmSpec:
    x, y, *scales = item.anchor.inputs
    left, right = item.pointers
    n, k = y.shape
    kind = i4 if scales else y.dtype
    group = packed_group(evaluate(floordiv(k, scales[0].shape[1]), {})) if scales else 0
    static = isinstance(n, int) and isinstance(k, int)
    constant = static and right.value in constants and right.offset == 0 and right.strides == y.tensor.strides
    rhs = None if constant else Strides(0, right.strides[0], right.strides[1])
    rows, row = _merged(x.shape[:-1], left.strides[: x.tensor.rank - 1])
    if row is not None and len(left.strides) == x.tensor.rank:
        lhs = Strides(0, row, left.strides[-1])
        return GemmSpec(x.dtype, kind, rows, n, k, lhs, item.epilogue, 1, constant, rhs, item.params, group)
    if left.strides[-1] == 1:
        lhs, pieces = Strides(0, 0), _pieces(x, left)
        return GemmSpec(x.dtype, kind, rows, n, k, lhs, item.epilogue, 1, constant, rhs, item.params, group, pieces)
    *batch, m = x.shape[:-1]  # unequally spaced rows: as many matrices as the leading axes have elements
    lhs = Strides(_batched(left.strides[:-2], batch, batch), left.strides[-2], left.strides[-1])
    return GemmSpec(x.dtype, kind, m, n, k, lhs, item.epilogue, product(batch), constant, rhs, item.params, group)


def _pieces(x: Value, left: Strided) -> Pieces:
    """Where the rows of x lie, and what they consist of."""
    lead = x.tensor.rank - 1
    depth = list(zip(unmerged(x).shape[lead:] if len(left.strides) > x.tensor.rank else x.shape[lead:], left.strides[lead:], strict=True))
    run: Dim = 1
    while depth and depth[-1][1] == run:
        run = depth.pop()[0] * run
    return Pieces(_at(x.shape[:lead], left.strides[:lead]), _at(tuple(d for d, _ in depth), [s for _, s in depth]), evaluate(run, {}))


def _at(shape: Shape, steps: Sequence[Dim]) -> Dim:
    """Offset of the element with row-major number `BATCH`."""
    total: Dim = 0
    for i, step in zip(delinearize(BATCH, shape), steps, strict=True):
        total = total + i * step
    return total


def _batched(steps: Sequence[Dim], shape: Sequence[Dim], batch: Sequence[Dim]) -> Dim:
    """Offset of matrix number b, for an operand whose batch axes are broadcast to `batch`."""
    index = delinearize(BATCH, tuple(batch))
    own = index[len(index) - len(shape) :]
    offset: Dim = 0
    for i, step, extent in zip(own, steps, shape, strict=True):
        offset = offset + (0 if extent == 1 else i * step)
    return offset


def _merged(shape: Sequence[Dim], steps: Sequence[Dim]) -> tuple[Dim, Dim | None]:
    """(number of rows, their common stride) of leading axes; None when they are not equally spaced."""
    kept = [(extent, step) for extent, step in zip(shape, steps, strict=True) if extent != 1]
    if not kept:
        return 1, 0
    for (_, outer), (extent, inner) in itertools.pairwise(kept):
        if outer != inner * extent:
            return product(shape), None
    return product(shape), kept[-1][1]


def attention_spec(item: ContractionItem) -> AttentionSpec:
    """The kernel's view of an attention item; its result has the value's own layout."""
    q, k, v = item.anchor.inputs[:3]
    assert isinstance(item.anchor.attrs, A.AttentionAttrs)
    out = HeadStrides(*item.anchor.tensor.strides)
    heads = [_head(p) for p in item.pointers]
    depth, width = evaluate(q.shape[3], {}), evaluate(v.shape[3], {})
    return AttentionSpec(
        q.dtype,
        q.shape[0],
        q.shape[1],
        k.shape[1],
        q.shape[2],
        k.shape[2],
        depth,
        width,
        heads[0],
        heads[1],
        heads[2],
        out,
        item.epilogue,
        item.params,
    )


def _head(pointer: Strided) -> HeadStrides:
    batch, head, row, col = pointer.strides
    return HeadStrides(batch, head, row, col, pointer.offset)
