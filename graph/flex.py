"""`flex_attention` as attention with a mask: its functions of a score and its place become operations on all scores at once.

Such a function is traced for one score, with scalars for where it is. The same operations on tensors that broadcast, the numbers of
batches, heads, queries and keys along an axis of their own each, give all scores. What it adds to a score, and whether it keeps one, is a
mask then; what does anything else with a score is spelled out with products around it. Which blocks a mask has anything in is not looked
at, as in PyTorch's own eager form: what is kept follows from the mask alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._higher_order_ops.flex_attention import flex_attention
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils import _pytree as pytree

aten = torch.ops.aten
WHY = "why it stays"  # in a node's meta
_INDEXED = "ModIndex"  # how `buffer[h]` is spelled inside
_ANYWHERE = frozenset({  # element by element, which their tags do not say, or one number, whatever the tensor
    aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, aten.new_ones.default, aten.new_zeros.default, aten.new_full.default,
})
_BITWISE: Mapping[Any, Any] = {
    aten.__and__.Tensor: aten.bitwise_and.Tensor, aten.__or__.Tensor: aten.bitwise_or.Tensor, aten.__xor__.Tensor: aten.bitwise_xor.Tensor,
}


def spell_out(module: GraphModule) -> None:
    """Replaces the attentions of a graph that it can, in place, and says of others, in `meta[WHY]`, why not. Nodes need fake results in
    `meta["val"]`."""
    spelled = [_spelled(module, node) for node in _attentions(module)]
    if any(spelled):
        module.graph.eliminate_dead_code()
        module.recompile()


def still_say(before: GraphModule, after: GraphModule) -> None:
    """Has the attentions of a graph that was traced again say why they stay."""
    for old, new in zip(_attentions(before), _attentions(after)):
        new.meta[WHY] = old.meta[WHY]


def _attentions(module: GraphModule) -> list[Node]:
    return list(module.graph.find_nodes(op="call_function", target=flex_attention))


class _Unsuited(Exception):
    """What stands in the way of operations on all scores at once."""


class _Everywhere(Interpreter):
    """A function of one score and its place, run for all of them: its operations work element by element."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if getattr(target, "__name__", "") == "flat_apply" and str(args[2]).endswith(_INDEXED):
            target, args = aten.index.Tensor, (args[3], list(args[4:]))
        target = _BITWISE.get(target, target)
        if target is aten.index.Tensor:
            if args[0].dim() != len(args[1]) or any(index is None for index in args[1]):
                raise _Unsuited("a buffer is not indexed along all its axes")
        elif not (_is_elementwise(target) or (isinstance(target, torch._ops.OpOverload) and _of_numbers(args, kwargs))):
            raise _Unsuited(f"it uses {target}")
        return target(*args, **kwargs)


def _is_elementwise(target: Any) -> bool:
    return target in _ANYWHERE or torch.Tag.pointwise in getattr(target, "tags", ())


def _of_numbers(*arguments: Any) -> bool:
    return not any(isinstance(leaf, Tensor) and leaf.dim() for leaf in pytree.tree_leaves(arguments))


def _spelled(module: GraphModule, node: Node) -> bool:
    users = list(node.users)
    try:
        if any(user.args[1] != 0 and user.users for user in users):
            raise _Unsuited("the logarithms of its sums, or the largest scores, are asked for")
        made, operands = _traced(module, node)
    except Exception as error:  # whatever such a function does that has no form for tensors: PyTorch computes it
        node.meta[WHY] = str(error).partition("\n")[0]
        return False
    result = _inlined(module.graph, node, made, operands)
    for user in users:
        if user.args[1] == 0:
            name = user.name
            user.replace_all_uses_with(result)
            module.graph.erase_node(user)
            result.name = name  # the signature of an exported program has it
        elif not user.users:
            module.graph.erase_node(user)
    module.graph.erase_node(node)
    return True


def _traced(module: GraphModule, node: Node) -> tuple[Graph, list[Any]]:
    """The attention of a node by other operations, and what its arguments are."""
    query, key, value, score, mask, scale, _, score_buffers, mask_buffers = node.args
    of_scores, of_places = (getattr(module, str(each.target)) for each in (score, mask[-1]))  # type: ignore[union-attr, index]
    operands = [query, key, value, *score_buffers, *mask_buffers]  # type: ignore[misc]
    values = [each.meta["val"] if isinstance(each, Node) else each for each in operands]
    of_score = len(score_buffers)  # type: ignore[arg-type]

    def call(query: Tensor, key: Tensor, value: Tensor, *buffers: Any) -> Tensor:
        return _attention(of_scores, of_places, query, key, value, scale, buffers[:of_score], buffers[of_score:])

    with torch.no_grad(), values[0].fake_mode, enable_python_dispatcher():
        made = make_fx(call, pre_dispatch=True)(*values).graph
    if made.find_nodes(op="get_attr"):
        raise _Unsuited("it has constants of its own")
    return made, operands


def _attention(
    score: GraphModule, mask: GraphModule, query: Tensor, key: Tensor, value: Tensor, scale: Any, score_buffers: Sequence[Any],
    mask_buffers: Sequence[Any],
) -> Tensor:
    """What the operation is, by others. Rows of which no score is kept are 0."""
    if query.shape[0] != key.shape[0]:
        key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    sizes = (*query.shape[:3], key.shape[2])
    places = [torch.arange(n, dtype=torch.int32).view([-1 if at == axis else 1 for at in range(4)]) for axis, n in enumerate(sizes)]
    keep = _Everywhere(mask).run(*places, *mask_buffers)
    keep = keep.view([1] * (4 - keep.dim()) + list(keep.shape))
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    if adds(score):
        nothing = torch.zeros((), dtype=wide)
        added = _Everywhere(score).run(nothing, *places, *score_buffers)
        given = keep if added is nothing else torch.where(keep, added, float("-inf"))
        return F.scaled_dot_product_attention(query, key, value, given, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    shared = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(shared, 1) if shared != 1 else x for x in (key, value))
    scores = torch.matmul(query.to(wide), key.to(wide).transpose(-2, -1)) * scale
    scores = torch.where(keep, _Everywhere(score).run(scores, *places, *score_buffers), float("-inf"))
    return torch.matmul(torch.ops.aten._safe_softmax.default(scores, -1).to(query.dtype), value)


def adds(score: GraphModule) -> bool:
    """Whether a function of a score only adds to it what is none, or makes it -inf."""
    given = next(iter(score.graph.find_nodes(op="placeholder")))
    reached = {given}
    for node in score.graph.nodes:
        if reached.isdisjoint(node.all_input_nodes) or node.op == "output":
            continue
        first, others = node.args[0], node.args[1:]
        match node.target:
            case aten.add.Tensor:
                alone = (first in reached) != (others[0] in reached) and not node.kwargs
            case aten.add.Scalar:
                alone = first in reached
            case aten.sub.Tensor:
                alone = first in reached and others[0] not in reached and not node.kwargs
            case aten.where.self | aten.where.ScalarOther:
                alone = first not in reached and others[0] in reached and _is_lowest(others[1])
            case _:
                alone = False
        if not alone:
            return False
        reached.add(node)
    return score.graph.output_node().args[0] in reached


def _is_lowest(item: Any) -> bool:
    if isinstance(item, Node):
        item = item.args[-1] if item.target in (aten.full.default, aten.scalar_tensor.default) else None
    return isinstance(item, float) and item == float("-inf")


def _inlined(graph: Graph, before: Node, made: Graph, operands: Sequence[Any]) -> Node:
    """The nodes of another graph, whose arguments are `operands`, in front of a node. The one that is its result."""
    made.eliminate_dead_code()
    env = dict(zip(made.find_nodes(op="placeholder"), operands, strict=True))
    with graph.inserting_before(before):
        for inner in made.nodes:
            if inner.op == "output":
                result: Node = env[inner.args[0]]
                return result
            if inner.op != "placeholder":
                env[inner] = graph.node_copy(inner, env.__getitem__)
                env[inner].meta = {**before.meta, "val": inner.meta["val"]}
    raise AssertionError("a graph ends with its output")
