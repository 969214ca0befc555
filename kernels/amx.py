"""Micro-kernels of AMX: 32 x 32 accumulators in four tile registers, two tiles of the lhs and two panels of the rhs.

The tile operations are behind an interface of seven, so that the whole kernel, tails included, also runs on an emulation of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from ..cpu_codegen.builder import I8, I16, VOID, Function, Val, i64
from ..cpu_codegen.intrinsics import prefetch
from ..graph.types import DType, bf16, i8
from .micro import Lhs, MicroKernel, Start, Tile, offset
from .spec import Packing
from .x86_vector import PACK_PAIRS_BF16, PACK_QUADS, vnni, widen

ROWS = 16
ROW_BYTES = 64
TILE_BYTES = ROWS * ROW_BYTES
# Tile registers.
_C = (0, 1, 2, 3)
_A = (4, 5)
_B = (6, 7)


class Tiles(ABC):
    """The operations on tile registers, each of which holds 16 rows of 64 bytes. Pitches are in bytes."""

    @abstractmethod
    def configure(self, fn: Function) -> None: ...

    @abstractmethod
    def release(self, fn: Function) -> None: ...

    @abstractmethod
    def zero(self, fn: Function, tile: int) -> None: ...

    @abstractmethod
    def load(self, fn: Function, tile: int, pointer: Val, pitch: Val, streamed: bool) -> None:
        """streamed: what is read will not be needed again soon, and should not push other data out of L1."""

    @abstractmethod
    def dot(self, fn: Function, kind: str, acc: int, a: int, b: int) -> None:
        """acc += a times b. kind: tdpbssd, tdpbusd or tdpbf16ps; to the last denormals count as zero."""

    @abstractmethod
    def store(self, fn: Function, tile: int, pointer: Val, pitch: Val) -> None: ...


class TileInstructions(Tiles):
    """The instructions themselves, on fixed registers."""

    def configure(self, fn: Function) -> None:
        # Palette 1; from byte 16 the bytes of a row of each tile, 16 bits each; from byte 48 the rows of each tile.
        rows, widths = [ROWS] * 8, [ROW_BYTES, 0] * 8
        config = fn.module.table(I8, [1, *[0] * 15, *widths, *[0] * 16, *rows, *[0] * 8])
        fn.call("llvm.x86.ldtilecfg", VOID, [config])

    def release(self, fn: Function) -> None:
        fn.call("llvm.x86.tilerelease", VOID, [])

    def _call(self, fn: Function, name: str, tiles: tuple[int, ...], rest: tuple[Val, ...] = ()) -> None:
        args = [*(Val(I8, str(tile)) for tile in tiles), *rest]
        fn.call(f"llvm.x86.{name}", VOID, args, params=[*["i8 immarg"] * len(tiles), *(a.ty for a in rest)])

    def zero(self, fn: Function, tile: int) -> None:
        self._call(fn, "tilezero", (tile,))

    def load(self, fn: Function, tile: int, pointer: Val, pitch: Val, streamed: bool) -> None:
        self._call(fn, "tileloaddt164" if streamed else "tileloadd64", (tile,), (pointer, pitch))

    def dot(self, fn: Function, kind: str, acc: int, a: int, b: int) -> None:
        self._call(fn, kind, (acc, a, b))

    def store(self, fn: Function, tile: int, pointer: Val, pitch: Val) -> None:
        self._call(fn, "tilestored64", (tile,), (pointer, pitch))


INSTRUCTIONS = TileInstructions()


@dataclass(frozen=True)
class AmxMicro(MicroKernel):
    """Four tile products a step: 64 k of 8-bit operands, 32 of bf16.

    The operand that is used again soon is loaded normally, the other one with TILELOADDT1, which spares L1: measured 20-28 % faster
    when rows have 512 bytes or more. blocked: the rows of a step lie together, [k / step_k][32][64 bytes], as they come from beyond L1 the
    fastest: lines one after the other, and no two of a tile in the same set.
    """

    tiles: Tiles = INSTRUCTIONS
    blocked: bool = False

    # Accumulators are in tile registers, and the vector units have nothing to do while those are multiplied; an epilogue is longer than the
    # processor looks ahead by itself.
    overlaps = True

    @property
    def isa(self) -> str:  # type: ignore[override]
        return "amxbf16" if self.lhs == bf16 else "amxint8"

    @property
    def layout(self) -> Lhs:
        element = I16 if self.lhs == bf16 else I8
        return Lhs(element, group=self.step_k) if self.blocked else Lhs(element, direct=True)

    @property
    def copied(self) -> MicroKernel:
        return replace(self, blocked=True)

    @property
    def step_k(self) -> int:
        return ROW_BYTES // self.lhs.bytes

    @property
    def row_cost(self) -> float:
        return 1 / 16 if self.lhs == bf16 else 1 / 8

    @property
    def product(self) -> str:
        """The instruction."""
        return "tdpbf16ps" if self.lhs == bf16 else "tdpbssd" if self.lhs == i8 else "tdpbusd"

    def enter(self, fn: Function) -> None:
        self.tiles.configure(fn)

    def leave(self, fn: Function) -> None:
        self.tiles.release(fn)

    def _places(self, fn: Function, tile: Tile) -> list[Val]:
        """Where the four accumulator tiles lie in `out`."""
        return [offset(fn, tile.out, self.out_bytes(tile, ROWS * i, ROWS * j)) for i in range(2) for j in range(2)]

    def start(self, fn: Function, tile: Tile, kind: Start) -> list[Val]:
        for register, place in zip(_C, self._places(fn, tile)):
            if kind is Start.OUT:
                self.tiles.load(fn, register, place, i64(4 * tile.out_pitch), False)
            else:
                self.tiles.zero(fn, register)
        return []

    def step(self, fn: Function, tile: Tile, index: Val, accumulators: list[Val]) -> list[Val]:
        for register, panel in zip(_B, tile.b):
            self.tiles.load(fn, register, fn.gep(panel, index, scale=TILE_BYTES), i64(ROW_BYTES), not tile.shares)
        for register, rows in zip(_A, self._rows(fn, tile, index)):
            self.tiles.load(fn, register, rows, i64(ROW_BYTES) if self.blocked else tile.a_pitch, tile.shares > 0)
        share = TILE_BYTES // max(1, tile.shares)
        for panel in tile.b if tile.shares else ():
            for line in range(0, share, ROW_BYTES):
                prefetch(fn, offset(fn, fn.gep(fn.gep(panel, tile.next), index, scale=share), line), 2)
        for i, x in enumerate(_A):
            for j, y in enumerate(_B):
                self.tiles.dot(fn, self.product, _C[2 * i + j], x, y)
        return []

    def _rows(self, fn: Function, tile: Tile, index: Val) -> tuple[Val, Val]:
        """Where the two tiles of the lhs are in step `index`."""
        if self.blocked:
            a = fn.gep(tile.a, index, scale=2 * TILE_BYTES)
            return a, fn.gep(a, i64(TILE_BYTES))
        a = fn.gep(tile.a, index, scale=ROW_BYTES)
        return a, fn.gep(a, fn.mul(tile.a_pitch, i64(ROWS)))

    def finish(self, fn: Function, tile: Tile, accumulators: list[Val]) -> None:
        for register, place in zip(_C, self._places(fn, tile)):
            self.tiles.store(fn, register, place, i64(4 * tile.out_pitch))


def amx(lhs: DType, rhs: DType, tiles: Tiles = INSTRUCTIONS) -> tuple[MicroKernel, ...]:
    """The AMX tile, and vector tiles on the same packing for few rows."""
    packing: Packing = PACK_PAIRS_BF16 if lhs == bf16 else PACK_QUADS
    small = widen(16)[1:] if lhs == bf16 else vnni(lhs, 16)[1:]
    return (AmxMicro(2 * ROWS, 2, packing, lhs, rhs, tiles), *small)
