"""From graph values to loop IR: evaluate a value at an index, inlining everything that has no buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from ..graph import attrs as A
from ..graph.dims import Dim, less, non_negative, product, symbols
from ..graph.ir import Value
from ..graph.ops import OPS
from ..graph.ranges import lies_within
from ..graph.types import DType, boolean, f32, i64
from ..graph.updates import IN_PLACE, around, inside, under
from .costs import are_scattered, below_windows, is_expensive, is_shuffled, reads, rows_stored_apart
from .counted import counted
from .elementwise import elementwise, full, iota
from .loops import BodyBuilder, Node
from .repeats import Repeats
from .steps import by_pieces
from .views import VIEWS, Index, axes, broadcast_index, entangled, offset, strip, takes_turns, through

_TOGETHER = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}  # how a `put` of a kind makes one of two elements
_DEEPEST = 100  # values computed one from another in one kernel; each takes up to four frames of Python's stack, which has some 1000


class NeedsBuffer(Exception):
    """A value cannot be inlined where it is wanted; with a buffer of its own it can be read."""

    def __init__(self, value: Value, why: str) -> None:
        super().__init__(f"{value}: {why}")
        self.value, self.why = value, why


@dataclass
class Lowering:
    """Evaluates values of one kernel.

    stored: values that have buffers. home: values that this very kernel computes, with the index at which it does. accumulators: anchors
    whose accumulator is at hand, likewise. reduce_axes: names and extents of the axes that reductions run over, `reduce_kind` c or k.
    reductions: how many results one has here, for each row (c), or for each row and column (k). loops: names of the axes, the outermost
    first, where they are known. read: how many elements are looked up in each table. concats: how many concatenations are around what is
    evaluated.
    """

    stored: set[Value]
    home: dict[Value, Index] = field(default_factory=dict)
    accumulators: dict[Value, Index] = field(default_factory=dict)
    acc_dtype: DType = f32
    reduce_axes: tuple[tuple[str, Dim], ...] = ()
    reduce_kind: str = "c"
    reductions: Dim = 1
    loops: tuple[str, ...] = ()
    builder: BodyBuilder = field(default_factory=BodyBuilder)
    operands: dict[Value, int] = field(default_factory=dict)
    inlined: dict[Value, None] = field(default_factory=dict)
    read: dict[Value, Dim] = field(default_factory=dict)
    concats: int = 0
    _memo: dict[tuple[Value, Index, int], int] = field(default_factory=dict)
    _depth: int = 0

    def __post_init__(self) -> None:
        self.repeats = Repeats(self.builder, frozenset([name for name, _ in self.reduce_axes]))

    def value(self, value: Value, index: Index, guard: int = -1) -> int:
        """Position of the node that is `value` at `index`, where `guard` is true. Raises NeedsBuffer."""
        key = (value, index, guard)
        node = self._memo.get(key)
        if node is None:
            self._depth += 1
            node = self._memo[key] = self._evaluate(value, index, guard)
            self._depth -= 1
        return node

    def buffer(self, value: Value) -> int:
        """Number of the buffer that holds a stored value."""
        if value not in self.operands:
            self.operands[value] = self.builder.buffer(value.dtype)
        return self.operands[value]

    def store(self, value: Value, index: Index) -> None:
        """Computes and stores what the kernel computes for a root: of a `put`, the new elements; `by_pieces`, all pieces."""
        if value.op == "put":
            self._put(value, index)
            return
        if by_pieces(value):
            self._pieces(value, index)
            return
        if isinstance(value.attrs, A.PadAttrs) and value.op == "border":
            self.inlined[value] = None
            node, index = self.builder.const(value.attrs.value, value.dtype), around(value, index)
        else:
            node = self.value(value, index)
        self.builder.store(self.buffer(value), offset(value.tensor, index), node)

    def _put(self, value: Value, index: Index) -> None:
        """Stores the element of the part at `index` where its positions say; nothing where they are out of range."""
        assert isinstance(value.attrs, A.PutAttrs)
        at, guard, b = list(index), -1, self.builder
        for axis, position in zip(value.attrs.axes, value.inputs[2:], strict=True):
            size = value.shape[axis]
            own = broadcast_index(index, position.shape)
            if inside(position, size):
                at[axis] = self._counted(position, own)
                continue
            if value.attrs.kind and self._varies_with_columns(own):
                late = next((v for v in value.inputs[1:] if v not in self.stored), position)
                raise NeedsBuffer(late, "elements that are put together side by side might meet")
            if value.attrs.kind and position not in self.stored and is_expensive(position, self.stored):
                raise NeedsBuffer(position, "it would be computed row by row, where there are no vectors")
            node = b.cast(self.value(position, own), i64)
            at[axis], ok = b.node_index(node), _within(b, node, size)
            b.add(Node("check", boolean, (ok,)))
            guard = ok if guard < 0 else b.op("and", boolean, guard, ok)
        part, buffer, place = self.value(value.inputs[1], index), self.buffer(value), offset(value.tensor, tuple(at))
        if value.attrs.kind:
            other = b.const(0, value.dtype) if guard >= 0 else -1
            part = b.op(_TOGETHER[value.attrs.kind], value.dtype, b.load(buffer, place, guard, other), part)
        b.store(buffer, place, part, guard)

    def _varies_with_columns(self, index: Index) -> bool:
        """Whether an index moves along the axes that are reduced, which are a row's columns."""
        reduced = {name for name, _ in self.reduce_axes}
        return any(s.name in reduced for i in index for s in symbols(i))

    def _pieces(self, value: Value, index: Index) -> None:
        assert isinstance(value.attrs, A.AxisAttrs)
        axis = value.attrs.axis
        self.inlined[value] = None
        start: Dim = 0
        for piece in value.inputs:
            at = index[:axis] + (index[axis] + start,) + index[axis + 1 :]
            self.builder.store(self.buffer(value), offset(value.tensor, at), self.value(piece, index))
            start = start + piece.shape[axis]

    def _counted(self, position: Value, index: Index) -> Dim:
        while position.op != "iota":
            position, index = through(position, index) if position.op in VIEWS else (position.inputs[0], index)
        assert isinstance(position.attrs, A.IotaAttrs) and not isinstance(position.attrs.start, float)
        assert isinstance(position.attrs.step, int)
        return position.attrs.start + index[0] * position.attrs.step

    def _evaluate(self, value: Value, index: Index, guard: int) -> int:
        if value in self.accumulators:
            if index != self.accumulators[value]:
                raise NeedsBuffer(value, "its accumulator is wanted at another index")
            return self.builder.op("acc", self.acc_dtype)
        if value in self.stored and (value.op in IN_PLACE or by_pieces(value) or self.home.get(value) != index):
            if value in self.home:
                raise NeedsBuffer(value, "computed by this kernel at another index")
            return self._load(value, index, guard)
        if self._depth > _DEEPEST and OPS[value.op].group != "leaf":
            raise NeedsBuffer(value, "so long a chain is several kernels")
        if value.op in VIEWS:
            source = below_windows(value, self.stored)
            if source is not None:
                raise NeedsBuffer(source, "windows over it overlap, or lie apart")
            rows = rows_stored_apart(value, self.stored) if value in self.home else None
            if rows is not None:
                raise NeedsBuffer(rows, "its rows are looked up, and would be stored element by element")
            inner, at = through(value, index)
            if any(map(entangled, at)):
                base = under(value)
                if base in self.stored and base not in self.home and base.tensor.order is None and not base.tensor.room:
                    return self._load(base, index, guard, value)
                wanted = base if value in self.home and base not in self.stored else value  # what this kernel is for, as a whole
                raise NeedsBuffer(wanted, "its elements lie too far out of order to be found in place")
            if self._repeated(index) and self._is_put_together(inner, at):
                raise NeedsBuffer(value, "its elements would be put together again in every turn of a loop around them")
            if self.concats and is_shuffled(value, self.stored):
                raise NeedsBuffer(value, "its parts, in turns, would be looked for within parts")
            return self.value(inner, at, guard)
        group = OPS[value.op].group
        if group == "elementwise" and self._repeated(index) and is_expensive(value, self.stored) and reads(value, self.stored):
            raise NeedsBuffer(value, "it would be computed again in every turn of a loop around its own")
        self.inlined[value] = None
        start = len(self.builder.nodes)
        node = self._computed(value, index, guard)
        # Whether a place is beyond the edge is asked of a row, at the edges alone where windows are written out.
        if value.op != "pad" and self.repeats.add(value, index, start):
            raise NeedsBuffer(value, "it would be computed at several places for each point")
        return node

    def _computed(self, value: Value, index: Index, guard: int) -> int:
        group = OPS[value.op].group
        if group == "elementwise":
            args = [self.value(v, broadcast_index(index, v.shape), guard) for v in value.inputs]
            return elementwise(self.builder, value, args)
        if group == "reduce":
            return self._scan(value, index, guard) if value.op == "scan" else self._reduce(value, index, guard)
        row = _ROWS.get(value.op)
        if row is None:
            raise NeedsBuffer(value, f"{value.op} has a kernel of its own")
        return row(self, value, index, guard)

    def _is_put_together(self, value: Value, index: Index) -> bool:
        """Whether elements of what is stored do not lie as vectors read them."""
        return any(takes_turns(i, self.loops[-1]) for i in index) and strip(value, index, self.stored)[0] in self.stored

    def _repeated(self, index: Index) -> bool:
        """Whether a loop that the index does not depend on is around one that it does; what depends on no inner loop is hoisted."""
        used = {s.name for i in index for s in symbols(i)}
        around = [name in used for name in self.loops]
        return True in around and False in around[: len(around) - around[::-1].index(True)]

    def _load(self, value: Value, index: Index, guard: int, seen: Value | None = None) -> int:
        """An element of a buffer, at an index of `value`, or of what its memory is seen as."""
        seen = seen or value
        if guard >= 0 and all(map(_is_inside, index, seen.shape)):
            guard = -1  # what is there in any case is read without a mask
        other = self.builder.const(0, value.dtype) if guard >= 0 else -1
        return self.builder.load(self.buffer(value), offset(seen.tensor, index), guard, other)

    def _reduce(self, value: Value, index: Index, guard: int) -> int:
        assert isinstance(value.attrs, A.ReduceAttrs)
        source = value.inputs[0]
        wanted = tuple(source.shape[a] for a in value.attrs.axes)
        if wanted != tuple(extent for _, extent in self.reduce_axes):
            raise NeedsBuffer(value, "reduces over other extents than this kernel")
        if product(value.shape) != self.reductions:
            raise NeedsBuffer(value, "it would be computed again for every element that it is broadcast to")
        if guard >= 0:
            raise NeedsBuffer(value, "reduction under a guard")
        names = {name for name, _ in self.reduce_axes}
        if any(s.name in names for i in index for s in symbols(i)):
            raise NeedsBuffer(value, "its result is wanted along the reduced axis")
        inner = dict(zip(value.attrs.axes, axes(wanted, "q")[0]))
        kept = iter(index) if not value.attrs.keepdim else iter([i for a, i in enumerate(index) if a not in inner])
        full = tuple(inner[a] if a in inner else next(kept) for a in range(source.tensor.rank))
        arg = self.value(source, full, guard)
        kind = value.attrs.kind
        return self.builder.add(Node("reduce", value.dtype, (arg,), kind=kind, axis=self.reduce_kind))

    def _scan(self, value: Value, index: Index, guard: int) -> int:
        """The columns are the scanned axis, from the first to the last, in every row."""
        assert isinstance(value.attrs, A.ScanAttrs)
        columns = axes(value.shape[-1:], "q")[0]
        inner = any(s in symbols(i) for i in index[:-1] for c in columns for s in symbols(c))
        if self.reduce_kind != "c" or value.shape[-1:] != tuple(extent for _, extent in self.reduce_axes) or index[-1:] != columns or inner:
            raise NeedsBuffer(value, "its axis is not the columns of this kernel")
        if guard >= 0 or product(value.shape[:-1]) != self.reductions:
            raise NeedsBuffer(value, "not every row of it is computed once")
        arg = self.value(value.inputs[0], index, guard)
        return self.builder.add(Node("scan", value.dtype, (arg,), kind=value.attrs.kind, axis="c"))


@lru_cache(maxsize=1 << 12)
def _is_inside(position: Dim, extent: Dim) -> bool:
    """Whether a position lies in [0, extent). Of a size that a call gives, the first and the last element may be missing, unless a loop
    runs over it."""
    known = isinstance(extent, int) or any(s.extent is not None for s in symbols(position))
    return known and non_negative(position) and less(position, extent)


def _inside(low: Lowering, position: Dim, extent: Dim, guard: int) -> int:
    """bool node: 0 <= position < extent, and the guard so far."""
    b = low.builder
    ok = _within(b, b.add(Node("index", i64, index=position)), extent)
    return ok if guard < 0 else b.op("and", boolean, guard, ok)


def _pad(low: Lowering, value: Value, index: Index, guard: int) -> int:
    assert isinstance(value.attrs, A.PadAttrs)
    source = value.inputs[0]
    moved = []
    for i, (before, after), extent in zip(index, value.attrs.amounts, source.shape):
        moved.append(i - before)
        if before != 0 or after != 0:
            guard = _inside(low, i - before, extent, guard)
    inside = low.value(source, tuple(moved), guard)
    return inside if guard < 0 else low.builder.op("where", value.dtype, guard, inside, low.builder.const(value.attrs.value, value.dtype))


def _concat(low: Lowering, value: Value, index: Index, guard: int) -> int:
    if by_pieces(value):
        raise NeedsBuffer(value, "its pieces are computed together")
    assert isinstance(value.attrs, A.AxisAttrs)
    axis, result = value.attrs.axis, -1
    start: Dim = 0
    for piece in value.inputs:
        first, position = len(low.builder.nodes), index[axis] - start
        here = _inside(low, position, piece.shape[axis], guard)
        low.concats += 1
        node = low.value(piece, index[:axis] + (position,) + index[axis + 1 :], here)
        low.concats -= 1
        result = node if result < 0 else low.builder.op("where", value.dtype, here, node, result)
        low.repeats.share(first, piece.shape[axis], value.shape[axis])
        start = start + piece.shape[axis]
    return result


def _within(b: BodyBuilder, position: int, extent: Dim) -> int:
    """bool node: 0 <= position < extent."""
    end = b.add(Node("index", i64, index=extent))
    return b.op("and", boolean, b.op("ge", boolean, position, b.const(0, i64)), b.op("lt", boolean, position, end))


def _checked(low: Lowering, indices: Value, index: Index, extent: Dim, guard: int) -> Dim:
    """An index read from memory: reported when out of range, clamped so that the read stays inside, unless it is there in any case."""
    b = low.builder
    wide, zero = b.cast(low.value(indices, index, guard), i64), b.const(0, i64)
    if isinstance(extent, int) and guard < 0 and lies_within(indices, 0, extent - 1):
        return b.node_index(wide)
    ok = _within(b, wide, extent)
    if guard >= 0:
        ok = b.op("or", boolean, ok, b.op("logical_not", boolean, guard))
    b.add(Node("check", boolean, (ok,)))
    last = b.add(Node("index", i64, index=extent - 1))
    return b.node_index(b.op("maximum", i64, b.op("minimum", i64, wide, last), zero))


def _take(low: Lowering, value: Value, index: Index, guard: int) -> int:
    assert isinstance(value.attrs, A.AxisAttrs)
    table, indices = value.inputs
    axis, rank = value.attrs.axis, indices.tensor.rank
    at = counted(indices, index[axis : axis + rank])
    if at is None or not (non_negative(at) and less(at, table.shape[axis])):
        at = _checked(low, indices, index[axis : axis + rank], table.shape[axis], guard)
    return low.value(table, index[:axis] + (at,) + index[axis + rank :], guard)


def _gather(low: Lowering, value: Value, index: Index, guard: int) -> int:
    assert isinstance(value.attrs, A.AxisAttrs)
    table, indices = value.inputs
    at = _checked(low, indices, index, table.shape[value.attrs.axis], guard)
    axis = value.attrs.axis
    low.read[table] = low.read.get(table, 0) + product(value.shape)
    if are_scattered(table, low.read[table], low.stored):
        raise NeedsBuffer(table, "its rows, of which many are read, lie apart")
    return low.value(table, index[:axis] + (at,) + index[axis + 1 :], guard)


_ROWS: dict[str, Callable[[Lowering, Value, Index, int], int]] = {
    "copy": lambda low, value, index, guard: low.value(value.inputs[0], index, guard),
    "full": lambda low, value, index, guard: full(low.builder, value),
    "iota": lambda low, value, index, guard: iota(low.builder, value, index),
    "pad": _pad,
    "concat": _concat,
    "take": _take,
    "gather": _gather,
}
