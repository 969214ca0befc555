"""Micro-kernels of AMX: 32 x 32 accumulators in four tile registers, of two tiles of the lhs and two panels of the rhs, or 16 x 64 for what
is left of the rows: a product waits for the one before on the same accumulators, 52 cycles, which are time for more than three. Products of
fewer rows alone have registers of as many: no others are packed, loaded and stored.

The tile operations are behind an interface of eight, so that the whole kernel, tails included, also runs on an emulation of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..cpu_codegen.builder import I8, I16, VOID, Function, Val, const, i64
from ..cpu_codegen.intrinsics import prefetch
from ..cpu_codegen.sweep import tail_mask
from ..graph.types import DType, bf16, i8
from .micro import Lhs, MicroKernel, Start, Tile, offset
from .spec import Packing
from .x86_vector import PACK_PAIRS_BF16, PACK_QUADS, vnni, widen

ROWS = 16
ROW_BYTES = 64
TILE_BYTES = ROWS * ROW_BYTES
# Tile registers: four accumulators, row by row of tiles, then those of the lhs; the panels take turns in the others.
_A, _REGISTERS = 4, 8
_NARROWEST = 16  # bytes of a row in a step: a product takes as long as with 64


def register_rows(rows: int, width: int = ROW_BYTES) -> list[int]:
    """Rows of each register where the lhs has so many, 32 at most, of `width` bytes in a step."""
    first, second, panel = min(rows, ROWS), rows - ROWS, width // 4
    if second <= 0:
        return [first] * (_A + 1) + [panel] * (_REGISTERS - _A - 1)
    return [first, first, second, second, first, second, panel, panel]


def register_widths(rows: int, width: int = ROW_BYTES) -> list[int]:
    """Bytes of a row of each."""
    heights = 1 if rows <= ROWS else 2
    return [ROW_BYTES] * _A + [width] * heights + [ROW_BYTES] * (_REGISTERS - _A - heights)


class Tiles(ABC):
    """The operations on tile registers, each of which holds 16 rows of 64 bytes. Pitches are in bytes."""

    @abstractmethod
    def shaped(self, rows: int, width: int = ROW_BYTES) -> Tiles:
        """The same for so many rows in all, of so many bytes in a step: registers have no others."""

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


@dataclass(frozen=True)
class TileInstructions(Tiles):
    """The instructions themselves, on fixed registers."""

    rows: int = 2 * ROWS
    width: int = ROW_BYTES

    def shaped(self, rows: int, width: int = ROW_BYTES) -> Tiles:
        return TileInstructions(rows, width)

    def configure(self, fn: Function) -> None:
        # Palette 1; from byte 16 the bytes of a row of each tile, 16 bits each; from byte 48 the rows of each tile.
        widths = [byte for width in register_widths(self.rows, self.width) for byte in (width, 0)]
        config = fn.module.table(I8, [1, *[0] * 15, *widths, *[0] * 16, *register_rows(self.rows, self.width), *[0] * 8])
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
    """A tile product a step for each 16 rows and panel: 64 k of 8-bit operands, 32 of bf16.

    The operand that is used again soon is loaded normally, the other one with TILELOADDT1, which spares L1: measured 20-28 % faster
    when rows have 512 bytes or more. blocked: the rows of a step lie together, [k / step_k][mr][64 bytes], as they come from beyond L1 the
    fastest: lines one after the other, and no two of a tile in the same set. width: bytes of a row in a step.
    """

    tiles: Tiles = INSTRUCTIONS
    blocked: bool = False
    width: int = ROW_BYTES

    # Accumulators are in tile registers, and the vector units have little to do while those are multiplied; an epilogue is longer than the
    # processor looks ahead by itself.
    overlaps = True

    @property
    def isa(self) -> str:  # type: ignore[override]
        return ("amxbf16" if self.lhs == bf16 else "amxint8") + (f"_{self.width}" if self.width < ROW_BYTES else "")

    @property
    def layout(self) -> Lhs:
        element = I16 if self.lhs == bf16 else I8
        return Lhs(element, group=self.step_k) if self.blocked else Lhs(element, direct=True, ragged=True)

    @property
    def copied(self) -> MicroKernel:
        return replace(self, blocked=True, tiles=self.tiles.shaped(self.mr), width=ROW_BYTES)

    def resized(self, mr: int, panels: int) -> MicroKernel | None:
        return replace(self, panels=panels) if mr == self.mr and panels < self.panels else None

    def alone(self, rows: int) -> MicroKernel:
        fewer = self.mr - ROWS < rows < self.mr  # with as many registers
        return replace(self, mr=rows, tiles=self.tiles.shaped(rows)) if fewer else self

    def in_steps(self, size: int) -> MicroKernel | None:
        width = max((n for n in range(_NARROWEST, ROW_BYTES + 4, 4) if size % n == 0), default=0)
        if width in (0, self.width):
            return self if width else None
        return replace(self, tiles=self.tiles.shaped(self.mr, width), width=width)

    @property
    def step_k(self) -> int:
        return self.width // self.lhs.bytes

    @property
    def row_cost(self) -> float:
        return 1 / 16 if self.lhs == bf16 else 1 / 8

    @property
    def product(self) -> str:
        """The instruction."""
        return "tdpbf16ps" if self.lhs == bf16 else "tdpbssd" if self.lhs == i8 else "tdpbusd"

    @property
    def mode(self) -> object:
        return self.tiles

    def enter(self, fn: Function) -> None:
        self.tiles.configure(fn)

    def leave(self, fn: Function) -> None:
        self.tiles.release(fn)

    @property
    def _heights(self) -> range:
        """The tiles of the lhs."""
        return range(-(-self.mr // ROWS))

    def _place(self, fn: Function, out: Val, out_pitch: int, register: int) -> Val:
        """Where an accumulator lies in `out`."""
        i, j = divmod(register, self._across)
        return offset(fn, out, self.out_bytes(out_pitch, ROWS * i, ROWS * j))

    @property
    def _across(self) -> int:
        """Accumulators from one tile of the lhs to the next, which may be lower, in a narrower tile, too."""
        return _A // len(self._heights)

    @property
    def _accumulators(self) -> list[int]:
        return [i * self._across + j for i in self._heights for j in range(self.panels)]

    def start(self, fn: Function, tile: Tile, kind: Start) -> list[Val]:
        for register in self._accumulators:
            self._begin(fn, tile, kind, register)
        return []

    def _begin(self, fn: Function, tile: Tile, kind: Start, register: int) -> None:
        if kind is Start.OUT:
            self.tiles.load(fn, register, self._place(fn, tile.out, tile.out_pitch, register), i64(4 * tile.out_pitch), False)
        else:
            self.tiles.zero(fn, register)

    def step(self, fn: Function, tile: Tile, index: Val, accumulators: list[Val]) -> list[Val]:
        self._products(fn, tile, index, None)
        return []

    @property
    def turns(self) -> int:
        return len(self._accumulators)

    def turn(self, fn: Function, tile: Tile, index: Val, number: int | None) -> None:
        self._products(fn, tile, index, number)

    def first_turn(self, fn: Function, tile: Tile, kind: Start, before: Val, number: int | None) -> None:
        # Four stores that follow one another take 64 cycles, in which nothing is multiplied; one ahead of each product takes none.
        def ready(register: int) -> None:
            self.tiles.store(fn, register, self._place(fn, before, tile.out_pitch, register), i64(4 * tile.out_pitch))
            self._begin(fn, tile, kind, register)

        self._products(fn, tile, i64(0), number, ready)

    def stored(self, fn: Function, number: Val) -> Val:
        return fn.smin(fn.mul(fn.udiv(fn.add(number, i64(1)), i64(self.panels)), i64(ROWS)), i64(self.mr))

    def _products(
        self, fn: Function, tile: Tile, index: Val, number: int | None, ready: Callable[[int], None] = lambda register: None
    ) -> None:
        """Those of a step, or one of them; `ready` comes before that of an accumulator. All begin with all loads for which there are
        registers, one alone with what those before it have not loaded."""
        first = _A + len(self._heights)
        turns = _REGISTERS - first
        index = tile.place(fn, index)
        rows, pitch = self._rest(fn, tile, index) if tile.left else self._rows(fn, tile, index)

        def panel(j: int) -> None:
            place = fn.gep(tile.b[j], index, scale=self.step_read)
            self.tiles.load(fn, first + j % turns, place, i64(ROW_BYTES), not tile.shares)

        def height(i: int) -> None:
            self.tiles.load(fn, _A + i, fn.gep(rows, fn.mul(pitch, i64(i * ROWS))), pitch, tile.shares > 0)

        if number is None:
            for j in range(min(turns, self.panels)):
                panel(j)
            for i in self._heights:
                height(i)
        share = self.step_read // max(1, tile.shares)
        for following in tile.b if tile.shares and not number else ():
            for line in range(0, share, ROW_BYTES):
                prefetch(fn, offset(fn, fn.gep(fn.gep(following, tile.next), index, scale=share), line), 2)
        for each in range(self.turns) if number is None else (number,):
            i, j = divmod(each, self.panels)
            if number is not None and j == 0:
                height(i)
            if j >= turns or (number is not None and i == 0):
                panel(j)
            register = self._accumulators[each]
            ready(register)
            self.tiles.dot(fn, self.product, register, _A + i, first + j % turns)

    def _rows(self, fn: Function, tile: Tile, index: Val) -> tuple[Val, Val]:
        """Where the rows of step `index` are, and how far apart."""
        if self.blocked:
            return fn.gep(tile.a, index, scale=self.mr * ROW_BYTES), i64(ROW_BYTES)
        place = tile.a if tile.ways else fn.gep(tile.a, index, scale=self.width)
        for steps, way in tile.ways:
            place = fn.gep(place, fn.mul(fn.udiv(index, i64(steps)) if steps > 1 else index, way))
        return place, tile.a_pitch

    def _rest(self, fn: Function, tile: Tile, index: Val) -> tuple[Val, Val]:
        """The same of a step that the rows do not fill: a copy with zeros."""
        to, (rows, pitch) = fn.alloca(self.mr * ROW_BYTES), self._rows(fn, tile, index)
        ty = self.layout.element.vec(self.step_k)
        mask = tail_mask(fn, i64(tile.left), self.step_k)

        def row(r: Val, _: list[Val]) -> list[Val]:
            fn.store(fn.masked_load(ty, fn.gep(rows, fn.mul(r, pitch)), mask, const(ty, 0)), fn.gep(to, r, scale=ROW_BYTES))
            return []

        fn.loop(i64(0), i64(self.mr), 1, [], row)
        return to, i64(ROW_BYTES)

    def finish(self, fn: Function, tile: Tile, accumulators: list[Val]) -> None:
        self.put(fn, tile.out, tile.out_pitch)

    def put(self, fn: Function, out: Val, out_pitch: int) -> None:
        for register in self._accumulators:
            self.tiles.store(fn, register, self._place(fn, out, out_pitch, register), i64(4 * out_pitch))


def amx(lhs: DType, rhs: DType, tiles: Tiles = INSTRUCTIONS) -> tuple[MicroKernel, ...]:
    """The AMX tiles, and vector tiles on the same packing for few rows."""
    packing: Packing = PACK_PAIRS_BF16 if lhs == bf16 else PACK_QUADS
    small = widen(16)[1:] if lhs == bf16 else vnni(lhs, 16)[1:]
    tall, low = (AmxMicro(height * ROWS, 4 // height, packing, lhs, rhs, tiles) for height in (2, 1))
    return (tall, low, *small)
