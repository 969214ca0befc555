"""Rows in order: where the elements of each row go when it is sorted, all of them or those that come first.

An element becomes a word, its key above its place in the row (`sorting_words.py`); keys are unsigned integers in the order of the elements.
Where only some of the first are asked for, vectors of keys are compared with the last key that counts so far, and what lies below is
collected until there is no more room, then sorted and cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..cpu_codegen.builder import I32, I64, PTR, VOID, Function, Module, Ty, Val, const, i64
from ..cpu_codegen.contract import KernelCode
from ..cpu_codegen.division import any_lane
from ..cpu_codegen.slots import Slots
from ..graph.dims import Dim, bounds, ceildiv, product
from ..graph.types import DType, bf16, f16, f32
from ..platforms.target import Target
from .sorting_words import COUNTERS, key_at, sorter

X, PLACES, WORKSPACE = range(3)
_PARTS = 16  # of the rows, each with its own room
_ROOM = 64  # the fewest words that are collected
_NARROW = 1 << 32  # elements of a row whose places fit beside keys of 32 bits
_SELECTED = 4  # times as many elements as are asked for are not all sorted
_WORK = 16  # scalar operations for an element
_INFINITY = {f16: 0x7C00, bf16: 0x7F80, f32: 0x7F800000}


@dataclass(frozen=True)
class SortSpec:
    """places[r, i], i < count: where the element of row r of x[rows, length] is that comes i-th in order; NaN is greater than all.

    Operands: x of `dtype`, i64 places, workspace. params: none.
    """

    dtype: DType
    rows: Dim
    length: Dim
    count: Dim
    descending: bool
    params: tuple[float, ...] = ()

    @property
    def key(self) -> Ty:
        longest = bounds(self.length)[1]
        return I64 if self.dtype.bits == 64 or (longest is not None and longest > _NARROW) else I32

    @property
    def spare(self) -> Dim | None:
        """How many elements longer rows without a bound could be; calls must see to it that this is not below 0."""
        return _NARROW - self.length if self.key == I32 and bounds(self.length)[1] is None else None

    @property
    def word(self) -> Ty:
        return Ty(f"i{2 * self.key.bits}")

    @property
    def parts(self) -> Dim:
        """Of the rows; the domain of the kernel."""
        return max(1, min(self.rows, _PARTS)) if isinstance(self.rows, int) else _PARTS

    @property
    def selects(self) -> bool:
        """Whether most elements are only compared with those that come first."""
        most = bounds(self.length)[1]
        return isinstance(self.count, int) and self.count > 0 and (most is None or most > _SELECTED * self.count)

    @property
    def room(self) -> Dim:
        """Words that are collected before they are sorted."""
        if not self.selects:
            return self.length
        assert isinstance(self.count, int)
        return max(_ROOM, -(-_SELECTED * self.count // _ROOM) * _ROOM)

    @property
    def words_bytes(self) -> Dim:
        """Of one of the two arrays of words of a part; whole vectors are read, and collected."""
        return ceildiv((self.room + _ROOM) * (self.word.bits // 8), 64) * 64

    @property
    def part_bytes(self) -> Dim:
        return 2 * self.words_bytes + COUNTERS

    @property
    def workspace_bytes(self) -> Dim:
        return self.parts * self.part_bytes


def emit(module: Module, target: Target, spec: SortSpec, symbol: str) -> KernelCode:
    """The kernel; its domain are parts of the rows."""
    fn = Function(module, symbol, VOID, [PTR, I64, I64])
    slots = Slots(fn)
    _Rows(fn, slots, target, spec).emit()
    fn.ret()
    fn.finish()
    return KernelCode(symbol, slots.order, spec.parts, work=product((spec.rows, spec.length, _WORK)))


class _Rows:
    """The kernel's own function."""

    def __init__(self, fn: Function, slots: Slots, target: Target, spec: SortSpec) -> None:
        self.fn, self.slots, self.spec = fn, slots, spec
        self.element, self.key, self.word = Ty(f"i{spec.dtype.bytes * 8}"), spec.key, spec.word
        self.lanes = target.vector_bits // self.key.bits
        self.sorter = sorter(fn.module, target, self.word)

    def emit(self) -> None:
        fn, slots, spec = self.fn, self.slots, self.spec
        rows, each = slots.dim(spec.rows), slots.dim(ceildiv(spec.rows, spec.parts))

        def part(number: Val, _: list[Val]) -> list[Val]:
            start = fn.gep(slots.buffer(WORKSPACE), fn.mul(number, slots.dim(spec.part_bytes)))
            self.words, self.other = start, fn.gep(start, slots.dim(spec.words_bytes))
            self.counters = fn.gep(start, slots.dim(2 * spec.words_bytes))
            first = fn.mul(number, each)
            fn.loop(first, fn.smin(rows, fn.add(first, each)), 1, [], row)
            return []

        def row(number: Val, _: list[Val]) -> list[Val]:
            self.x = fn.gep(slots.buffer(X), fn.mul(number, slots.dim(spec.length)), self.element)
            words = self._first() if spec.selects else self._all()
            self._write(words, fn.gep(slots.buffer(PLACES), fn.mul(number, slots.dim(spec.count)), I64))
            return []

        fn.loop(fn.args[1], fn.args[2], 1, [], part)

    def _all(self) -> Val:
        length = self.slots.dim(self.spec.length)
        self._fill(length)
        return self._sorted(length)

    def _first(self) -> Val:
        fn, room, length = self.fn, self.slots.dim(self.spec.room), self.slots.dim(self.spec.length)
        head = fn.smin(length, room)
        self._fill(head)
        state = fn.branch(fn.icmp("sgt", length, room), lambda: self._cut(head), lambda: [head, const(self.key, 0)])
        whole = fn.sub(length, fn.urem(fn.sub(length, head), i64(self.lanes)))

        def vector(at: Val, state: list[Val]) -> list[Val]:
            below = fn.icmp("ult", self._keys(at, self.lanes), fn.splat(state[1], self.lanes))
            return fn.branch(any_lane(fn, below), lambda: self._collect(at, below, state, room), lambda: state)

        def single(at: Val, state: list[Val]) -> list[Val]:
            key = self._keys(at, 0)
            count, last = state
            fn.store(self._word(key, at), fn.gep(self.words, count, self.word))
            return [fn.add(count, fn.convert("zext", fn.icmp("ult", key, last), I64)), last]

        state = fn.loop(head, whole, self.lanes, state, vector)
        return self._sorted(fn.loop(whole, length, 1, state, single)[0])

    def _collect(self, at: Val, below: Val, state: list[Val], room: Val) -> list[Val]:
        """Takes in the elements of a vector that lie below the last one that counts."""
        fn, (count, last) = self.fn, state
        mask = fn.convert("zext", fn.convert("bitcast", below, Ty(f"i{self.lanes}")), I64)
        number = fn.call("llvm.ctpop.i64", I64, [mask])

        def lane(_: Val, state: list[Val]) -> list[Val]:
            mask, count = state
            place = fn.add(at, fn.call("llvm.cttz.i64", I64, [mask, const(Ty("i1"), True)], params=[I64, "i1 immarg"]))
            fn.store(self._word(self._keys(place, 0), place), fn.gep(self.words, count, self.word))
            return [fn.and_(mask, fn.sub(mask, i64(1))), fn.add(count, i64(1))]

        count = fn.loop(i64(0), number, 1, [mask, count], lane)[1]
        return fn.branch(fn.icmp("sge", count, room), lambda: self._cut(count), lambda: [count, last])

    def _cut(self, count: Val) -> list[Val]:
        """Keeps of the words those that come first. How many these are, and the key of the last of them."""
        fn, kept = self.fn, self.slots.dim(self.spec.count)
        found = self._sorted(count)

        def copy(at: Val, _: list[Val]) -> list[Val]:
            fn.store(fn.load(self.word, fn.gep(found, at, self.word)), fn.gep(self.words, at, self.word))
            return []

        fn.loop(i64(0), kept, 1, [], copy)
        return [kept, fn.load(self.key, key_at(fn, self.word, self.words, fn.sub(kept, i64(1))))]

    def _sorted(self, count: Val) -> Val:
        return self.fn.call(self.sorter, PTR, [self.words, self.other, self.counters, count])

    def _fill(self, count: Val) -> None:
        fn = self.fn

        def fill(at: Val, lanes: int) -> None:
            fn.store(self._word(self._keys(at, lanes), at), fn.gep(self.words, at, self.word))

        self._along(count, fill)

    def _write(self, words: Val, places: Val) -> None:
        fn = self.fn

        def write(at: Val, lanes: int) -> None:
            place = fn.convert("trunc", fn.load(self.word.vec(lanes), fn.gep(words, at, self.word)), self.key.vec(lanes))
            fn.store(place if self.key == I64 else fn.convert("zext", place, I64.vec(lanes)), fn.gep(places, at, I64))

        self._along(self.slots.dim(self.spec.count), write)

    def _along(self, count: Val, visit: Callable[[Val, int], None]) -> None:
        """Whole vectors of words, then single ones."""
        fn, lanes = self.fn, self.lanes // 2
        whole = fn.sub(count, fn.urem(count, i64(lanes))) if lanes > 1 else i64(0)

        def step(lanes: int) -> Callable[[Val, list[Val]], list[Val]]:
            def body(at: Val, _: list[Val]) -> list[Val]:
                visit(at, lanes)
                return []

            return body

        if lanes > 1:
            fn.loop(i64(0), whole, lanes, [], step(lanes))
        fn.loop(whole, count, 1, [], step(0))

    def _word(self, key: Val, at: Val) -> Val:
        fn, word = self.fn, self.word.vec(key.ty.lanes)
        place = fn.splat(at if self.key == I64 else fn.convert("trunc", at, I32), key.ty.lanes)
        if key.ty.lanes:
            place = fn.add(place, fn.lane_ids(key.ty))
        return fn.or_(fn.shl(fn.convert("zext", key, word), const(word, self.key.bits)), fn.convert("zext", place, word))

    def _keys(self, at: Val, lanes: int) -> Val:
        """Those of elements side by side."""
        fn, dtype, ty = self.fn, self.spec.dtype, self.element.vec(lanes)
        value = fn.load(ty, fn.gep(self.x, at, self.element))
        top = 1 << (ty.bits - 1)
        if dtype.is_float:
            # Magnitudes with their signs: 0 and -0 are one number, and so is every NaN.
            size, negative = fn.and_(value, const(ty, top - 1)), fn.ashr(value, const(ty, ty.bits - 1))
            infinity = const(ty, _INFINITY.get(dtype, 0x7FF << 52))
            value = fn.select(fn.icmp("sgt", size, infinity), const(ty, top - 1), fn.sub(fn.xor(size, negative), negative))
        if dtype.kind in ("float", "int"):
            value = fn.xor(value, const(ty, -top))
        if self.spec.descending:
            value = fn.xor(value, const(ty, -1))
        return value if ty.bits == self.key.bits else fn.convert("zext", value, self.key.vec(lanes))
