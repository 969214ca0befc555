"""Index functions: where an element of a view comes from. Views never move data; they change the index that reaches a buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from ..graph import attrs as A
from ..graph.dims import Dim, Func, Poly, Shape, Symbol, bounds, coefficient, floordiv, mod, rejoin, symbol, symbols
from ..graph.ir import Value
from ..graph.shapes import reshape_groups
from ..graph.types import TensorType

Index = tuple[Dim, ...]
_FAR, _DEEP = 1 << 40, 2  # magnitude of what is divided, and where that is not known, divisions within one another


def linearize(index: Sequence[Dim], shape: Shape) -> Dim:
    """Row-major position of `index`."""
    position: Dim = 0
    for i, extent in zip(index, shape, strict=True):
        position = position * extent + i
    return rejoin(position)


def delinearize(position: Dim, shape: Shape) -> Index:
    """The index whose row-major position this is."""
    result: list[Dim] = []
    for axis in range(len(shape) - 1, -1, -1):
        if axis == 0:
            result.append(position)
        else:
            result.append(mod(position, shape[axis]))
            position = floordiv(position, shape[axis])
    return tuple(reversed(result))


@lru_cache(maxsize=1 << 12)
def reshape_index(index: Index, shape: Shape, source: Shape) -> Index:
    """Index into `source` of the element at `index` of its reshape to `shape`.

    Axes are converted in the smallest groups of equal products, so that dims that a reshape leaves alone stay as they are.
    """
    result: list[Dim] = []
    for left, right in reshape_groups(shape, source):
        position = linearize(index[left.start : left.stop], shape[left.start : left.stop])
        result.extend(delinearize(position, source[right.start : right.stop]))
    return tuple(result)


def divides_by_sizes(value: Dim, axis: Symbol) -> bool:
    """Whether an index expression divides positions along an axis by sizes that are not known, which takes longer than most operations."""
    along = [f for f in _functions(value) if axis in symbols(f.args[0])]
    return any((f.kind in ("floordiv", "mod") and isinstance(f.args[1], Poly)) or divides_by_sizes(f.args[0], axis) for f in along)


def parts(axis: Dim, extent: Dim, index: Index) -> list[Dim]:
    """The extents of what index expressions make of an axis: (8, 32) of 256 where they hold floordiv(axis, 32) and mod(axis, 32)."""
    result = [extent]
    for step in sorted({step for position in index for step in _steps(position, axis)}, reverse=True):
        if isinstance(result[-1], int) and 1 < step < result[-1] and result[-1] % step == 0:
            result[-1:] = [result[-1] // step, step]
    return result


def _steps(value: Dim, axis: Dim) -> Iterator[int]:
    """The numbers by which positions along an axis are divided in an expression; divisions of quotients count together."""
    for f in _functions(value):
        yield from _steps(f.args[0], axis)
        if f.kind in ("floordiv", "mod") and isinstance(f.args[1], int):
            yield _unit(f.args[0], axis) * f.args[1]


def _unit(value: Dim, axis: Dim) -> int:
    """How many positions along an axis are one for an expression; 0: it is no part of that axis alone."""
    if value == axis:
        return 1
    f = next(iter(_functions(value)), None)
    if f is None or value != Poly((((f,), 1),)) or f.kind not in ("floordiv", "mod") or not isinstance(f.args[1], int):
        return 0
    return _unit(f.args[0], axis) * (f.args[1] if f.kind == "floordiv" else 1)


def _functions(value: Dim) -> list[Func]:
    return [atom for mono, _ in value.terms for atom in mono if isinstance(atom, Func)] if isinstance(value, Poly) else []


def is_divided(position: Dim) -> bool:
    """Whether a position is computed with quotients or remainders of what changes from point to point."""
    return bool(_moving(position))


def through(view: Value, index: Index) -> tuple[Value, Index]:
    """(operand, index) that hold the element `index` of a view."""
    source = view.inputs[0]
    attrs = view.attrs
    if isinstance(attrs, A.PermuteAttrs):
        back: list[Dim] = [0] * len(index)
        for position, axis in enumerate(attrs.order):
            back[axis] = index[position]
        return source, tuple(back)
    if isinstance(attrs, A.SliceAttrs):
        moved = attrs.start + index[attrs.axis] * attrs.step
        return source, index[: attrs.axis] + (moved,) + index[attrs.axis + 1 :]
    if isinstance(attrs, A.WindowAttrs):
        axis = attrs.axis
        moved = index[axis] * attrs.step + index[axis + 1] * attrs.dilation
        return source, index[:axis] + (moved,) + index[axis + 2 :]
    if view.op == "expand":
        return source, broadcast_index(index, source.shape)
    return source, reshape_index(index, view.shape, source.shape)


def broadcast_index(index: Index, shape: Shape) -> Index:
    """Index into an operand of `shape` that is broadcast (right-aligned) to the rank of `index`."""
    own = index[len(index) - len(shape) :]
    return tuple(0 if extent == 1 else i for i, extent in zip(own, shape, strict=True))


VIEWS = ("reshape", "permute", "expand", "slice", "window")


def strip(value: Value, index: Index, stop: set[Value]) -> tuple[Value, Index]:
    """Follow views until something that is no view or is in `stop`, or until the index is `entangled`."""
    while value.op in VIEWS and value not in stop and not any(map(entangled, index)):
        value, index = through(value, index)
    return value, index


ROW = 16  # elements: a vector of f32 at its widest


def takes_turns(position: Dim, axis: str) -> bool:
    """Whether places along an axis are in runs that vectors do not fit: an element stays for some steps of the axis, whose number neither
    divides the lanes of a vector nor is a multiple of them."""
    for f in _functions(position):
        run = f.args[1]
        moves = any(s.name == axis for s in symbols(f.args[0]))
        if f.kind == "floordiv" and moves and isinstance(run, int) and ROW % run != 0 and run % ROW != 0:
            return True
    return False


@lru_cache(maxsize=1 << 12)
def entangled(position: Dim) -> bool:
    """Whether an index expression has grown, by divisions of what was divided, beyond what code can follow: generated code takes numbers
    for small against 2^52, and each such division may multiply them by the size of the tensor (x % n is n x // n less than x). Sizes that
    are divided do not count: they are numbers of a call, whatever the loops."""
    for f in _moving(position):
        low, high = bounds(f.args[0])
        far = _depth(position) > _DEEP if low is None or high is None else max(-low, high) > _FAR
        if far or any(map(entangled, f.args)):
            return True
    return False


def _depth(value: Dim) -> int:
    return max((1 + max(map(_depth, f.args)) for f in _moving(value)), default=0)


def _moving(value: Dim) -> list[Func]:
    """The functions that may change from point to point: those of more than sizes, which are at least 1, where axes begin at 0."""
    return [f for f in _functions(value) if any(s.lo < 1 for arg in f.args for s in symbols(arg))]


@lru_cache(maxsize=1 << 12)
def offset(ty: TensorType, index: Index) -> Dim:
    """Element position of `index` in the dense buffer of a value of type `ty`."""
    position = ty.start
    for i, step in zip(index, ty.strides, strict=True):
        position = position + i * step
    return rejoin(position)


def affine(position: Dim, shape: Shape, names: Sequence[str]) -> tuple[Dim, Index] | None:
    """(base, strides) when `position` is base + sum of stride * axis over the named axes; None when it is not affine."""
    slopes: list[Dim] = []
    for name, extent in zip(names, shape, strict=True):
        if extent == 1:
            slopes.append(0)
            continue
        parts = coefficient(position, name)
        if parts is None or {s.name for s in symbols(parts[0])} & set(names):
            return None
        slopes.append(parts[0])
        position = parts[1]
    return position, tuple(slopes)


def unmerged(operand: Value) -> Value:
    """The left operand of a product before a reshape that only merges its last axes: windows are strided there."""
    source = operand.inputs[0] if operand.op == "reshape" else operand
    rows = operand.shape[:-1]
    return source if source.shape[: len(rows)] == rows and source.tensor.rank > len(rows) else operand


def in_pieces(operand: Value, stop: set[Value]) -> tuple[Value, Dim, Index] | None:
    """As `strided`, of the unmerged left operand of a product, when the elements of its last axis lie side by side, and it is known how
    many of them do."""
    source = unmerged(operand)
    if not all(isinstance(extent, int) for extent in source.shape[operand.tensor.rank - 1 :]):
        return None
    found = strided(source, stop)
    return found if found is not None and found[2][-1] == 1 else None


def axes(shape: Shape, prefix: str) -> tuple[Index, tuple[str, ...]]:
    """One axis symbol for each dimension (0 where the extent is 1), and their names."""
    names = tuple(f"{prefix}{n}" for n in range(len(shape)))
    return tuple(0 if extent == 1 else symbol(name, 0, None, extent) for name, extent in zip(names, shape)), names


def strided(value: Value, stop: set[Value]) -> tuple[Value, Dim, Index] | None:
    """(buffer value, base offset, strides of `value`'s axes) when `value` is an affine view of a materialized value."""
    index, names = axes(value.shape, "x")
    root, at = strip(value, index, stop)
    if root not in stop:
        return None
    found = affine(offset(root.tensor, at), value.shape, names)
    return None if found is None else (root, *found)
