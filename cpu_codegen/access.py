"""Loads and stores of vectors: contiguous, masked, gathered, lane by lane. The element types are those of memory.

Where a lane must not touch memory and the target cannot mask it, its address is replaced by that of unused bytes on the stack, so that
no code here branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..platforms.target import Target
from ..stitch.costs import SHUFFLED
from .builder import I32, I64, PTR, Function, Ty, Val, const, const_vec, i64
from .division import any_lane

_READERS = 4  # lanes of one element: for each, its mask is put in order
_NOWHERE_BYTES = 512  # the widest vector of any kernel: 64 elements of 8 bytes


@dataclass(frozen=True)
class Place:
    """Where the lanes of a vector are: lane 0 at `pointer`, the others by one of

    step      a number or i64 value: lane i is i * step elements on; 0: all lanes are the same element
    offsets   an integer vector of elements
    known     the same as numbers
    """

    pointer: Val
    step: int | Val | None = None
    offsets: Val | None = None
    known: tuple[int, ...] = ()

    def numbers(self, lanes: int) -> tuple[int, ...]:
        """How many elements each lane is behind the pointer; () where that is not known."""
        return tuple(lane * self.step for lane in range(lanes)) if isinstance(self.step, int) else self.known


def can_mask(target: Target, bits: int) -> bool:
    """Whether loads and stores of vectors can leave out lanes of so many bits."""
    return target.masked_memory or (target.has("avx2") and bits in (32, 64))


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
        elif (ordered := self._ordered(ty, place, mask)) is not None:
            value = ordered
        elif ty.bits >= 32 and self._target.has("avx2"):
            return self._gather(ty, place, mask, other)
        else:
            value = const(ty, 0)
            for lane in range(ty.lanes):
                value = fn.insert(value, fn.load(ty.vec(0), self._lane(ty, place, lane, mask)), lane)
        return value if mask is None or other is None else fn.select(mask, value, other)

    def _ordered(self, ty: Ty, place: Place, mask: Val | None) -> Val | None:
        """Elements that lie within a few vectors, such as every other one, are put in order in registers. None: they are further apart, or
        what lies between them cannot be left out where lanes are inactive."""
        fn, at = self._fn, place.numbers(ty.lanes)
        if not at:
            return None
        low, span = min(at), max(at) - min(at) + 1
        width = 1 << (min(span, ty.lanes).bit_length() - 1)
        if span > SHUFFLED * width or width == 1:
            return None
        parts = sorted({(number - low) // width for number in at})
        starts = [low + min(n * width, span - width) for n in parts]
        where, count = [parts.index((number - low) // width) for number in at], len(parts)
        blocks: list[Val] = []
        for block, start in enumerate(starts):
            pointer, part = fn.gep(place.pointer, i64(start), ty.vec(0)), ty.vec(width)
            if mask is None:
                blocks.append(fn.load(part, pointer))
                continue
            readers = [[n for n in range(ty.lanes) if where[n] == block and at[n] == start + each] for each in range(width)]
            if not self._masks(ty) or max(map(len, readers)) > _READERS:
                return None
            blocks.append(fn.masked_load(part, pointer, self._any_of(mask, readers), const(part, 0)))
        from_start = [number - starts[block] for block, number in zip(where, at, strict=True)]
        if count <= 2:
            return fn.shuffle(blocks[0], blocks[-1], [block * width + each for block, each in zip(where, from_start)])
        pairs = [
            fn.shuffle(blocks[n], blocks[min(n + 1, count - 1)], [block % 2 * width + each for block, each in zip(where, from_start)])
            for n in range(0, count, 2)
        ]
        return fn.shuffle(pairs[0], pairs[1], [lane + block // 2 * ty.lanes for lane, block in enumerate(where)])

    def _any_of(self, mask: Val, groups: Sequence[Sequence[int]]) -> Val:
        """For each group of lanes whether one of them is active."""
        fn, none = self._fn, mask.ty.lanes
        turns = [[group[n] if n < len(group) else none for group in groups] for n in range(max(map(len, groups)))]
        found = [fn.shuffle(mask, const(mask.ty, False), turn) for turn in turns]
        result = found[0]
        for each in found[1:]:
            result = fn.or_(result, each)
        return result

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
        return can_mask(self._target, ty.bits)

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
