"""Loads and stores of vectors: contiguous, masked, gathered, lane by lane. The element types are those of memory.

Where a lane must not touch memory and the target cannot mask it, its address is replaced by that of unused bytes on the stack, so that
no code here branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..platforms.target import Target
from .builder import I32, I64, PTR, Function, Ty, Val, const, const_vec, i64
from .division import any_lane

_NOWHERE_BYTES = 512  # the widest vector of any kernel: 64 elements of 8 bytes


@dataclass(frozen=True)
class Place:
    """Where the lanes of a vector are: lane 0 at `pointer`, the others by one of

    step      a number or i64 value: lane i is i * step elements on; 0: all lanes are the same element
    offsets   an integer vector of elements
    """

    pointer: Val
    step: int | Val | None = None
    offsets: Val | None = None


class Memory:
    """Emits the memory accesses of one function."""

    def __init__(self, fn: Function, target: Target) -> None:
        self._fn, self._target = fn, target
        self._nowhere: Val | None = None
        self.streamed = False

    def nowhere(self) -> Val:
        """Bytes on the stack that nobody reads for their value."""
        if self._nowhere is None:
            self._nowhere = self._fn.alloca(_NOWHERE_BYTES)
        return self._nowhere

    def only_if(self, condition: Val, pointer: Val) -> Val:
        """The pointer, or unused bytes when the condition (i1) is false."""
        return self._fn.select(condition, pointer, self.nowhere())

    def load(self, ty: Ty, place: Place, mask: Val | None = None, other: Val | None = None) -> Val:
        """A vector. Inactive lanes read nothing and are `other`, or anything when that is None."""
        fn = self._fn
        if place.step == 0:
            pointer = place.pointer if mask is None else self.only_if(any_lane(fn, mask), place.pointer)
            value = fn.splat(fn.load(ty.vec(0), pointer), ty.lanes)
        elif place.step == 1 and mask is None:
            return fn.load(ty, place.pointer)
        elif place.step == 1 and mask is not None and self._masks(ty):
            return fn.masked_load(ty, place.pointer, mask, other or const(ty, 0))
        elif ty.bits >= 32 and self._target.has("avx2"):
            return self._gather(ty, place, mask, other)
        else:
            value = const(ty, 0)
            for lane in range(ty.lanes):
                value = fn.insert(value, fn.load(ty.vec(0), self._lane(ty, place, lane, mask)), lane)
        return value if mask is None or other is None else fn.select(mask, value, other)

    def stream(self, value: Val, pointer: Val) -> None:
        """Stores a whole, aligned vector around the caches."""
        self._fn.stream(value, pointer)
        self.streamed = True

    def store(self, value: Val, place: Place, mask: Val | None = None) -> None:
        """Stores the active lanes of a vector; where lanes meet, the last one stays."""
        fn, ty = self._fn, value.ty
        if place.step == 1 and mask is None:
            fn.store(value, place.pointer)
        elif place.step == 1 and mask is not None and self._masks(ty):
            fn.masked_store(value, place.pointer, mask)
        else:
            for lane in range(ty.lanes):
                fn.store(fn.extract(value, lane), self._lane(ty, place, lane, mask))

    def _masks(self, ty: Ty) -> bool:
        return self._target.masked_memory or (self._target.has("avx2") and ty.bits in (32, 64))

    def _lane(self, ty: Ty, place: Place, lane: int, mask: Val | None) -> Val:
        fn, element = self._fn, ty.vec(0)
        pointer = place.pointer
        if place.offsets is not None:
            pointer = fn.gep(pointer, fn.extract(place.offsets, lane), element)
        elif lane and place.step != 0:
            step = place.step
            assert step is not None
            index = i64(lane * step) if isinstance(step, int) else fn.mul(step, i64(lane))
            pointer = fn.gep(pointer, index, element)
        return pointer if mask is None else self.only_if(fn.extract(mask, lane), pointer)

    def _gather(self, ty: Ty, place: Place, mask: Val | None, other: Val | None) -> Val:
        fn = self._fn
        offsets = place.offsets
        if offsets is None:
            step = place.step
            if isinstance(step, int):
                offsets = lane_offsets([step * lane for lane in range(ty.lanes)])
            else:
                assert step is not None
                offsets = fn.mul(fn.splat(step, ty.lanes), fn.lane_ids(I64.vec(ty.lanes)))
        pointers = PTR.vec(ty.lanes)
        at = fn.emit(pointers, f"getelementptr {ty.vec(0)}, ptr {place.pointer.ref}, {offsets.ty} {offsets.ref}")
        name = f"llvm.masked.gather.{ty.mangled}.{pointers.mangled}"
        active = mask or const(Ty("i1", ty.lanes), True)
        fn.module.declare(name, ty, [pointers, "i32 immarg", active.ty, ty])
        passed = other or const(ty, 0)
        return fn.emit(ty, f"call {ty} @{name}({at.ty} {at.ref}, i32 {ty.bits // 8}, {active.ty} {active.ref}, {ty} {passed.ref})")


def lane_offsets(elements: Sequence[int]) -> Val:
    """Constant offsets, as 32-bit integers where they fit: half the registers, and gather instructions extend them."""
    wide = any(not -(1 << 31) <= e < 1 << 31 for e in elements)
    return const_vec((I64 if wide else I32).vec(len(elements)), elements)
