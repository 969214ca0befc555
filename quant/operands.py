"""The operands of an operation that could be quantized, found through views and expressions of parameters; or why it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import Node

from ..graph.aten.experts import NAMED
from ..graph.nodes import name_of
from .constants import Constants
from .scheme import Operation

aten = torch.ops.aten
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FACTORS = {"linear": (0, 1), "addmm": (1, 2), "mm": (0, 1), "matmul": (0, 1), "bmm": (0, 1)}
"""Positions of the left and the right factor."""
_INTEGERS = "it multiplies integers already"
_WHOLE = "recurrent layers hold their products inside"
_FUSED = "torch's fused layer holds its products inside"
_SPELLING = "the operator is not taken apart; write it as matmul or linear"
_NO_MATRICES = "it is no product of an activation and a matrix, nor one of batches of matrices; write it as matmul or linear"
_TRANSPOSED = "transposed convolutions of one channel each, or with a weight that is no constant, stay in floating point"
_OPEN = ("aten", "prims", "quantized_decomposed")
"""Namespaces of operators whose meaning is known."""
NEVER = {
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _TRANSPOSED),
    "bilinear": "bilinear multiplies activations with activations",
    "conv_tbc": "it is not taken apart; write it as conv1d",
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _WHOLE),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), "cells hold their products inside"),
    **dict.fromkeys(("einsum", "tensordot", "inner", "mv", "addmv", "addbmm", "baddbmm"), _NO_MATRICES),
    **dict.fromkeys(("linalg_matmul", "linalg_multi_dot", "chain_matmul", "_addmm_activation", "_sparse_mm"), _SPELLING),
    **dict.fromkeys(("_int_mm", "_weight_int8pack_mm", "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu"), _INTEGERS),
    "_native_multi_head_attention": _FUSED,
    "_transformer_encoder_layer_fwd": _FUSED,
}
"""Operators with products inside that no scheme reaches, and why."""


@dataclass(frozen=True)
class Operands:
    """linear: activation[..., K] @ weight + bias, the weight [N, K] as in linear, or [K, N] (`transposed`). convolution: weight [N, ...].

    experts: activation[S, K], along whose rows the matrices of the weight [E, N, K] take turns, or [E, K, N] (`transposed`); or a batch
    [E, M, K], with a matrix for each of its parts.
    recurrence: the weight [N, K] alone, since the hidden state is inside. matmul and attention: their activations alone. embedding: the
    table alone.
    """

    operation: Operation
    activations: tuple[Node, ...]
    weight: Node | None = None
    transposed: bool = False
    bias: Node | None = None


def packet(node: Node) -> str:
    """`linear` of aten.linear.default; empty for what is no operator of ATen or ours, and has no native form."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return ""
    if node.target.namespace not in ("aten", "sashiko") and name_of(node) not in NAMED:
        return ""
    return node.target._schema.name.split("::")[1]


def operands(node: Node, constants: Constants) -> Operands | str | None:
    """The operands of an operation, why it cannot be quantized, or None when there is nothing to quantize in it, as where parameters are
    multiplied with each other alone. A table is one even where the same rows are read in every call."""
    name = packet(node)
    if name != "embedding" and constants.is_constant(node):
        return None
    if name in NEVER:
        return NEVER[name]
    reader = _READERS.get(name)
    return reader(node, constants) if reader is not None else _foreign(node, constants)


def _foreign(node: Node, constants: Constants) -> str | None:
    """A package's own operator that is given a weight, as transformers' products of experts are, most likely multiplies with it."""
    if not isinstance(node.target, OpOverload) or node.target.namespace in _OPEN:
        return None
    weights = (constants.value(operand) for operand in node.all_input_nodes if constants.is_constant(operand))
    taken = any(weight.dim() >= 2 and weight.is_floating_point() for weight in weights)
    return f"an operator of {node.target.namespace} takes the weight, and only it knows what it computes" if taken else None


def _product(node: Node, constants: Constants) -> Operands | str | None:
    name = packet(node)
    left, right = (node.args[i] for i in FACTORS[name])
    if not isinstance(left, Node) or not isinstance(right, Node):
        return "an operand is not a tensor"
    linear = name == "linear"
    weight = right if linear else _peeled(right)
    why = _not_float(left, right)
    if not constants.is_constant(weight):
        if constants.is_constant(_peeled(left)):
            return "the weight is on the left"
        plain = name in ("matmul", "bmm", "mm") and min(left.meta["val"].dim(), right.meta["val"].dim()) >= 2
        return why or (Operands("matmul", (left, right)) if plain else "both factors are activations")
    if constants.is_constant(left):
        return None
    if why:
        return why
    shape = constants.value(weight).shape
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    if not all(shape):
        return "the weight is empty"
    if len(shape) == left.meta["val"].dim() == 3 and str(left.meta["val"].shape[0]) == str(shape[0]):
        return Operands("experts", (left,), weight, True)
    if len(shape) != 2:
        stretched = f"the weight is a batch of {shape[0]} matrices, and the activation no batch of as many"
        return "the weight is a vector" if len(shape) < 2 else stretched
    if not linear and [str(d) for d in left.meta["val"].shape[:-1]] != [str(d) for d in node.meta["val"].shape[:-1]]:
        return "the weight's leading dimensions stretch the activation"
    if name == "addmm" and {1} != {node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)}:
        return "addmm with alpha or beta"
    bias = node.args[0] if name == "addmm" else node.args[2] if linear and len(node.args) > 2 else None
    return Operands("linear", (left,), weight, not linear, bias if isinstance(bias, Node) else None)


def _convolution(node: Node, constants: Constants) -> Operands | str | None:
    x, weight = node.args[:2]
    assert isinstance(x, Node) and isinstance(weight, Node)
    if packet(node) == "convolution" and node.args[6]:
        return _TRANSPOSED
    if not constants.is_constant(weight):
        return "the weight is an activation"
    if constants.is_constant(x):
        return None
    if not constants.value(weight).numel():
        return "the weight is empty"
    bias = node.args[2] if len(node.args) > 2 else None
    why = _not_float(x, weight)
    return why or Operands("convolution", (x,), weight, bias=bias if isinstance(bias, Node) else None)


def _experts(node: Node, constants: Constants) -> Operands | str:
    x, weight, ends = (*node.args, None)[:3]
    assert isinstance(x, Node) and isinstance(weight, Node)
    if not isinstance(ends, Node) or len(node.args) > 3 or x.meta["val"].dim() != 2 or weight.meta["val"].dim() != 3:
        return "its matrices take turns along something else than the rows"
    if not constants.is_constant(weight):
        return "the weight is an activation"
    if not constants.value(weight).numel():
        return "the weight is empty"
    return _not_float(x, weight) or Operands("experts", (x,), weight, packet(node) != "experts")


def _recurrence(node: Node, constants: Constants) -> Operands | str:
    weight = node.args[3]
    assert isinstance(weight, Node)
    if not constants.is_constant(weight):
        return "the weight is an activation"
    return Operands("recurrence", (), weight) if constants.value(weight).numel() else "the weight is empty"


def _attention(node: Node, constants: Constants) -> Operands | str:
    factors = node.args[:3]
    nodes = [f for f in factors if isinstance(f, Node)]
    return _not_float(*nodes) or Operands("attention", tuple(nodes))


def _embedding(node: Node, constants: Constants) -> Operands | str:
    table = node.args[0]
    assert isinstance(table, Node)
    if not constants.is_constant(table):
        return "the table is not constant"
    value = constants.value(table)
    return _not_float(table) or (Operands("embedding", (), table) if value.numel() and value.dim() == 2 else "the table is empty")


_READERS: dict[str, Callable[[Node, Constants], Operands | str | None]] = {
    **dict.fromkeys(FACTORS, _product),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution),
    **dict.fromkeys(("_grouped_mm", "grouped_mm_fallback", "experts"), _experts),
    "recurrence": _recurrence,
    "scaled_dot_product_attention": _attention,
    "embedding": _embedding,
}


def _not_float(*factors: Node) -> str:
    for factor in factors:
        if factor.meta["val"].dtype not in _FLOATS:
            return f"its operands are {factor.meta['val'].dtype}"
    return ""


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
