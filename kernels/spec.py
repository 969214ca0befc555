"""What a matrix product is asked to be, how its right operand is packed, and what the generator gives back."""

from __future__ import annotations

from dataclasses import dataclass

from ..cpu_codegen.contract import KernelCode
from ..cpu_codegen.lines import Lines
from ..diagnostics.errors import InvalidGraph, Unsupported
from ..graph.dims import Dim, bounds, ceildiv, symbol
from ..graph.types import DType, bf16, f16, f32, i4, i8, i32, u8
from ..stitch.loops import Body

BATCH: Dim = symbol("b")
"""The batch index inside `Strides.batch`."""

FIRST_EPILOGUE_BUFFER = 2
"""The operand of a kernel that is the epilogue's first buffer; before it are the lhs and the packed rhs."""

_OPERANDS = ((f32, f32), (bf16, bf16), (f16, f16), (i8, i8), (u8, i8), (f32, i8), (bf16, i8), (f32, i4), (bf16, i4))


@dataclass(frozen=True)
class Strides:
    """Element (b, i, j) of a stack of matrices lies `batch + i * row + j * col` elements from the start of its buffer.

    batch: an expression of `BATCH`, so that a batch made of several dimensions (samples and heads) needs no copy.
    """

    batch: Dim
    row: Dim
    col: Dim = 1


@dataclass(frozen=True)
class Pieces:
    """Rows that begin anywhere and have gaps, such as those that windows over an image make: element (i, t) of the matrix lies
    `row + piece + t % run` elements from the start of its buffer. row and piece: expressions of `BATCH`, which stands for i in the one
    and for t // run in the other. run divides k."""

    row: Dim
    piece: Dim
    run: int


def dense(rows: Dim, cols: Dim) -> Strides:
    """Strides of row-major [batch, rows, cols]."""
    return Strides(BATCH * rows * cols, cols)


@dataclass(frozen=True)
class Choice:
    """How a product is computed where it has been measured; what is empty or 0 is left to the table and to estimates.

    row: the name of a row of the kernel table. tiles: how many tiles of rows share the panels of a block, as far as there is room. pieces:
    of k, where k is known.
    """

    row: str = ""
    tiles: int = 0
    pieces: int = 0

    def __str__(self) -> str:
        parts = (self.row, f"{self.tiles} tiles of rows to a block" if self.tiles else "", f"k in {self.pieces}" if self.pieces else "")
        return ", ".join(filter(None, parts)) or "as estimated"


@dataclass(frozen=True)
class GemmSpec:
    """acc[b, i, j] = sum over t of lhs[b, i, t] * rhs[b, j, t], then the epilogue at every (r, c) = (b * m + i, j).

    lhs [batch, m, k], rhs [batch, n, k] (the layout of a Linear weight): f32 x f32, bf16 x bf16, f16 x f16, i8 x i8 or u8 x i8, and
    f32 or bf16 x constant i8 or i4; Unsupported for others. i4 weights have a scale for each `group` neighbours along k, a multiple of 8
    that divides k: rhs[b, j, t] = integer[j, t] * scale[j, t / group]. The accumulator is i32 for integers, exact for k < 65536, and f32
    for floats. constant_rhs: one [n, k] weight for every b, packed once by the kernel's `pack`; n and k are ints then. Otherwise
    `rhs_strides` says where it lies, and it is packed in each call, or read there. weights: so many constant ones, b / turn % weights for
    b. routed: they take turns along the rows of the one lhs instead, as `graph.build.routed_linear` says; i64 ends[weights] is the buffer
    behind those of the epilogue. lhs_pieces: where a matrix of the lhs lies instead; its place is still that of `lhs_strides.batch`.
    lines, ways: how rows are rows of the result, where not all are, and `Tile.ways` of their steps in bytes (`lines.py`). choice: what
    measuring decided. sums16: `graph.sums16.how_many` of the constant weights, as far as the table wants to know.
    diagonal: (groups, run), where n columns are in so many groups and k take turns of `run`, one for each group: the rhs is 0 where another
    one has its turn. run 0: nothing of that is known. first: of `first_row`, where matrices do not follow one another in the result.
    epilogue: the node `acc` is the accumulator; its buffers follow lhs and packed rhs in the order of operands.
    """

    lhs: DType
    rhs: DType
    m: Dim
    n: Dim
    k: Dim
    lhs_strides: Strides
    epilogue: Body
    batch: Dim = 1
    constant_rhs: bool = True
    rhs_strides: Strides | None = None
    params: tuple[float, ...] = ()
    group: int = 0
    lhs_pieces: Pieces | None = None
    choice: Choice = Choice()
    weights: int = 1
    routed: bool = False
    sums16: int = 1
    lines: Lines | None = None
    ways: tuple[tuple[int, int], ...] = ()
    turn: Dim = 1
    diagonal: tuple[int, int] = (1, 0)
    first: Dim | None = None

    def __post_init__(self) -> None:
        if self.dtypes not in _OPERANDS:
            raise Unsupported(f"no matrix product of {self.lhs} and {self.rhs}", hint="cast both to float32")
        if self.constant_rhs and not (isinstance(self.n, int) and isinstance(self.k, int)):
            raise InvalidGraph(f"a constant weight of {self.n} x {self.k} has no fixed size", "contraction")
        if not self.constant_rhs and self.rhs_strides is None:
            raise InvalidGraph("a dynamic rhs needs strides", "contraction")
        if self.lhs.is_float and not self.rhs.is_float and not self.constant_rhs:
            raise InvalidGraph("integers times floats must be a constant weight", "contraction")
        if self.routed and (not self.constant_rhs or self.batch != 1):
            raise InvalidGraph(f"a routed product of {self.batch} matrices with weights that are no constants", "contraction")
        if self.lhs_pieces is not None and (not isinstance(self.k, int) or self.k % self.lhs_pieces.run):
            raise InvalidGraph(f"rows of {self.k} k in pieces of {self.lhs_pieces.run}", "contraction")
        if (self.rhs == i4) != bool(self.group) or (self.group and (self.group % 8 or not isinstance(self.k, int) or self.k % self.group)):
            raise InvalidGraph(f"{self.rhs} weights of {self.k} k in groups of {self.group}", "contraction")

    @property
    def rows(self) -> Dim:
        """How many rows meet one weight: any number of them in a routed product."""
        return symbol("rows", 0, bounds(self.m)[1]) if self.routed else self.m

    @property
    def first_row(self) -> Dim:
        """The number of the first row of a matrix, an expression of `BATCH`."""
        if self.first is not None:
            return self.first
        return BATCH * (self.m if self.lines is None else ceildiv(self.m, self.lines.length) * self.lines.length)

    @property
    def ends(self) -> int:
        """The number of the buffer that says where the weights of a routed product take turns."""
        return FIRST_EPILOGUE_BUFFER + len(self.epilogue.buffers)

    @property
    def acc(self) -> DType:
        """Type of the accumulator."""
        return f32 if self.lhs.is_float else i32

    @property
    def dtypes(self) -> tuple[DType, DType]:
        return self.lhs, self.rhs


@dataclass(frozen=True)
class Packing:
    """[ceil(n / nr)][k_padded / kr][nr][kr]: panels of nr columns, in each of them groups of kr neighbours along k. Zero-padded.

    pad: k is padded to a multiple of it (a multiple of kr). sums: packed i8 ends with the sums of all columns, i32 [ceil(n / nr) * nr].
    group: in a panel, before each `group` neighbours along k stand their scales, f32 [nr]; 0: there are none. pitch: panels are columns
    of a matrix [k][n] whose rows are so many bytes apart, where they are not packed; 0: they are. balanced: it ends with a power of two for
    each k, f32 [k_padded], that rows are to be multiplied by.
    """

    nr: int
    kr: int
    pad: int
    sums: bool = True
    group: int = 0
    pitch: int = 0
    balanced: bool = False

    def panels(self, n: Dim) -> Dim:
        return ceildiv(n, self.nr)

    def k_padded(self, k: Dim) -> Dim:
        return ceildiv(k, self.pad) * self.pad

    @property
    def unit_k(self) -> int:
        """The fewest k that lie together and repeat."""
        return self.group or self.kr

    def unit_bytes(self, dtype: DType) -> int:
        """Bytes from `unit_k` k of a panel, their scales included, to the next ones."""
        if self.pitch:
            return self.pitch
        return self.nr * self.unit_k * dtype.bits // 8 + (4 * self.nr if self.group else 0)

    def panel_bytes(self, k: Dim, dtype: DType) -> Dim:
        """From panel to panel."""
        if self.pitch:
            return self.nr * dtype.bytes
        return ceildiv(self.k_padded(k), self.unit_k) * self.unit_bytes(dtype)

    def sums_offset(self, n: Dim, k: Dim, dtype: DType) -> Dim:
        """Where the column sums begin, in bytes."""
        return self.panels(n) * self.panel_bytes(k, dtype)

    def bytes(self, n: Dim, k: Dim, dtype: DType) -> Dim:
        """Size of one packed [n, k] matrix, a multiple of 64."""
        sums = self.panels(n) * (self.nr * 4) if dtype == i8 and self.sums else 0
        powers = self.k_padded(k) * 4 if self.balanced else 0
        return ceildiv(self.sums_offset(n, k, dtype) + sums + powers, 64) * 64


@dataclass(frozen=True)
class GemmCode:
    """The generated functions of one product.

    rows: its domain cuts the rows of the result. columns: the same product, its domain cuts the column panels; for few rows and many
    threads. Operands of both: lhs, packed rhs, then the buffers of the epilogue.
    pack: makes the packed rhs of a dynamic rhs (operands: rhs, packed), None for constants and where a dynamic one is taken as it lies.
    packed_bytes: size of the packed operand; 0 in the latter case.
    packing: None when the kernel reads the plain row-major [n, k] weight. workspace_bytes: size of one more operand, after all others,
    whose content means nothing between calls; 0: there is none.
    """

    rows: KernelCode
    columns: KernelCode | None
    packing: Packing | None
    pack: KernelCode | None
    packed_bytes: Dim
    workspace_bytes: Dim = 0
