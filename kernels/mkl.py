"""The vendor row: MKL's packed matrix product, which torch carries, called by its C symbols.

    cblas_sgemm_pack      once for a constant weight
    cblas_sgemm_compute   from inside the kernel, on blocks of rows whose result stays in L2 until the epilogue has read it

MKL documents neither the packed layout nor that it depends on nothing but n and k; since one packing serves every number of rows here,
`layout_is_fixed` looks whether that is so before the row is used.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from ..cpu_codegen import symbols
from ..cpu_codegen.body import BodyEmitter
from ..cpu_codegen.builder import F32, I32, I64, PTR, VOID, Function, Module, Val, const, i64
from ..cpu_codegen.contract import KernelCode
from ..cpu_codegen.epilogue import emit_tile_epilogue
from ..cpu_codegen.slots import Slots
from ..graph.dims import bounds
from ..graph.types import f32
from ..platforms.target import Target
from ..stitch.loops import COLUMN, ROW
from .spec import GemmCode, GemmSpec

NAME = "mkl_sgemm_compute"
_PACK, _SIZE, _COMPUTE, _THREADS = "cblas_sgemm_pack", "cblas_sgemm_pack_get_size", "cblas_sgemm_compute", "MKL_Set_Num_Threads_Local"
_ROW_MAJOR, _NO_TRANS, _TRANS, _PACKED, _B_MATRIX = 101, 111, 112, 151, 162
_COLUMNS = 64  # columns that the epilogue takes at a time
_LEAST_K = 384
_FEW_ROWS = 4


def when(target: Target, spec: GemmSpec) -> str | None:
    """None, or why MKL does not compute `spec`.

    Measured on Cascade Lake against the generated AVX-512 kernel, one thread, 1 to 1024 rows, weights from 256 x 256 to 3072 x 768: MKL is
    slower for one row (0.8 to 0.95), equal at k = 256, and faster by 3 to 15 % from k = 384 on.
    """
    if spec.dtypes != (f32, f32):
        return f"computes f32 x f32, not {spec.lhs} x {spec.rhs}"
    if not target.has("avx2"):
        return f"{target.name} has no MKL"
    if not spec.constant_rhs or spec.batch != 1:
        return "packs constant weights of one matrix only"
    if spec.lhs_strides.col != 1 or not isinstance(spec.n, int) or not isinstance(spec.k, int):
        return "needs contiguous rows"
    most = bounds(spec.m)[1]
    if spec.k < _LEAST_K or (most is not None and most <= _FEW_ROWS):
        return f"is slower than generated code below k = {_LEAST_K} or for at most {_FEW_ROWS} rows"
    absent = symbols.reasons((_PACK, _SIZE, _COMPUTE, _THREADS))
    if absent:
        return "; ".join(f"{name}: {reason}" for name, reason in absent.items())
    return None if layout_is_fixed() else "this version packs differently for different numbers of rows"


@lru_cache(maxsize=1)
def layout_is_fixed() -> bool:
    """Whether the packed weight is the same whatever number of rows it is packed for."""
    weight = torch.arange(96 * 400, dtype=torch.float32).view(96, 400)
    first = _packed(weight, 1)
    return all(torch.equal(first, _packed(weight, rows)) for rows in (8, 100, 4096))


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Returns weight [n, k], f32, as MKL packs it: one-dimensional int8."""
    return _packed(weight, 64)


def packed_bytes(n: int, k: int) -> int:
    """Size of the packed weight."""
    return _size(64, n, k)


def _packed(weight: torch.Tensor, rows: int) -> torch.Tensor:
    source = weight.detach().contiguous()
    n, k = source.shape
    result = torch.zeros(_size(rows, n, k), dtype=torch.int8)
    number, pointer = ctypes.c_int, ctypes.c_void_p
    function = ctypes.CFUNCTYPE(None, *[number] * 6, ctypes.c_float, pointer, number, pointer)(symbols.find(_PACK).address)
    function(_ROW_MAJOR, _B_MATRIX, _TRANS, rows, n, k, 1.0, source.data_ptr(), k, result.data_ptr())
    return result


def _size(rows: int, n: int, k: int) -> int:
    function = ctypes.CFUNCTYPE(ctypes.c_size_t, *[ctypes.c_int] * 4)(symbols.find(_SIZE).address)
    return int(function(_B_MATRIX, rows, n, k))


def emit(module: Module, target: Target, spec: GemmSpec, name: str) -> GemmCode:
    """Adds the kernel over rows. One operand more than the epilogue's, a workspace of f32 [m, n], unless the epilogue only stores."""
    n, k = spec.n, spec.k
    assert isinstance(n, int) and isinstance(k, int)
    fn = Function(module, name, VOID, [PTR, I64, I64])
    slots = Slots(fn, spec.params)
    only_stores = _only_stores(spec)
    where = slots.buffer(2 if only_stores else 2 + len(spec.epilogue.buffers))
    emitter = BodyEmitter(fn, target, spec.epilogue, slots, spec.params, 2)
    rows = max(32, target.l2 // 2 // (4 * (n + k)) // 16 * 16)
    threads = fn.call(_THREADS, I32, [const(I32, 1)])

    def block(row: Val, _: list[Val]) -> list[Val]:
        count = fn.smin(fn.sub(fn.args[2], row), i64(rows))
        result = fn.gep(where, row, scale=4 * n)
        _compute(fn, slots, spec, row, count, result)
        if not only_stores:
            _epilogue(fn, emitter, result, n, row, count)
        return []

    fn.loop(fn.args[1], fn.args[2], rows, [], block)
    fn.call(_THREADS, I32, [threads])
    fn.ret()
    fn.finish()
    code = KernelCode(name, slots.order, spec.m, 16, spec.m * spec.n * spec.k)
    return GemmCode(code, None, None, None, packed_bytes(n, k), 0 if only_stores else spec.m * (4 * n))


def _only_stores(spec: GemmSpec) -> bool:
    """Whether the epilogue is nothing but out[r, c] = acc into a dense f32 buffer."""
    body = spec.epilogue
    return len(body.nodes) == 1 and len(body.stores) == 1 and body.buffers == (f32,) and body.stores[0].index == ROW * spec.n + COLUMN


def _compute(fn: Function, slots: Slots, spec: GemmSpec, row: Val, count: Val, result: Val) -> None:
    def number(value: int) -> Val:
        return const(I32, value)

    def narrow(value: Val) -> Val:
        return fn.convert("trunc", value, I32) if value.ref.startswith("%") else number(int(value.ref))

    pitch = slots.dim(spec.lhs_strides.row)
    lhs = fn.gep(slots.buffer(0), fn.mul(row, pitch), F32)
    n, k = narrow(slots.dim(spec.n)), narrow(slots.dim(spec.k))
    kinds = [number(value) for value in (_ROW_MAJOR, _NO_TRANS, _PACKED)]
    fn.call(_COMPUTE, VOID, [*kinds, narrow(count), n, k, lhs, narrow(pitch), slots.buffer(1), k, const(F32, 0.0), result, n])


def _epilogue(fn: Function, emitter: BodyEmitter, result: Val, n: int, row: Val, rows: Val) -> None:
    def columns(col: Val, _: list[Val]) -> list[Val]:
        with emitter.scope():
            cols = fn.smin(i64(_COLUMNS), fn.sub(i64(n), col))
            emit_tile_epilogue(fn, emitter, fn.gep(result, col, F32), F32, n, rows, cols, row, col, _COLUMNS)
        return []

    fn.loop(i64(0), i64(n), _COLUMNS, [], columns)
