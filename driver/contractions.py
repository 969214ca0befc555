"""Contractions as kernels want them: strides of operands as (batch, row, column)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from ..graph import attrs as A
from ..graph import sums16
from ..graph.dims import Dim, evaluate, floordiv, mod, product
from ..graph.ir import Value
from ..graph.ops import OPS
from ..graph.products import transposed
from ..graph.types import DType, bf16, boolean, f16, f32, i4, i8, u8
from ..kernels import table
from ..kernels.attention_few import enough_keys, most_queries
from ..kernels.attention_spec import AttentionSpec, HeadStrides
from ..kernels.attention_table import LONGEST
from ..kernels.attention_words import worth_packing
from ..kernels.packing import int_of, packed_group
from ..kernels.spec import BATCH, GemmSpec, Pieces, Strides
from ..platforms.target import Target
from ..rewrite.query import is_weight
from ..stitch.constants import compute
from ..stitch.program import ContractionItem, Strided
from ..stitch.views import VIEWS, delinearize
from .grouped import Axis, blocks_of, joint, lhs_axes, matrices, side_by_side

GEMM_TYPES: tuple[tuple[DType, DType], ...] = ((f32, f32), (bf16, bf16), (f16, f16), (i8, i8), (u8, i8))
_FEW_COLUMNS = 4  # of 512 x 768, on a Zen 4: 37 us for 2 and 66 for 4, where a tile of 16 takes 117, and 86 in bf16
# Of what is no weight, on a Zen 4: 1024 x 4096 on 4 rows 1.7 instead of 5.0 ms, 96 of 128 x 64 on 8 rows 170 us instead of 231, 2048 of
# 8 x 8 47 us instead of 146; where a column lies side by side 1.2 ms instead of 2.2 on 4 rows, but 297 us instead of 224 on 8.
_FEW_ROWS, _FEW_ROWS_ALONG = 8, 4
# Not where tiles read that in place, on an Emerald Rapids: 1024 x 4096 on 4 rows takes 710 us instead of 940, on 8 1050 instead of 1390, 96
# of 128 x 64 on 8 rows 208 us instead of 260; 512 x 512 on one row 16 us instead of 20. Nothing is known of other architectures.
_FEW_QUERIES = {f32: 4, f16: 4, bf16: 2}  # in loops, beside few keys
# 8 heads of 64 beside 1024 keys that lie in memory, rounded and not: 1.45 of the time for 16 queries, 1.2 for 32, 1.0 for 48; 1024 queries
# beside 16 keys 1.1, 24 keys 1.04, 32 keys 0.93 (Emerald Rapids without AMX; with AVX2 alone it is the same).
_MANY_QUERIES, _MANY_KEYS = 48, 32
WEIGHT_TYPES: tuple[tuple[DType, DType], ...] = ((f32, i8), (bf16, i8))  # for constant weights


def has_kernel(value: Value, target: Target, whole: bool = False, panel: int = 0) -> bool:
    """Whether a kernel computes a contraction. Others are spelled out in loops: those of other types than the kernel table takes, and those
    that loops compute faster, unless it must stay whole. panel: of `is_dot`."""
    types = tuple(v.dtype for v in value.inputs)
    if value.op == "routed_linear":
        known = is_weight(value.inputs[1]) and all(isinstance(d, int) for d in (*value.inputs[1].shape, *value.inputs[2].shape))
        return known and types[:2] in (*GEMM_TYPES, *WEIGHT_TYPES)
    if value.op == "attention":
        depth, width = value.inputs[0].shape[-1], value.inputs[2].shape[-1]
        taken = types[0] in (f32, bf16, f16) and types[0] == types[1] == types[2]
        if not (taken and isinstance(depth, int) and isinstance(width, int)):
            return False
        return whole or (max(depth, width) <= LONGEST and not _in_loops(value, target))
    if is_dot(value, panel) and not whole:
        return False
    return types[:2] in GEMM_TYPES or (types[:2] in WEIGHT_TYPES and is_weight(value.inputs[1]))


def few_queries(value: Value, target: Target) -> int:
    """How many queries a key of an attention has, those of all heads that share it, where these are few, as in a step of text generation:
    it reads the keys and values and does little else. 0 elsewhere."""
    if value.op != "attention" or not isinstance(queries := value.inputs[0].shape[-2], int):
        return 0
    heads, groups, most = value.inputs[0].shape[1], value.inputs[1].shape[1], most_queries(target, value.inputs[0].dtype)
    return next((queries * shared for shared in range(1, most // max(queries, 1) + 1) if heads == shared * groups), 0)


def _in_loops(attention: Value, target: Target) -> bool:
    """Whether loops compute it faster than any kernel: few queries beside few keys, or what no kernel reads as it lies."""
    queries = few_queries(attention, target)
    if queries and not enough_keys(queries, attention.inputs[1].shape[-2]):
        return queries <= _FEW_QUERIES.get(attention.inputs[0].dtype, 0)
    return queries > 0 and any(map(_read_in_loops, attention.inputs[1:3]))


def _read_in_loops(rows: Value) -> bool:
    """Whether loops read keys or values faster than the kernel for few queries: those that are made of fewer bytes, as of a quantized
    cache, of which they make no others in memory, and those that lie column by column."""
    if transposed(rows) is not None:
        return True
    seen, stack = {rows}, [rows]
    while stack:
        value = stack.pop()
        inner = value.inputs if value.op in VIEWS or OPS[value.op].group == "elementwise" else ()
        if value.op == "cast" and inner[0].dtype != boolean and inner[0].dtype.bits < rows.dtype.bits:
            return True
        stack += [each for each in inner if each not in seen]
        seen.update(inner)
    return False


def worth_rounding(attention: Value) -> bool:
    """Whether attention in bf16 saves more time, where integers stand for it, than making these takes. What rounds its operands is part of
    what makes them, but of those that lie in memory, as caches do: these have to have many queries to a key, and many keys."""
    (_, heads, m, _), (_, groups, keys, _) = (value.shape for value in attention.inputs[:2])
    if all(_made(value) for value in attention.inputs[:3]):
        return worth_packing(m, keys)
    known = isinstance(m, int) and isinstance(heads, int) and isinstance(groups, int)
    few = known and int_of(m) * int_of(heads) < _MANY_QUERIES * int_of(groups)
    return not few and (not isinstance(keys, int) or keys >= _MANY_KEYS)


def _made(value: Value) -> bool:
    """Whether an operand is computed, and not only put together."""
    while value.op in ("reshape", "permute", "expand", "slice"):
        value = value.inputs[0]
    return OPS[value.op].group in ("elementwise", "contraction")


@lru_cache(maxsize=64)
def panel_in_place(target: Target) -> int:
    """How many columns of f32 tiles read where they lie, with few rows; 0: loops are as good."""
    return table.tiles(target, f32, f32)[0].packing.nr if target.has("avx2", "fma") else 0


def is_dot(value: Value, panel: int = 0) -> bool:
    """Whether a product of floats has few columns, or few rows and a right operand that would have to be packed for it: sums along memory,
    where a tile would compute as many columns as its vectors have, or packing would take longer than the product. panel: columns of
    f32 that tiles read where they lie; 0: none."""
    if value.op not in ("linear", "matmul") or not all(v.dtype.is_float for v in value.inputs[:2]):
        return False
    (rows, columns), count = value.inputs[:2], value.shape[-1]
    along = value.op == "linear" or transposed(columns) is not None
    if not (isinstance(count, int) and count <= (_FEW_COLUMNS if along else 1)):
        alone = value.shape[-2] if value.op == "matmul" else product(value.shape[:-1])
        if panel and not along and columns.dtype == f32 and isinstance(count, int) and count % panel == 0:
            return False
        return isinstance(alone, int) and alone <= (_FEW_ROWS_ALONG if along else _FEW_ROWS) and not is_weight(columns)
    while rows.op in VIEWS and rows.op != "window":
        rows = rows.inputs[0]
    return rows.op != "window"  # whose elements lie in pieces


def gemm_spec(item: ContractionItem, constants: set[Value], target: Target) -> GemmSpec:
    """The product behind an item whose anchor is no attention, with what the table of a target wants to know of it."""
    if item.anchor.op in ("matmul", "int_matmul"):
        return _matmul_spec(item)
    spec = _routed_spec(item) if item.anchor.op == "routed_linear" else _linear_spec(item, constants)
    return replace(spec, sums16=_sums16(item)) if table.asks_sums16(target, spec) else spec


def _sums16(item: ContractionItem) -> int:
    """`sums16.how_many` of the constant weights of a product, as they are packed."""
    weight, blocks = compute(item.anchor.inputs[1]), blocks_of(item, True)
    return min(map(sums16.how_many, (weight,) if blocks is None else blocks.of(weight)))


def _routed_spec(item: ContractionItem) -> GemmSpec:
    x, w, ends, *scales = item.anchor.inputs
    (rows, n), (row, column) = item.anchor.shape, item.pointers[0].strides
    count, lhs = evaluate(ends.shape[0], {}), Strides(0, row, column)
    return GemmSpec(
        x.dtype, i4 if scales else w.dtype, rows, n, w.shape[1], lhs, item.epilogue, params=item.params, group=_group(w, scales),
        weights=count, routed=True,
    )


def _group(w: Value, scales: Sequence[Value]) -> int:
    """How many neighbours along k have a packed scale of their own."""
    return packed_group(evaluate(floordiv(w.shape[1], scales[0].shape[1]), {})) if scales else 0


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
    group = _group(y, scales)
    static = isinstance(n, int) and isinstance(k, int)
    constant = static and right.value in constants and right.offset == 0 and _lies_as(right, y)
    blocks = blocks_of(item, constant)
    outer, inner = lhs_axes(item)
    count = 1
    if blocks is not None:
        count, n, k = blocks.count, floordiv(n, blocks.count), k * blocks.joined
        outer, inner = matrices(outer, inner, blocks)
    rhs = None if constant else Strides(mod(BATCH, count) * (n * right.strides[0]), right.strides[0], right.strides[1])
    lead = list(zip(x.shape[:-1], left.strides[: x.tensor.rank - 1], strict=True))
    samples, pieces, rows = joint(lead[:-1]), None, joint(lead)
    if len(rows) <= 1 and len(inner) == 1:
        m, row = rows[0] if rows else (1, 0)
        samples, lhs = [], Strides(_at(outer, BATCH), row, inner[0][1])
    elif inner[-1][1] == 1:
        *starts, (run, _) = inner
        samples, m, lhs = [], product(x.shape[:-1]), Strides(_at(outer, BATCH), 0)
        pieces = Pieces(_at(rows, BATCH), _at(starts, BATCH), evaluate(run, {}))
    else:  # unequally spaced rows: as many matrices as the leading axes have elements
        m, row = lead[-1]
        lhs = Strides(_at(samples, floordiv(BATCH, count)) + _at(outer, mod(BATCH, count)), row, inner[-1][1])
    batch = product(extent for extent, _ in samples)
    epilogue = item.epilogue if count == 1 else side_by_side(item.epilogue, m, n, count, batch)
    weights = count if constant else 1
    diagonal = (blocks.joined, blocks.run) if blocks is not None and constant and inner[-1][1] == 1 else (1, 0)
    return GemmSpec(
        x.dtype, kind, m, n, k, lhs, epilogue, batch * count, constant, rhs, item.params, group, pieces, weights=weights,
        diagonal=diagonal,
    )


def _lies_as(operand: Strided, value: Value) -> bool:
    """Whether the elements lie as those of the value itself do. The stride of an axis with one element says nothing."""
    return all(extent == 1 or step == own for extent, step, own in zip(value.shape, operand.strides, value.tensor.strides, strict=True))


def _at(axes: Sequence[Axis], number: Dim) -> Dim:
    """Offset of the element with this row-major number."""
    total: Dim = 0
    for i, (_, step) in zip(delinearize(number, tuple(extent for extent, _ in axes)), axes, strict=True):
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
        item.result,
    )


def _head(pointer: Strided) -> HeadStrides:
    batch, head, row, col = pointer.strides
    return HeadStrides(batch, head, row, col, pointer.offset)
