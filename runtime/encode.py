"""Plans as JSON and back. Every class has its own explicit form; nothing is imported or called because a file says so, but ATen
operations by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..cpu_codegen.contract import BufferSlot, DimSlot, KernelCode, ParamSlot, Slot
from ..diagnostics.errors import ArtifactError, Unsupported
from ..graph import attrs, dims, types
from ..graph.dims import Dim, Poly, Symbol
from ..graph.types import TensorType

Json = Any
_NAMED: dict[str, tuple[type, ...]] = {"dtype": (torch.dtype,), "layout": (torch.layout,), "memory_format": (torch.memory_format,)}
_FUNCTIONS = {"floordiv": dims.floordiv, "mod": dims.mod, "min": dims.minimum, "max": dims.maximum}


def dim_json(dim: Dim) -> Json:
    """An int, or a list of terms [coefficient, atom, ...]; an atom is {"symbol", "lo", "hi"} or {"function", "args"}."""
    if isinstance(dim, int):
        return dim
    return [[coefficient, *map(_atom_json, atoms)] for atoms, coefficient in dim.terms]


def _atom_json(atom: dims.Atom) -> Json:
    if isinstance(atom, Symbol):
        extent = {} if atom.extent is None else {"extent": dim_json(atom.extent)}
        return {"symbol": atom.name, "lo": atom.lo, "hi": atom.hi, **extent}
    return {"function": atom.kind, "args": [dim_json(arg) for arg in atom.args]}


def dim_from(data: Json) -> Dim:
    if isinstance(data, int):
        return data
    total: Dim = 0
    for coefficient, *atoms in data:
        total = total + dims.product([int(coefficient), *map(_atom_from, atoms)])
    return total


def _atom_from(data: Json) -> Dim:
    if "symbol" in data:
        extent = dim_from(data["extent"]) if "extent" in data else None
        hi = None if data["hi"] is None else int(data["hi"])
        return dims.symbol(str(data["symbol"]), int(data["lo"]), hi, extent)
    return _FUNCTIONS[data["function"]](*map(dim_from, data["args"]))


def type_json(ty: TensorType) -> Json:
    """Element type, shape and order; a plan needs no more of a type."""
    return {"dtype": ty.dtype.name, "shape": [dim_json(d) for d in ty.shape], "order": ty.order}


def type_from(data: Json) -> TensorType:
    return TensorType(types.BY_NAME[data["dtype"]], tuple(map(dim_from, data["shape"])), None, order_from(data["order"]))


def order_from(data: Json) -> tuple[int, ...] | None:
    return None if data is None else tuple(map(int, data))


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


def template_json(item: Any) -> Json:
    """Arguments of an ATen step. Unsupported for what has no form in a file, such as a tensor or a generator."""
    if item is None or isinstance(item, (bool, int, str)):
        return item
    if isinstance(item, float):
        return item if math.isfinite(item) else {"float": str(item)}
    if isinstance(item, (list, tuple)):
        return {"list" if isinstance(item, list) else "tuple": [template_json(part) for part in item]}
    if isinstance(item, attrs.Slot):
        return {"slot": item.index}
    if isinstance(item, Poly):
        return {"dim": dim_json(item)}
    if isinstance(item, torch.device):
        return {"device": str(item)}
    for kind, classes in _NAMED.items():
        if isinstance(item, classes):
            return {kind: str(item).removeprefix("torch.")}
    raise Unsupported(f"an argument of type {type(item).__name__} cannot be saved", hint="compile without the operation that takes it")


def template_from(data: Json) -> Any:
    if not isinstance(data, dict):
        return data
    ((kind, value),) = data.items()
    if kind in ("list", "tuple"):
        parts = [template_from(part) for part in value]
        return parts if kind == "list" else tuple(parts)
    if kind in _NAMED:
        found = getattr(torch, str(value), None)
        if not isinstance(found, _NAMED[kind]):
            raise ArtifactError(f"this torch has no {kind} {value}")
        return found
    simple: dict[str, Callable[[Any], Any]] = {"float": float, "slot": attrs.Slot, "dim": dim_from, "device": torch.device}
    return simple[kind](value)


def target_json(target: Any) -> str:
    """The name of an ATen operation, such as aten::add.Tensor. Unsupported for other callables."""
    if not isinstance(target, torch._ops.OpOverload):
        raise Unsupported(f"a call of {target} cannot be saved", hint="only operations of torch.ops have a name in a file")
    namespace, name = target._schema.name.split("::")
    return f"{namespace}::{name}.{target._overloadname}"


def target_from(name: str) -> torch._ops.OpOverload:
    """The operation that `target_json` named. ArtifactError when this torch has none of that name."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.rpartition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    except AttributeError as error:
        hint = "import the library that defines it, or use the torch it was saved with"
        raise ArtifactError(f"this torch has no operation {name}", hint=hint) from error
    if not isinstance(found, torch._ops.OpOverload):
        raise ArtifactError(f"{name} is no operation")
    return found


def ints(data: Sequence[Json]) -> tuple[int, ...]:
    return tuple(map(int, data))
