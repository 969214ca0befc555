"""Quantized modules as JSON and tensors, and back: the one form in which they are saved and pickled.

A file may come from anyone. Nothing in it is imported or run: operators are looked up by name among those of `_NAMESPACES`, other
functions in `_FUNCTIONS`, and every name that goes into the generated `forward` must be an identifier, or safe between quotes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen, _PyTreeCodeGen, _PyTreeInfo
from torch.fx.node import map_aggregate, map_arg

from ..diagnostics.errors import ArtifactError, Unsupported
from ..graph.attrs import Slot
from ..graph.encode import Json, target_from, target_json, template_from, template_json, tree_from, tree_json
from ..graph.nodes import schema_arguments
from ..graph.sites import name_node, site_of, with_name
from ..graph.types import inverse
from . import ops
from .module import Gate, QuantizedModule, gate_of
from .plain import from_plain, to_plain
from .record import QuantRecord

_NAMESPACES = ("aten", "prims", "torchvision", "sashiko", ops.quantize_per_tensor.namespace)
_HIGHER_ORDER = ("cond", "map_impl", "while_loop", "wrap_with_set_grad_enabled", "wrap_with_autocast")
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{
        f"operator.{name}": getattr(operator, name)
        for name in (
            *("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "pos", "abs"),
            *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_"),
        )
    },
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc")},
    **{f"torch.{name}": getattr(torch, name) for name in ("sym_max", "sym_min", "sym_not", "sym_float", "sym_int", "sym_ite", "sym_sqrt")},
}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}


def encode(module: QuantizedModule) -> tuple[Json, dict[str, torch.Tensor]]:
    """JSON, and the tensors that it names. Raises Unsupported for what has no form in a file."""
    writer = _Writer()
    gate, record = to_plain(gate_of(module)), to_plain(module.record)
    return {"graph": writer.graph(module, ""), "gate": gate, "record": record, "places": writer.places}, writer.tensors


def decode(data: Json, tensors: Mapping[str, torch.Tensor]) -> QuantizedModule:
    """The module of which `encode` made these. Raises ArtifactError, or an error of Python, for what it cannot have made."""
    reader = _Reader(data["places"], tensors)
    graph, attributes = reader.graph(data["graph"])
    gate, record = from_plain(Gate, data["gate"]), from_plain(QuantRecord, data["record"])
    gate.check_symbols()
    return QuantizedModule.build(attributes, graph, gate, record)


class _Writer:
    """tensors: those met so far, by the name under which they are first read. places: where nodes come from, each once."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.places: list[Json] = []
        self._keys: dict[int, str] = {}
        self._known_places: dict[str, int] = {}

    def graph(self, module: GraphModule, prefix: str) -> Json:
        numbers = {node: n for n, node in enumerate(module.graph.nodes)}
        targets = dict.fromkeys(str(node.target) for node in numbers if node.op == "get_attr")
        return {
            "nodes": [self._node(node, numbers) for node in numbers],
            "attributes": {name: self._attribute(_lookup(module, name), f"{prefix}{name}") for name in targets},
            "call": _call_json(module.graph._codegen),
        }

    def _node(self, node: Node, numbers: Mapping[Node, int]) -> Json:
        def refer(value: Node) -> Any:
            return Slot(numbers[value])

        args, kwargs = map_arg(node.args, refer), map_arg(node.kwargs, refer)
        return [node.name, node.op, _target_json(node), template_json(args), template_json(kwargs), self._place(node)]

    def _place(self, node: Node) -> int:
        """The number of the node's place: modules around it as (name, class), its stack trace, the name of its operation."""
        stack = node.meta.get("nn_module_stack") or {}
        modules = [[str(key), str(path), _class_name(kind)] for key, (path, kind) in stack.items()]
        place = [modules, node.meta.get("stack_trace") or "", site_of(with_name("", node))]
        number = self._known_places.setdefault(str(place), len(self.places))
        if number == len(self.places):
            self.places.append(place)
        return number

    def _attribute(self, value: Any, name: str) -> Json:
        if isinstance(value, GraphModule):
            return {"graph": self.graph(value, f"{name}.")}
        if not isinstance(value, torch.Tensor):
            raise Unsupported(f"{name} is a {type(value).__name__}, which has no form in a file")
        order = _storage_order(value)
        if id(value) not in self._keys:
            self._keys[id(value)] = name
            self.tensors[name] = value.detach().permute(order).contiguous()
        held = {"tensor": self._keys[id(value)], "order": order, "parameter": isinstance(value, torch.nn.Parameter)}
        return {**held, "type": _type_json(value), "ones": _strides_of_ones(value)}


class _Reader:
    """Tied attributes are one tensor again."""

    def __init__(self, places: Json, tensors: Mapping[str, torch.Tensor]) -> None:
        self.places = list(places)
        self.tensors = tensors
        self._made: dict[str, torch.Tensor] = {}

    def graph(self, data: Json) -> tuple[Graph, dict[str, Any]]:
        attributes = {name: self._attribute(item) for name, item in data["attributes"].items()}
        graph = Graph()
        made: list[Node] = []
        for name, op, target, args, kwargs, place in data["nodes"]:
            found = _target_from(op, target, attributes)
            read, named = map_aggregate((template_from(args), template_from(kwargs)), lambda v: made[v.index] if isinstance(v, Slot) else v)
            node = graph.create_node(op, found, tuple(read), dict(named), name=_identifier(name))
            _check_numbers(node, attributes)
            _put(node, self.places[place])
            made.append(node)
        graph.set_codegen(_call_from(data["call"]))
        graph.lint()
        return graph, attributes

    def _attribute(self, data: Json) -> Any:
        if "graph" in data:
            graph, attributes = self.graph(data["graph"])
            return GraphModule(attributes, graph)
        key = data["tensor"]
        if key not in self._made:
            tensor = self.tensors[key].permute(inverse(data["order"]))
            if _type_json(tensor) != data.get("type", _type_json(tensor)):
                raise ArtifactError(f"{key} is {_type_json(tensor)}, and the program was written for {data['type']!r:.100}")
            tensor = _with_strides_of_ones(tensor, data.get("ones"))
            self._made[key] = torch.nn.Parameter(tensor, requires_grad=False) if data["parameter"] else tensor
        return self._made[key]


def _type_json(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _lookup(module: GraphModule, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _storage_order(tensor: torch.Tensor) -> list[int]:
    """The axes from the one with the greatest stride on, so that memory formats survive."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis))


def _strides_of_ones(tensor: torch.Tensor) -> list[int]:
    """The strides of axes of size 1, which say nothing of the memory, and yet tell PyTorch's convolutions which format it has."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size == 1]


def _with_strides_of_ones(tensor: torch.Tensor, strides: list[int] | None) -> torch.Tensor:
    """strides: None where a file does not know them."""
    if strides is None or strides == _strides_of_ones(tensor):
        return tensor
    ones = dict(zip([axis for axis, size in enumerate(tensor.shape) if size == 1], strides, strict=True))
    return tensor.as_strided(tensor.shape, [ones.get(axis, own) for axis, own in enumerate(tensor.stride())])


def _class_name(kind: object) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


def _put(node: Node, place: Json) -> None:
    modules, trace, name = place
    if modules:
        node.meta["nn_module_stack"] = {str(key): (str(path), str(kind)) for key, path, kind in modules}
    if trace:
        node.meta["stack_trace"] = str(trace)
    if name:
        name_node(node, str(name))


def _call_json(codegen: CodeGen) -> Json:
    """Names and trees of the arguments; None for a graph that takes and gives flat values."""
    if not isinstance(codegen, _PyTreeCodeGen):
        return None
    info = codegen.pytree_info
    assert info.out_spec is not None
    return {"names": list(info.orig_args), "in": tree_json(info.in_spec), "out": tree_json(info.out_spec)}


def _call_from(data: Json) -> CodeGen:
    if data is None:
        return CodeGen()
    names, into, out = [_identifier(name) for name in data["names"]], tree_from(data["in"]), tree_from(data["out"])
    if not into.is_leaf() and into.num_children == 2 and into.child(1).type is dict:
        for name in into.child(1).context:
            _identifier(name)
    return _PyTreeCodeGen(_PyTreeInfo(names, into, out))


def _target_json(node: Node) -> Json:
    target = node.target
    if isinstance(target, str):
        if node.op == "get_attr" and not _is_path(target):
            raise Unsupported(f"the name {target!r:.60} cannot be saved", hint="names of modules have no quotes or backslashes")
        return target
    if isinstance(target, OpOverload) and target.namespace in _NAMESPACES:
        return {"operator": target_json(target)}
    if isinstance(target, HigherOrderOperator) and target._name in _HIGHER_ORDER:
        return {"higher_order": target._name}
    if target in _NAMES:
        return {"function": _NAMES[target]}
    raise Unsupported(f"a call of {target} cannot be saved")


def _is_path(name: str) -> bool:
    """Whether a name of an attribute, with dots, is safe in the source of the module's forward: part of it or between quotes there."""
    return all(part and part.isprintable() and not {*"\"'\\"} & {*part} for part in name.split("."))


def _target_from(op: str, data: Json, attributes: Mapping[str, Any]) -> Any:
    if op == "call_function":
        ((kind, name),) = data.items()
        if kind == "function":
            return _FUNCTIONS[name]
        if kind == "higher_order" and name in _HIGHER_ORDER:
            return getattr(torch.ops.higher_order, name)
        return _operator(name)
    if op == "get_attr" and data in attributes:
        if not _is_path(data):
            raise ArtifactError(f"{data!r:.60} is no name")
        return data
    if op in ("placeholder", "output"):
        return _identifier(data)
    raise ArtifactError(f"{op} {data!r:.60} is no part of a quantized model")


def _operator(name: str) -> OpOverload:
    """An operator of tensors: of a known namespace, with a kernel, and none that opens files."""
    found = target_from(name)
    if found.namespace not in _NAMESPACES or not torch._C._dispatch_has_kernel(name.removesuffix(".default")):
        raise ArtifactError(f"{name} is no operation of a quantized model")
    if any(argument.name == "filename" for argument in found._schema.arguments):
        raise ArtifactError(f"{name} opens files")
    return found


def _check_numbers(node: Node, attributes: Mapping[str, Any]) -> None:
    """Raises ArtifactError for scales that are not finite, and for zero points that are none of the integers."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != ops.quantize_per_tensor.namespace:
        return
    names = (argument.name.removesuffix("s") for argument in node.target._schema.arguments)
    held = dict(zip(names, schema_arguments(node), strict=True))
    scales, zeros = (_known(held.get(name), attributes) for name in ("scale", "zero_point"))
    if not bool(scales.isfinite().all()):
        raise ArtifactError(f"the scale of {node.name} is NaN or infinity")
    if zeros.numel() and not bool(((held["quant_min"] <= zeros) & (zeros <= held["quant_max"])).all()):
        raise ArtifactError(f"the zero point of {node.name} is not within {held['quant_min']}..{held['quant_max']}")


def _known(item: Any, attributes: Mapping[str, Any]) -> torch.Tensor:
    """The numbers that are part of the program; none where they are computed."""
    if isinstance(item, Node):
        item = attributes[str(item.target)] if item.op == "get_attr" else None
    return torch.as_tensor([] if item is None else item)


def _identifier(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise ArtifactError(f"{name!r:.60} is no name")
    return name
