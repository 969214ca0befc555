"""Loads and stores of a body: where their lanes are, which are active, and how element types change between memory and registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from ..graph.dims import Dim
from ..graph.types import DType
from ..platforms.target import Target
from ..stitch.loops import Node, Store
from . import convert
from .access import Memory, Place
from .addresses import Addresses
from .builder import Function, Ty, Val, i64
from .intrinsics import prefetch
from .scopes import Point
from .slots import Slots
from .transpose import transposed

Operand = Callable[[int, int, Point], Val]


class Transfers:
    """`operand(node, lanes, point)` gives the value of a node in every lane; buffer i of the body is operand `offset` + i of the kernel."""

    def __init__(self, fn: Function, target: Target, slots: Slots, addresses: Addresses, operand: Operand, offset: int) -> None:
        self._fn, self._target, self._slots, self._addresses = fn, target, slots, addresses
        self._operand, self._offset = operand, offset
        self.memory = Memory(fn, target)

    def load(self, node: Node, lanes: int, point: Point, guard: Val | None) -> Val:
        """The node's element at every lane. `guard`: i1, one or one for each lane; where false nothing is read."""
        fn, dtype = self._fn, node.dtype
        ty = convert.memory_type(dtype, lanes)
        other = self._operand(node.args[1], lanes, point) if guard is not None else None
        if not lanes:
            pointer = self._addresses.pointer(node.buffer + self._offset, ty, node.index, point)
            if guard is None or other is None:
                return convert.from_memory(fn, fn.load(ty, pointer), dtype)
            value = convert.from_memory(fn, fn.load(ty, self.memory.only_if(guard, pointer)), dtype)
            return fn.select(guard, value, other)
        place = self._place(node.buffer, ty.vec(0), node.index, point)
        place, mask = self._restricted(place, lanes, point.mask, guard)
        passed = convert.to_memory(fn, other, dtype) if other is not None and guard is not None and guard.ty.lanes else None
        value = convert.from_memory(fn, self.memory.load(ty, place, mask, passed), dtype)
        if guard is None or other is None or guard.ty.lanes:
            return value
        return fn.select(guard, value, other)

    def load_square(self, node: Node, first: Point, rows: Val | None, left: Val | None) -> list[Val]:
        """The vectors of a load at rows beside each other, as many as lanes, from `first` on: it reads side by side along the rows. rows:
        a mask of those where it reads anything. left: how many columns there are, if fewer; what the others would be is anything."""
        fn, lanes = self._fn, first.lanes
        ty = convert.memory_type(node.dtype, lanes)
        place = self._place(node.buffer, ty.vec(0), node.index, first)
        assert place.step is not None, "columns are apart alike"
        step = i64(place.step) if isinstance(place.step, int) else place.step
        last = None if left is None else fn.sub(left, i64(1))
        columns = [i64(n) if last is None else fn.smin(i64(n), last) for n in range(lanes)]
        at = [fn.gep(place.pointer, fn.mul(column, step), ty.vec(0)) for column in columns]
        for pointer in at:
            prefetch(fn, fn.gep(pointer, i64(lanes), ty.vec(0)), 2)
        if rows is None:
            loaded = [fn.load(ty, pointer) for pointer in at]
        else:
            other = convert.to_memory(fn, self._operand(node.args[1], lanes, first), node.dtype)
            loaded = [fn.masked_load(ty, pointer, rows, other) for pointer in at]
        return [convert.from_memory(fn, each, node.dtype) for each in transposed(fn, loaded)]

    def address(self, node: Node, point: Point) -> Val:
        """Where the element of a load lies, that of lane 0."""
        return self._addresses.pointer(node.buffer + self._offset, convert.memory_type(node.dtype), node.index, point)

    def store(self, spec: Store, dtype: DType, lanes: int, point: Point, guard: Val | None) -> None:
        """Stores the node of a store, whose element type is `dtype`, at every active lane."""
        fn = self._fn
        value = self._operand(spec.node, lanes, point)
        data = convert.to_memory(fn, value, dtype)
        if not lanes:
            pointer = self._addresses.pointer(spec.buffer + self._offset, data.ty, spec.index, point)
            fn.store(data, pointer if guard is None else self.memory.only_if(guard, pointer))
            return
        place = self._place(spec.buffer, data.ty.vec(0), spec.index, point)
        place, mask = self._restricted(place, lanes, point.mask, guard)
        if mask is not None and data.ty.bits < 32 and not point.axes["c"].ref.startswith("%"):
            mask = fn.and_(mask, self._true(lanes))
        self._put(data, place, mask, spec.streams)

    def contiguous(self, node: Node, lanes: int) -> bool:
        """Whether a load reads elements beside each other."""
        form = self._addresses.form(node.index, lanes)
        return form is not None and form.contiguous

    def fetch(self, node: Node, point: Point) -> None:
        """Asks for the elements of a load in the second-level cache."""
        prefetch(self._fn, self._addresses.pointer(node.buffer + self._offset, convert.memory_type(node.dtype), node.index, point), 2)

    def fetch_place(self, spec: Store, dtype: DType, point: Point) -> None:
        """Asks for where a store writes in the second-level cache, unless it goes around the caches."""
        if not spec.streams:
            place = self._addresses.pointer(spec.buffer + self._offset, convert.memory_type(dtype), spec.index, point)
            prefetch(self._fn, place, 2, writes=True)

    def joins(self, spec: Store, dtype: DType, lanes: int) -> int:
        """How many vectors of `lanes` beside each other a store fills one register with; 1: it stores them one by one.

        AVX-512 narrows and stores in one instruction, which takes no longer: there only what goes around the caches is joined. But Intel's
        take two micro-operations of the port that shuffles to narrow to bytes, where packing four vectors takes four.
        """
        count = self._target.vector_bits // max(1, lanes * convert.memory_type(dtype).bits)
        narrows = self._target.has("avx512bw") and not (count == 4 and self._target.golden_cove)
        if count not in (2, 4) or spec.guard >= 0 or (narrows and not spec.streams):
            return 1
        form = self._addresses.form(spec.index, lanes * count)
        return count if form is not None and form.contiguous else 1

    def store_joined(self, spec: Store, data: Val, points: Sequence[Point]) -> None:
        """Stores a whole register of elements, those of one point after those of the other; of one row they lie beside each other."""
        lanes, at = data.ty.lanes // len(points), 0
        for _, group in groupby(points, key=lambda point: point.axes.get("r")):
            row = list(group)
            part = data if len(row) == len(points) else self._fn.shuffle(data, data, range(at, at + len(row) * lanes))
            pointer = self._addresses.pointer(spec.buffer + self._offset, part.ty.vec(0), spec.index, row[0])
            self._put(part, Place(pointer, step=1), None, spec.streams)
            at += len(row) * lanes

    def _put(self, data: Val, place: Place, mask: Val | None, streams: bool) -> None:
        if streams and mask is None and data.ty.bits * data.ty.lanes == self._target.vector_bits:
            self.memory.stream(data, place.pointer)
        else:
            self.memory.store(data, place, mask)

    def _true(self, lanes: int) -> Val:
        """A mask of all lanes that LLVM cannot see through.

        LLVM 22 turns a masked store of truncated elements whose mask is constant with one lane into a store of that element before
        truncation, which writes beyond it.
        """
        pointer = self._slots.status()
        return self._fn.splat(self._fn.emit(Ty("i1"), f"icmp ne ptr {pointer.ref}, null"), lanes)

    def reach(self, buffer: int, dtype: DType, index: Dim, point: Point, within: frozenset[str]) -> None:
        """Computes now the part of an address that needs no other axes than `within`."""
        if self._addresses.form(index, point.lanes) is not None:
            self._addresses.pointer(buffer + self._offset, convert.memory_type(dtype), index, point, within)

    def load_at(self, pointer: Val, dtype: DType, lanes: int, point: Point) -> Val:
        """Element c of an array over the columns."""
        ty = convert.memory_type(dtype, lanes)
        return convert.from_memory(self._fn, self._fn.load(ty, self._fn.gep(pointer, point.axes["c"], ty.vec(0))), dtype)

    def store_at(self, value: Val, pointer: Val, dtype: DType, point: Point) -> None:
        """Stores whole vectors into an array over the columns, inactive lanes too: it has room for them."""
        data = convert.to_memory(self._fn, value, dtype)
        self._fn.store(data, self._fn.gep(pointer, point.axes["c"], data.ty.vec(0)))

    def _place(self, buffer: int, element: Ty, index: Dim, point: Point) -> Place:
        form = self._addresses.form(index, point.lanes)
        if form is None:
            return Place(self._slots.buffer(buffer + self._offset), offsets=self._addresses.vector(index, point))
        pointer = self._addresses.pointer(buffer + self._offset, element, index, point)
        if form.offsets:
            known = tuple(each + lane * form.step for lane, each in enumerate(form.offsets)) if isinstance(form.step, int) else ()
            return Place(pointer, offsets=self._addresses.offsets(form, point), known=known)
        return Place(pointer, step=form.step if isinstance(form.step, int) else self._addresses.scalar(form.step, point))

    def _restricted(self, place: Place, lanes: int, mask: Val | None, guard: Val | None) -> tuple[Place, Val | None]:
        """The place and the mask of its active lanes. One guard for all lanes moves the whole vector to unused bytes."""
        if guard is None:
            # Lane 0 of a masked tail is always active, and all lanes of a splat are lane 0.
            return place, None if place.step == 0 else mask
        if not guard.ty.lanes and place.step in (0, 1):
            return replace(place, pointer=self.memory.only_if(guard, place.pointer)), None if place.step == 0 else mask
        each = guard if guard.ty.lanes else self._fn.splat(guard, lanes)
        return place, each if mask is None else self._fn.and_(mask, each)
