"""Attention in bf16 by VPDPWSSD, or VPMADDWD and VPADDD, which add products of pairs of 16-bit integers: for processors that multiply
these faster than f32, and bf16 no faster.

    products   [keys][queries]         += k pair [keys][pairs of depth][2]               .  q pairs [pairs of depth][queries][2]
    sums       [columns of v][queries] += v pair [pairs of keys][columns of v][2]        .  weights [pairs of keys][queries][2]

Each query and each key has a scale, by which its largest number becomes the largest integer whose products add up in 32 bits, and so has
each column of v in a block of keys. Integers of a query and a key have 12 bits beside the sign for a depth of 128, 12.5 for 64: they are
nearer to what they stand for than bf16 is, but for those that are much smaller than the largest of their row, which matter less to its
products. Weights have 14 bits, and of each block of keys the largest is the largest integer, so that many keys of small weights are not
lost beside a single one in another block. (Scales of rows and of blocks after Zhang et al., "SageAttention: Accurate 8-bit Attention for
Plug-and-play Inference Acceleration", ICLR 2025.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..cpu_codegen import convert
from ..cpu_codegen.builder import F32, I16, I32, Function, Module, Val, const, i64
from ..cpu_codegen.slots import Slots
from ..graph.dims import Dim, product
from ..platforms.target import Target
from ..stitch.loops import Body
from .attention_blocks import emit_blocks
from .attention_pairs import PairStream
from .attention_spec import WORKSPACE, AttentionCode, AttentionSpec, heads_as_queries
from .attention_stream import Stream
from .attention_tiling import Tiling, even_block
from .attention_vector import VectorFamily, VectorStream
from .attention_words_pack import OCTAVE, WordLayout, emit_word_pack, halves, larger, scales, words_together
from .x86_words import pairs_multiplied

_BLOCK = 96  # keys, about
_FEWEST = 1024  # scores of a head, from where on it takes no longer than widening: 4 heads of 32 x 32, depth 32, on an Emerald Rapids


class WordStream(PairStream, VectorStream):
    """`Stream` by VPDPWSSD: `VectorStream` whose elements of 32 bits are pairs of integers. k and v are those of the workspace."""

    pack = 2
    octave = OCTAVE
    apart = True
    by_blocks = True  # whose values have a scale

    def __init__(
        self, fn: Function, target: Target, spec: AttentionSpec, slots: Slots, body: Body, tiling: Tiling, layout: WordLayout
    ) -> None:
        super().__init__(fn, target, spec, slots, body, tiling)
        self.layout = layout
        self.sum = I32.vec(tiling.lanes)
        # Where sums go on in the same block of code LLVM makes VPMADDWD and VPADDD of each step: the last one is done sooner then, but they
        # take twice the units.
        self.ahead = 1

    def load_queries(self) -> None:
        """Pairs of bf16, then pairs of integers in their place, and what a step of each query is."""
        super().load_queries()
        fn, count = self.fn, range(self.tiling.vectors)
        pairs = i64(-(-self.spec.depth // 2))

        def place(pair: Val, v: int) -> Val:
            return self.place(self.queries, self.row(pair), v)

        half = I16.vec(2 * self.tiling.lanes)

        def largest_of(pair: Val, largest: list[Val]) -> list[Val]:
            return [larger(fn, largest[v], fn.load(half, place(pair, v))) for v in count]

        both = fn.loop(i64(0), pairs, 1, [const(half, 0) for _ in count], largest_of)
        tops = [fn.intrinsic("umax", I16.vec(self.tiling.lanes), self._halves_of(top)) for top in both]
        factors, self.steps_of_queries = zip(*(scales(fn, top, self.layout.most) for top in tops), strict=True)

        def converted(pair: Val, _: list[Val]) -> list[Val]:
            for v in count:
                even, odd = (fn.mul(number, factors[v]) for number in halves(fn, fn.load(self.sum, place(pair, v))))
                fn.store(words_together(fn, even, odd), place(pair, v))
            return []

        fn.loop(i64(0), pairs, 1, [], converted)

    def _halves_of(self, pairs: Val) -> list[Val]:
        """Integers of 16 bits: the first of each pair, and the second."""
        return [self.fn.shuffle(pairs, pairs, range(n, 2 * self.tiling.lanes, 2)) for n in range(2)]

    def pair(self, even: Val, odd: Val) -> Val:
        """Weights have no sign to be cut off."""
        low, high = (convert.round_to_int(self.fn, value, 32) for value in (even, odd))
        return self.fn.or_(low, self.fn.shl(high, const(high.ty, 16)))

    def keys(self, start: Val, count: Val) -> tuple[Val, Val]:
        fn, pitch = self.fn, self.layout.key_pitch
        key = fn.add(fn.mul(self.group(), self.slots.dim(self.spec.s)), start)
        return fn.gep(self.slots.buffer(WORKSPACE), key, scale=pitch), i64(pitch)

    def values(self, start: Val, count: Val) -> tuple[Val, Val]:
        fn, pitch = self.fn, self.layout.value_pitch
        block = fn.add(fn.mul(self.group(), self.slots.dim(self.layout.blocks)), fn.udiv(start, i64(self.tiling.block)))
        steps = fn.gep(self.slots.buffer(WORKSPACE), self.slots.dim(self.layout.steps_at))
        self.column_steps = fn.gep(steps, block, scale=self.layout.step_pitch)
        pair = fn.add(fn.mul(self.group(), self.slots.dim(self.layout.pairs)), fn.udiv(start, i64(2)))
        first = fn.gep(self.slots.buffer(WORKSPACE), self.slots.dim(self.layout.values_at))
        return fn.gep(first, pair, scale=pitch), i64(pitch)

    def product(self, value: Val, scalar: Val, vector: Val) -> Val:
        key, query = (self.fn.convert("bitcast", operand, self.sum) for operand in (scalar, vector))
        return pairs_multiplied(self.fn, value, key, query, self.target.vnni)

    def whole_product(self, total: Val, key: Val, v: int) -> Val:
        fn = self.fn
        step = fn.splat(fn.load(F32, fn.gep(key, i64(self.layout.key_step))), self.tiling.lanes)
        if not self.score.proportional:
            step = fn.mul(step, self.steps_of_queries[v])
        return fn.mul(fn.convert("sitofp", total, self.vector), step)

    def factors_of_scores(self, factor: Val | None) -> list[Val | None]:
        """The step of each query, where nothing but the largest score is to be known before it is multiplied with."""
        if not self.score.proportional:
            return super().factors_of_scores(factor)
        return [step if factor is None else self.fn.mul(step, factor) for step in self.steps_of_queries]

    def first_sums(self, places: Sequence[Val], alpha: Sequence[Val]) -> list[Val]:
        return [const(self.sum, 0)] * len(places)

    def last_sums(self, values: list[Val], places: Sequence[Val], at: Val, alpha: Sequence[Val]) -> list[Val]:
        """Times the step of their column and the share of this block, beside what earlier ones have come to."""
        fn, vectors, found = self.fn, self.tiling.vectors, list[Val]()
        column = fn.gep(self.column_steps, at, F32)
        for n, (value, place) in enumerate(zip(values, places, strict=True)):
            step = fn.splat(fn.load(F32, fn.gep(column, i64(4 * (n // vectors)))), self.tiling.lanes)
            total = fn.convert("sitofp", value, self.vector)
            if self.once:
                found.append(fn.mul(total, step))
                continue
            before = fn.mul(fn.load(self.vector, place), alpha[n % vectors])
            found.append(fn.fma(total, fn.mul(step, self.share[n % vectors]), before))
        return found


@dataclass(frozen=True)
class WordFamily(VectorFamily):
    """Blocks by `WordStream`."""

    layout: WordLayout

    def tilings(self, target: Target, spec: AttentionSpec) -> tuple[Tiling, ...]:
        """Of 8 keys, as for pairs of bf16, and alike blocks of keys: fewer of them have more bits and know less of each other."""
        return tuple(replace(tiling, keys=min(8, tiling.keys), block=self.layout.block) for tiling in super().tilings(target, spec))

    def stream(self, fn: Function, target: Target, spec: AttentionSpec, slots: Slots, body: Body, tiling: Tiling) -> Stream:
        return WordStream(fn, target, spec, slots, body, tiling, self.layout)


def worth_packing(queries: Dim, keys: Dim) -> bool:
    """Whether so many queries of a head of k and v, and so many keys, take longer than making integers of them, as far as that is known."""
    scores = product((queries, keys))
    return not isinstance(scores, int) or scores >= _FEWEST


def why_not_words(target: Target, spec: AttentionSpec) -> str | None:
    """Why integers would take longer than floats; None where they do not."""
    if not target.word_pairs:
        return f"{target.name} multiplies integers no faster than floats"
    if not worth_packing(spec.m, spec.s):
        return f"making integers takes longer than they save with {spec.m} queries and {spec.s} keys"
    return None


def emit_words(module: Module, target: Target, spec: AttentionSpec, name: str) -> AttentionCode:
    """Adds the kernel, and the one that makes integers of k and v."""
    spec = heads_as_queries(spec)
    layout = WordLayout(spec, even_block(spec, _BLOCK, 4))
    run = emit_blocks(module, target, spec, name, WordFamily(layout))
    return AttentionCode(run, emit_word_pack(module, target, layout, f"{name}.pack"), layout.bytes)
