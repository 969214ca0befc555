"""Kernels as JSON and back. Every class has its own explicit form."""

from __future__ import annotations

import math

from ..graph.encode import Json, dim_from, dim_json
from .contract import BufferSlot, DimSlot, KernelCode, ParamSlot, Slot


def kernel_json(code: KernelCode | None) -> Json:
    if code is None:
        return None
    slots = [_slot_json(slot) for slot in code.slots]
    return {"symbol": code.symbol, "slots": slots, "domain": dim_json(code.domain), "grain": code.grain, "work": dim_json(code.work)}


def kernel_from(data: Json) -> KernelCode:
    slots = tuple(map(_slot_from, data["slots"]))
    return KernelCode(str(data["symbol"]), slots, dim_from(data["domain"]), int(data["grain"]), dim_from(data["work"]))


def _slot_json(slot: Slot) -> Json:
    if isinstance(slot, BufferSlot):
        return {"buffer": slot.index}
    return {"dim": dim_json(slot.dim)} if isinstance(slot, DimSlot) else {"params": [_float_json(v) for v in slot.values]}


def _slot_from(data: Json) -> Slot:
    if "buffer" in data:
        return BufferSlot(int(data["buffer"]))
    return DimSlot(dim_from(data["dim"])) if "dim" in data else ParamSlot(tuple(map(float, data["params"])))


def _float_json(value: float) -> float | str:
    """JSON has no infinities and no NaN; Python's float() reads their names."""
    return value if math.isfinite(value) else str(value)
