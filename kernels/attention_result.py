"""What is stored of results of attention: rounded to the type of its operands, or what a body makes of them."""

from __future__ import annotations

from collections.abc import Sequence

from ..cpu_codegen import convert
from ..cpu_codegen.body import BodyEmitter, Point
from ..cpu_codegen.builder import I32, Function, Val, i64
from ..cpu_codegen.epilogue import accumulator_node
from ..cpu_codegen.slots import Slots
from ..graph.types import f32
from ..platforms.target import Target
from .attention_rows import together
from .attention_spec import AttentionSpec

_ANYWHERE = {"r": i64(0), "c": i64(0)}  # the body reads nothing that depends on where it is


class Results:
    """Emits it, inside one function, in units of 32 bits: `each` results fill one."""

    def __init__(self, fn: Function, target: Target, spec: AttentionSpec, slots: Slots) -> None:
        self._fn, self._target, self._dtype = fn, target, spec.dtype
        self._emitter = None if spec.result is None else BodyEmitter(fn, target, spec.result, slots)
        self.each = 4 // spec.stored.bytes

    def units(self, parts: Sequence[Val]) -> Val:
        """A vector of units of `each` vectors of results in f32, the first one in the lowest bits."""
        fn, lanes = self._fn, parts[0].ty.lanes
        if self._emitter is None:
            return parts[0] if len(parts) == 1 else together(fn, self._target, self._dtype, *parts)
        joined = self.row(parts)
        mixed = fn.shuffle(joined, joined, [lanes * (n % self.each) + n // self.each for n in range(self.each * lanes)])
        return fn.convert("bitcast", mixed, I32.vec(lanes))

    def row(self, parts: Sequence[Val]) -> Val:
        """Results, as they are stored, of vectors in f32 that lie beside each other."""
        if self._emitter is None:
            return self._fn.concatenate([convert.cast(self._fn, self._target, part, f32, self._dtype) for part in parts])
        with self._emitter.scope():
            return self._emitter.joined(0, [self._unjoined(part) for part in parts])

    def one(self, value: Val) -> Val:
        """What a body makes of a number in f32."""
        assert self._emitter is not None
        with self._emitter.scope():
            self._emitter.provide(accumulator_node(self._emitter), value)
            return self._emitter.operand(self._emitter.body.stores[0].node, 0, Point(0, _ANYWHERE))

    def _unjoined(self, value: Val) -> Val:
        assert self._emitter is not None
        self._emitter.provide(accumulator_node(self._emitter), value)
        return self._emitter.unjoined(0, Point(value.ty.lanes, _ANYWHERE))
