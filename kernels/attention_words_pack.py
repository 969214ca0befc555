"""k and v of attention in bf16 as 16-bit integers with scales, and the kernel that makes them, once for each head.

    workspace   [batch * groups][keys][pairs of depth][2], the step of each key behind it
                [batch * groups][pairs of keys][columns of v][2]
                [batch * groups][steps of columns]

A step is what 1 stands for. Where a row or a column has a NaN or an infinity its step is none either, and neither are its products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt

from ..cpu_codegen import convert
from ..cpu_codegen.builder import F32, I16, I32, I64, PTR, VOID, Function, Module, Val, const, i64
from ..cpu_codegen.contract import KernelCode
from ..cpu_codegen.slots import Slots
from ..graph.dims import Dim, ceildiv, product
from ..graph.types import bf16
from ..platforms.target import Target
from .attention_rows import copy_row, head_start
from .attention_spec import WORKSPACE, AttentionSpec, HeadStrides, K, V
from .attention_tiling import PADDING

OCTAVE = 14  # the largest weight is 2 to this power
_MOST = 2**31 - 1  # of a sum
_ROUNDING = 16  # how much larger a weight may be for its error
_LEAST = 0x0D80  # 2^-100 in bf16, the least number that counts as the largest of its row


@dataclass(frozen=True)
class WordLayout:
    """Where integers lie in the workspace, and how large they are. block: the most keys of a block. Sizes are bytes."""

    spec: AttentionSpec
    block: int

    @property
    def most(self) -> int:
        """Of a number of a query or a key, so that no product of these overflows."""
        return min(32767, isqrt(_MOST // self.spec.depth))

    @property
    def most_value(self) -> int:
        """Of a number of v, so that no weighted sum of a block of them overflows."""
        return min(32767, _MOST // (self.block * ((1 << OCTAVE) + _ROUNDING)))

    @property
    def pairs(self) -> Dim:
        """Of keys."""
        return ceildiv(self.spec.s, 2)

    @property
    def key_step(self) -> int:
        """From a key to its step."""
        return -(-self.spec.depth // 32) * 64

    @property
    def key_pitch(self) -> int:
        return self.key_step + 4

    @property
    def value_columns(self) -> int:
        """Columns of v, filled up to whole vectors."""
        return -(-self.spec.width // 32) * 32

    @property
    def value_pitch(self) -> int:
        """From a pair of keys to the next: not so far that those of a column share few places of the cache."""
        return self.step_pitch + (4 * PADDING if self.step_pitch % 256 == 0 else 0)

    @property
    def step_pitch(self) -> int:
        """From the steps of a head's columns to the next ones."""
        return 4 * self.value_columns

    @property
    def values_at(self) -> Dim:
        return product((self.spec.all_groups, self.spec.s, self.key_pitch))

    @property
    def steps_at(self) -> Dim:
        return self.values_at + product((self.spec.all_groups, self.pairs, self.value_pitch))

    @property
    def bytes(self) -> Dim:
        return self.steps_at + product((self.spec.all_groups, self.step_pitch))


def halves(fn: Function, pairs: Val) -> tuple[Val, Val]:
    """The numbers of pairs of bf16 in f32."""
    low, high = fn.shl(pairs, const(pairs.ty, 16)), fn.and_(pairs, const(pairs.ty, -(1 << 16)))
    ty = pairs.ty.of("float")
    return fn.convert("bitcast", low, ty), fn.convert("bitcast", high, ty)


def larger(fn: Function, largest: Val, numbers: Val) -> Val:
    """The bits of the larger magnitude in each lane, of bf16. As integers, infinities come after numbers, NaNs last."""
    return fn.intrinsic("umax", largest.ty, [largest, fn.and_(numbers, const(numbers.ty, 0x7FFF))])


def widened(fn: Function, bits: Val) -> Val:
    """bf16 as f32."""
    return convert.widen(fn, bits, bf16)


def scales(fn: Function, largest: Val, most: int) -> tuple[Val, Val]:
    """What to multiply numbers by to have integers up to `most`, and what 1 stands for then. largest: bits from `larger`."""
    top = widened(fn, fn.intrinsic("umax", largest.ty, [largest, const(largest.ty, _LEAST)]))
    return fn.div(const(top.ty, float(most)), top), fn.mul(top, const(top.ty, 1.0 / most))


def words_together(fn: Function, even: Val, odd: Val) -> Val:
    """Vectors of f32 as one of 32-bit units: the nearest integers of 16 bits, the even one in the low half."""
    low, high = (convert.round_to_int(fn, value, 32) for value in (even, odd))
    return fn.or_(fn.and_(low, const(low.ty, 0xFFFF)), fn.shl(high, const(high.ty, 16)))


def emit_word_pack(module: Module, target: Target, layout: WordLayout, name: str) -> KernelCode:
    """Adds the kernel that packs; its domain is the keys and the values of all groups in turn."""
    spec = layout.spec
    fn = Function(module, name, VOID, [PTR, I64, I64])
    packing = _Packing(fn, target, layout)

    def one(index: Val, _: list[Val]) -> list[Val]:
        group = fn.udiv(index, i64(2))
        fn.branch(fn.icmp("eq", fn.urem(index, i64(2)), i64(0)), lambda: packing.keys(group), lambda: packing.values(group))
        return []

    fn.loop(fn.args[1], fn.args[2], 1, [], one)
    fn.ret()
    fn.finish()
    return KernelCode(name, packing.slots.order, spec.all_groups * 2, 1, product((spec.all_groups, spec.s, spec.depth + spec.width)))


class _Packing:
    """Emits the packing of one head, inside one function."""

    def __init__(self, fn: Function, target: Target, layout: WordLayout) -> None:
        self.fn, self.layout, self.spec, self.lanes = fn, layout, layout.spec, target.lanes(32)
        self.slots = Slots(fn)
        self.vector, self.integer, self.half = F32.vec(self.lanes), I32.vec(self.lanes), I16.vec(2 * self.lanes)

    def keys(self, group: Val) -> list[Val]:
        """Each with the scale of its largest number."""
        fn, spec, layout = self.fn, self.spec, self.layout
        row = self._rows(K, spec.k, group, spec.depth)
        to = fn.gep(self.slots.buffer(WORKSPACE), fn.mul(group, self.slots.dim(spec.s)), scale=layout.key_pitch)
        parts = range(-(-spec.depth // (2 * self.lanes)))

        def key(index: Val, _: list[Val]) -> list[Val]:
            source, target = row(index), fn.gep(to, index, scale=layout.key_pitch)
            largest = const(self.half, 0)
            for n in parts:
                largest = larger(fn, largest, fn.load(self.half, self._part(source, n)))
            one = fn.call(f"llvm.vector.reduce.umax.{self.half.mangled}", I16, [largest])
            factor, step = scales(fn, one, layout.most)
            every = fn.splat(factor, self.lanes)
            for n in parts:
                numbers = halves(fn, fn.load(self.integer, self._part(source, n)))
                fn.store(words_together(fn, *(fn.mul(number, every) for number in numbers)), self._part(target, n))
            fn.store(step, fn.gep(target, i64(layout.key_step)))
            return []

        return fn.loop(i64(0), self.slots.dim(spec.s), 1, [], key)

    def values(self, group: Val) -> list[Val]:
        """Each column with the scale of its largest number."""
        fn, spec, layout, workspace = self.fn, self.spec, self.layout, self.slots.buffer(WORKSPACE)
        row, keys = self._rows(V, spec.v, group, spec.width), self.slots.dim(spec.s)
        count = -(-spec.width // (2 * self.lanes))
        parts = range(2 * count)

        def largest_of(index: Val, largest: list[Val]) -> list[Val]:
            source = row(index)
            return [larger(fn, top, fn.load(self.half, self._part(source, n))) for n, top in enumerate(largest)]

        tops = fn.loop(i64(0), keys, 1, [const(self.half, 0)] * count, largest_of)
        each = [fn.shuffle(top, top, range(at, at + self.lanes)) for top in tops for at in (0, self.lanes)]
        factors, steps = zip(*(scales(fn, top, layout.most_value) for top in each), strict=True)
        of_group = fn.gep(fn.gep(workspace, self.slots.dim(layout.steps_at)), group, scale=layout.step_pitch)
        first = fn.gep(workspace, self.slots.dim(layout.values_at))
        to = fn.gep(first, fn.mul(group, self.slots.dim(layout.pairs)), scale=layout.value_pitch)
        for n in parts:
            fn.store(steps[n], self._part(of_group, n))

        def number(source: Val, n: int) -> Val:
            bits = fn.load(I16.vec(self.lanes), fn.gep(source, i64(2 * self.lanes * n)))
            return fn.mul(widened(fn, bits), factors[n])

        def pair(index: Val, even: Val, odd: Val | None) -> list[Val]:
            target = fn.gep(to, index, scale=layout.value_pitch)
            for n in parts:
                other = const(self.vector, 0.0) if odd is None else number(odd, n)
                fn.store(words_together(fn, number(even, n), other), self._part(target, n))
            return []

        def two(index: Val, _: list[Val]) -> list[Val]:
            key = fn.mul(index, i64(2))
            return pair(index, row(key), row(fn.add(key, i64(1)), 1))

        whole = fn.udiv(keys, i64(2))
        fn.loop(i64(0), whole, 1, [], two)
        odd = fn.icmp("ne", fn.and_(keys, i64(1)), i64(0))
        return fn.branch(odd, lambda: pair(whole, row(fn.sub(keys, i64(1))), None))

    def _rows(self, operand: int, strides: HeadStrides, group: Val, length: int) -> Callable[..., Val]:
        """What says where a row of a head is, or a copy of it (number 0 or 1), whole vectors of its numbers side by side."""
        fn, spec, groups = self.fn, self.spec, self.slots.dim(self.spec.groups)
        first = head_start(fn, self.slots, operand, strides, I16, fn.udiv(group, groups), fn.urem(group, groups))
        row_bytes, col = self.slots.dim(strides.row * 2), self.slots.dim(strides.col)
        padded = -(-length // (2 * self.lanes)) * 2 * self.lanes
        in_place = strides.col == 1 and length == padded
        scratch = [] if in_place else [fn.alloca(padded * 2) for _ in range(2)]

        def row(index: Val, copy: int = 0) -> Val:
            source = fn.gep(first, fn.mul(index, row_bytes))
            if in_place:
                return source
            copy_row(fn, spec.dtype, source, col, length, scratch[copy], padded, 2 * self.lanes)
            return scratch[copy]

        return row

    def _part(self, base: Val, n: int) -> Val:
        return self.fn.gep(base, i64(4 * self.lanes * n)) if n else base
