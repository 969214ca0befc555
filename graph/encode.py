"""Parts of graphs as JSON and back: dimensions, types, arguments and names of operations, trees of arguments.

Nothing is imported or called because a file says so: operations are looked up among those that this process has registered.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..diagnostics.errors import ArtifactError, Unsupported
from . import attrs, dims, types
from .dims import Dim, Poly, Symbol
from .types import TensorType

Json = Any
_NAMED: dict[str, tuple[type, ...]] = {"dtype": (torch.dtype,), "layout": (torch.layout,), "memory_format": (torch.memory_format,)}
_FUNCTIONS: Mapping[str, Callable[[Dim, Dim], Dim]] = {"floordiv": dims.floordiv, "mod": dims.mod, "min": dims.minimum, "max": dims.maximum}


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


def template_json(item: Any) -> Json:
    """Arguments of an operation. Unsupported for what has no form in a file, such as a tensor or a generator."""
    if item is None or isinstance(item, (bool, int, str)):
        return item
    if isinstance(item, float):
        return item if math.isfinite(item) else {"float": str(item)}
    if isinstance(item, (list, tuple)):
        return {"list" if isinstance(item, list) else "tuple": [template_json(part) for part in item]}
    if isinstance(item, dict):
        return {"dict": [[template_json(key), template_json(part)] for key, part in item.items()]}
    if isinstance(item, slice):
        return {"slice": [template_json(part) for part in (item.start, item.stop, item.step)]}
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
    """What `template_json` wrote."""
    if not isinstance(data, dict):
        return data
    ((kind, value),) = data.items()
    if kind in ("list", "tuple"):
        parts = [template_from(part) for part in value]
        return parts if kind == "list" else tuple(parts)
    if kind == "dict":
        return {template_from(key): template_from(part) for key, part in value}
    if kind == "slice":
        return slice(*map(template_from, value))
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


def tree_json(spec: pytree.TreeSpec) -> Json:
    """The tree of a model's arguments or results. Unsupported when it holds a type without a name in files, or would be read as another."""
    what = "the model's arguments or results have a type that cannot be written to a file"
    hint = "return tensors, lists, tuples and dicts, whose keys are text or numbers"
    try:
        text = pytree.treespec_dumps(spec)
        same = tree_from(text) == spec
    except (TypeError, NotImplementedError, ArtifactError) as error:
        raise Unsupported(f"{what}: {error.what if isinstance(error, ArtifactError) else error}", hint=hint) from error
    if not same:
        raise Unsupported(f"{what}: {spec}"[:300], hint=hint)
    return text


def tree_from(data: Json) -> pytree.TreeSpec:
    """What `tree_json` wrote. ArtifactError for a type that this process does not know."""
    _, tree = json.loads(data)
    _check_tree(tree)
    return pytree.treespec_loads(data)


def _check_tree(tree: Json) -> None:
    kind, context = tree["type"], tree["context"]
    if kind is not None and kind not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
        module = str(kind).rpartition(".")[0]
        what = f"the model takes or returns a {kind}, which this process does not know"
        raise ArtifactError(what, hint=f"write `import {module}` before loading")
    # These two name modules, which torch would import.
    if kind == "collections.defaultdict" or "__enum__" in json.dumps(context):
        raise ArtifactError(f"a {kind} in the model's arguments or results cannot be read from a file")
    for child in tree["children_spec"]:
        _check_tree(child)
