"""The operations on AMX tiles in plain LLVM IR: tile registers are 1 KiB arrays in memory that this process keeps.

As in Intel's description of the instructions: integers are multiplied and added exactly in 32 bits; products of bf16 are added up in f32,
the even and the odd ones of a row apart, and the two sums together to the accumulator, where denormals count as zero and become zero.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import numpy as np

from sashiko.cpu_codegen.builder import F32, I8, I16, I32, PTR, Function, Val, const, i64
from sashiko.kernels.amx import INSTRUCTIONS, ROW_BYTES, ROWS, TILE_BYTES, Tiles, register_rows, register_widths
from sashiko.platforms.target import Target

_MEMORY = np.zeros(9 * TILE_BYTES, np.int8)  # code that has its address may be called at any time


class EmulatedTiles(Tiles):
    """Tiles without AMX. `calls` counts what was emitted; that of tiles with fewer rows is the same."""

    def __init__(self) -> None:
        self._heights, self._widths = register_rows(2 * ROWS), register_widths(2 * ROWS)
        self.calls: dict[str, int] = {}

    def shaped(self, rows: int, width: int = ROW_BYTES) -> EmulatedTiles:
        found = copy(self)
        found._heights, found._widths = register_rows(rows, width), register_widths(rows, width)
        return found

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def _tile(self, fn: Function, tile: int) -> Val:
        first = -(-_MEMORY.ctypes.data // TILE_BYTES) * TILE_BYTES
        return fn.gep(Val(PTR, f"inttoptr (i64 {first} to ptr)"), i64(tile * TILE_BYTES))

    def configure(self, fn: Function) -> None:
        self._count("configure")

    def release(self, fn: Function) -> None:
        self._count("release")

    def zero(self, fn: Function, tile: int) -> None:
        self._count("zero")
        place = self._tile(fn, tile)
        self._rows(fn, tile, lambda row: fn.store(const(I32.vec(16), 0), fn.gep(place, row, scale=ROW_BYTES)))

    def load(self, fn: Function, tile: int, pointer: Val, pitch: Val, streamed: bool) -> None:
        self._count("load streamed" if streamed else "load")
        place = self._tile(fn, tile)

        def row(index: Val) -> None:
            ty = I8.vec(self._widths[tile])
            fn.store(fn.load(ty, fn.gep(pointer, fn.mul(index, pitch))), fn.gep(place, index, scale=ROW_BYTES))

        self._rows(fn, tile, row)

    def store(self, fn: Function, tile: int, pointer: Val, pitch: Val) -> None:
        self._count("store")
        place = self._tile(fn, tile)

        def row(index: Val) -> None:
            fn.store(fn.load(I8.vec(64), fn.gep(place, index, scale=ROW_BYTES)), fn.gep(pointer, fn.mul(index, pitch)))

        self._rows(fn, tile, row)

    def dot(self, fn: Function, kind: str, acc: int, a: int, b: int) -> None:
        self._count(kind)
        c, x, y = (self._tile(fn, tile) for tile in (acc, a, b))
        bf16 = kind == "tdpbf16ps"
        ty = (F32 if bf16 else I32).vec(16)

        def row(m: Val, _: list[Val]) -> list[Val]:
            def group(k: Val, sums: list[Val]) -> list[Val]:
                one = fn.splat(fn.load(I32, fn.gep(fn.gep(x, m, scale=ROW_BYTES), k, I32)), 16)
                many = fn.load(I32.vec(16), fn.gep(y, k, scale=ROW_BYTES))
                return _bf16(fn, sums, one, many) if bf16 else [_int8(fn, sums[0], one, many, kind == "tdpbssd")]

            place = fn.gep(c, m, scale=ROW_BYTES)
            old = fn.load(ty, place)
            sums = fn.loop(i64(0), i64(self._heights[b]), 1, [const(ty, 0.0)] * 2 if bf16 else [old], group)
            fn.store(_added(fn, old, _added(fn, *sums)) if bf16 else sums[0], place)
            return []

        fn.loop(i64(0), i64(self._heights[acc]), 1, [], row)

    def _rows(self, fn: Function, tile: int, act: Callable[[Val], None]) -> None:
        def row(index: Val, _: list[Val]) -> list[Val]:
            act(index)
            return []

        fn.loop(i64(0), i64(self._heights[tile]), 1, [], row)


def tiles_on(target: Target) -> Tiles:
    """The instructions where `target` has them, else their emulation."""
    return INSTRUCTIONS if target.has("amx_tile", "amx_int8", "amx_bf16") else EmulatedTiles()


def _int8(fn: Function, total: Val, a: Val, b: Val, signed: bool) -> Val:
    x = fn.convert("sext" if signed else "zext", fn.convert("bitcast", a, I8.vec(64)), I32.vec(64))
    y = fn.convert("sext", fn.convert("bitcast", b, I8.vec(64)), I32.vec(64))
    products = fn.mul(x, y)
    for j in range(4):
        total = fn.add(total, fn.shuffle(products, products, [4 * n + j for n in range(16)]))
    return total


def _bf16(fn: Function, sums: list[Val], a: Val, b: Val) -> list[Val]:
    def half(value: Val, j: int) -> Val:
        words = fn.convert("bitcast", value, I16.vec(32))
        wide = fn.convert("zext", fn.shuffle(words, words, [2 * n + j for n in range(16)]), I32.vec(16))
        return _flushed(fn, fn.convert("bitcast", fn.shl(wide, const(wide.ty, 16)), F32.vec(16)))

    return [_flushed(fn, fn.fma(half(a, j), half(b, j), total)) for j, total in enumerate(sums)]


def _added(fn: Function, a: Val, b: Val) -> Val:
    return _flushed(fn, fn.add(_flushed(fn, a), b))


def _flushed(fn: Function, value: Val) -> Val:
    """Denormals as zeros of their sign."""
    bits = fn.convert("bitcast", value, I32.vec(16))
    normal = fn.icmp("uge", fn.and_(bits, const(bits.ty, 0x7FFFFFFF)), const(bits.ty, 0x00800000))
    kept = fn.select(normal, bits, fn.and_(bits, const(bits.ty, -0x80000000)))
    return fn.convert("bitcast", kept, value.ty)
