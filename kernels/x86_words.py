"""Micro-kernels of x86-64 for bf16 times constant weights that multiply 16-bit integers: VPDPWSSD, or VPMADDWD and VPADDD, take pairs of
these, where multiply-adds of f32 take one number at a time and no faster instruction takes bf16.

The numbers of a row that share a step are X * scale, where the largest X is the largest integer of which a step of products with others
like it fits 32 bits, 4095 for 128 k; so are those of a column, once. What a step adds up is multiplied by both scales and added in f32.

Rounding is off by 2^-13 of the largest number, which is less than what rounding it to bf16 was off by, where it counts: a weight may hide
a large number, or make much of a small one. So each k has a power of two, by which weights are divided, so that the largest there is next
to 1, and rows multiplied: their numbers are then as large as they count for results. And where few numbers of a row are far above all
others of their step even so (fewer than half of `LANES` parts of it have one above 2^-`_FAR` of the largest), what rounding took off the
row becomes integers, too, of a unit that is 2^12 times as small, and their products are added.

A step of a packed row is [scale: f32][scale of what was taken off, or 0: f32][X: step_k * i16][what was taken off: step_k * i16], one of a
panel [scale: nr * f32][step_k / 2][nr][2: i16]; the powers follow the panels. An infinity or NaN makes NaN of all that its row, or its
column, gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, reduce
from math import isqrt

import torch

from ..cpu_codegen.access import can_mask
from ..cpu_codegen.builder import F32, I16, I32, Function, Module, Val, const, i64
from ..cpu_codegen.convert import round_to_int, widen
from ..cpu_codegen.intrinsics import prefetch
from ..graph.dims import Dim, bounds
from ..graph.types import bf16
from ..platforms.target import Target
from . import gemm
from .micro import Lhs, Tile, offset
from .packing import int_of
from .selection import lacks
from .spec import GemmCode, GemmSpec, Packing
from .vector_micro import VectorMicro
from .x86_vector import pairs_added

LANES = 16
SAMPLE = 768  # k of a product like any other
_FAR = 5  # powers of two
_LONGEST = 128  # neighbours with one scale: of more, integers would have less than 12 bits
_HEADER = 8
_FINER = 1 << 12
_LEAST = 2.0**-100  # counts as the largest of a step of smaller numbers
_LEAST_BITS = 0x0D800000
_LEAST_POWER = -40
_AT_ONCE = 8  # panels
_FEW_PLACES = 2048


@dataclass(frozen=True)
class WordMicro(VectorMicro):
    """A step is a group of neighbours along k that have one scale. fused: whether one instruction multiplies and adds."""

    fused: bool = True

    # In pairs: 128 rows of 4096 x 4096 from memory take 16.9 ms, with 8 ahead 19.0, 8 rows 2.53 and 2.87 (Emerald Rapids).
    ahead = 32

    @property
    def isa(self) -> str:  # type: ignore[override]
        return "avx512vnni" if self.lanes == 16 else "avxvnni" if self.fused else "avx2madd"

    @property
    def step_k(self) -> int:
        return self.packing.group

    @property
    def layout(self) -> Lhs:
        return Lhs(F32, step_bytes=_HEADER + 4 * self.step_k)

    # -- rows ---------------------------------------------------------------------------------------------------
    def convert(self, fn: Function, value: Val) -> Val:
        return widen(fn, value, bf16)

    def pack_step(self, fn: Function, elements: Val, to: Val, powers: Val | None) -> None:
        assert powers is not None
        ints, floats, most = I32.vec(LANES), F32.vec(LANES), float(most_of(self.step_k))
        places = [offset(fn, elements, 4 * at) for at in range(0, self.step_k, LANES)]
        for n, place in enumerate(places):
            balanced = fn.mul(fn.load(floats, place), fn.load(floats, offset(fn, powers, 4 * LANES * n), 4))
            fn.store(balanced, place)
        sizes = (fn.and_(fn.load(ints, place), const(ints, 0x7FFFFFFF)) for place in places)
        tops = reduce(fn.smax, sizes)
        bits = fn.smax(fn.call(f"llvm.vector.reduce.smax.{ints.mangled}", I32, [tops]), const(I32, _LEAST_BITS))
        largest = fn.convert("bitcast", bits, F32)
        unit = fn.mul(largest, const(F32, 1 / most))
        factor = fn.splat(fn.div(const(F32, most), largest), LANES)
        fn.store(unit, to)

        def scaled(place: Val) -> tuple[Val, Val]:
            x = fn.mul(fn.load(floats, place), factor)
            return x, round_to_int(fn, x, 32)

        for n, place in enumerate(places):
            self._put(fn, scaled(place)[1], offset(fn, to, _HEADER + 2 * LANES * n))

        def taken_off() -> list[Val]:
            for n, place in enumerate(places):
                x, whole = scaled(place)
                off = fn.mul(fn.sub(x, fn.convert("sitofp", whole, floats)), const(floats, float(_FINER)))
                self._put(fn, round_to_int(fn, off, 32), offset(fn, to, _HEADER + 2 * self.step_k + 2 * LANES * n))
            return [fn.mul(unit, const(F32, 1.0 / _FINER))]

        near = fn.or_(
            fn.icmp("eq", tops, const(ints, 0)), fn.icmp("sge", tops, fn.splat(fn.sub(bits, const(I32, _FAR << 23)), LANES))
        )
        count = fn.intrinsic("ctpop", I16, [fn.convert("bitcast", near, I16)])
        finer = fn.branch(fn.icmp("slt", count, const(I16, LANES // 2)), taken_off, lambda: [const(F32, 0.0)])
        fn.store(finer[0], offset(fn, to, 4))

    def _put(self, fn: Function, whole: Val, to: Val) -> None:
        fn.store(fn.convert("trunc", whole, I16.vec(LANES)), to, 2)

    # -- a step -------------------------------------------------------------------------------------------------
    def step(self, fn: Function, tile: Tile, index: Val, accumulators: list[Val]) -> list[Val]:
        panels = [fn.gep(panel, index, scale=self.packing.unit_bytes(self.rhs)) for panel in tile.b]
        each = self.packing.nr // self.lanes
        vectors = [offset(fn, panel, 4 * self.lanes * v) for panel in panels for v in range(each)]
        start = fn.gep(tile.a, index, scale=self.layout.step_bytes)
        rows = [fn.gep(start, fn.mul(i64(r), tile.a_pitch)) for r in range(self.mr)]
        scales = [fn.load(F32.vec(self.lanes), at) for at in vectors]

        def added(accumulators: list[Val], header: int, words: int, ahead: int) -> list[Val]:
            totals = self._totals(fn, [offset(fn, row, words) for row in rows], panels, ahead)
            factors = [fn.splat(fn.load(F32, offset(fn, row, header), 2), self.lanes) for row in rows]
            parts = [fn.mul(fn.convert("sitofp", t, scales[0].ty), factors[n // self.vectors]) for n, t in enumerate(totals)]
            return [fn.fma(part, scales[n % self.vectors], acc) for n, (acc, part) in enumerate(zip(accumulators, parts, strict=True))]

        found = added(accumulators, 0, _HEADER, self.ahead)
        some = reduce(fn.or_, (fn.load(I32, offset(fn, row, 4), 2) for row in rows))
        again = fn.icmp("ne", some, const(I32, 0))
        return fn.branch(again, lambda: added(found, 4, _HEADER + 2 * self.step_k, 0), lambda: found)

    def _totals(self, fn: Function, rows: list[Val], panels: list[Val], ahead: int) -> list[Val]:
        """Sums of products of integers over a step, for every row and vector."""
        pair_bytes, ints = 4 * self.packing.nr, I32.vec(self.lanes)

        def pair(n: Val, totals: list[Val]) -> list[Val]:
            groups = [fn.gep(offset(fn, panel, pair_bytes), n, scale=pair_bytes) for panel in panels]
            found: list[Val] = []
            columns = self.columns(fn, groups, 0)
            for r, row in enumerate(rows):
                word = fn.splat(fn.load(I32, fn.gep(row, n, I32), 2), self.lanes)
                found += [self.product(fn, totals[r * self.vectors + v], word, column) for v, column in enumerate(columns)]
            for group in groups if ahead else ():
                prefetch(fn, offset(fn, group, ahead * pair_bytes))
            return found

        # LLVM makes two instructions of VPDPWSSD where its sum goes on in the same block of code, to have that sooner.
        return fn.loop(i64(0), i64(self.step_k // 2), 1, [const(ints, 0)] * (self.mr * self.vectors), pair)

    def load_a(self, fn: Function, tile: Tile, index: Val, part: int) -> Iterable[Val]:
        raise AssertionError(f"{self.name} reads pairs of its rows within a step")

    def load_b(self, fn: Function, group: Val, vector: int, part: int) -> Val:
        return fn.load(I32.vec(self.lanes), offset(fn, group, 4 * self.lanes * vector))

    def product(self, fn: Function, acc: Val, a: Val, b: Val) -> Val:
        return pairs_multiplied(fn, acc, a, b, self.fused)


def pairs_multiplied(fn: Function, total: Val, a: Val, b: Val, fused: bool) -> Val:
    """`total` and the products of the pairs of 16-bit integers in the words of a and b. fused: by the instruction that adds them, too."""
    if fused:
        return fn.call(f"llvm.x86.avx512.vpdpwssd.{32 * total.ty.lanes}", total.ty, [total, b, a])
    half = I16.vec(2 * total.ty.lanes)
    return pairs_added(fn, total, *(fn.convert("bitcast", value, half) for value in (a, b)))


def enough(target: Target, n: Dim, k: Dim) -> bool:
    """Whether a weight [n, k] is so large that making integers of rows takes less time than they save."""
    least = 64 if target.vnni else 96
    return isinstance(n, int) and isinstance(k, int) and n >= least and k >= 64


def why_not(target: Target, spec: GemmSpec) -> str | None:
    """Why other products of bf16 are faster; None where they are not."""
    for name in ("amx_bf16", "avx512_bf16"):
        if lacks(target, (name,)) is None:
            return f"products are faster with {name}"
    if not target.word_pairs:
        return f"{target.name} multiplies integers no faster than floats"
    if not spec.constant_rhs:
        return "is for constant weights"
    if spec.lhs_pieces is None and spec.lhs_strides.col != 1 and (spec.lhs_strides.row != 1 or not can_mask(target, bf16.bits)):
        return "the numbers of a row lie apart, and the rows are not transposed in registers"
    return None if enough(target, spec.n, spec.k) else f"making integers takes longer than they save with a weight of {spec.n} x {spec.k}"


def faster_over_few_places(target: Target, spec: GemmSpec) -> str | None:
    """Why minimal filtering is slower than 36 products of integers, if it is: 128 channels take 845 and 708 us over 28 x 28 places, but
    2584 and 2854 over 56 x 56 (Emerald Rapids)."""
    most = bounds(spec.m)[1]
    few = spec.lhs == bf16 and target.vnni and most is not None and most < _FEW_PLACES and why_not(target, spec) is None
    return f"36 products of integers are faster over {most} places" if few else None


@cache
def step_of(k: int) -> int:
    """How many of k neighbours share a scale: so many that few k are added to fill the last step, and few steps to join."""
    return min(range(LANES, _LONGEST + 1, LANES), key=lambda step: -(-k // step) * step * (1 + 6 / step))


def most_of(step: int) -> int:
    """The largest integer of which so many products with one as large fit 32 bits when they are added."""
    return min(32767, isqrt((2**31 - 1) // step))


def family(k: int, lanes: int, fused: bool) -> tuple[WordMicro, ...]:
    """The tiles for so many k."""
    sizes = ((14, 2), (4, 4), (1, 4)) if lanes == LANES else ((6 if fused else 5, 1), (2, 2), (1, 4))
    return tuple(WordMicro(mr, panels, packing(k), bf16, bf16, lanes, fused) for mr, panels in sizes)


def packing(k: int) -> Packing:
    """The form of a weight."""
    return Packing(LANES, 2, step_of(k), False, step_of(k), balanced=True)


def pack(weight: torch.Tensor, form: Packing) -> torch.Tensor:
    """A weight [n, k] in that form, as one-dimensional int8."""
    n, k = weight.shape
    panels, steps = int_of(form.panels(n)), int_of(form.k_padded(k)) // form.group
    packed = torch.zeros(int_of(form.bytes(n, k, bf16)), dtype=torch.int8)
    data = packed[: int_of(form.sums_offset(n, k, bf16))].view(torch.int16).view(panels, steps, form.group // 2 + 1, LANES, 2)
    powers = powers_of(weight)
    packed[data.numel() * 2 :].view(torch.float32)[:k] = powers
    # Zero times what a row has is zero.
    factors = torch.where(powers == 0, 0.0, 1 / powers)
    for first in range(0, panels, _AT_ONCE):
        part = (weight[first * LANES : (first + _AT_ONCE) * LANES].float() * factors).contiguous()  # it may be a transposed one
        _pack_some(part, form.group, data[first : first + _AT_ONCE])
    return packed


def powers_of(weight: torch.Tensor) -> torch.Tensor:
    """For each k the power of two next to the largest magnitude there of a weight [n, k], each column [k] as large as others, 0 for 0.

    Not below 2^-40: what a row has then would not be seen beside others anyway.
    """
    parts = []
    for part in torch.split(weight, _AT_ONCE * LANES):
        sizes = part.float().abs()
        parts.append(sizes.mul_(1 / sizes.amax(1, keepdim=True).clamp_(min=_LEAST)).amax(0))
    largest = torch.stack(parts).amax(0)
    powers = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent.clamp(min=_LEAST_POWER))
    return torch.where(largest == 0, 0.0, powers)


def _pack_some(numbers: torch.Tensor, step: int, data: torch.Tensor) -> None:
    """Some panels, of f32: few enough for them to stay in the cache."""
    (panels, steps), (n, k) = data.shape[:2], numbers.shape
    if n < panels * LANES or k < steps * step:
        numbers = torch.nn.functional.pad(numbers, (0, steps * step - k, 0, panels * LANES - n))
    numbers = numbers.view(panels, LANES, steps, step)
    scales = numbers.abs().amax(-1).clamp_(min=_LEAST) / most_of(step)
    words = numbers.mul_(1 / scales[..., None]).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int16)
    data[:, :, 0] = scales.transpose(1, 2).contiguous().view(torch.int16).view(panels, steps, LANES, 2)
    pairs = words.view(torch.int32).view(panels, LANES, steps, step // 2)
    data[:, :, 1:].view(torch.int32).squeeze(-1).copy_(pairs.permute(0, 2, 3, 1))


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A weight in the form of its own k."""
    return pack(weight, packing(weight.shape[1]))


def emitter(lanes: int, fused: bool) -> Callable[[Module, Target, GemmSpec, str], GemmCode]:
    """What adds the kernels of a product under a name."""
    return lambda module, target, spec, name: gemm.emit(module, target, spec, family(int_of(spec.k), lanes, fused), name)
