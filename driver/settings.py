"""Floats that Dynamo makes inputs of a graph, as `torch.compile(..., dynamic=True)` has it do with every attribute of a module.

Of one that arithmetic with tensors reads, in layers too that are made of it, AOTAutograd makes a tensor. Others are constants after all: it
finds that out when it has traced the whole graph, and has Dynamo start again. The scale of an attention and what `nn.Embedding` calls its
norm_type are among them in about every transformer. Asked for before, they cost no trace: the first text of the Llama of 4 layers in
`benchmarks/decode.py` takes three quarters of the time (Emerald Rapids, both ways run in turn).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import SymFloat
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch.fx import GraphModule, Node
from torch.nn import functional as F
from torch.utils._sympy.symbol import SymT, symbol_is_type

# Functions whose floats nobody changes between calls. Of others, as F.gumbel_softmax, each number would be compiled again.
_LAYERS = frozenset((
    F.scaled_dot_product_attention, F.embedding, F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm, F.instance_norm,
))


def settle(module: GraphModule) -> None:
    """Has Dynamo trace a graph again with the floats in it that are nothing but settings of such layers as constants, if there are any that
    it has not been told of. Raises TensorifyScalarRestartAnalysis for it then, which is Dynamo's own."""
    new = [name for name in _settings(module) if not TensorifyState.should_specialize(name)]
    for name in new:
        TensorifyState.specialize(name)
    if new:
        raise TensorifyScalarRestartAnalysis


def _settings(module: GraphModule) -> Iterator[str]:
    """The names that floats have for Dynamo which layers alone read."""
    for node in module.graph.find_nodes(op="call_method", target="item"):
        number = node.meta.get("example_value")
        if isinstance(number, SymFloat) and node.users and all(map(_is_layer, node.users)):
            expr = number.node._expr  # what it is called, replaced by a number or not
            if symbol_is_type(expr, SymT.FLOAT):  # of the call, not of a tensor's numbers
                yield expr.name


def _is_layer(user: Node) -> bool:
    return user.op == "call_function" and user.target in _LAYERS
