"""Nodes and attributes that quantization adds to an exported graph, or takes from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Graph, GraphModule, Node

from ..graph.alone import alone
from ..graph.sites import copy_name
from .module import attribute_name, is_hidden


@alone()
def call(graph: Graph, target: Any, args: tuple[Any, ...], like: Node, kwargs: Mapping[str, Any] | None = None) -> Node:
    """A call placed where `like` comes from, with the type of its result worked out."""
    node = graph.call_function(target, args, dict(kwargs or {}))
    for key in ("nn_module_stack", "stack_trace"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    copy_name(like, node)
    # Composites ask their parts for symbolic sizes through the dispatcher of Python alone, before torch 2.13.
    with like.meta["val"].fake_mode, enable_python_dispatcher():
        node.meta["val"] = target(*(a.meta["val"] if isinstance(a, Node) else a for a in args), **dict(kwargs or {}))
    return node


@alone()
def read(graph: Graph, name: str, value: torch.Tensor, like: Node) -> Node:
    """Reads an attribute that has, or will have, that value."""
    # `create_node`: `get_attr` would look for the attribute in the owning module, which gets it later.
    node = graph.create_node("get_attr", name)
    node.meta["val"] = like.meta["val"].fake_mode.from_tensor(value, static_shapes=True)
    return node


def add_attribute(graph: Graph, attributes: dict[str, Any], base: str, value: torch.Tensor, like: Node) -> Node:
    """Reads a new attribute that is named after `base`."""
    name = free_name(attributes, base)
    attributes[name] = value
    return read(graph, name, value, like)


def free_name(attributes: Mapping[str, Any], base: str, suffix: str = "") -> str:
    """A name that with `suffix` is no attribute: it must not be, or lie below, an attribute that is a tensor, nor be hidden."""
    base = attribute_name(base) if is_hidden(base) else base
    parts = base.split(".")
    if any(".".join(parts[:i]) in attributes for i in range(1, len(parts))):
        base = base.replace(".", "_")
    name, count = base, 1
    while f"{name}{suffix}" in attributes:
        count += 1
        name = f"{base}_{count}"
    return name


def rename_attributes(exported: ExportedProgram) -> None:
    """Gives parameters, buffers and constants the names that they have in a quantized module. torch makes a GraphModule of the program,
    where those of its own would be in their way."""
    for tensors in (exported.state_dict, exported.constants):
        renamed = {attribute_name(name): value for name, value in tensors.items()}
        tensors.clear()
        tensors.update(renamed)
    signature = exported.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        if spec.target is not None and spec.kind is not OutputKind.USER_INPUT_MUTATION:
            spec.target = attribute_name(spec.target)


def drop_unread(graph: Graph, attributes: dict[str, Any]) -> None:
    """Removes the attributes that nothing reads."""
    for node in [n for n in graph.nodes if n.op == "get_attr" and not n.users]:
        graph.erase_node(node)
    targets = {node.target for node in graph.nodes if node.op == "get_attr"}
    for name in [n for n in attributes if n not in targets]:
        del attributes[name]


def drop_statements(module: GraphModule) -> None:
    """Removes what torch.export writes before each cast: of which type its operand was in the trace, where calls may bring another."""
    for inner in (m for m in module.modules() if isinstance(m, GraphModule)):
        statements = inner.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default)
        for node in statements:
            inner.graph.erase_node(node)
        if statements:
            inner.recompile()
