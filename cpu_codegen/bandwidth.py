"""What one core reads, writes and copies per second in each level of its memory, measured with generated loops."""

from __future__ import annotations

from dataclasses import dataclass

from ..platforms.target import Target
from .builder import I32, I64, PTR, VOID, Function, Module, Val, const, i64
from .jit import Library
from .rate import USUAL, Bound, Effort, aligned, best_rate, loaded

UNROLL = 8
MEMORY = "memory"
_MEMORY_BYTES = (256 << 20, 1 << 30)  # least and most


@dataclass(frozen=True)
class Bandwidth:
    """10^9 bytes per second of one core on `size` bytes, which stay in `level` ("L1", "L2", "L3", "memory").

    copy counts the bytes read and those written, half of `size` each. Writes go through the caches as ordinary stores do.
    """

    level: str
    size: int
    read: float
    write: float
    copy: float


def sizes(target: Target) -> tuple[tuple[str, int], ...]:
    """The levels of a machine and the bytes to measure each with: well inside it, and well beyond the level before."""
    levels = [("L1", target.l1d // 2), ("L2", target.l2 // 2)]
    if target.l3 > 2 * target.l2:
        # A part of a shared cache: other cores have theirs, and on a rented machine the whole may be said but not given.
        levels.append(("L3", min(target.l3 // 2, 8 * target.l2)))
    least, most = _MEMORY_BYTES
    return (*levels, (MEMORY, min(max(least, 3 * target.l3), most)))


def measure(target: Target, levels: tuple[tuple[str, int], ...], effort: Effort = USUAL) -> tuple[Bandwidth, ...]:
    """Measures on this machine, whose vectors and cache lines `target` describes."""
    library = loaded(emit(target), target)
    block = UNROLL * target.vector_bits // 8
    return tuple(_level(library, name, size // (2 * block) * (2 * block), effort) for name, size in levels)


def _level(library: Library, name: str, size: int, effort: Effort) -> Bandwidth:
    data = aligned(size)
    at, half = data.ctypes.data, size // 2
    read = best_rate(Bound(library, "read", (at, at, size)), size, effort)
    write = best_rate(Bound(library, "write", (at, at, size)), size, effort)
    copy = best_rate(Bound(library, "copy", (at, at + half, half)), size, effort)
    return Bandwidth(name, size, read / 1e9, write / 1e9, copy / 1e9)


def emit(target: Target) -> Module:
    """The functions read, write and copy: void f(ptr from, ptr to, i64 bytes, i64 passes), bytes a multiple of UNROLL vectors."""
    module = Module()
    for name, reads, writes in (("read", True, False), ("write", False, True), ("copy", True, True)):
        _emit_stream(module, target, name, reads, writes)
    return module


def _emit_stream(module: Module, target: Target, name: str, reads: bool, writes: bool) -> None:
    fn = Function(module, name, VOID, [PTR, PTR, I64, I64])
    source, to, size, passes = fn.args
    ty = I32.vec(target.lanes(32))
    width = target.vector_bits // 8

    def block(at: Val, sums: list[Val]) -> list[Val]:
        places = [fn.add(at, i64(width * u)) for u in range(UNROLL)]
        values = [fn.load(ty, fn.gep(source, place)) if reads else const(ty, 1) for place in places]
        if not writes:
            return [fn.add(total, value) for total, value in zip(sums, values, strict=True)]
        for place, value in zip(places, values, strict=True):
            fn.store(value, fn.gep(to, place))
        return []

    def once(_: Val, sums: list[Val]) -> list[Val]:
        return fn.loop(i64(0), size, width * UNROLL, sums, block)

    # Sums keep the loads alive; what they are is of no interest, so they may overwrite the data.
    for total in fn.loop(i64(0), passes, 1, [] if writes else [const(ty, 0)] * UNROLL, once):
        fn.store(total, to)
    fn.ret()
    fn.finish()
