"""Threads of a block: who they are, and how what each of them found becomes one result.

A group is the threads that share a row, a power of two of them side by side: part of a warp, which exchange values directly, or a whole
block of warps, which do it through shared memory. PTX ISA 8.0, sections 9.7.8.6 (shfl.sync) and 9.7.13.1 (bar.sync).
"""

from __future__ import annotations

from ..cpu_codegen.builder import I32, I64, PTR, VOID, Function, Module, Ty, Val, const, i64
from ..cpu_codegen.reduce import Reduction, State
from ..platforms.gpu import WARP

WORDS = 8
_ALL = const(I32, -1)
_CLAMP = const(I32, WARP - 1)


class KernelFunction(Function):
    """A kernel that is launched. Its slots are passed by value: as many words as `launched` is told. Vectors lie where one instruction
    reads and writes them: at multiples of their size."""

    def __init__(self, module: Module, name: str) -> None:
        super().__init__(module, name, VOID, [PTR])

    def load(self, ty: Ty, pointer: Val, align: int = 0) -> Val:
        return super().load(ty, pointer, align or _size(ty))

    def store(self, value: Val, pointer: Val, align: int = 0) -> None:
        super().store(value, pointer, align or _size(value.ty))

    def launched(self, words: int, threads: int) -> None:
        """Adds it to the module: a kernel of so many slots, for blocks of so many threads."""
        self._head = (
            f"define ptx_kernel void @{self.name}(ptr byval([{words} x i64]) align 8 %a0) "
            f'"nvvm.maxntid"="{threads}" nounwind {{'
        )
        self.finish()


def _size(ty: Ty) -> int:
    return max(1, ty.bits // 8) * max(1, ty.lanes)


def _register(fn: Function, name: str) -> Val:
    return fn.convert("zext", fn.call(f"llvm.nvvm.read.ptx.sreg.{name}.x", I32, []), I64)


def thread(fn: Function) -> Val:
    """The number of the thread in its block, i64."""
    return _register(fn, "tid")


def block(fn: Function) -> Val:
    """The number of the block, i64."""
    return _register(fn, "ctaid")


class Group:
    """The threads that share a row: `size` of them, this one number `lane`. Larger than a warp, it is the whole block."""

    def __init__(self, fn: Function, size: int, lane: Val) -> None:
        self._fn, self.size, self.lane = fn, size, lane
        self._shared = 0

    def across(self, reduction: Reduction, state: State) -> State:
        """The state of all threads of the group together, the same in each of them."""
        state = self._within_warp(reduction, state, min(self.size, WARP))
        if self.size <= WARP:
            return state
        warps = self.size // WARP
        fn, kept = self._fn, [self._array(warps) for _ in state]
        inside, number = fn.urem(self.lane, i64(WARP)), fn.udiv(self.lane, i64(WARP))

        def leave() -> list[Val]:
            for array, value in zip(kept, state, strict=True):
                fn.store(_as_memory(fn, value), fn.gep(array, number, scale=WORDS))
            return []

        fn.branch(fn.icmp("eq", inside, i64(0)), leave)
        fn.call("llvm.nvvm.barrier0", VOID, [])
        place = fn.urem(inside, i64(warps))
        found = [_from_memory(fn, fn.load(_memory(v.ty), fn.gep(a, place, scale=WORDS)), v.ty) for a, v in zip(kept, state)]
        return self._within_warp(reduction, found, warps)

    def _within_warp(self, reduction: Reduction, state: State, size: int) -> State:
        while size > 1:
            size //= 2
            other = [self._from(value, size) for value in state]
            state = reduction.merge(state, other)
        return state

    def _from(self, value: Val, distance: int) -> Val:
        """The value that the thread has whose number differs in one bit."""
        fn, bits = self._fn, value.ty.bits
        whole = fn.convert("bitcast", value, Ty(f"i{bits}")) if value.ty.is_float else value
        if bits < 32:
            moved = fn.convert("trunc", self._word(fn.convert("zext", whole, I32), distance), whole.ty)
        elif bits == 32:
            moved = self._word(whole, distance)
        else:
            low = self._word(fn.convert("trunc", whole, I32), distance)
            high = self._word(fn.convert("trunc", fn.lshr(whole, i64(32)), I32), distance)
            moved = fn.or_(fn.convert("zext", low, I64), fn.shl(fn.convert("zext", high, I64), i64(32)))
        return fn.convert("bitcast", moved, value.ty) if value.ty.is_float else moved

    def _word(self, word: Val, distance: int) -> Val:
        return self._fn.call("llvm.nvvm.shfl.sync.bfly.i32", I32, [_ALL, word, const(I32, distance), _CLAMP])

    def _array(self, count: int) -> Val:
        """Shared memory for a value of each warp; of its own, so that none is overwritten before all have read it."""
        self._shared += 1
        name = f"{self._fn.name}.shared{self._shared}"
        self._fn.module.constants[f"internal addrspace(3) global [{count * WORDS} x i8] undef, align 16 ; {name}"] = name
        return self._fn.at_entry(PTR, f"addrspacecast ptr addrspace(3) @{name} to ptr")


def _memory(ty: Ty) -> Ty:
    return Ty("i8") if ty.bits < 8 else ty


def _as_memory(fn: Function, value: Val) -> Val:
    return value if value.ty.bits >= 8 else fn.convert("zext", value, _memory(value.ty))


def _from_memory(fn: Function, value: Val, ty: Ty) -> Val:
    return value if value.ty == ty else fn.convert("trunc", value, ty)
