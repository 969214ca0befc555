"""Attention in bf16 by instructions that multiply pairs: what they share, and the ones by VDPBF16PS (x86) and BFDOT (AArch64).

    products   [keys][queries]         += k pair, as it lies in a row              .  q pairs [pairs of depth][queries][2]
    sums       [columns of v][queries] += v pair [pairs of keys][columns of v][2]  .  weights [pairs of keys][queries][2]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ..cpu_codegen.builder import BF16, Function, Module, Val, i64
from ..cpu_codegen.slots import Slots
from ..graph.dims import ceildiv, product
from ..graph.types import bf16
from ..platforms.target import Target
from ..stitch.loops import Body
from .attention_blocks import emit_blocks
from .attention_pairs_pack import PairLayout, emit_pair_pack, pair_of_keys
from .attention_rows import copy_row, together
from .attention_spec import WORKSPACE, AttentionCode, AttentionSpec, heads_as_queries
from .attention_stream import Stream
from .attention_tiling import PADDING, Tiling
from .attention_vector import VectorFamily, VectorStream

# By lanes of a vector: sums plus products of pairs.
_PAIRS = {16: "llvm.x86.avx512bf16.dpbf16ps.512", 4: "llvm.aarch64.neon.bfdot.v4f32.v8bf16"}


class PairStream(Stream):
    """`Stream` whose queries are pairs of neighbours along the depth and whose weights are pairs of neighbouring keys, in bf16."""

    short = True

    def load_queries(self) -> None:
        """Pairs of depth by queries: 32-bit units are transposed. The depth is filled up to whole vectors by zeros."""
        whole = 2 * self.tiling.lanes
        padded = -(-self.spec.depth // whole) * whole
        self.queries = self.fn.alloca(padded // 2 * self.tiling.queries * 4)
        in_place = self.spec.q.col == 1 and padded == self.spec.depth
        self.when_whole(in_place, self._queries_in_place, lambda: self._staged_queries(padded))

    def _queries_in_place(self) -> list[Val]:
        self._pairs(self.q, self.slots.dim(self.spec.q.row * 2), self.spec.depth)
        return []

    def _staged_queries(self, padded: int) -> list[Val]:
        """Queries beyond the last one repeat it."""
        fn, spec = self.fn, self.spec
        row_bytes, col = self.slots.dim(spec.q.row * 2), self.slots.dim(spec.q.col)
        last, pitch = fn.sub(self.rows, i64(1)), (padded // 2 + PADDING) * 4
        staging = fn.alloca(self.tiling.queries * pitch)

        def row(index: Val, _: list[Val]) -> list[Val]:
            source = fn.gep(self.q, fn.mul(fn.smin(index, last), row_bytes))
            copy_row(fn, bf16, source, col, spec.depth, fn.gep(staging, index, scale=pitch), padded, 2 * self.tiling.lanes)
            return []

        fn.loop(i64(0), i64(self.tiling.queries), 1, [], row)
        self._pairs(staging, i64(pitch), padded)
        return []

    def _pairs(self, rows: Val, pitch: Val, depth: int) -> None:
        for v in range(self.tiling.vectors):
            source = self.fn.gep(rows, self.fn.mul(pitch, i64(v * self.tiling.lanes)))
            self.transpose(source, pitch, self.place(self.queries, i64(0), v), i64(self.row_bytes), depth // 2)

    def store_weights(self, row: Val, weights: list[list[Val]]) -> None:
        """Pairs of bf16, over the scores that they come from: row / 2 is never beyond what has been read."""
        fn = self.fn
        for n in range(0, len(weights), 2):
            to = self.row(fn.add(fn.udiv(row, i64(2)), i64(n // 2)))
            for v, (even, odd) in enumerate(zip(weights[n], weights[n + 1])):
                fn.store(self.pair(even, odd), self.place(self.scores, to, v))

    def pair(self, even: Val, odd: Val) -> Val:
        """Weights of neighbouring keys as units of 32 bits."""
        return together(self.fn, self.target, bf16, even, odd)


class DotStream(PairStream, VectorStream):
    """`Stream` by VDPBF16PS or BFDOT: `VectorStream` whose elements of 32 bits are pairs. v is always copied: neighbouring keys meet so.

    Numbers below 2^-126 count as zero. packed: where v lies in pairs already; None: each block of queries copies it.
    """

    pack = 2

    def __init__(
        self,
        fn: Function,
        target: Target,
        spec: AttentionSpec,
        slots: Slots,
        body: Body,
        tiling: Tiling,
        packed: PairLayout | None,
    ) -> None:
        super().__init__(fn, target, spec, slots, body, tiling)
        self.packed = packed

    def keys(self, start: Val, count: Val) -> tuple[Val, Val]:
        """In place where all elements have their neighbours beside them."""
        fn, spec = self.fn, self.spec
        row_bytes, col = self.slots.dim(spec.k.row * 2), self.slots.dim(spec.k.col)
        first, units = fn.gep(self.k, fn.mul(start, row_bytes)), -(-spec.depth // 2)
        if spec.k.col == 1 and spec.depth % 2 == 0:
            return first, row_bytes

        def copy(index: Val, to: Val) -> None:
            copy_row(fn, bf16, fn.gep(first, fn.mul(index, row_bytes)), col, spec.depth, to, 2 * units, 2 * self.tiling.lanes)

        return self.stage(count, units, copy)

    def values(self, start: Val, count: Val) -> tuple[Val, Val]:
        """Pairs of keys: those of the workspace, or of this block of keys alone."""
        fn, spec = self.fn, self.spec
        if self.packed is not None:
            pitch, pair = self.packed.pitch, fn.mul(self.group(), self.slots.dim(self.packed.pairs))
            return fn.gep(self.slots.buffer(WORKSPACE), fn.add(pair, fn.udiv(start, i64(2))), scale=pitch), i64(pitch)
        row_bytes, col = self.slots.dim(spec.v.row * 2), self.slots.dim(spec.v.col)
        first, lanes = fn.gep(self.v, fn.mul(start, row_bytes)), 2 * self.tiling.lanes

        def copy(pair: Val, to: Val) -> None:
            pair_of_keys(fn, first, row_bytes, col, pair, count, spec.width, to, lanes)

        return self.stage(self.steps(count), spec.width, copy)

    def scalars(self, pointer: Val, count: int) -> list[Callable[[], Val]]:
        """A lane of half a register: of a whole one that was loaded, LLVM does not take BFDOT's lane, but makes a vector of it first."""
        fn, lanes = self.fn, self.tiling.lanes
        if not self.by_lane or count != lanes:
            return super().scalars(pointer, count)
        halves = [fn.load(BF16.vec(lanes), fn.gep(pointer, i64(8 * n))) for n in range(2)]

        def lane(n: int) -> Val:
            pair = [2 * (n % 2), 2 * (n % 2) + 1]
            return fn.shuffle(halves[n // 2], halves[n // 2], pair * lanes)

        return [partial(lane, n) for n in range(count)]

    def product(self, value: Val, scalar: Val, vector: Val) -> Val:
        pairs = BF16.vec(2 * self.tiling.lanes)
        # BFDOT has the lane to multiply by as its last operand.
        operands = [value, self.fn.convert("bitcast", vector, pairs), self.fn.convert("bitcast", scalar, pairs)]
        return self.fn.call(_PAIRS[self.tiling.lanes], value.ty, operands)


@dataclass(frozen=True)
class DotFamily(VectorFamily):
    """Blocks by `DotStream`."""

    packed: PairLayout | None

    def tilings(self, target: Target, spec: AttentionSpec) -> tuple[Tiling, ...]:
        """8 keys are enough to hide the latency, and leave less of a rest than 12: 2 to 5 % faster on Zen 4."""
        return tuple(replace(tiling, keys=min(8, tiling.keys)) for tiling in super().tilings(target, spec))

    def stream(self, fn: Function, target: Target, spec: AttentionSpec, slots: Slots, body: Body, tiling: Tiling) -> Stream:
        return DotStream(fn, target, spec, slots, body, tiling, self.packed)


def emit_dots(module: Module, target: Target, spec: AttentionSpec, name: str) -> AttentionCode:
    """Adds the kernel, and one that packs v where several blocks of queries share it, or may where their number comes with the call."""
    spec = heads_as_queries(spec)
    family = DotFamily(None)
    blocks = product((ceildiv(spec.m, family.tilings(target, spec)[0].queries), spec.heads))
    if blocks == spec.groups:
        return AttentionCode(emit_blocks(module, target, spec, name, family))
    layout = PairLayout(spec)
    run = emit_blocks(module, target, spec, name, DotFamily(layout))
    return AttentionCode(run, emit_pair_pack(module, target, layout, f"{name}.pack"), layout.bytes)
