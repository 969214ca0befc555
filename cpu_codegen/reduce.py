"""Reductions: what is carried through a loop, how an element joins, how partial results merge, and what comes out.

A reduction's state is a list of values, scalars or vectors of independent partial results. NaN wins in max, min, argmax and argmin
as in torch; of equal elements argmax and argmin give the first. An empty domain gives the identity (index 0).

Where max and min instructions lose NaN, it is carried beside them that there was none; once for all reductions of an operand.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.types import DType, boolean, f32
from ..platforms.target import Target
from ..stitch.loops import Body, Node
from . import convert, elementwise
from .builder import Function, Ty, Val, const

State = list[Val]
# Steps, or vectors of a row, whose sum is a number of its own before it is added to those before it: rounding errors of sums grow with the
# length of the chain (Higham, The accuracy of floating point summation, 1993).
BLOCK = 512
_OF_BOOLS = {"sum": "any", "max": "any", "prod": "all", "min": "all"}


class Reduction:
    """One reduce node of a body over values of element type `dtype`. `wide_index`: positions may need 64 bits.

    watched: number of the reduction of the same loop that looks for NaN among the same elements, or None.
    """

    def __init__(self, fn: Function, target: Target, node: Node, dtype: DType, wide_index: bool, watched: int | None = None) -> None:
        self._fn, self._target, self.kind, self.result_dtype, self.watched = fn, target, node.kind, node.dtype, watched
        self._source = dtype
        self.dtype = f32 if dtype in convert.HALVES else dtype
        if dtype == boolean:
            self.kind = _OF_BOOLS.get(self.kind, self.kind)
        self._index = Ty("i64" if wide_index else "i32")
        # Masks stay in mask registers where there are any; elsewhere they are vectors of integers as wide as the elements.
        self._mask = Ty("i1") if target.masked_memory else Ty(f"i{max(8, self.dtype.bits)}")
        self._loses_nan = self.kind in ("max", "min") and self.dtype.is_float and not target.has("neon")
        self.watches = self._loses_nan and watched is None

    @property
    def rounds(self) -> bool:
        """Whether errors grow with the number of elements."""
        return self.kind == "sum" and self.dtype.is_float

    @property
    def restarts(self) -> bool:
        """Whether columns may be reduced on their own, and merged with those before them when they all are known."""
        return True

    @property
    def needs_position(self) -> bool:
        return self.kind.startswith("arg")

    def identity(self, lanes: int) -> State:
        """The state of nothing."""
        if self.kind in ("any", "all"):
            return [const(self._mask.vec(lanes), 0 if self.kind == "any" else -1)]
        first = const(convert.register_type(self.dtype, lanes), self._neutral())
        if self.needs_position:
            return [first, const(self._index.vec(lanes), 0)]
        return [first, const(self._mask.vec(lanes), -1)] if self.watches else [first]

    def _neutral(self) -> float | int:
        if self.kind in ("sum", "prod"):
            return 0 if self.kind == "sum" else 1
        largest = self.kind.endswith("min")
        if self.dtype.is_float:
            return float("inf") if largest else float("-inf")
        if self.dtype.kind != "int":
            return (1 if self.dtype == boolean else 255) if largest else 0
        limit = 1 << (self.dtype.bits - 1)
        return limit - 1 if largest else -limit

    def start(self, x: Val, position: Val | None, mask: Val | None) -> State:
        """The state of one element in each lane."""
        if self.kind not in ("sum", "prod") or self._source != self.dtype:
            return self.update(self.identity(x.ty.lanes), x, position, mask)
        return [x if mask is None else self._fn.select(mask, x, const(x.ty, self._neutral()))]

    def update(self, state: State, x: Val, position: Val | None, mask: Val | None) -> State:
        """The state with one more element in each lane; `position` (i64) is the element's place on the axis, for argmax and argmin."""
        fn = self._fn
        if self._source != self.dtype:
            x = convert.widen(fn, x, self._source)
        if self.kind in ("any", "all"):
            if mask is not None:
                x = fn.and_(x, mask) if self.kind == "any" else fn.or_(x, fn.xor(mask, const(mask.ty, True)))
            return [self._logic(state[0], self._to_mask(x))]
        if mask is not None:
            x = fn.select(mask, x, const(x.ty, self._neutral()))
        if self.needs_position:
            assert position is not None
            place = position if position.ty.scalar == self._index.scalar else fn.convert("trunc", position, position.ty.of("i32"))
            better = self._better(x, state[0])
            return [fn.select(better, x, state[0]), fn.select(better, place, state[1])]
        if self.watches:
            return [self._pick(state[0], x), fn.and_(state[1], self._to_mask(fn.fcmp("ord", x, x)))]
        return [self._pick(state[0], x)]

    def merge(self, a: State, b: State) -> State:
        """The state of both domains together."""
        fn = self._fn
        if self.kind in ("any", "all"):
            return [self._logic(a[0], b[0])]
        if self.needs_position:
            better = self._better(b[0], a[0])
            tie = fn.and_(self._same(a[0], b[0]), fn.icmp("slt", b[1], a[1]))
            chosen = fn.or_(better, tie)
            return [fn.select(chosen, b[0], a[0]), fn.select(chosen, b[1], a[1])]
        merged = [self._pick(a[0], b[0])]
        return [*merged, fn.and_(a[1], b[1])] if self.watches else merged

    def across(self, state: State) -> State:
        """The scalar state of all lanes together: halves are merged until one lane is left."""
        fn = self._fn
        lanes = state[0].ty.lanes
        while lanes > 1:
            half = lanes // 2
            low = [fn.shuffle(v, v, range(half)) for v in state]
            high = [fn.shuffle(v, v, range(half, lanes)) for v in state]
            state, lanes = self.merge(low, high), half
        return [fn.extract(v, 0) for v in state] if state[0].ty.lanes else state

    def result(self, state: State, watcher: State) -> Val:
        """The value of the node, of the lanes the state has. watcher: the state of the reduction that looks for NaN."""
        fn = self._fn
        if self.kind in ("any", "all"):
            return state[0] if self._mask.scalar == "i1" else fn.icmp("ne", state[0], const(state[0].ty, 0))
        if self.needs_position:
            place = state[1]
            wanted = place.ty.of(f"i{self.result_dtype.bits}")
            if wanted == place.ty:
                return place
            return fn.convert("sext" if wanted.bits > place.ty.bits else "trunc", place, wanted)
        value = state[0]
        if self._loses_nan:
            ordered = watcher[1]
            good = ordered if self._mask.scalar == "i1" else fn.icmp("ne", ordered, const(ordered.ty, 0))
            value = fn.select(good, value, const(value.ty, float("nan")))
        if self._source == self.dtype:
            return value
        return convert.narrow(fn, self._target, value, self._source, self.kind in ("max", "min"))

    # -- parts -----------------------------------------------------------------------------------------------------
    def _to_mask(self, flags: Val) -> Val:
        wanted = flags.ty.of(self._mask.scalar)
        return flags if wanted == flags.ty else self._fn.convert("sext", flags, wanted)

    def _logic(self, a: Val, b: Val) -> Val:
        return self._fn.or_(a, b) if self.kind == "any" else self._fn.and_(a, b)

    def _pick(self, a: Val, b: Val) -> Val:
        """One of two partial results, or their sum or product; `a` is never NaN where NaN is lost."""
        fn = self._fn
        if self.kind in ("sum", "prod"):
            if self.kind == "prod":
                return fn.mul(a, b)
            return fn.contracted("add", a, b) if self.dtype == f32 else fn.add(a, b)
        op = "maximum" if self.kind == "max" else "minimum"
        if not self._loses_nan:
            return elementwise.apply(fn, self._target, op, self.dtype, [a, b])
        # A comparison with NaN is false, so NaN never gets in.
        return fn.select(fn.fcmp("ogt" if self.kind == "max" else "olt", b, a), b, a)

    def _better(self, x: Val, best: Val) -> Val:
        """Whether x comes before `best`: larger (argmax), or NaN when `best` is not."""
        fn = self._fn
        greater = self.kind == "argmax"
        if self.dtype.is_float:
            return fn.and_(fn.fcmp("ugt" if greater else "ult", x, best), fn.fcmp("ord", best, best))
        return elementwise.compare(fn, "gt" if greater else "lt", self.dtype, x, best)

    def _same(self, a: Val, b: Val) -> Val:
        fn = self._fn
        if not self.dtype.is_float:
            return fn.icmp("eq", a, b)
        return fn.or_(fn.fcmp("oeq", a, b), fn.and_(fn.fcmp("uno", a, a), fn.fcmp("uno", b, b)))


def reductions_of(fn: Function, target: Target, body: Body, nodes: Sequence[int], most: int | None) -> list[Reduction]:
    """The reductions of one loop over at most so many elements. Of those that would look for NaN among the same ones the first one does."""
    wide_index = most is None or most >= 1 << 31
    result: list[Reduction] = []
    watching: dict[int, int] = {}
    for which, n in enumerate(nodes):
        arg = body.nodes[n].args[0]
        reduction = Reduction(fn, target, body.nodes[n], body.nodes[arg].dtype, wide_index, watching.get(arg))
        if reduction.watches:
            watching[arg] = which
        result.append(reduction)
    return result


def results(reductions: Sequence[Reduction], states: Sequence[State]) -> list[Val]:
    """The values of the nodes of one loop."""
    return [r.result(state, state if r.watched is None else states[r.watched]) for r, state in zip(reductions, states, strict=True)]


def flatten(states: Sequence[State]) -> list[Val]:
    """States as loop-carried values."""
    return [value for state in states for value in state]


def unflatten(values: Sequence[Val], like: Sequence[State]) -> list[State]:
    """The inverse of `flatten` for states of the same form."""
    result: list[State] = []
    at = 0
    for state in like:
        result.append(list(values[at : at + len(state)]))
        at += len(state)
    return result
