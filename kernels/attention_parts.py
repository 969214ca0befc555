"""Attention of few queries and few heads, as in steps of text generation with keys that many heads share: parts of the keys of a head are
the domain of a first kernel, so that there is work for many threads, and a second one puts their sums together, by the maximum of all.

    m = max of m'       total = sum of exp(m' - m) total'       o = sum of exp(m' - m) o'       of parts, where o' are not divided yet

(Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference", 2023.)
"""

from __future__ import annotations

from functools import partial

from ..cpu_codegen.builder import F32, I64, PTR, VOID, Function, Module, Val, i64
from ..cpu_codegen.contract import KernelCode
from ..cpu_codegen.math.exponential import exp_weight
from ..graph.dims import ceildiv, product
from ..graph.types import f32
from ..platforms.target import Target
from .attention_few import Few, emit_few
from .attention_softmax import finite, larger
from .attention_spec import WORKSPACE, AttentionCode, AttentionSpec, heads_as_queries
from .attention_tiling import PADDING

_PART = 512  # keys
_HEADS = 32  # from which on there is work for many threads as it is


def emit_few_or_parts(module: Module, target: Target, spec: AttentionSpec, name: str) -> AttentionCode:
    """Adds the kernel for few queries, or both."""
    spec = heads_as_queries(spec)
    heads = product([size for size in (spec.batch, spec.heads) if isinstance(size, int)])
    if (isinstance(spec.s, int) and spec.s <= _PART) or (isinstance(heads, int) and heads >= _HEADS):
        return AttentionCode(emit_few(module, target, spec, name))
    first, second = Function(module, f"{name}.parts", VOID, [PTR, I64, I64]), Function(module, name, VOID, [PTR, I64, I64])
    apart, together = Parts(first, target, spec), Parts(second, target, spec)
    first.loop(first.args[1], first.args[2], 1, [], apart.part)
    second.loop(second.args[1], second.args[2], 1, [], together.joined)
    for fn in (first, second):
        fn.ret()
        fn.finish()
    heads, parts = product((spec.batch, spec.heads)), ceildiv(spec.s, _PART)
    pack = KernelCode(first.name, apart.slots.order, product((heads, parts)), 1, spec.work)
    run = KernelCode(name, together.slots.order, heads, 1, product((heads, parts, together.record // 4)))
    return AttentionCode(run, pack, product((heads, parts, together.record)))


class Parts(Few):
    """Emits the work of a part, or of a head whose parts are in the workspace: of each query its sums, largest score and total."""

    def __init__(self, fn: Function, target: Target, spec: AttentionSpec) -> None:
        super().__init__(fn, target, spec)
        self.pitch = (self.width + PADDING) * 4
        self.record = self.queries * self.pitch
        self.parts = self.slots.dim(ceildiv(spec.s, _PART))

    def part(self, index: Val, _: list[Val]) -> list[Val]:
        """Of a head, by its number among the parts of all."""
        fn = self.fn
        head = fn.udiv(index, self.parts)
        start = fn.mul(fn.sub(index, fn.mul(head, self.parts)), i64(_PART))
        with self.score.emitter.scope():
            self.enter(head)
            self.each_query(self.begin)
            self.attend(start, fn.smin(fn.add(start, i64(_PART)), self.slots.dim(self.spec.s)))
            self.each_query(partial(self._keep, index))
        return []

    def joined(self, head: Val, _: list[Val]) -> list[Val]:
        """All of a head."""
        fn = self.fn
        first = fn.mul(head, self.parts)

        def join(index: Val, _: list[Val]) -> list[Val]:
            self.each_query(partial(self._join, index))
            return []

        with self.score.emitter.scope():
            self.enter(head)
            self.each_query(self.begin)
            fn.loop(first, fn.add(first, self.parts), 1, [], join)
            self.each_query(self.finish)
        return []

    def _place(self, index: Val, query: Val) -> Val:
        record = self.fn.gep(self.slots.buffer(WORKSPACE), index, scale=self.record)
        return self.fn.gep(record, query, scale=self.pitch)

    def _keep(self, index: Val, query: Val) -> None:
        fn, to = self.fn, self._place(index, query)
        row = fn.gep(self.sums, query, scale=self.width * 4)
        for n in range(self.width // self.lanes):
            fn.store(self.vector_of(f32, row, n), fn.gep(to, i64(n * self.lanes * 4)))
        for n, kept in enumerate((self.largest, self.totals)):
            fn.store(fn.load(F32, fn.gep(kept, query, F32)), fn.gep(to, i64((self.width + n) * 4)))

    def _join(self, index: Val, query: Val) -> None:
        fn, part = self.fn, self._place(index, query)
        row = fn.gep(self.sums, query, scale=self.width * 4)
        largest, totals = fn.gep(self.largest, query, F32), fn.gep(self.totals, query, F32)
        old, found = fn.load(F32, largest), fn.load(F32, fn.gep(part, i64(self.width * 4)))
        top = larger(fn, self.target, found, old)
        alpha, beta = (exp_weight(fn, self.target, fn.splat(fn.sub(score, finite(fn, top)), self.lanes)) for score in (old, found))
        for n in range(self.width // self.lanes):
            more = fn.mul(self.vector_of(f32, part, n), beta)
            fn.store(fn.fma(self.vector_of(f32, row, n), alpha, more), fn.gep(row, i64(n * self.lanes * 4)))
        total = fn.mul(fn.load(F32, fn.gep(part, i64((self.width + 1) * 4))), fn.extract(beta, 0))
        fn.store(fn.fma(fn.load(F32, totals), fn.extract(alpha, 0), total), totals)
        fn.store(top, largest)
