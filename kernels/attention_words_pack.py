"""k and v of attention in bf16 as 16-bit integers with scales, and the kernel that makes them, once for each head.

    workspace   [batch * groups][keys][pairs of depth][2], the step of each key behind it
                [batch * groups][pairs of keys][columns of v][2]
                [batch * groups][blocks of keys][steps of columns]

A step is what 1 stands for. Where a row or a column has a NaN or an infinity its step is none either, and neither are its products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..cpu_codegen import convert
from ..cpu_codegen.builder import F32, I16, I32, I64, PTR, VOID, Function, Module, Val, const, i64
from ..cpu_codegen.contract import KernelCode
from ..cpu_codegen.slots import Slots
from ..graph.dims import Dim, ceildiv, product
from ..graph.types import bf16
from ..platforms.target import Target
from .attention_rows import copy_row, head_start
from .attention_spec import WORKSPACE, AttentionSpec, HeadStrides, K, V
from .attention_tiling import PADDING, first_to_pack
from .x86_words import most_of

OCTAVE = 14  # the largest weight is 2 to this power
_MOST = 2**31 - 1  # of a sum
_ROUNDING = 16  # how much larger a weight may be for its error
_LEAST = 0x0780  # 2^-112 in bf16, the least number that counts as the largest of its row
_STAGED = 16  # rows that are copied at a time


@dataclass(frozen=True)
class WordLayout:
    """Where integers lie in the workspace, and how large they are. block: keys of a block. Sizes are bytes."""

    spec: AttentionSpec
    block: int

    @property
    def most(self) -> int:
        """Of a number of a query or a key, so that no product of these overflows."""
        return most_of(self.spec.depth)

    @property
    def most_value(self) -> int:
        """Of a number of v, so that no weighted sum of a block of them overflows."""
        return min(32767, _MOST // (self.block * ((1 << OCTAVE) + _ROUNDING)))

    @property
    def pairs(self) -> Dim:
        """Of keys."""
        return ceildiv(self.spec.s, 2)

    @property
    def blocks(self) -> Dim:
        """Of keys."""
        return ceildiv(self.spec.s, self.block)

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
        """From the steps of the columns of a block to the next ones."""
        return 4 * self.value_columns

    @property
    def values_at(self) -> Dim:
        return product((self.spec.all_groups, self.spec.s, self.key_pitch))

    @property
    def steps_at(self) -> Dim:
        return self.values_at + product((self.spec.all_groups, self.pairs, self.value_pitch))

    @property
    def bytes(self) -> Dim:
        return self.steps_at + product((self.spec.all_groups, self.blocks, self.step_pitch))


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

    fn.loop(first_to_pack(fn, packing.slots, spec), fn.args[2], 1, [], one)
    fn.ret()
    fn.finish()
    return KernelCode(name, packing.slots.order, spec.all_groups * 2, 1, product((spec.all_groups, spec.s, spec.depth + spec.width)))


@dataclass(frozen=True)
class Rows:
    """Rows of a head: where the first one is, bytes from one to the next, elements from number to number, how many numbers, whole vectors
    of them, and room for copies if they are copied."""

    first: Val
    row_bytes: Val
    col: Val
    length: int
    padded: int
    scratch: Val | None


class _Packing:
    """Emits the packing of one head, inside one function."""

    def __init__(self, fn: Function, target: Target, layout: WordLayout) -> None:
        self.fn, self.layout, self.spec, self.lanes = fn, layout, layout.spec, target.lanes(32)
        self.slots = Slots(fn)
        self.vector, self.integer, self.half = F32.vec(self.lanes), I32.vec(self.lanes), I16.vec(2 * self.lanes)

    def keys(self, group: Val) -> list[Val]:
        """Each with the scale of its largest number."""
        fn, spec, layout = self.fn, self.spec, self.layout
        to = fn.gep(self.slots.buffer(WORKSPACE), fn.mul(group, self.slots.dim(spec.s)), scale=layout.key_pitch)
        parts = range(-(-spec.depth // (2 * self.lanes)))

        def key(index: Val, source: Val) -> None:
            target, largest = fn.gep(to, index, scale=layout.key_pitch), const(self.half, 0)
            for n in parts:
                largest = larger(fn, largest, fn.load(self.half, self._part(source, n)))
            one = fn.call(f"llvm.vector.reduce.umax.{self.half.mangled}", I16, [largest])
            factor, step = scales(fn, one, layout.most)
            every = fn.splat(factor, self.lanes)
            for n in parts:
                numbers = halves(fn, fn.load(self.integer, self._part(source, n)))
                fn.store(words_together(fn, *(fn.mul(number, every) for number in numbers)), self._part(target, n))
            fn.store(step, fn.gep(target, i64(layout.key_step)))

        def some(start: Val, first: Val, pitch: Val, count: Val) -> None:
            def one(n: Val, _: list[Val]) -> list[Val]:
                key(fn.add(start, n), fn.gep(first, fn.mul(n, pitch)))
                return []

            fn.loop(i64(0), count, 1, [], one)

        self._each(self._rows(K, spec.k, group, spec.depth), i64(0), self.slots.dim(spec.s), some)
        return []

    def values(self, group: Val) -> list[Val]:
        """Each column of a block of keys with the scale of its largest number."""
        fn, layout = self.fn, self.layout
        rows, keys = self._rows(V, self.spec.v, group, self.spec.width), self.slots.dim(self.spec.s)
        steps = fn.gep(self.slots.buffer(WORKSPACE), self.slots.dim(layout.steps_at))
        first_block = fn.mul(group, self.slots.dim(layout.blocks))

        def block(start: Val, _: list[Val]) -> list[Val]:
            number = fn.add(first_block, fn.udiv(start, i64(layout.block)))
            end = fn.smin(fn.add(start, i64(layout.block)), keys)
            factors = self._steps_of(rows, start, end, fn.gep(steps, number, scale=layout.step_pitch))
            self._words_of(rows, group, start, end, factors)
            return []

        return fn.loop(i64(0), keys, layout.block, [], block)

    def _steps_of(self, rows: Rows, start: Val, end: Val, steps: Val) -> list[Val]:
        """Writes the steps of the columns of some keys; returns what to multiply their numbers by."""
        fn, count = self.fn, -(-self.spec.width // (2 * self.lanes))
        place = fn.alloca(4 * self.lanes * count)
        for n in range(count):
            fn.store(const(self.half, 0), self._part(place, n))

        def some(_: Val, first: Val, pitch: Val, count_of_rows: Val) -> None:
            def one(index: Val, tops: list[Val]) -> list[Val]:
                source = fn.gep(first, fn.mul(index, pitch))
                return [larger(fn, top, fn.load(self.half, self._part(source, n))) for n, top in enumerate(tops)]

            tops = [fn.load(self.half, self._part(place, n)) for n in range(count)]
            for n, top in enumerate(fn.loop(i64(0), count_of_rows, 1, tops, one)):
                fn.store(top, self._part(place, n))

        self._each(rows, start, end, some)
        tops = [fn.load(self.half, self._part(place, n)) for n in range(count)]
        each = [fn.shuffle(top, top, range(at, at + self.lanes)) for top in tops for at in (0, self.lanes)]
        factors, found = zip(*(scales(fn, top, self.layout.most_value) for top in each), strict=True)
        for n, step in enumerate(found):
            fn.store(step, self._part(steps, n))
        return list(factors)

    def _words_of(self, rows: Rows, group: Val, start: Val, end: Val, factors: list[Val]) -> None:
        """Writes pairs of some keys; the neighbour of an odd last one is 0."""
        fn, layout = self.fn, self.layout
        first_pair = fn.gep(self.slots.buffer(WORKSPACE), self.slots.dim(layout.values_at))
        to = fn.gep(first_pair, fn.mul(group, self.slots.dim(layout.pairs)), scale=layout.value_pitch)

        def number(source: Val, n: int) -> Val:
            bits = fn.load(I16.vec(self.lanes), fn.gep(source, i64(2 * self.lanes * n)))
            return fn.mul(widened(fn, bits), factors[n])

        def pair(key: Val, even: Val, odd: Val | None) -> list[Val]:
            target = fn.gep(to, fn.udiv(key, i64(2)), scale=layout.value_pitch)
            for n in range(len(factors)):
                other = const(self.vector, 0.0) if odd is None else number(odd, n)
                fn.store(words_together(fn, number(even, n), other), self._part(target, n))
            return []

        def some(key: Val, first: Val, pitch: Val, count: Val) -> None:
            def two(n: Val, _: list[Val]) -> list[Val]:
                source = fn.gep(first, fn.mul(n, pitch))
                return pair(fn.add(key, n), source, fn.gep(source, pitch))

            whole = fn.and_(count, i64(-2))
            fn.loop(i64(0), whole, 2, [], two)
            last = fn.gep(first, fn.mul(whole, pitch))
            fn.branch(fn.icmp("slt", whole, count), lambda: pair(fn.add(key, whole), last, None))

        self._each(rows, start, end, some)

    def _rows(self, operand: int, strides: HeadStrides, group: Val, length: int) -> Rows:
        """Where the rows of a head are."""
        fn, groups = self.fn, self.slots.dim(self.spec.groups)
        first = head_start(fn, self.slots, operand, strides, I16, fn.udiv(group, groups), fn.urem(group, groups))
        padded = -(-length // (2 * self.lanes)) * 2 * self.lanes
        scratch = None if strides.col == 1 and length == padded else fn.alloca(_STAGED * padded * 2)
        return Rows(first, self.slots.dim(strides.row * 2), self.slots.dim(strides.col), length, padded, scratch)

    def _each(self, rows: Rows, start: Val, end: Val, act: Callable[[Val, Val, Val, Val], None]) -> None:
        """Calls act(number of the first, address of the first, bytes from one to the next, count) for rows from start on: all of them
        where they lie, if they are whole vectors, or copies of a few at a time: to read a copy right after it was written takes long."""
        fn, scratch = self.fn, rows.scratch
        if scratch is None:
            act(start, fn.gep(rows.first, fn.mul(start, rows.row_bytes)), rows.row_bytes, fn.sub(end, start))
            return

        def some(index: Val, _: list[Val]) -> list[Val]:
            count = fn.smin(fn.sub(end, index), i64(_STAGED))

            def copy(n: Val, _: list[Val]) -> list[Val]:
                source = fn.gep(rows.first, fn.mul(fn.add(index, n), rows.row_bytes))
                to = fn.gep(scratch, n, scale=rows.padded * 2)
                copy_row(fn, self.spec.dtype, source, rows.col, rows.length, to, rows.padded, 2 * self.lanes)
                return []

            fn.loop(i64(0), count, 1, [], copy)
            act(index, scratch, i64(rows.padded * 2), count)
            return []

        fn.loop(start, end, _STAGED, [], some)

    def _part(self, base: Val, n: int) -> Val:
        return self.fn.gep(base, i64(4 * self.lanes * n)) if n else base
