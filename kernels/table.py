"""The kernel table: which code computes a matrix product on a target, and why not the rows before it.

Rows are tried in order, the fastest first; the last one always accepts. Tests and benchmarks go through the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from ..cpu_codegen.builder import Module
from ..diagnostics.errors import Outdated
from ..graph import sums16
from ..graph.dims import bounds
from ..graph.types import DType, bf16, f16, f32, i4, i8, u8
from ..platforms.target import Target
from ..stitch.loops import Body
from . import amx, gemm, mkl, narrow, neon, packing, reference, weight_only, winograd, winograd_emit, x86_vector, x86_words
from .micro import MicroKernel
from .selection import Selection, first_accepting, lacks
from .spec import GemmCode, GemmSpec, dense
from .vector_micro import VectorMicro
from .weight_only import Small

FEW_ROWS = 4
Micros = tuple[MicroKernel, ...]
_Names = tuple[str, ...]
_Features = tuple[_Names, ...]
_Tall = tuple[tuple[MicroKernel, tuple[str, ...], float], ...]  # tiles for many rows, what each needs beside the family, its rate


@dataclass(frozen=True)
class Kernel:
    """One row.

    name: by the grammar of `docs/add_a_kernel.md`. when: None, or the reason why the row does not apply. pack: the packed form of a
    constant weight [n, k], or of one and its group scales [n, groups]. emit: adds the functions to a module under a given name.
    rate: products of the lhs and rhs types a core makes in a cycle at best; 0: unknown. micros: the tiles, empty for vendor rows. narrow:
    of a block-diagonal weight (`GemmSpec.diagonal`) it packs [n, k / groups], what columns multiply of their own group.
    """

    name: str
    when: Callable[[Target, GemmSpec], str | None]
    pack: Callable[..., torch.Tensor]
    emit: Callable[[Module, Target, GemmSpec, str], GemmCode]
    rate: float
    micros: Micros = ()
    narrow: bool = False


def select(target: Target, spec: GemmSpec) -> Selection[Kernel]:
    """Returns the row that `spec.choice` names if it accepts `spec` on `target`, else the first one that does."""
    first = first_accepting(TABLE, target, spec)
    if spec.choice.row in ("", first.kernel.name):
        return first
    chosen = next((row for row in accepting(target, spec) if row.name == spec.choice.row), None)
    if chosen is None:
        return first
    return Selection(chosen, (*first.refusals, (first.kernel.name, "took longer when it was measured")))


def accepting(target: Target, spec: GemmSpec) -> list[Kernel]:
    """All rows that accept `spec` on `target`, but for the last one, which always does."""
    return [row for row in TABLE[:-1] if row.when(target, spec) is None]


def asks_sums16(target: Target, spec: GemmSpec) -> bool:
    """Whether another row computes a product where the weights are small (`graph.sums16`)."""
    return spec.constant_rhs and not spec.lhs.is_float and _prefers_small(target, spec.lhs)


@cache
def _prefers_small(target: Target, lhs: DType) -> bool:
    usual, small = (first_accepting(TABLE, target, _sample(lhs, i8, count)) for count in (1, sums16.COUNTS[0]))
    return usual.kernel is not small.kernel


def unsigned_step(target: Target) -> int:
    """Of how many k the 8-bit products of `target` read whole rows in place where the lhs is unsigned; 0: a signed one will do as well."""
    signed, unsigned = (tiles(target, lhs, i8)[0] for lhs in (i8, u8))
    return unsigned.step_k if unsigned.layout.direct and not signed.layout.direct else 0


def tiles(target: Target, lhs: DType, rhs: DType) -> tuple[MicroKernel, ...]:
    """The largest tile of every generated row that `target` can run, the fastest first; the reference where there is none."""
    spec = _sample(lhs, rhs, sums16.COUNTS[0])
    rows = (row for row in TABLE if row.micros and row.when(target, spec) is None)
    return tuple(row.micros[0] for row in rows) or reference.plain(lhs, rhs)


def _sample(lhs: DType, rhs: DType, count: int) -> GemmSpec:
    """A large product like any other. count: of its weights, `sums16.how_many`."""
    return GemmSpec(lhs, rhs, 1024, 1024, 1024, dense(1024, 1024), Body((), (), ()), sums16=count)


def operands(lhs: DType, rhs: DType, spec: GemmSpec) -> str | None:
    """Why a row for these operand types does not apply to `spec`."""
    return None if spec.dtypes == (lhs, rhs) else f"computes {lhs} x {rhs}, not {spec.lhs} x {spec.rhs}"


def many_rows(spec: GemmSpec, few: int = FEW_ROWS) -> str | None:
    """Why a row of small tiles, which are for `few` rows, does not apply to `spec`; None: the result never has more."""
    most = bounds(spec.rows)[1]
    return None if most is not None and most <= few else f"is for at most {few} rows, here there may be more"


def _row(micros: Micros, features: tuple[str, ...], rate: float) -> Kernel:
    """A generated row."""
    first = micros[0]

    def when(target: Target, spec: GemmSpec) -> str | None:
        return operands(first.lhs, first.rhs, spec) or lacks(target, features)

    return Kernel(first.name, when, lambda weight: packing.pack_rhs(weight, first.packing), _emitter(micros), rate, micros)


def _small(micros: Micros, features: tuple[str, ...], rate: float) -> Kernel:
    """The row of the small tiles of a family, for products that never have many rows."""
    row = _row(micros[1:], features, rate)
    return replace(row, when=lambda target, spec: row.when(target, spec) or many_rows(spec))


def _unless_near(row: Kernel, feature: str) -> Kernel:
    """The same row, but where the processor has `feature` only for weights that L2 does not hold: others come faster than it multiplies."""

    def when(target: Target, spec: GemmSpec) -> str | None:
        weights = bounds(spec.n * spec.k)[1]
        near = target.has(feature) and weights is not None and weights * spec.rhs.bytes <= target.l2
        return row.when(target, spec) or (f"is slower than {feature} where weights stay in L2" if near else None)

    return replace(row, when=when)


def _sums16(count: int, row: Kernel) -> Kernel:
    """The same row for weights of which `count` products are added in 16 bits."""
    too_large = f"{count} of its products do not fit 16 bits"

    def when(target: Target, spec: GemmSpec) -> str | None:
        unfit = None if spec.sums16 >= count else too_large if spec.constant_rhs else "is for constant weights"
        return row.when(target, spec) or unfit

    def pack(weight: torch.Tensor) -> torch.Tensor:
        if sums16.how_many(weight) < count:
            raise Outdated(f"the weight has become larger: {too_large}", hint="compile the model again")
        return row.pack(weight)

    return replace(row, when=when, pack=pack)


def _windows(lhs: DType, rhs: DType, micros: Micros, features: _Names, rate: float, unless: _Names = ()) -> Kernel:
    """The row of a family for convolutions by minimal filtering, which has 16 products of the types of `micros` where windows have 36.
    unless: features whose products are faster."""

    def when(target: Target, spec: GemmSpec) -> str | None:
        reason = operands(lhs, rhs, spec) or lacks(target, features) or winograd.why_not(target, spec)
        faster = [name for name in unless if lacks(target, (name,)) is None]
        return reason or (f"36 products are faster with {faster[0]}" if faster else x86_words.faster_over_few_places(target, spec))

    def emit(module: Module, target: Target, spec: GemmSpec, name: str) -> GemmCode:
        return winograd_emit.emit(module, target, spec, micros, name)

    first = micros[0]
    name = first.name.replace(f"gemm_{first.acc}_{first.lhs}_{first.rhs}", f"winograd_{first.acc}_{lhs}_{rhs}")
    return Kernel(name, when, lambda weight: winograd.pack(weight, first), emit, rate * 36 / winograd.POINTS)


def _narrow(inner: VectorMicro, features: _Features, rate: float, unless: tuple[str, ...] = ()) -> Kernel:
    """The row of some instructions for few columns over windows, and for columns in narrow groups. features: each enough. unless: features
    whose products are faster."""

    def when(target: Target, spec: GemmSpec) -> str | None:
        missing = [lacks(target, each) for each in features]
        reason = operands(inner.lhs, inner.rhs, spec) or narrow.foreign(spec) or (missing[0] if all(missing) else None)
        faster = next((f"products are faster with {name}" for name in unless if target.has(name)), None)
        return reason or faster or narrow.why_not(target, spec, inner)

    def emit(module: Module, target: Target, spec: GemmSpec, name: str) -> GemmCode:
        return narrow.emit(module, target, spec, inner, name)

    name = f"narrow_{inner.acc}_{inner.lhs}_{inner.rhs}_{inner.lanes}_{inner.isa}"
    return Kernel(name, when, lambda weight: narrow.pack(weight, inner), emit, rate, narrow=True)


def _words(lanes: int, fused: bool, features: tuple[str, ...], rate: float) -> Kernel:
    """The row of some instructions that multiply pairs of 16-bit integers, where none multiplies bf16 faster."""
    row = _row(x86_words.family(x86_words.SAMPLE, lanes, fused), features, rate)

    def when(target: Target, spec: GemmSpec) -> str | None:
        return row.when(target, spec) or x86_words.why_not(target, spec)

    return replace(row, when=when, pack=x86_words.packed, emit=x86_words.emitter(lanes, fused))


def _emitter(micros: Micros) -> Callable[[Module, Target, GemmSpec, str], GemmCode]:
    return lambda module, target, spec, name: gemm.emit(module, target, spec, micros, name)


def weight_only_row(
    inner: MicroKernel | None, small: Small, lhs: DType, rhs: DType, features: tuple[str, ...], rate: float, others: _Features = ()
) -> Kernel:
    """A row for integer weights times floats. inner: the tile for many rows; None: the small tiles serve them too.

    others: what rows for many rows need that are faster at them; where there is one, the small tiles are for few rows alone.
    """
    sample = weight_only.family(inner, small, lhs, rhs, 64 if rhs == i4 else 0, 1024)

    def when(target: Target, spec: GemmSpec) -> str | None:
        reason = operands(lhs, rhs, spec) or lacks(target, features)
        if inner is None:
            has_other = any(lacks(target, needs) is None for needs in others)
            return reason or (many_rows(spec, max(FEW_ROWS, sample[0].mr)) if has_other else None)
        step = inner.step_k
        return reason or (f"takes {step} k at a time, the groups have {spec.group}" if spec.group % step else None)

    return Kernel(sample[0].name, when, _weight_packer(small, rhs), _weight_emitter(inner, small), rate, sample)


def _weight_packer(small: Small, rhs: DType) -> Callable[..., torch.Tensor]:
    def pack(weight: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
        if scales is None:
            return packing.pack_rhs(weight, small.packing(rhs, 0, weight.shape[1]))
        group = packing.packed_group(weight.shape[1] // scales.shape[1])
        return packing.pack_grouped(weight, scales, small.packing(rhs, group, weight.shape[1]))

    return pack


def _weight_emitter(inner: MicroKernel | None, small: Small) -> Callable[[Module, Target, GemmSpec, str], GemmCode]:
    def emit(module: Module, target: Target, spec: GemmSpec, name: str) -> GemmCode:
        micros = weight_only.family(inner, small, spec.lhs, spec.rhs, spec.group, packing.int_of(spec.k))
        return gemm.emit(module, target, spec, micros, name)

    return emit


_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
_AVX2 = ("avx2", "fma")
_DOTS = ("avx512_vnni", "avx_vnni")


def _eight_bit(lhs: DType) -> tuple[Kernel, ...]:
    """The rows for an 8-bit lhs."""
    x, a = x86_vector, neon
    return (
        _narrow(x.vnni(lhs, 16)[0], (("avx512_vnni",),), 128, ("amx_int8",)),
        _narrow(x.vnni(lhs, 8)[0], (("avx512_vnni",), ("avx_vnni",)), 64, ("amx_int8",)),
        _narrow(a.sdot(lhs)[0], (("dotprod",),), 32, ("i8mm",)),
        _sums16(2, _narrow(x.maddubs(lhs, 2, 16)[0], (_AVX512,), 62, _DOTS)),
        _sums16(2, _narrow(x.maddubs(lhs, 2, 8)[0], (_AVX2,), 31, _DOTS)),
        _small(x.vnni(lhs, 16), ("avx512_vnni",), 128),
        _row(amx.amx(lhs, i8), ("amx_int8", "avx512_vnni"), 1024),
        _row(x.vnni(lhs, 16), ("avx512_vnni",), 128),
        _row(x.vnni(lhs, 8), ("avx_vnni",), 64),
        _windows(lhs, i8, x.pairs(16), _AVX512, 44),
        *(_sums16(count, _row(x.maddubs(lhs, count, 16), _AVX512, rate)) for count, rate in ((4, 76), (2, 62))),
        _small(x.madd(lhs, 16), _AVX512, 32),
        _row(x.madd(lhs, 16), _AVX512, 32),
        _windows(lhs, i8, x.pairs(8), _AVX2, 22),
        *(_sums16(count, _row(x.maddubs(lhs, count, 8), _AVX2, rate)) for count, rate in ((4, 38), (2, 31))),
        _row(x.madd(lhs, 8), _AVX2, 16),
        _small(a.smmla(lhs), ("i8mm",), 32),
        _row(a.smmla(lhs), ("i8mm",), 64),
        _small(a.sdot(lhs), ("dotprod",), 32),
        _row(a.sdot(lhs), ("dotprod",), 32),
    )


_BF16 = (
    *(_narrow(x86_vector.dot_bf16(lanes)[0], (("avx512_bf16",),), 4 * lanes) for lanes in (16, 8)),
    _windows(bf16, bf16, x86_vector.fma(16), _AVX512, 32, ("avx512_bf16", "amx_bf16")),
    _windows(bf16, bf16, x86_vector.fma(8), _AVX2, 16, ("avx512_bf16", "amx_bf16")),
    _windows(bf16, bf16, neon.fmla(), ("neon",), 8, ("bf16",)),
    _small(x86_vector.dot_bf16(), ("avx512_bf16",), 64),
    _words(16, True, ("avx512_vnni", *_AVX512), 56),
    _words(8, True, ("avx_vnni", *_AVX2), 28),
    _unless_near(_small(x86_vector.widen(16), _AVX512, 32), "amx_bf16"),
    _row(amx.amx(bf16, bf16), ("amx_bf16", *_AVX512), 512),
    _row(x86_vector.dot_bf16(), ("avx512_bf16",), 64),
    _row(x86_vector.widen(16), _AVX512, 32),
    _words(8, False, _AVX2, 22),
    _row(x86_vector.widen(8), _AVX2, 16),
    _small(neon.bfmmla(), ("bf16",), 16),
    _row(neon.bfmmla(), ("bf16",), 32),
    _row(neon.fmla_bf16(), ("neon",), 8),
)
_F16 = (
    _windows(f16, f16, x86_vector.fma(16), _AVX512, 32),
    _windows(f16, f16, x86_vector.fma(8), (*_AVX2, "f16c"), 16),
    _windows(f16, f16, neon.fmla(), ("neon",), 8),
    _small(x86_vector.half(16), _AVX512, 32),
    _row(x86_vector.half(16), _AVX512, 32),
    _row(x86_vector.half(8), (*_AVX2, "f16c"), 16),
    _row(neon.fmla_f16(), ("neon",), 8),
)
_F32 = (
    *(_narrow(x86_vector.fma(lanes)[0], (needs,), 2 * lanes) for lanes, needs in ((16, _AVX512), (8, _AVX2))),
    _narrow(neon.fmla()[0], (("neon",),), 8),
    _windows(f32, f32, x86_vector.fma(16), _AVX512, 32),
    _windows(f32, f32, x86_vector.fma(8), _AVX2, 16),
    _windows(f32, f32, neon.fmla(), ("neon",), 8),
    _small(x86_vector.fma(16), _AVX512, 32),
    Kernel(mkl.NAME, mkl.when, mkl.pack, mkl.emit, 32),
    _row(x86_vector.fma(16), _AVX512, 32),
    _row(x86_vector.fma(8), _AVX2, 16),
    _row(neon.fmla(), ("neon",), 8),
)


def _weights(rhs: DType) -> tuple[Kernel, ...]:
    """The rows for weights of type `rhs` and floats."""
    x, a, w = x86_vector, neon, weight_only
    wide, narrow, arm = (((tiles[0], (), rate),) for tiles, rate in ((x.fma(16), 32), (x.fma(8), 16), (a.fmla(), 8)))
    # AVX2 widens a byte in the time of a load: one tile serves any number of rows, as fast as fp32 or faster on Zen 3
    # (`benchmarks/weight_only.py --rows 8,24,64`); by hand, up to 15 % faster than with floats that were written out.
    widened = narrow if rhs == i4 else ()
    wide_halves = ((amx.amx(bf16, bf16)[0], ("amx_bf16",), 512), (x.dot_bf16()[0], ("avx512_bf16",), 64))
    arm_halves = ((a.bfmmla()[0], ("bf16",), 32), *arm)
    # The small tiles, what they need, their rate, and the tall ones for f32 and for bf16, where these are faster.
    families: tuple[tuple[Small, tuple[str, ...], float, _Tall, _Tall], ...] = (
        (w.AVX512_VNNI, (*_AVX512, "avx512_vnni"), 42, (), wide_halves),
        (w.AVX512, _AVX512, 16, wide, (*wide_halves, *wide)),
        (w.AVX_VNNI, (*_AVX2, "avx_vnni"), 21, (), ()),
        (w.AVX2, _AVX2, 8 if widened else 16, widened, widened),
        (w.SDOT, ("neon", "dotprod"), 10, arm, arm_halves),
        (w.NEON, ("neon",), 4, arm, arm_halves),
    )
    rows: list[Kernel] = []
    for small, features, few, *tall in families:
        for lhs, tiles in zip((f32, bf16), tall, strict=True):
            rows.append(weight_only_row(None, small, lhs, rhs, features, few, tuple(more for _, more, _ in tiles)))
            rows += (weight_only_row(inner, small, lhs, rhs, (*features, *more), rate) for inner, more, rate in tiles)
    return (*rows, *(weight_only_row(None, w.PLAIN, lhs, rhs, (), 2) for lhs in (f32, bf16)))


def _reference() -> Kernel:
    """Accepts everything: its tiles are made for the types of the product."""

    def emit(module: Module, target: Target, spec: GemmSpec, name: str) -> GemmCode:
        return gemm.emit(module, target, spec, reference.plain(spec.lhs, spec.rhs), name)

    def pack(weight: torch.Tensor) -> torch.Tensor:
        return packing.pack_rhs(weight, reference.PACK_PLAIN)

    return Kernel("reference", lambda target, spec: None, pack, emit, 2)


TABLE: tuple[Kernel, ...] = (*_eight_bit(i8), *_eight_bit(u8), *_BF16, *_F16, *_F32, *_weights(i8), *_weights(i4), _reference())
