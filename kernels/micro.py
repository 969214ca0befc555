"""What a micro-kernel is: one register tile of a matrix product, for one instruction set.

A class says how to start, advance and finish a tile of mr rows and `panels` column panels; `tile.py` makes a function of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

from ..cpu_codegen.builder import F32, I32, Function, Module, Ty, Val, i64
from ..graph.types import DType, f32, i32
from ..platforms.target import Target
from .spec import Packing

_MOST_SHARES = 4


class Start(Enum):
    """What accumulators begin with: zero, a multiple of the column sums, or what `out` holds (a later block of k)."""

    ZERO = "zero"
    SUMS = "sums"
    OUT = "out"


@dataclass(frozen=True)
class Lhs:
    """How a micro-kernel reads its rows.

    element: type in memory. group: [k / group][mr][group] instead of mr rows of `a_pitch` bytes; 0: rows. direct: rows of the user's own
    matrix will do, whenever k is contiguous and a multiple of the step; ragged: or any number. step_bytes: elements are only what
    `MicroKernel.pack_step` makes steps of, each of so many bytes; 0: elements are what is read.
    """

    element: Ty
    group: int = 0
    direct: bool = False
    ragged: bool = False
    step_bytes: int = 0


@dataclass(frozen=True)
class Tile:
    """The operands of one tile inside its function.

    out_pitch: columns of a block of `out`. shares: of `shares_of`; where there are none, the lhs is used again soon and the panels are not.
    left: how many k of the lhs there are after all the steps, less than one has. ways: (n, bytes), where n steps on in a row, besides what
    others say, are so many bytes on; none: steps follow one another. back: -1 where it goes through the operands from the last
    step to the first, else 0; None: it never does.
    """

    a: Val
    a_pitch: Val
    out: Val
    steps: Val
    next: Val
    b: tuple[Val, ...]
    sums: tuple[Val, ...]
    out_pitch: int
    shares: int
    left: int = 0
    ways: tuple[tuple[int, Val], ...] = ()
    back: Val | None = None

    def place(self, fn: Function, index: Val) -> Val:
        """Where step `index` is among those of the operands."""
        if self.back is None or self.left:
            return index
        return fn.add(fn.xor(index, self.back), fn.and_(self.steps, self.back))


@dataclass(frozen=True)
class MicroKernel(ABC):
    """One register tile: mr rows by panels * packing.nr columns. lhs, rhs: types of the operands as the user has them."""

    mr: int
    panels: int
    packing: Packing
    lhs: DType
    rhs: DType

    isa = ""
    # Whether the tile before is stored in the first step of a tile, and its epilogue done between the steps or their products.
    overlaps = False
    # Whether rows are read where they lie, wherever the places are that a step reads of each: they may overlap.
    reads_windows = False

    @property
    def acc(self) -> DType:
        return f32 if self.lhs.is_float else i32

    @property
    def acc_ty(self) -> Ty:
        return F32 if self.lhs.is_float else I32

    @property
    def nr(self) -> int:
        """Columns of the tile."""
        return self.panels * self.packing.nr

    @property
    def step_k(self) -> int:
        """How many k one step covers; packed operands are padded with zeros to whole steps."""
        return self.packing.kr

    @property
    def step_read(self) -> int:
        """Bytes of a panel that one step reads."""
        return self.packing.nr * self.step_k * self.rhs.bits // 8

    @property
    def panel_step(self) -> int:
        """Bytes from those to what the next step reads."""
        return self.packing.pitch or self.step_read

    @property
    def sums_factor(self) -> int:
        """What multiple of the column sums the accumulators must start with to undo a shift of the lhs; 0: none."""
        return 0

    @property
    def begins(self) -> Start:
        """What the accumulators start with in the first piece of k."""
        return Start.SUMS if self.sums_factor else Start.ZERO

    @property
    def row_cost(self) -> float:
        """Time of one row of a tile, in those of a row of the vector kernel for the same operands."""
        return 1.0

    @property
    def panel_cost(self) -> float:
        """Time of reading the panels of a tile, in the same unit."""
        return 2.0

    @property
    def name(self) -> str:
        """By the grammar gemm_<dst>_<lhs>_<rhs>_<mr>x<nr>x<kr>_<isa>; dst is the type of the accumulator."""
        return f"gemm_{self.acc}_{self.lhs}_{self.rhs}_{self.mr}x{self.nr}x{self.packing.kr}_{self.isa}"

    def resized(self, mr: int, panels: int) -> MicroKernel | None:
        """The same instructions on a tile of that size, with this packing; None where the size is part of the form of the operands."""
        del mr, panels
        return None

    def alone(self, rows: int) -> MicroKernel:
        """The tile for a product of so many rows, which has no other: as low as they are if they are fewer, where it can be."""
        return (self.resized(rows, self.panels) if rows < self.mr else None) or self

    def in_steps(self, size: int) -> MicroKernel | None:
        """The same tile in steps that rows, or pieces of them that lie anywhere (`Tile.ways`), of `size` bytes are a whole number of; None
        where there is none."""
        del size
        return None

    @property
    def copied(self) -> MicroKernel:
        """The same tile for a lhs that is copied first, where that has a better form than rows."""
        return self

    def out_bytes(self, out_pitch: int, row: int, col: int) -> int:
        """Where an accumulator lies in `Tile.out`."""
        block, within = divmod(col, out_pitch)
        return 4 * ((block * self.mr + row) * out_pitch + within)

    @property
    @abstractmethod
    def layout(self) -> Lhs:
        """How the rows are read."""

    def convert(self, fn: Function, value: Val) -> Val:
        """Elements of the lhs (scalar or vector, integers for bf16) as `layout.element` holds them."""
        return value

    @property
    def step_bytes(self) -> int:
        """Bytes of a row of the lhs in one step."""
        return self.layout.step_bytes or self.step_k * self.layout.element.bits // 8

    def pack_step(self, fn: Function, elements: Val, to: Val, powers: Val | None) -> None:
        """Writes a step of a row, `layout.step_bytes` bytes, from its `step_k` elements. powers: those of `Packing.balanced`, if it is."""
        raise AssertionError(f"{self.name} reads rows as elements")

    @abstractmethod
    def start(self, fn: Function, tile: Tile, kind: Start) -> list[Val]:
        """Returns the initial accumulators; a class whose accumulators are not SSA values sets them and returns nothing."""

    @abstractmethod
    def step(self, fn: Function, tile: Tile, index: Val, accumulators: list[Val]) -> list[Val]:
        """Returns the accumulators after step `index`, which has `tile.left` k unless that is 0."""

    @abstractmethod
    def finish(self, fn: Function, tile: Tile, accumulators: list[Val]) -> None:
        """Stores the accumulators into `tile.out`."""

    @property
    def turns(self) -> int:
        """How many products a step of a tile that overlaps is."""
        raise AssertionError(f"{self.name} does not overlap")

    def turn(self, fn: Function, tile: Tile, index: Val, number: int | None) -> None:
        """A product of a step of a tile that overlaps, or all of them."""
        raise AssertionError(f"{self.name} does not overlap")

    def first_turn(self, fn: Function, tile: Tile, kind: Start, before: Val, number: int | None) -> None:
        """The same of `start` and step 0, while the accumulators of the tile before are stored into `before`."""
        raise AssertionError(f"{self.name} does not overlap")

    def stored(self, fn: Function, number: Val) -> Val:
        """How many rows of the tile before are stored after product `number` of step 0."""
        raise AssertionError(f"{self.name} does not overlap")

    def put(self, fn: Function, out: Val, out_pitch: int) -> None:
        """Stores the accumulators of a tile that overlaps."""
        raise AssertionError(f"{self.name} does not overlap")

    @property
    def unpacked_panels(self) -> int:
        """How many panels of the form that `step` reads a stored one becomes, where that is not the stored form."""
        return 1

    def unpacked_bytes(self, k: int) -> int:
        """Size of `k` k of each of them; 0: panels are read as they are stored."""
        del k
        return 0

    def emit_unpack(self, module: Module, target: Target) -> tuple[str, int]:
        """Adds void name(ptr panel, ptr to, i64 apart, i64 steps), which makes that form; returns the name and how many k a step is.

        apart: bytes from one of the panels that it writes to the next.
        """
        raise AssertionError(f"{self.name} reads panels as they are")

    @property
    def mode(self) -> object:
        """Tiles of different ones must be entered by turns; None: those of any."""
        return None

    def enter(self, fn: Function) -> None:
        """What must happen once in a call of a kernel before the first tile, and before the first of another mode; for most nothing."""
        del fn

    def leave(self, fn: Function) -> None:
        """What must happen once after the last tile; for most nothing."""
        del fn


def shares_of(tiles: int) -> int:
    """How many of so many tiles that use the same panels fetch those that follow into L2, a share each: one that fetched all would wait for
    memory. A tile that is alone fetches none."""
    return 0 if tiles == 1 else min(_MOST_SHARES, 1 << tiles.bit_length() - 1)


def share_of(fn: Function, micro: MicroKernel, shares: int, tile: Val, steps: Val, following: Val) -> Val:
    """The way from panels to the share of number `tile` of those that are `following` bytes on; from there on 0, the panels themselves."""
    at = fn.add(following, fn.mul(tile, fn.mul(steps, i64(micro.panel_step // max(1, shares)))))
    return fn.select(fn.icmp("slt", tile, i64(shares)), at, i64(0))


def offset(fn: Function, pointer: Val, bytes_: int) -> Val:
    """pointer + bytes_."""
    return fn.gep(pointer, i64(bytes_)) if bytes_ else pointer
