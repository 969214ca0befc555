"""The vendor row: the matrix product of the BLAS that torch carries (MKL on x86-64), called by its C symbol from inside a kernel.

`sgemm_` works on blocks of rows whose result stays in L2 until the epilogue has read it. The weight stays as it is, [n, k].

MKL's packed product (`cblas_sgemm_pack`, `cblas_sgemm_compute`) would be faster still, but cannot be a row: what it packs depends on the
number of rows and on the address of the buffer, so that it can neither serve every number of rows nor be saved.
"""

from __future__ import annotations

import ctypes

import torch

from ..cpu_codegen import symbols
from ..cpu_codegen.body import BodyEmitter
from ..cpu_codegen.builder import F32, I8, I32, I64, PTR, VOID, Function, Module, Val, const, i64
from ..cpu_codegen.contract import KernelCode
from ..cpu_codegen.epilogue import emit_tile_epilogue
from ..cpu_codegen.slots import Slots
from ..graph.dims import bounds
from ..graph.types import f32
from ..platforms.target import Target
from ..stitch.loops import COLUMN, ROW
from .spec import GemmCode, GemmSpec

NAME = "mkl_sgemm"
_PRODUCT, _THREADS, _FULL_SPEED = "sgemm_", "MKL_Set_Num_Threads_Local", "mkl_serv_intel_cpu_true"
_COLUMNS = 64  # columns that the epilogue takes at a time
_LEAST_ROWS, _LEAST_K = 1024, 384


def when(target: Target, spec: GemmSpec) -> str | None:
    """None, or why the vendor library does not compute `spec`.

    Measured on Cascade Lake against the generated AVX-512 kernel, one thread: `sgemm_`, which packs the weight in each call, is slower up
    to a few hundred rows (half as fast for 32) and at k = 256, equal at 512 rows, and about 5 % faster from 1024 rows and k = 384 on.
    On Emerald Rapids it takes 1.03 to 1.15 times as long, from 1024 x 384 x 384 to 2048 x 4096 x 4096, and on Zen 4 1.25 times: MKL has
    slower code for processors that are not Intel's.
    """
    if spec.dtypes != (f32, f32):
        return f"computes f32 x f32, not {spec.lhs} x {spec.rhs}"
    if not target.has("avx2"):
        return f"{target.name} has no MKL"
    if target.golden_cove:
        return "is slower than generated code on Intel's processors from Sapphire Rapids on"
    if not spec.constant_rhs or spec.batch != 1 or spec.routed or spec.lhs_strides.col != 1 or spec.lhs_pieces is not None:
        return "takes one constant weight and contiguous rows"
    if (bounds(spec.m)[0] or 0) < _LEAST_ROWS or (bounds(spec.k)[1] or 0) < _LEAST_K:
        return f"is faster than generated code only from {_LEAST_ROWS} rows and k = {_LEAST_K} on, here m = {spec.m}, k = {spec.k}"
    absent = symbols.reasons((_PRODUCT, _THREADS, _FULL_SPEED))
    if absent:
        return "; ".join(f"{name}: {reason}" for name, reason in absent.items())
    return None if full_speed() else "MKL has slower code for processors that are not Intel's"


def full_speed() -> bool:
    """Whether MKL takes this processor for one of Intel's, which decides which code it runs."""
    at = symbols.address(_FULL_SPEED)
    return at is not None and ctypes.CFUNCTYPE(ctypes.c_int)(at)() == 1


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Returns weight [n, k], f32, as it is: one-dimensional int8."""
    return weight.detach().contiguous().view(-1).view(torch.int8)


def emit(module: Module, target: Target, spec: GemmSpec, name: str) -> GemmCode:
    """Adds the kernel over rows. One operand more than the epilogue's, a workspace of f32 [m, n], unless the epilogue only stores."""
    n, k = spec.n, spec.k
    assert isinstance(n, int) and isinstance(k, int)
    fn = Function(module, name, VOID, [PTR, I64, I64])
    slots = Slots(fn, spec.params)
    only_stores = _only_stores(spec)
    where = slots.buffer(2 if only_stores else 2 + len(spec.epilogue.buffers))
    emitter = BodyEmitter(fn, target, spec.epilogue, slots, 2)
    product = _Product(fn, slots, spec, n, k)
    rows = max(128, target.l2 // 2 // (4 * (n + k)) // 16 * 16)
    threads = fn.call(_THREADS, I32, [const(I32, 1)])

    def block(row: Val, _: list[Val]) -> list[Val]:
        count = fn.smin(fn.sub(fn.args[2], row), i64(rows))
        result = fn.gep(where, row, scale=4 * n)
        product.emit(row, count, result)
        if not only_stores:
            _epilogue(fn, emitter, result, n, row, count)
        return []

    fn.loop(fn.args[1], fn.args[2], rows, [], block)
    fn.call(_THREADS, I32, [threads])
    fn.ret()
    fn.finish()
    code = KernelCode(name, slots.order, spec.m, 16, spec.m * (n * k))
    # The epilogue reads whole vectors of the workspace: one more after the last row.
    return GemmCode(code, None, None, None, 4 * n * k, 0 if only_stores else spec.m * (4 * n) + 64)


def _only_stores(spec: GemmSpec) -> bool:
    """Whether the epilogue is nothing but out[r, c] = acc into a dense f32 buffer."""
    body = spec.epilogue
    return len(body.nodes) == 1 and len(body.stores) == 1 and body.buffers == (f32,) and body.stores[0].index == ROW * spec.n + COLUMN


class _Product:
    """The call of sgemm_, whose arguments are all pointers, to numbers of 32 bits. It sees our matrices transposed, column by column."""

    def __init__(self, fn: Function, slots: Slots, spec: GemmSpec, n: int, k: int) -> None:
        self.fn, self.slots = fn, slots
        self.pitch = slots.dim(spec.lhs_strides.row)
        self.trans, self.plain = (fn.module.table(I8, [ord(letter)]) for letter in "TN")
        self.n, self.k = (fn.module.table(I32, [value]) for value in (n, k))
        self.one, self.zero = (fn.module.table(F32, [value]) for value in (1.0, 0.0))
        self.m, self.lda = fn.alloca(4, 4), fn.alloca(4, 4)

    def emit(self, row: Val, count: Val, result: Val) -> None:
        """result[0 : count] = lhs[row : row + count] times the transposed weight."""
        fn = self.fn
        fn.store(fn.convert("trunc", count, I32), self.m)
        fn.store(fn.convert("trunc", self.pitch, I32), self.lda)
        lhs = fn.gep(self.slots.buffer(0), fn.mul(row, self.pitch), F32)
        sizes = [self.trans, self.plain, self.n, self.m, self.k]
        fn.call(_PRODUCT, VOID, [*sizes, self.one, self.slots.buffer(1), self.k, lhs, self.lda, self.zero, result, self.n])


def _epilogue(fn: Function, emitter: BodyEmitter, result: Val, n: int, row: Val, rows: Val) -> None:
    def columns(col: Val, _: list[Val]) -> list[Val]:
        with emitter.scope():
            cols = fn.smin(i64(_COLUMNS), fn.sub(i64(n), col))
            emit_tile_epilogue(fn, emitter, fn.gep(result, col, F32), F32, n, rows, cols, row, col, _COLUMNS, n % _COLUMNS)
        return []

    fn.loop(i64(0), i64(n), _COLUMNS, [], columns)
