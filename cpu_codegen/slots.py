"""Reading a kernel's slots: every buffer, dimension and number is loaded once, in the entry block, when first asked for."""

from __future__ import annotations

from ..graph.dims import Dim
from .builder import F32, I64, PTR, Function, Ty, Val, i64
from .contract import BufferSlot, DimSlot, ParamSlot, Slot


class Slots:
    """Allocates the slots of one kernel function and gives their values. pointer: an argument of it, to the slots; the first one when not
    given."""

    def __init__(self, fn: Function, params: tuple[float, ...] = (), pointer: Val | None = None) -> None:
        self._fn = fn
        self._pointer = fn.args[0] if pointer is None else pointer
        self._params = params
        self._order: list[Slot] = []
        self._loaded: dict[tuple[Slot, int], Val] = {}
        self._tables: dict[tuple[int, int], Val] = {}

    def _read(self, slot: Slot, ty: Ty) -> Val:
        value = self._loaded.get((slot, 0))
        if value is None:
            self._order.append(slot)
            address = self._fn.at_entry(PTR, f"getelementptr i64, ptr {self._pointer.ref}, i64 {len(self._order)}")
            value = self._loaded[slot, 0] = self._fn.at_entry(ty, f"load {ty}, ptr {address.ref}, align 8")
        return value

    def buffer(self, index: int) -> Val:
        """Pointer to operand `index`."""
        return self._read(BufferSlot(index), PTR)

    def dim(self, dim: Dim) -> Val:
        """The i64 value of an expression over dimension symbols; plain ints are immediate."""
        return i64(dim) if isinstance(dim, int) else self._read(DimSlot(dim), I64)

    def number(self, index: int, lanes: int) -> Val:
        """Parameter `index` as f32, in every lane."""
        slot = ParamSlot(self._params)
        key = (slot, 1 + index * 1024 + lanes)
        if key not in self._loaded:
            base = self._read(slot, PTR)
            fn = self._fn
            address = fn.at_entry(PTR, f"getelementptr float, ptr {base.ref}, i64 {index}")
            scalar = fn.at_entry(F32, f"load float, ptr {address.ref}, align 4")
            if lanes:
                ty = F32.vec(lanes)
                first = fn.at_entry(ty, f"insertelement {ty} poison, float {scalar.ref}, i64 0")
                scalar = fn.at_entry(ty, f"shufflevector {ty} {first.ref}, {ty} {first.ref}, <{lanes} x i32> zeroinitializer")
            self._loaded[key] = scalar
        return self._loaded[key]

    def table(self, index: int, count: int, lanes: int) -> list[Val]:
        """`count` parameters from `index` on, in vectors of `lanes`."""
        fn, ty = self._fn, F32.vec(lanes)
        base = self._read(ParamSlot(self._params), PTR)
        parts = []
        for at in range(index, index + count, lanes):
            if (at, lanes) not in self._tables:
                address = fn.at_entry(PTR, f"getelementptr float, ptr {base.ref}, i64 {at}")
                self._tables[at, lanes] = fn.at_entry(ty, f"load {ty}, ptr {address.ref}, align 4")
            parts.append(self._tables[at, lanes])
        return parts

    def status(self) -> Val:
        """Pointer to the i32 status word."""
        if (ParamSlot(()), -1) not in self._loaded:
            self._loaded[ParamSlot(()), -1] = self._fn.at_entry(PTR, f"load ptr, ptr {self._pointer.ref}, align 8")
        return self._loaded[ParamSlot(()), -1]

    @property
    def order(self) -> tuple[Slot, ...]:
        """What the slots hold, slot 1 first."""
        return tuple(self._order)
