"""Slots and index expressions of the generated products."""

from __future__ import annotations

from collections.abc import Iterable

from ..cpu_codegen.builder import PTR, VOID, Function, Module, Val, i64
from ..cpu_codegen.contract import BufferSlot, DimSlot, Slot
from ..cpu_codegen.slots import Slots
from ..graph.dims import Dim, Func, Poly, coefficient, symbols
from .spec import BATCH


def request(slots: Slots, order: Iterable[Slot]) -> None:
    """Asks for all slots of `order`, so that they get these numbers."""
    for slot in order:
        if isinstance(slot, BufferSlot):
            slots.buffer(slot.index)
        elif isinstance(slot, DimSlot):
            slots.dim(slot.dim)
        else:
            slots.number(0, 0)


def wanted_slots(dims: Iterable[Dim], *offsets: Dim) -> tuple[Slot, ...]:
    """The slots for these numbers and for what `batch_offset` of these expressions needs."""
    fn = Function(Module(), "unused", VOID, [PTR])
    slots = Slots(fn)
    for dim in dims:
        slots.dim(dim)
    for offset in offsets:
        batch_offset(fn, slots, offset, i64(1))
    return slots.order


def batch_offset(fn: Function, slots: Slots, expression: Dim, b: Val) -> Val:
    """The value of an expression of `BATCH`, whose index is b; everything in it is non-negative."""
    if not _has_batch(expression):
        return slots.dim(expression)
    if expression == BATCH:
        return b
    split = coefficient(expression, "b")
    if split is not None and not _has_batch(split[0]):
        return fn.add(fn.mul(b, slots.dim(split[0])), batch_offset(fn, slots, split[1], b))
    assert isinstance(expression, Poly)
    total: Val = i64(0)
    for atoms, factor in expression.terms:
        term: Val = i64(factor)
        for atom in atoms:
            one = Poly((((atom,), 1),))
            if isinstance(atom, Func) and _has_batch(one):
                x, y = (batch_offset(fn, slots, arg, b) for arg in atom.args)
                operation = {"floordiv": fn.udiv, "mod": fn.urem, "min": fn.smin, "max": fn.smax}[atom.kind]
                term = fn.mul(term, operation(x, y))
            else:
                term = fn.mul(term, b if one == BATCH else slots.dim(one))
        total = fn.add(total, term)
    return total


def _has_batch(expression: Dim) -> bool:
    return any(symbol.name == "b" for symbol in symbols(expression))
