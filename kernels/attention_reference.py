"""Attention one element after the other: for every element type, stride and target. It defines what the other kernels compute."""

from __future__ import annotations

from collections.abc import Callable

from ..cpu_codegen import convert
from ..cpu_codegen.body import BodyEmitter, Point
from ..cpu_codegen.builder import F32, F64, I64, PTR, VOID, Function, Module, Val, const, i64
from ..cpu_codegen.contract import KernelCode
from ..cpu_codegen.math import call as math_call
from ..cpu_codegen.slots import Slots
from ..graph.types import DType, f32, f64
from ..platforms.target import Target
from .attention_result import Results
from .attention_softmax import larger, sink_weight
from .attention_spec import FIRST_SCORE_BUFFER, OUT, AttentionSpec, HeadStrides, K, Q, V


def emit_reference(module: Module, target: Target, spec: AttentionSpec, name: str) -> KernelCode:
    """Adds the kernel, whose domain is the rows of the result. Scores are computed twice: for the maximum, then for the weights."""
    fn = Function(module, name, VOID, [PTR, I64, I64])
    row = _Row(fn, target, spec)
    fn.loop(fn.args[1], fn.args[2], 1, [], row.emit)
    fn.ret()
    fn.finish()
    return KernelCode(name, row.slots.order, spec.rows, 1, spec.work * 2)


class _Row:
    """One row of the result. Sums are f64 for f64, otherwise f32."""

    def __init__(self, fn: Function, target: Target, spec: AttentionSpec) -> None:
        self.fn, self.target, self.spec = fn, target, spec
        self.wide: DType = f64 if spec.dtype == f64 else f32
        self.ty = F64 if self.wide == f64 else F32
        self.slots = Slots(fn, spec.params)
        self.emitter = BodyEmitter(fn, target, spec.score, self.slots, FIRST_SCORE_BUFFER)
        self.results = Results(fn, target, spec, self.slots)
        self.sums = fn.alloca(max(1, spec.width) * self.ty.bits // 8)

    def emit(self, row: Val, _: list[Val]) -> list[Val]:
        fn, spec, dim = self.fn, self.spec, self.slots.dim
        zero, low = const(self.ty, 0.0), const(self.ty, float("-inf"))
        head, heads = fn.udiv(row, dim(spec.m)), dim(spec.heads)
        b, h = fn.udiv(head, heads), fn.urem(head, heads)
        g = fn.udiv(h, fn.udiv(heads, dim(spec.groups)))
        i = fn.urem(row, dim(spec.m))
        self.q, self.out = self._place(Q, spec.q, b, h, i), self._place(OUT, spec.out, b, h, i, spec.stored)
        self.k, self.v = self._place(K, spec.k, b, g, i64(0)), self._place(V, spec.v, b, g, i64(0))
        keys = dim(spec.s)
        largest = fn.loop(i64(0), keys, 1, [low], lambda j, top: [larger(fn, self.target, self._score(row, j), top[0])])[0]
        # Where every score is -inf, -inf - -inf would be NaN; the weights are to be 0 then, and so is the result.
        safe = fn.select(fn.fcmp("oeq", largest, low), zero, largest)
        self._each(lambda e: fn.store(zero, fn.gep(self.sums, e, self.ty)))
        total = fn.loop(i64(0), keys, 1, [zero], lambda j, sums: [self._add(row, j, safe, sums[0])])[0]
        if len(spec.score.stores) > 1:
            total = fn.add(total, sink_weight(fn, self.target, self._sink(row), safe))
        divisor = fn.select(fn.fcmp("oeq", total, zero), const(self.ty, 1.0), total)
        self._each(lambda e: self._write(e, divisor))
        return []

    def _each(self, body: Callable[[Val], None]) -> None:
        def column(e: Val, _: list[Val]) -> list[Val]:
            body(e)
            return []

        self.fn.loop(i64(0), i64(self.spec.width), 1, [], column)

    def _place(self, operand: int, strides: HeadStrides, b: Val, h: Val, row: Val, dtype: DType | None = None) -> Val:
        fn, dim = self.fn, self.slots.dim
        at = dim(strides.offset)
        for index, stride in ((b, strides.batch), (h, strides.head), (row, strides.row)):
            at = fn.add(at, fn.mul(index, dim(stride)))
        return fn.gep(self.slots.buffer(operand), at, convert.memory_type(dtype or self.spec.dtype))

    def _element(self, base: Val, *terms: tuple[Val, Val]) -> Val:
        """Address of the element at the sum of index * stride."""
        at = i64(0)
        for index, stride in terms:
            at = self.fn.add(at, self.fn.mul(index, stride))
        return self.fn.gep(base, at, convert.memory_type(self.spec.dtype))

    def _load(self, place: Val) -> Val:
        value = self.fn.load(convert.memory_type(self.spec.dtype), place)
        return convert.cast(self.fn, self.target, value, self.spec.dtype, self.wide)

    def _score(self, row: Val, j: Val) -> Val:
        fn, spec, dim = self.fn, self.spec, self.slots.dim

        def step(d: Val, total: list[Val]) -> list[Val]:
            q = self._load(self._element(self.q, (d, dim(spec.q.col))))
            k = self._load(self._element(self.k, (j, dim(spec.k.row)), (d, dim(spec.k.col))))
            return [fn.fma(q, k, total[0])]

        product = fn.loop(i64(0), i64(spec.depth), 1, [const(self.ty, 0.0)], step)[0]
        with self.emitter.scope():
            for n, node in enumerate(self.emitter.body.nodes):
                if node.op == "acc":
                    self.emitter.provide(n, convert.cast(fn, self.target, product, self.wide, node.dtype))
            point = Point(0, {"r": row, "c": j})
            result = spec.score.stores[0].node
            value = self.emitter.operand(result, 0, point)
            self.emitter.checks(point, self.emitter.all_checks)
            return convert.cast(fn, self.target, value, spec.score.nodes[result].dtype, self.wide)

    def _sink(self, row: Val) -> Val:
        with self.emitter.scope():
            value = self.emitter.operand(self.spec.score.stores[1].node, 0, Point(0, {"r": row}))
            return convert.cast(self.fn, self.target, value, f32, self.wide)

    def _add(self, row: Val, j: Val, largest: Val, total: Val) -> Val:
        """Adds one key to the sums; returns the new total of the weights."""
        fn, spec, dim = self.fn, self.spec, self.slots.dim
        weight = math_call(fn, self.target, "exp", [fn.sub(self._score(row, j), largest)])

        def column(e: Val) -> None:
            v = self._load(self._element(self.v, (j, dim(spec.v.row)), (e, dim(spec.v.col))))
            place = fn.gep(self.sums, e, self.ty)
            fn.store(fn.fma(weight, v, fn.load(self.ty, place)), place)

        self._each(column)
        return fn.add(total, weight)

    def _write(self, e: Val, divisor: Val) -> None:
        fn, spec = self.fn, self.spec
        value = fn.div(fn.load(self.ty, fn.gep(self.sums, e, self.ty)), divisor)
        to = fn.gep(self.out, fn.mul(e, self.slots.dim(spec.out.col)), convert.memory_type(spec.stored))
        if spec.result is None:
            fn.store(convert.cast(fn, self.target, value, self.wide, spec.dtype), to)
        else:
            fn.store(self.results.one(convert.cast(fn, self.target, value, self.wide, f32)), to)
