"""What the nodes of an FX graph say of themselves: name, arguments, where in the user's code, and whether they change anything."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from .sites import with_name

_LIBRARY = re.compile(r"[/\\](site-packages|dist-packages|torch|functorch)[/\\]|[/\\]lib[/\\]python3|^<")
_WRITING = frozenset({
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
    operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.imatmul,
})
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def origin_of(node: Node) -> str:
    """`file.py:12` of the innermost frame that is the user's; of the innermost outside torch when all are libraries'. A node with a name
    gets `file.py:12 in name`."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [f for f in frames if not _LIBRARY.search(f[0])] or [f for f in frames if not re.search(r"[/\\]torch[/\\]", f[0])]
    return with_name(f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else "", node)


def as_it_is(node: Node) -> bool:
    """Whether `as_strided` reads what it is given as that is: pooling says so what the strides of its axes of size 1 are."""
    of = node.args[0]
    if not isinstance(of, Node) or of.op == "placeholder":  # a caller's tensor may have other strides than the example
        return False
    old, new = of.meta["val"], node.meta["val"]

    def places(tensor: torch.Tensor) -> list[str]:
        return [str(s) for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1] + [str(tensor.storage_offset())]

    return [str(d) for d in old.shape] == [str(d) for d in new.shape] and places(old) == places(new)


def name_of(node: Node) -> str:
    """`aten.sort.default`"""
    return str(node.target) if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "__name__", str(node.target))


def schema_arguments(node: Node) -> list[Any]:
    """All arguments of the schema in order, defaults filled in."""
    result = list(node.args)
    for argument in node.target._schema.arguments[len(result):]:  # type: ignore[union-attr]
        result.append(node.kwargs.get(argument.name, argument.default_value))
    return result


def written_by(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What a call of an operation writes into: tensors, or nodes of a graph."""
    arguments = op._schema.arguments
    given = {**dict(zip((argument.name for argument in arguments), args)), **kwargs}
    return pytree.tree_leaves([given[argument.name] for argument in arguments if argument.is_write and argument.name in given])


def written(node: Node) -> list[Node]:
    """What a node of a graph of torch.export or Dynamo writes into."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        found = written_by(target, node.args, node.kwargs)
    else:
        found = [node.args[:1] if target in _WRITING or _is_in_place(node) else (), node.kwargs.get("out")]
    return [each for each in pytree.tree_leaves(found) if isinstance(each, Node)]


def _is_in_place(node: Node) -> bool:
    """Whether a method or function is named as those are that write into what they are called with first, or is told to do so."""
    target, name = node.target, name_of(node)
    code = getattr(target, "__code__", None)
    told = {**dict(zip(code.co_varnames, node.args) if code else ()), **node.kwargs}.get("inplace") is True
    return told or (name.endswith("_") and not name.endswith("__") and getattr(target, "__module__", "") != operator.and_.__module__)


def tensors(node: Node) -> list[torch.Tensor]:
    """The tensors that a node of such a graph stands for."""
    held = pytree.tree_leaves(node.meta.get("val", node.meta.get("example_value")))
    return [each for each in held if isinstance(each, torch.Tensor)]
