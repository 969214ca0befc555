"""Integers that are counted from positions, as expressions of these: what arange and plain arithmetic make, without looking at data."""

from __future__ import annotations

from collections.abc import Callable

from ..graph import attrs as A
from ..graph.dims import Dim, bounds, floordiv, maximum, minimum, mod, non_negative
from ..graph.ir import Value
from ..graph.positions import fit
from .views import VIEWS, Index, broadcast_index, through

_MOST = 32  # operations: of longer chains nothing is expected
_Known = dict[tuple[Value, Index], Dim | None]


def counted(value: Value, index: Index) -> Dim | None:
    """What an element of a value is; None where it is not only counted."""
    return _counted(value, index, {})


def _counted(value: Value, index: Index, known: _Known) -> Dim | None:
    while value.op in VIEWS:
        value, index = through(value, index)
    key = (value, index)
    if key not in known:
        known[key] = None
        if len(known) <= _MOST and value.dtype.kind == "int" and value.dtype.bits >= 32:
            found = _computed(value, index, known)
            known[key] = found if found is not None and fit(value.dtype, *bounds(found)) else None
    return known[key]


def _computed(value: Value, index: Index, known: _Known) -> Dim | None:
    a = value.attrs
    if isinstance(a, A.IotaAttrs):
        return None if isinstance(a.start, float) or isinstance(a.step, float) else a.start + index[0] * a.step
    if isinstance(a, A.FullAttrs):
        return int(a.value)
    if value.op not in _OPERATIONS:
        return None
    operands = [_counted(v, broadcast_index(index, v.shape), known) for v in value.inputs]
    if None in operands:
        return None
    return _OPERATIONS[value.op](*operands)


def _product(x: Dim, y: Dim) -> Dim | None:
    return x * y if isinstance(x, int) or isinstance(y, int) else None


def _quotient(x: Dim, y: Dim) -> Dim | None:
    return floordiv(x, y) if isinstance(y, int) and y > 0 and non_negative(x) else None


def _remainder(x: Dim, y: Dim) -> Dim | None:
    return mod(x, y) if isinstance(y, int) and y > 0 and non_negative(x) else None


_OPERATIONS: dict[str, Callable[..., Dim | None]] = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": _product, "neg": lambda x: -x, "abs": lambda x: maximum(x, -x),
    "minimum": minimum, "maximum": maximum, "floordiv": _quotient, "truncdiv": _quotient, "remainder": _remainder, "fmod": _remainder,
    "cast": lambda x: x, "copy": lambda x: x,
}
