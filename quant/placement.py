"""Where to quantize: every contraction with a constant right factor, found through views and expressions of parameters."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from ..diagnostics.errors import InputError
from .constants import Constants
from .record import LeftOut, Placement, QuantSite

aten = torch.ops.aten
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_PRODUCTS = {
    aten.linear.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.mm.default: (0, 1),
    aten.matmul.default: (0, 1),
    aten.bmm.default: (0, 1),
}  # operator -> positions of the left and the right factor
_NOT_QUANTIZED = {
    "convolution": "convolutions stay in floating point",
    "conv1d": "convolutions stay in floating point",
    "conv2d": "convolutions stay in floating point",
    "conv3d": "convolutions stay in floating point",
    "conv_transpose1d": "convolutions stay in floating point",
    "conv_transpose2d": "convolutions stay in floating point",
    "conv_transpose3d": "convolutions stay in floating point",
    "scaled_dot_product_attention": "attention multiplies activations with activations",
    "einsum": "einsum is not taken apart; write it as matmul or linear",
    "bilinear": "bilinear multiplies activations with activations",
    "baddbmm": "a product with a batch of matrices stays in floating point",
    "lstm": "recurrent layers hold their products inside",
    "gru": "recurrent layers hold their products inside",
    "rnn_tanh": "recurrent layers hold their products inside",
    "rnn_relu": "recurrent layers hold their products inside",
    "_native_multi_head_attention": "torch's fused layer holds its products inside",
    "_transformer_encoder_layer_fwd": "torch's fused layer holds its products inside",
}


@dataclass(frozen=True)
class Operands:
    """A contraction as activation[..., K] @ weight + bias. The weight is [N, K] as in linear, or [K, N] (`transposed`)."""

    activation: Node
    weight: Node
    transposed: bool
    bias: Node | None


def operands(node: Node, constants: Constants) -> Operands | str:
    """The operands of a product, or why it is not quantized."""
    left, right = (node.args[i] for i in _PRODUCTS[node.target])  # type: ignore[index]
    if not isinstance(left, Node) or not isinstance(right, Node):
        return "an operand is not a tensor"
    linear = node.target == aten.linear.default
    weight = right if linear else _peeled(right)
    if not constants.is_constant(weight):
        return "the weight is on the left" if constants.is_constant(_peeled(left)) else "both factors are activations"
    if constants.is_constant(left):
        return "the whole product is constant"
    for factor in (left, right):
        if factor.meta["val"].dtype not in _FLOATS:
            return f"its operands are {factor.meta['val'].dtype}"
    shape = constants.value(weight).shape
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2:
        return "the weight is a vector" if len(shape) < 2 else f"the weight is a batch of {shape[0]} matrices"
    if not all(shape):
        return "the weight is empty"
    if not linear and [str(d) for d in left.meta["val"].shape[:-1]] != [str(d) for d in node.meta["val"].shape[:-1]]:
        return "the weight's leading dimensions stretch the activation"
    if node.target == aten.addmm.default and {1} != {node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)}:
        return "addmm with alpha or beta"
    bias = node.args[0] if node.target == aten.addmm.default else node.args[2] if linear and len(node.args) > 2 else None
    return Operands(left, weight, not linear, bias if isinstance(bias, Node) else None)


def _peeled(node: Node) -> Node:
    """What a chain of expands and leading unsqueezes repeats, so that a stretched matrix is seen as the matrix."""
    while node.op == "call_function" and isinstance(node.args[0] if node.args else None, Node):
        inner = node.args[0]
        assert isinstance(inner, Node)
        leading = node.target == aten.unsqueeze.default and node.args[1] == 0
        stretched = node.target == aten.expand.default and inner.meta["val"].dim() >= 2 and _matrix(node) == _matrix(inner)
        if not leading and not stretched:
            break
        node = inner
    return node


def _matrix(node: Node) -> list[str]:
    return [str(d) for d in node.meta["val"].shape[-2:]]


def place(graph: Graph, constants: Constants, exclude: Iterable[str | re.Pattern[str]] = ()) -> Placement:
    """Finds every contraction. exclude: a name, a module that contains it, or a compiled pattern to search in names.

    Raises InputError for an exclude that matches nothing.
    """
    rules = tuple(exclude)
    names: dict[str, int] = {}
    used: set[int] = set()
    sites: list[QuantSite] = []
    left: list[LeftOut] = []
    for node in graph.nodes:
        packet = _packet(node)
        product = node.target in _PRODUCTS
        if not product and packet not in _NOT_QUANTIZED:
            continue
        found = operands(node, constants) if product else _NOT_QUANTIZED[packet]
        name = _unique(_name(node, constants), names)
        hits = {i for i, rule in enumerate(rules) if _matches(rule, name)}
        used |= hits
        if isinstance(found, Operands) and hits:
            found = "excluded by the caller"
        if isinstance(found, Operands):
            n, k = constants.value(found.weight).shape[-2:]
            sources = constants.sources(found.weight)
            weight = sources[0] if len(sources) == 1 else f"expression of {', '.join(sources)}"
            features = (n, k) if found.transposed else (k, n)
            sites.append(QuantSite(name, packet, node.name, found.activation.name, weight, features, source_of(node)))
        else:
            left.append(LeftOut(name, packet, found, source_of(node)))
    for i, rule in enumerate(rules):
        if i not in used:
            close = difflib.get_close_matches(str(rule), names, 3, 0.3)
            hint = f"did you mean {', '.join(close)}?" if close else "report(quantize(model, batches)) lists the names"
            raise InputError(f"exclude={rule!r} matches no contraction of the model", "quantize(exclude=...)", hint)
    return Placement(tuple(sites), tuple(left))


def _packet(node: Node) -> str:
    """`linear` of aten.linear.default; empty for what is no ATen operator."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return ""
    return node.target._schema.name.split("::")[1]


def _name(node: Node, constants: Constants) -> str:
    """The owner of the parameter that is multiplied with, else the module that contains the operation, and its name."""
    for operand in node.all_input_nodes:
        if constants.is_constant(operand):
            sources = constants.sources(operand)
            if len(sources) == 1 and constants.value(operand).dim() >= 2:
                return sources[0].removesuffix(".weight")
    return ".".join(part for part in (module_path(node), node.name) if part)


def _unique(name: str, names: dict[str, int]) -> str:
    names[name] = names.get(name, 0) + 1
    return name if names[name] == 1 else f"{name}#{names[name]}"


def _matches(rule: str | re.Pattern[str], name: str) -> bool:
    if isinstance(rule, str):
        bare = name.split("#", maxsplit=1)[0]
        return rule in (name, bare) or bare.startswith(f"{rule}.")
    return rule.search(name) is not None


def module_path(node: Node) -> str:
    """Qualified name of the module whose `forward` the node comes from; empty for the model itself or when unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def source_of(node: Node) -> str:
    """`file:line` of the innermost frame in user code; empty when unknown."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in frames if "/torch/" not in file]
    return ":".join((own or frames or [("", "")])[-1]).strip(":")
