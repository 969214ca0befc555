"""Operations of an exported program taken apart one at a time.

torch's own `run_decompositions` traces the whole program again, twice. Most programs hold a few operations that need it, each of which
can be traced by itself; and most writes are to a tensor that the program made, or to a view of it, so that their functional form does:
the tensor gets a new value, and each view of it is made again where it is read next. What is perhaps a view, and perhaps not, is left to
torch, and so are writes to parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from ..diagnostics.dump import say
from . import views
from .nodes import tensors, written

aten = torch.ops.aten

# Composites whose result is a tensor of its own. Of others without a word about it in their schema, type_as for one, it may be an argument.
_NEW: frozenset[Any] = frozenset({
    aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.avg_pool1d.default, aten.batch_norm.default,
    aten.conv1d.default, aten.conv1d.padding, aten.conv2d.default, aten.conv2d.padding, aten.conv3d.default, aten.conv_transpose1d.default,
    aten.conv_transpose2d.input, aten.group_norm.default, aten.instance_norm.default, aten.layer_norm.default, aten.linear.default,
    aten.log_softmax.int, aten.matmul.default, aten.max_pool1d.default, aten.max_pool2d.default, aten.pad.default, aten.prelu.default,
    aten.rms_norm.default, aten.scaled_dot_product_attention.default, aten.softmax.int, aten.tensordot.default,
    aten.upsample_bilinear2d.vec, aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.where.ScalarOther, aten.where.ScalarSelf,
})
_RENAMED: Mapping[Any, Any] = {
    aten.item.default: aten._local_scalar_dense.default, aten.concat.default: aten.cat.default, aten.concatenate.default: aten.cat.default,
}
_DROPOUT: frozenset[Any] = frozenset({
    getattr(aten, name + ending).default
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for ending in ("", "_")
})  # of (tensor, share, whether it trains)
_VIEWS: frozenset[Any] = frozenset({aten._unsafe_view.default})  # although its schema does not say so


class _Whole(Exception):
    """The program has to be traced as a whole; the text says why."""


def by_node(program: ExportedProgram, table: Mapping[Any, Callable[..., Any]], stays: Callable[[Node], bool]) -> ExportedProgram | None:
    """The program with the nodes that do not stay decomposed by `table`, functional, and without dropout that drops nothing; None where
    that cannot be seen node by node."""
    nodes = list(program.graph.nodes)
    mode = next((val.fake_mode for n in nodes for val in pytree.tree_leaves(n.meta.get("val")) if isinstance(val, FakeTensor)), None)
    if mode is None:
        return None
    state = _state(program)
    walk = _Walk(dict(table), mode, frozenset(state))
    try:
        for node in nodes:
            walk.visit(node, stays(node))
        last = {n: walk.current(walk.env[n]) for n in state}
        return _like(program, walk.graph, [(value, *state[n]) for n, value in last.items() if value is not walk.env[n]])
    except Exception as error:  # also what a decomposition raises: the walk over the whole program decides whether that matters
        say(2, f"decomposed as a whole: {error}")
        return None


def deciding(graph: Graph) -> Iterator[tuple[torch.Tensor, torch.memory_format]]:
    """The tensors whose sizes decide whether what is made of them, and is written to under one of its names, is a view, in an exported
    graph that takes it for none: it would be one if they lay without gaps, in the order that is asked for."""
    memory: dict[Node, set[Node]] = {}
    for node in graph.nodes:
        common = {node}.union(*(memory[n] for n in (() if _alone(node) else node.all_input_nodes)))
        memory |= dict.fromkeys(common, common)
    overwritten = set[Node]().union(*(memory[n] for node in graph.nodes for n in written(node)))
    for node in graph.nodes:
        if node in overwritten and _is_perhaps_a_view(node):
            order = node.kwargs.get("memory_format") or torch.contiguous_format
            yield from ((tensor, order) for each in node.all_input_nodes for tensor in tensors(each))


def _is_perhaps_a_view(node: Node) -> bool:
    """Whether that depends on how its operands lie in memory. Of one without gaps, whatever its sizes, all shapes are views."""
    sure = node.op != "call_function" or node.target is getitem or _alone(node) or views.source(node) is not None
    changes = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
    return not (sure or changes or all(is_contiguous_or_false(tensor) for each in node.all_input_nodes for tensor in tensors(each)))


@dataclass
class _Walk:
    """The new graph so far. state: the old placeholders that may be written to. env: what the nodes of the old graph became, nodes or
    structures of nodes. memory: for each new node those that may have memory in common with it, and itself. source: for those that surely
    are views, what they are views of. stale: those whose memory has been written to since. now: for some of these, what stands for them."""

    table: dict[Any, Callable[..., Any]]
    mode: FakeTensorMode
    state: frozenset[Node]
    graph: Graph = field(default_factory=Graph)
    env: dict[Node, Any] = field(default_factory=dict)
    memory: dict[Node, set[Node]] = field(default_factory=dict)
    source: dict[Node, Node] = field(default_factory=dict)
    stale: set[Node] = field(default_factory=set)
    now: dict[Node, Node] = field(default_factory=dict)

    def visit(self, node: Node, stays: bool) -> None:
        if node.target in _RENAMED:
            self.env[node] = self.called(node, _RENAMED[node.target], *self.arguments(node, self.env))
        elif node.target in _DROPOUT and not node.args[2]:  # the very tensor: what writes to one writes to the other
            self.env[node] = self.arguments(node, self.env)[0][0]
        elif stays or node.op != "call_function":
            self.env[node] = self.copied(node, self.env)
        elif not isinstance(node.target, OpOverload):
            raise _Whole("an operation of operations")
        elif free_unbacked_symbols(node.meta.get("val")):
            raise _Whole(f"the result of {node.target} has sizes that depend on data")
        elif node.target._schema.is_mutable:
            self.env[node] = self.overwritten(node, node.target, self.env)
        else:
            self.env[node] = made = self.inlined(node, node.target, *self.arguments(node, self.env))
            if isinstance(made, Node) and any(r.alias_info for r in node.target._schema.returns) and _is_perhaps_a_view(node):
                self.share(made, *(self.current(self.env[n]) for n in node.all_input_nodes))

    def share(self, *nodes: Node) -> None:
        """Takes all of these for names of one memory."""
        common = set[Node]().union(*(self.memory[n] for n in nodes if n in self.memory))
        self.memory |= dict.fromkeys(common, common)

    def arguments(self, node: Node, env: Mapping[Node, Any]) -> tuple[Any, Any]:
        found = pytree.tree_map_only(Node, env.__getitem__, (node.args, node.kwargs))
        args, kwargs = pytree.tree_map_only(Node, self.current, found)
        return args, kwargs

    def called(self, node: Node, op: Any, args: Any, kwargs: Any) -> Node:
        """A call of another operation in the place of a node."""
        made = self.graph.call_function(op, args, kwargs)
        made.meta = dict(node.meta)
        self.memory[made] = {made}
        return made

    def copied(self, node: Node, env: Mapping[Node, Any]) -> Any:
        args, kwargs = self.arguments(node, env)
        if node.target is getitem and isinstance(args[0], (tuple, list)):
            return args[0][args[1]]
        made = self.graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        if node.op == "placeholder":
            made.name = node.name  # the signature has names that no graph gives, such as "input"
        made.meta = dict(node.meta)
        read = () if _alone(node) else made.all_input_nodes
        self.memory[made] = {made}
        self.share(made, *(n for n in read if not isinstance(n.meta.get("val"), torch.SymInt)))
        if (source := views.source(made)) is not None:
            self.source[made] = source
        return made

    def overwritten(self, node: Node, op: OpOverload, env: Mapping[Node, Any]) -> Any:
        """A call that writes to its first argument, as the one that does not. What the argument is a view of becomes a new tensor, and what
        stands for it or its views is made again of that where it is read."""
        args, kwargs = self.arguments(node, env)
        form, written = _without_writes(op), args[0]
        if form is None or not isinstance(written, Node):
            raise _Whole(f"{op} has no functional form")
        base, memory = self.base(written), self.memory[written]
        given = {n for n in memory if n.op != "call_function"}
        if given and (given != {base} or all(self.env.get(n) is not base for n in self.state)):
            raise _Whole(f"{op} writes to what may be a parameter, or one of several arguments")
        expected, found = node.meta["val"], self.result(form, args, kwargs)
        if found.shape != expected.shape:
            raise _Whole(f"{form} has another shape than {op}")
        made: Node = self.inlined(node, form, args, kwargs) if form in self.table else self.called(node, form, args, kwargs)
        if found.dtype != expected.dtype:
            made.meta["val"] = found
            made = self.called(node, aten._to_copy.default, (made,), {"dtype": expected.dtype})
        if torch.Tag.inplace_view in op.tags:  # it changes what one name is for, and not what there is in memory
            if given or not form.is_view:
                raise _Whole(f"{op} changes an argument, or what memory a tensor has")
            for other in memory | self.stale:  # no view from before can be made again of the new shape
                self.source.pop(other, None)
            return self.instead(written, made) if made is not written else made
        if not self.memory[made].isdisjoint(pytree.tree_leaves((args, kwargs))):
            made = self.called(node, aten.clone.default, (made,), {})  # for what is written is a tensor of its own
        value = self.instead(base, self.put(written, made))
        value.meta["val"] = base.meta["val"]  # with the strides that PyTorch gives it
        return written

    def instead(self, node: Node, value: Node) -> Node:
        """Lets a value, whose memory is its own, stand for a node that was overwritten."""
        self.stale |= self.memory[node] - {value}
        self.now[node] = value
        self.memory[value] = {value}
        self.source.pop(value, None)
        return value

    def base(self, node: Node) -> Node:
        """What a node is a view of, as far as that is known."""
        while node in self.source:
            node = self.source[node]
        return node

    def put(self, view: Node, value: Node) -> Node:
        """The new value of what a node is a view of, given that of the view."""
        while view in self.source:
            source = self.source[view]
            put = views.put(self.graph, view, source, value)
            if put is None:
                raise _Whole(f"a view by {view.target} is written to")
            view, value = source, put
        return value

    def current(self, node: Node) -> Node:
        """What stands for a node after all writes so far: the same view of the new value of what it is a view of."""
        while node in self.now:
            node = self.now[node]
        if node not in self.stale:
            return node
        if node not in self.source:
            raise _Whole(f"what was overwritten is read as {node.target}")
        self.now[node] = new = self.graph.node_copy(node, lambda n: self.current(n) if n in self.memory[node] else n)
        self.source[new] = source = self.current(self.source[node])
        self.memory[new] = self.memory[source]
        self.memory[new].add(new)
        return new

    def result(self, op: OpOverload, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Node, lambda n: n.meta["val"], (args, kwargs))
        with torch.no_grad(), self.mode, enable_python_dispatcher():
            return op(*args, **kwargs)

    def inlined(self, node: Node, op: OpOverload, args: Any, kwargs: Any) -> Any:
        """What a call consists of: a node, or several."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        nodes = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Node)}

        def call(*values: Any) -> Any:
            given = dict(zip(nodes, values, strict=True))
            args, kwargs = pytree.tree_unflatten([given.get(i, leaf) for i, leaf in enumerate(leaves)], spec)
            result = self.table[op](*args, **kwargs) if op in self.table else NotImplemented
            return op(*args, **kwargs) if result is NotImplemented else result  # a composite would not look into the table

        with torch.no_grad(), self.mode, enable_python_dispatcher():
            traced = make_fx(call, decomposition_table=self.table)(*(leaf.meta["val"] for leaf in nodes.values())).graph
        traced.eliminate_dead_code()
        env: dict[Node, Any] = dict(zip(traced.find_nodes(op="placeholder"), nodes.values(), strict=True))
        for inner in traced.nodes:
            inner.meta = {**node.meta, "val": inner.meta.get("val")}
            if inner.op == "output":
                return self.arguments(inner, env)[0][0]
            if isinstance(inner.target, OpOverload) and inner.target._schema.is_mutable:
                if not self.memory[env[inner.args[0]]].isdisjoint(nodes.values()):
                    raise _Whole(f"{op} writes to an argument")
                env[inner] = self.overwritten(inner, inner.target, env)
            elif inner.op == "get_attr" or (inner.op == "call_function" and not inner.users):
                raise _Whole(f"{op} has a constant of its own, or checks something")
            elif inner.op == "call_function":
                env[inner] = self.copied(inner, env)
        return None


def _without_writes(op: OpOverload) -> OpOverload | None:
    """The operation that gives what one writes to its first argument, and to no other."""
    arguments = op._schema.arguments
    if [n for n, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write] != [0]:
        return None
    name = op._schema.name.split("::")[1]
    name = name.replace("__i", "__") if name.startswith("__i") else name.removesuffix("_")  # __ior__ or add_
    packet = getattr(getattr(torch.ops, op.namespace), name, None)
    if packet is None or packet is op.overloadpacket:
        return None
    forms = (getattr(packet, each) for each in sorted(packet.overloads(), key=op._overloadname.__ne__))  # that of the same name first
    return next((form for form in forms if _given(form) == _given(op)), None)


def _given(op: OpOverload) -> list[tuple[str, str]]:
    """The names and types of an operation's arguments."""
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]


def _alone(node: Node) -> bool:
    """Whether the memory of a node's result is its own, as far as its operation goes."""
    if node.op != "call_function":
        return False
    if node.target is getitem:
        source = node.args[0]
        assert isinstance(source, Node)
        return _alone(source) and sum(user.target is getitem and user.args[1] == node.args[1] for user in source.users) == 1
    op = node.target
    if not isinstance(op, OpOverload) or op in _VIEWS or any(r.alias_info for r in op._schema.returns):
        return False
    if op is aten.einsum.default:  # of one tensor it may be a view
        operands: Any = node.args[1]
        return len(operands) > 1
    return op in _NEW or not op._can_decompose()


def _state(program: ExportedProgram) -> dict[Node, tuple[OutputKind, str]]:
    """The placeholders of parameters, buffers and arguments that have no memory in common with another, with how a signature says that
    they are written to, and their names; none where it says that of some already."""
    if any(spec.kind != OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs):
        return {}
    nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
    storages = {n: val.untyped_storage()._cdata for n in nodes if isinstance(val := n.meta.get("val"), FakeTensor)}
    shared = Counter(storages.values())
    kinds = {
        InputKind.PARAMETER: OutputKind.PARAMETER_MUTATION, InputKind.BUFFER: OutputKind.BUFFER_MUTATION,
        InputKind.USER_INPUT: OutputKind.USER_INPUT_MUTATION,
    }
    return {
        node: (kinds[spec.kind], spec.target or node.name)
        for node, spec in zip(nodes, program.graph_signature.input_specs, strict=True)
        if spec.kind in kinds and shared[storages.get(node)] == 1
    }


def _like(program: ExportedProgram, graph: Graph, written: list[tuple[Node, OutputKind, str]]) -> ExportedProgram:
    """The program with another graph. written: the last values of what it writes to, as in its signature."""
    signature, output = program.graph_signature, graph.output_node()
    results = output.args[0]
    assert isinstance(results, (tuple, list))
    outputs = [OutputSpec(kind, TensorArgument(name=value.name), target) for value, kind, target in written] + [
        replace(spec, arg=TensorArgument(name=result.name)) if isinstance(result, Node) and isinstance(spec.arg, TensorArgument) else spec
        for spec, result in zip(signature.output_specs, results, strict=True)
    ]
    output.args = ((*(value for value, *_ in written), *results),)
    # What a decomposition gives beside what is asked for, such as the places of maxima, is not asked for either where it is but reshaped.
    graph.eliminate_dead_code(lambda node: node.target is not getitem and views.source(node) is None)
    return ExportedProgram(
        program.graph_module, graph, replace(signature, output_specs=outputs), program.state_dict, program.range_constraints,
        program.module_call_graph, program.example_inputs, program.constants, verifiers=program.verifiers,
    )
