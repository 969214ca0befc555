"""Micro-kernels for few rows of floats times integer weights that multiply the weights as they are stored, with dot products of bytes.

Widening every weight to a float costs more than reading it. Here the floats become integers instead, once for all columns: the elements
of a row that share a step are X * scale, where scale is a power of two and |X| < 2^23 has three balanced digits,
X = d0 + 2^8 d1 + 2^16 d2 with d in [-128, 127] (the splitting of Ozaki et al., 2012, to fixed point). Then

    sum of x w = scale * (S0 + 2^8 S1 + 2^16 S2),    S_j = sum of d_j w, exact in i32.

An element is rounded to a multiple of scale <= 2^-22 (1 + 2^-7) max|x| over its step, so what a step adds is off by no more than
2^-23 (1 + 2^-6) max|x| sum|w| and the roundings of an f32 sum; where max|x| < 2^-104, by 2^-127 sum|w|. Infinities and NaN give what f32
products of the same step give.

Rows of bf16 have two digits, |X| < 2^15: elements within 2^-7 of the largest keep all their 8 bits, and smaller ones are off by
2^-15 (1 + 2^-6) max|x| at most, a sixtyfourth of what rounding the largest to bf16 may have cost.

A step of a packed row is [-u * sum of d_0, -u * sum of d_1, ..: i32][scale: f32][digits][step_k: i8], the digits in the
order in which words of weights hold the neighbours. Instructions that take one operand unsigned get w + u; the sums undo that.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from math import gcd

from ..cpu_codegen.builder import F32, I8, I16, I32, Function, Val, const, i64
from ..cpu_codegen.convert import round_to_int
from ..cpu_codegen.dots import vpdpbusd
from ..cpu_codegen.intrinsics import prefetch
from ..graph.types import DType, bf16, i4, i8
from .micro import Lhs, Tile, offset
from .weight_float import WORD, WeightMicro
from .x86_vector import pair_products, pairs_added

_SHORT, _LONG = 64, 128  # neighbours along k that share a scale where weights have no groups
_LINE = 64
_INFINITY = 0x7F800000
_ROWS = 4  # whose sums registers hold
_WORDS = 4  # of weights that are multiplied at a time: as many as `MaddubsDigits` has room for


def step_of(k: int) -> int:
    """How many of k neighbours share a scale where weights have no groups: so many that few zeros fill the last step, and that there are
    few steps, each of which takes as long to join its digits as to multiply 12 k (64 rows of 1024 x 1024 on an Emerald Rapids)."""
    return min((_SHORT, _LONG), key=lambda step: -(-k // step) * (step + 12))


def digits_of(lhs: DType) -> int:
    """Digits of the elements of rows of a type."""
    return 2 if lhs == bf16 else 3


@dataclass(frozen=True)
class DigitMicro(WeightMicro):
    """A step is a group of neighbours along k that have one scale, or `step_of` them. Tall tiles multiply a step's weights by some rows
    after the others."""

    field = "digits"
    ahead = 1  # words from those that are multiplied to those that are asked for
    far_ahead = 0  # to those that several rows ask for in L2; 0: none are
    unsigned = False  # whether the instruction takes the weights unsigned
    weights: tuple[DType, ...] = (i8, i4)  # those whose products are exact
    together = 6  # how many vectors are multiplied at a time, at most

    @property
    def step_k(self) -> int:
        return self.packing.group or self.packing.pad

    @property
    def digits(self) -> int:
        """Of an element of a row."""
        return digits_of(self.lhs)

    @property
    def header(self) -> int:
        """Bytes of a step before its digits, the scale at their end."""
        return 4 * (self.digits + 1)

    @property
    def layout(self) -> Lhs:
        return Lhs(F32, step_bytes=self.header + self.digits * self.step_k)

    @property
    def panel_cost(self) -> float:
        return 1.0

    @abstractmethod
    def dot(self, fn: Function, acc: Val, weights: Val, digits: Val) -> Val:
        """Adds to every 32-bit lane of acc the products of its four bytes of weights (plus `shift`, if unsigned) and of digits."""

    def begun(self, total: Val) -> Val:
        """The accumulator of `dot` for the next words, `_WORDS` at most, where `total` is the sum of those before."""
        return total

    def ended(self, fn: Function, total: Val, acc: Val) -> Val:
        """The sum after these words."""
        del fn, total
        return acc

    @property
    def shift(self) -> int:
        """What is added to a weight before it is multiplied."""
        return 1 << (self.rhs.bits - 1) if self.unsigned else 0

    @property
    def quads(self) -> int:
        """Operands of four bytes in a word: its even nibbles, then its odd ones; or the word itself."""
        return self.parts // 4

    def place_of(self, k: int) -> int:
        """Where the digit of neighbour `k` of a word stands among those of the word."""
        return k % self.quads * 4 + k // self.quads

    # -- rows ---------------------------------------------------------------------------------------------------
    def pack_step(self, fn: Function, floats: Val, to: Val, powers: Val | None) -> None:
        lanes = gcd(self.step_k, 16)
        ints = I32.vec(lanes)
        bits = [fn.load(ints, offset(fn, floats, 4 * at)) for at in range(0, self.step_k, lanes)]
        sizes = [fn.and_(value, const(ints, 0x7FFFFFFF)) for value in bits]
        largest = sizes[0]
        for value in sizes[1:]:
            largest = fn.smax(largest, value)
        most = fn.call(f"llvm.vector.reduce.smax.{ints.mangled}", I32, [largest])
        factor, scale = self._scales(fn, most)
        fn.store(scale, offset(fn, to, self.header - 4))
        sums = [const(ints, 0)] * self.digits
        half = const(ints, sum(0x80 << 8 * j for j in range(self.digits)))
        for n, (value, size) in enumerate(zip(bits, sizes, strict=True)):
            # Beside infinities and NaN everything finite counts as 0, and they themselves as 1 or -1, times a scale of infinity or NaN.
            one = fn.or_(fn.and_(value, const(ints, -(1 << 31))), const(ints, 0x3F800000))
            x = fn.mul(fn.convert("bitcast", value, F32.vec(lanes)), fn.splat(factor, lanes))
            odd = fn.icmp("sge", size, const(ints, _INFINITY))
            whole = round_to_int(fn, fn.select(odd, fn.convert("bitcast", one, F32.vec(lanes)), x), 32)
            # With half a digit added to each digit they are the plain bytes of the number, from 0 to 255.
            digits = fn.xor(fn.add(whole, half), half)
            for j in range(self.digits):
                low = fn.convert("trunc", fn.lshr(digits, const(ints, 8 * j)) if j else digits, I8.vec(lanes))
                order = sorted(range(lanes), key=lambda k: k // self.parts * self.parts + self.place_of(k % self.parts))
                fn.store(fn.shuffle(low, low, order), offset(fn, to, self.header + j * self.step_k + n * lanes), 1)
                sums[j] = fn.add(sums[j], fn.convert("sext", low, ints))
        for j, total in enumerate(sums):
            whole = fn.call(f"llvm.vector.reduce.add.{ints.mangled}", I32, [total])
            fn.store(fn.mul(whole, const(I32, -self.shift)), offset(fn, to, 4 * j))

    def _scales(self, fn: Function, most: Val) -> tuple[Val, Val]:
        """1 / scale and scale for a step whose largest magnitude has the bits `most`; 0 and that magnitude if it is not finite."""
        # max|x| (1 + 2^-7) has the exponent e, and X = x 2^(22 - e): below 2^23 / (1 + 2^-7), so that three balanced digits hold it;
        # with two digits 14 and 2^15.
        bits = 8 * self.digits - 2
        above = fn.mul(fn.convert("bitcast", most, F32), const(F32, 1 + 2.0**-7))
        exponent = fn.and_(fn.lshr(fn.convert("bitcast", above, I32), const(I32, 23)), const(I32, 255))
        exponent = fn.smax(exponent, const(I32, bits + 1))  # both powers of two are normal numbers then
        finite = fn.icmp("slt", most, const(I32, _INFINITY))
        factor = fn.shl(fn.sub(const(I32, 254 + bits), exponent), const(I32, 23))
        scale = fn.shl(fn.sub(exponent, const(I32, bits)), const(I32, 23))
        pair = (fn.select(finite, factor, const(I32, 0)), fn.select(finite, scale, most))
        return fn.convert("bitcast", pair[0], F32), fn.convert("bitcast", pair[1], F32)

    # -- a step -------------------------------------------------------------------------------------------------
    def step(self, fn: Function, tile: Tile, index: Val, accumulators: list[Val]) -> list[Val]:
        panels = [fn.gep(panel, index, scale=self.packing.unit_bytes(self.rhs) * self.step_k // self.packing.unit_k) for panel in tile.b]
        each = self.packing.nr // self.lanes
        vectors = [offset(fn, panel, 4 * self.lanes * v) for panel in panels for v in range(each)]
        scales = [fn.load(F32.vec(self.lanes), at) for at in vectors] if self.packing.group else []
        words = [offset(fn, at, 4 * self.packing.nr) for at in vectors] if scales else vectors
        start = fn.gep(tile.a, index, scale=self.layout.step_bytes)
        rows = [fn.gep(start, fn.mul(i64(r), tile.a_pitch)) for r in range(self.mr)]
        turns = [rows[first : first + _ROWS] for first in range(0, self.mr, _ROWS)]
        totals = [total for turn, some in enumerate(turns) for total in self._scaled(fn, some, words, (turn, len(turns)))]
        if not scales:
            return [fn.add(acc, total) for acc, total in zip(accumulators, totals, strict=True)]
        return [self.product(fn, acc, t, scales[n % self.vectors]) for n, (acc, t) in enumerate(zip(accumulators, totals, strict=True))]

    def _scaled(self, fn: Function, rows: list[Val], words: list[Val], turn: tuple[int, int]) -> list[Val]:
        """Sums of products over a step, for each of some rows and every vector. turn: which rows of how many these are."""
        factors = [fn.load(F32, offset(fn, row, self.header - 4)) for row in rows]
        totals = self._totals(fn, rows, words, turn)
        odd = [fn.fcmp("ueq", factor, const(F32, float("inf"))) for factor in factors]
        some = odd[0]
        for value in odd[1:]:
            some = fn.or_(some, value)
        totals = [fn.mul(total, fn.splat(factors[n // self.vectors], self.lanes)) for n, total in enumerate(totals)]
        return fn.branch(some, lambda: self._of_infinities(fn, rows, words, factors, odd, totals), lambda: totals)

    def _totals(self, fn: Function, rows: list[Val], words: list[Val], turn: tuple[int, int]) -> list[Val]:
        """Sums of integer products over a step, as f32, for every row and vector."""
        ints, count = I32.vec(self.lanes), self.step_k // self.parts
        unroll = gcd(count, _WORDS)
        size = len(rows) * self.vectors

        def first(row: Val, j: int) -> Val:
            return fn.splat(fn.load(I32, offset(fn, row, 4 * j)), self.lanes) if self.shift else const(ints, 0)

        def some(begin: Val, sums: list[Val]) -> list[Val]:
            at = [fn.add(begin, i64(n)) for n in range(unroll)]
            values = [self.begun(total) for total in sums]
            for v in range(0, self.vectors, self.together):
                for index in at:
                    if self.ahead and v == 0:
                        self._fetch(fn, index, words, *turn)
                    self._multiply(fn, index, rows, words, range(v, min(v + self.together, self.vectors)), values)
            return [self.ended(fn, total, value) for total, value in zip(sums, values, strict=True)]

        sums = [value for j in range(self.digits) for row in rows for value in [first(row, j)] * self.vectors]
        sums = fn.loop(i64(0), i64(count), unroll, sums, some)
        return [self._joined(fn, sums[n::size]) for n in range(size)]

    def _multiply(self, fn: Function, index: Val, rows: list[Val], words: list[Val], vectors: range, values: list[Val]) -> None:
        """Adds the products of word `index` in some of the vectors to `values`, which are those of all digits, rows and vectors."""
        pitch = self.packing.nr * WORD // 8
        operands = {v: self._quads_of(fn, fn.load(I32.vec(self.lanes), fn.gep(words[v], index, scale=pitch))) for v in vectors}
        for quad in range(self.quads):
            for j in range(self.digits):
                for r, row in enumerate(rows):
                    place = offset(fn, row, self.header + j * self.step_k + 4 * quad)
                    digits = fn.splat(fn.load(I32, fn.gep(place, index, scale=self.parts)), self.lanes)
                    for v in vectors:
                        position = (j * len(rows) + r) * self.vectors + v
                        values[position] = self.dot(fn, values[position], operands[v][quad], digits)

    def _fetch(self, fn: Function, index: Val, words: list[Val], turn: int, turns: int) -> None:
        """Asks for the words that are `ahead` of those of `index`, and `far_ahead`: each time the rows take turns for a part of them."""
        pitch = self.packing.nr * WORD // 8
        for at in words[:: _LINE // (4 * self.lanes)][turn::turns]:
            prefetch(fn, fn.gep(offset(fn, at, self.ahead * pitch), index, scale=pitch))
            if self.far_ahead and self.mr > 1:
                prefetch(fn, fn.gep(offset(fn, at, self.far_ahead * pitch), index, scale=pitch), 2)

    def _joined(self, fn: Function, sums: list[Val]) -> Val:
        """S0 + 2^8 S1 + 2^16 S2, of two with one rounding, of three with two; a step has at most 2^8 k, so that the two lower sums fit 31
        bits."""
        floats = F32.vec(self.lanes)
        lower = fn.convert("sitofp", fn.add(fn.shl(sums[1], const(sums[1].ty, 8)), sums[0]), floats)
        return fn.fma(fn.convert("sitofp", sums[2], floats), const(floats, 65536.0), lower) if len(sums) > 2 else lower

    def _quads_of(self, fn: Function, word: Val) -> list[Val]:
        """The operands of `dot` in words of weights."""
        if self.rhs != i4:
            return [fn.xor(word, const(word.ty, -0x7F7F7F80))] if self.shift else [word]
        if self.shift:
            word = fn.xor(word, const(word.ty, -0x77777778))
            return [fn.and_(value, const(word.ty, 0x0F0F0F0F)) for value in (word, fn.lshr(word, const(word.ty, 4)))]
        bytes_ = fn.convert("bitcast", word, I8.vec(4 * self.lanes))
        four = const(bytes_.ty, 4)
        return [fn.convert("bitcast", fn.ashr(value, four), word.ty) for value in (fn.shl(bytes_, four), bytes_)]

    def _of_infinities(
        self, fn: Function, rows: list[Val], words: list[Val], factors: list[Val], odd: list[Val], totals: list[Val]
    ) -> list[Val]:
        """The totals, in rows with infinities or NaN (`odd`) as sums of their f32 products with weights."""
        pitch = self.packing.nr * WORD // 8

        def word(at: Val, sums: list[Val]) -> list[Val]:
            values = list(sums)
            for part in range(self.parts):
                columns = [self.load_b(fn, fn.gep(start, at, scale=pitch), 0, part) for start in words]
                for r, row in enumerate(rows):
                    place = offset(fn, row, self.header + self.place_of(part))
                    sign = fn.load(I8, fn.gep(place, at, scale=self.parts))
                    x = fn.mul(fn.convert("sitofp", sign, F32), factors[r])
                    x = fn.select(fn.icmp("eq", sign, const(I8, 0)), const(F32, 0), x)
                    for v, column in enumerate(columns):
                        values[r * self.vectors + v] = self.product(fn, values[r * self.vectors + v], fn.splat(x, self.lanes), column)
            return values

        zeros = [const(F32.vec(self.lanes), 0)] * len(totals)
        sums = fn.loop(i64(0), i64(self.step_k // self.parts), 1, zeros, word)
        return [fn.select(odd[n // self.vectors], s, t) for n, (s, t) in enumerate(zip(sums, totals, strict=True))]


@dataclass(frozen=True)
class VnniDigits(DigitMicro):
    """x86-64: VPDPBUSD. Weights are asked for so far ahead for where they lie in memory: 4 rows of 4096 x 4096 take 2.1 ms with the next
    words alone, 1.35 with those of `ahead`, and 1.2 with both (`benchmarks/weight_only.py --rows 4` on an Emerald Rapids). Where L2 holds
    them it costs nothing, but for one row, which reads from memory nearly as fast without `far_ahead`."""

    unsigned = True
    ahead, far_ahead = 32, 128

    def dot(self, fn: Function, acc: Val, weights: Val, digits: Val) -> Val:
        return vpdpbusd(fn, acc, weights, digits)


@dataclass(frozen=True)
class MaddubsDigits(DigitMicro):
    """x86-64 without VNNI: VPMADDUBSW, which adds two products in 16 bits. These hold 16 of 4-bit weights with digits, at
    most 15 * 128 each: those of `_WORDS` words."""

    unsigned = True
    weights = (i4,)
    together = 2
    ahead = 24

    @property
    def row_cost(self) -> float:
        return 1.1

    def begun(self, total: Val) -> Val:
        return const(I16.vec(2 * self.lanes), 0)

    def dot(self, fn: Function, acc: Val, weights: Val, digits: Val) -> Val:
        return fn.add(acc, pair_products(fn, weights, digits))

    def ended(self, fn: Function, total: Val, acc: Val) -> Val:
        return pairs_added(fn, total, acc, const(acc.ty, 1))


@dataclass(frozen=True)
class SdotDigits(DigitMicro):
    """AArch64: SDOT."""

    def dot(self, fn: Function, acc: Val, weights: Val, digits: Val) -> Val:
        operands = [fn.convert("bitcast", value, I8.vec(16)) for value in (weights, digits)]
        return fn.call("llvm.aarch64.neon.sdot.v4i32.v16i8", acc.ty, [acc, *operands])
