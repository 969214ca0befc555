"""Pickling of quantized modules: the graph as plain data, operators by name.

torch's own GraphModule pickles its source text and traces that again, which fails for exported programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, Node
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.fx.node import map_aggregate, map_arg
from torch.utils import _pytree as pytree

from .module import QuantizedModule
from .record import QuantRecord

_KEPT_META = ("nn_module_stack", "stack_trace")


@dataclass(frozen=True)
class NodeRef:
    """The result of the node of this name, as an argument."""

    name: str


@dataclass(frozen=True)
class OpRef:
    """An operator by qualified name: `aten::linear.default`, or a higher-order operator with an empty overload."""

    namespace: str
    name: str
    overload: str

    def resolve(self) -> Any:
        packet = getattr(getattr(torch.ops, self.namespace), self.name)
        return getattr(packet, self.overload) if self.overload else packet


@dataclass(frozen=True)
class NodeState:
    """One node: `target` is an OpRef, a function that pickles by itself, or a name."""

    name: str
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    meta: Mapping[str, Any]


def state(module: QuantizedModule) -> dict[str, Any]:
    """Everything that `restore` needs, picklable."""
    attributes: dict[str, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value: Any = module
            for part in node.target.split("."):
                value = getattr(value, part)
            attributes[node.target] = value
    codegen = module.graph._codegen
    assert isinstance(codegen, _PyTreeCodeGen)
    info = codegen.pytree_info
    assert info.out_spec is not None
    return {
        "attributes": attributes,
        "nodes": [_node_state(node) for node in module.graph.nodes],
        # TreeSpec objects warn when they are unpickled; an example of the structure says the same.
        "names": info.orig_args,
        "structures": tuple(pytree.tree_unflatten([0] * spec.num_leaves, spec) for spec in (info.in_spec, info.out_spec)),
        "gate": module.gate,
        "record": module.record,
    }


def restore(state: Mapping[str, Any]) -> QuantizedModule:
    """The module of which `state` was taken."""
    graph = Graph()
    made: dict[str, Node] = {}

    def resolve(value: Any) -> Any:
        return made[value.name] if isinstance(value, NodeRef) else value

    for saved in state["nodes"]:
        target = saved.target.resolve() if isinstance(saved.target, OpRef) else saved.target
        args, kwargs = map_aggregate(saved.args, resolve), map_aggregate(dict(saved.kwargs), resolve)
        assert isinstance(args, tuple) and isinstance(kwargs, dict)
        made[saved.name] = graph.create_node(saved.op, target, args, kwargs, name=saved.name)
        made[saved.name].meta.update(saved.meta)
    in_spec, out_spec = (pytree.tree_structure(example) for example in state["structures"])
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(state["names"], in_spec, out_spec)))
    record = state["record"]
    assert isinstance(record, QuantRecord)
    return QuantizedModule.build(state["attributes"], graph, state["gate"], record)


def _node_state(node: Node) -> NodeState:
    def refer(value: Node) -> Any:
        return NodeRef(value.name)

    meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
    return NodeState(node.name, node.op, _target(node.target), map_arg(node.args, refer), map_arg(node.kwargs, refer), meta)


def _target(target: Any) -> Any:
    if isinstance(target, OpOverload):
        namespace, name = target._schema.name.split("::")
        return OpRef(namespace, name, target._overloadname)
    if isinstance(target, HigherOrderOperator):
        return OpRef("higher_order", target._name, "")
    return target
