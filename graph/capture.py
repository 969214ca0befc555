"""Capture: from an exported program or an FX graph to `Captured`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from ..diagnostics.errors import InputError, Unsupported
from ..diagnostics.surroundings import undisturbed
from . import build as b
from . import masked
from .alone import alone
from .captured import (
    Captured,
    Check,
    FixedInput,
    FixedOutput,
    GraphOutput,
    Input,
    InputOutput,
    IntInput,
    Mutation,
    OutputSpec,
    StateInput,
    SymbolicOutput,
    TensorInput,
    symbol_sources,
)
from .device import device_of
from .dims import Poly
from .exporting import decompositions, export, functional, quiet
from .guards import ask
from .ir import Graph, Value
from .lower import Lowering, constant_value, tensor_type
from .memory_format import order_of
from .ops import make
from .small_sizes import needed, small_sizes
from .symbols import Assumed, Assumption, Symbols, integer_bounds

__all__ = ["Captured", "decompositions", "export", "from_exported", "from_fx", "functional"]

_SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)
Handed = Mapping[int, int]
NONE: Handed = MappingProxyType({})
_Specs = tuple[pytree.TreeSpec | None, pytree.TreeSpec | None]


@dataclass
class _Signature:
    """The inputs as they are found: flat inputs of the call, and the graph's tensors."""

    lowering: Lowering
    inputs: list[Input] = field(default_factory=list)
    tensors: list[Value] = field(default_factory=list)
    state: list[StateInput] = field(default_factory=list)

    def tensor(self, node: Node, name: str, meta: torch.Tensor) -> Value:
        """A new tensor input of the graph."""
        kind = tensor_type(meta, self.lowering.symbols, self.lowering.device)
        value = b.input_(len(self.tensors), kind.dtype, kind.shape, name)
        self.tensors.append(value)
        self.lowering.env[node] = value
        return value

    def user(self, node: Node, meta: Any) -> None:
        """A flat input of the call: a tensor, an integer, or a Python value that the graph is specialized on."""
        if isinstance(meta, torch.Tensor):
            value = self.tensor(node, node.name, meta)
            self.inputs.append(TensorInput(node.name, len(self.tensors) - 1, value.dtype, value.shape, order_of(meta)))
        elif isinstance(meta, torch.SymInt):
            self.lowering.env[node] = self.lowering.symbols.argument(meta)
            self.inputs.append(IntInput(node.name, self.lowering.env[node]))
        else:
            self.lowering.env[node] = meta
            self.inputs.append(FixedInput(node.name, meta))

    def finish(self, results: Sequence[Any], nodes: Sequence[Any], writes: Mapping[int, int], specs: _Specs = (None, None),
               handed: Handed = NONE) -> Captured:
        """The captured model. `nodes`: the FX nodes of what it returns; one that is returned twice is one tensor. `writes`: which results
        are copied into which graph inputs; all others are returned. `handed`: of these, those that are not computed but tensors of the
        call or of the model, and the graph input that each is (None: of the model)."""
        made: dict[Node, OutputSpec] = {}
        own_tensors: dict[int | None, OutputSpec] = {state.index: FixedOutput(state.tensor) for state in self.state}
        own_tensors |= {i.index: InputOutput(p) for p, i in enumerate(self.inputs) if isinstance(i, TensorInput)}
        outputs: list[Value] = []
        returned: list[OutputSpec] = []
        mutations: list[Mutation] = []
        for number, result in enumerate(results):
            if number not in writes:
                given = own_tensors.get(handed.get(number))
                node = _source(nodes[number])
                returned.append(made.get(node) or given or self._returned(result, node, outputs, number in handed))
                if isinstance(node, Node):
                    made[node] = returned[-1]
        for number, target in writes.items():  # outputs of their own: what is returned as well is another tensor
            mutations.append(Mutation(len(outputs), target))
            outputs.append(results[number])
        checks = tuple(Check(len(outputs) + n, message) for n, (_, message) in enumerate(self.lowering.checks))
        outputs += [own(ok) for ok, _ in self.lowering.checks]
        graph = Graph(tuple(self.tensors), tuple(outputs))
        self.lowering.check_random_order(graph)
        alive = set(graph.order)
        leftovers = tuple(note for value, note in self.lowering.leftovers if value in alive)
        return Captured(graph, tuple(self.inputs), tuple(self.state), tuple(returned), tuple(mutations), symbol_sources(self.inputs),
                        leftovers, *specs, tuple(dict.fromkeys(self.lowering.baked)), checks)

    def _returned(self, result: Any, node: Any, outputs: list[Value], handed: bool) -> OutputSpec:
        if isinstance(result, Poly):
            return SymbolicOutput(result)
        if not isinstance(result, Value):
            if result is not None and not isinstance(result, (int, float, bool, str)):
                raise Unsupported("the model returns a number computed from sizes or data", hint="return a tensor")
            return FixedOutput(result)
        if result.op == "constant" and handed:
            return FixedOutput(getattr(result.attrs, "tensor", None))
        outputs.append(own(result))
        meta = node.meta.get("val") if isinstance(node, Node) else None
        return GraphOutput(len(outputs) - 1, order_of(meta) if isinstance(meta, torch.Tensor) else None)

    def given(self, node: Any) -> int | None:
        """The graph input that an FX node is, -1 for a tensor of the model, None for what is computed."""
        node = _source(node)
        if not isinstance(node, Node) or node.op not in ("placeholder", "get_attr"):
            return None
        value = self.lowering.env[node]
        return self.tensors.index(value) if value in self.tensors else -1


def own(value: Value) -> Value:
    """A value as a tensor of its own, which inputs and constants are not."""
    return make("copy", value) if value.op in ("input", "constant") else value


def _source(node: Any) -> Any:
    """The FX node that makes the tensor which `node` is."""
    while isinstance(node, Node) and node.target in _SAME:
        node = node.args[0]
    return node


def _shape_env(nodes: Sequence[Node]) -> ShapeEnv | None:
    """The shape environment that the placeholders' fake values share."""
    for node in nodes:
        meta = node.meta.get("val")
        if isinstance(meta, torch.SymInt):
            env = meta.node.shape_env
        else:
            env = getattr(getattr(meta, "fake_mode", None), "shape_env", None)
        if isinstance(env, ShapeEnv):
            return env
    return None


def _declared(bounds: tuple[int, int | None]) -> tuple[int, int | None]:
    """torch assumes sizes of at least 2 while tracing and then admits others; so do we, where `small_sizes` finds nothing."""
    return (1 if bounds[0] == 2 else bounds[0]), bounds[1]


def _stored(program: ExportedProgram, name: str) -> torch.Tensor:
    """A parameter, buffer or constant: the model's own tensor."""
    found = program.state_dict.get(name, program.constants.get(name))
    if not isinstance(found, torch.Tensor):
        raise Unsupported(f"{name} is a {type(found).__name__}")
    return found


@alone()
@undisturbed()
def from_exported(program: ExportedProgram, *, decomposed: bool = False) -> Captured:
    """The graph of an exported program. `decomposed`: it went through `functional` already, as those from `export` did.

    Parameters and buffers become watched constants that hold the program's own tensors; those that the model writes become
    inputs. Raises Unsupported when the program as a whole has no native form.
    """
    program = program if decomposed else functional(program)
    signature = program.graph_signature
    nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
    ask(program.graph_module)
    masked.spell_out(program.graph_module)
    ranges = {s.name: _declared(integer_bounds(r)) for s, r in program.range_constraints.items() if s.is_Symbol}
    found = _Signature(Lowering(Symbols(_shape_env(nodes), ranges).unified()))
    _refuse_fixed(found.lowering.symbols)
    written = {s.target for s in signature.output_specs if s.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)}
    targets: dict[str, int] = {}
    late: list[tuple[Node, str, torch.Tensor]] = []
    for node, spec in zip(nodes, signature.input_specs, strict=True):
        if spec.kind == InputKind.USER_INPUT:
            found.user(node, getattr(spec.arg, "value", None) if type(spec.arg).__name__ == "ConstantArgument" else node.meta["val"])
            targets[node.name] = len(found.tensors) - 1
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            tensor = _stored(program, str(spec.target))
            if spec.target in written:
                late.append((node, str(spec.target), tensor))
            elif node.users:  # what is not read may be of any kind
                found.lowering.env[node] = constant_value(tensor, str(spec.target), spec.kind != InputKind.CONSTANT_TENSOR)
        else:
            found.lowering.env[node] = program.constants.get(str(spec.target))
    for node, name, tensor in late:
        found.tensor(node, name, node.meta["val"])
        targets[name] = len(found.tensors) - 1
        found.state.append(StateInput(name, targets[name], tensor))
    results = found.lowering.run(program.graph_module)
    writes: dict[int, int] = {}
    for number, output in enumerate(signature.output_specs):
        if output.kind == OutputKind.TOKEN:
            raise Unsupported("the model has operations with effects besides their results, such as a check that raises")
        if output.kind != OutputKind.USER_OUTPUT:
            if str(output.target) not in targets:
                what = f"the model writes to {output.target or output.kind.name}, which is no buffer, parameter or argument"
                raise Unsupported(what, hint="make it a buffer by register_buffer")
            writes[number] = targets[str(output.target)]
    nodes = program.graph_module.graph.output_node().args[0]
    handed = {n: index for n, node in enumerate(nodes) if (index := found.given(node)) is not None}
    mutated = {nodes[number]: target for number, target in writes.items()}
    handed |= {n: mutated[node] for n, node in enumerate(nodes) if n not in writes and node in mutated}
    made = found.finish(list(results), nodes, writes, (program.call_spec.in_spec, program.call_spec.out_spec), handed)
    lengths = dict.fromkeys(v.shape[0] for v in made.graph.order if v.op == "recurrence" and not isinstance(v.shape[0], int))
    stepped = tuple(Assumption(length, "!=") for length in lengths)  # PyTorch refuses recurrent layers over no steps, too
    symbols = found.lowering.symbols
    taken = symbols.assumptions()
    equal = [each.dim for each in taken if isinstance(each, Assumption) and each.relation == "=="]
    with quiet():  # of sizes that an operation does not bear
        small = (*needed(program.graph.nodes, symbols), *small_sizes(made.graph, equal))
    return replace(made, assumed=(*taken, *stepped, *small))


def _refuse_fixed(symbols: Symbols) -> None:
    """InputError for a size that is declared and yet one number by what tracing took for granted: torch does not tell where it takes
    several equations to see it, or where the size is a multiple of what is declared."""
    for tracked in getattr(symbols.env, "tracked_fakes", None) or ():
        sizes: Sequence[int | torch.SymInt] = tracked.fake.shape if isinstance(tracked.fake, torch.Tensor) else ()
        for axis, (size, declared) in enumerate(zip(sizes, getattr(tracked.symbolic_context, "constraint_sizes", ()))):
            if declared is not None and isinstance(size, torch.SymInt) and isinstance(number := symbols.dim(size), int):
                where = f"{tracked.source.name}.size()[{axis}]"
                what = f"dynamic_shapes do not fit the model: {where} is free there, and the model fixes it to {number}"
                raise InputError(what, symbols.decided_at(size), "leave it out, or declare it as Dim.AUTO, which lets the model decide")


def assumptions(program: ExportedProgram) -> tuple[Assumed, ...]:
    """What the program takes for granted of the sizes beyond their ranges. Raises Unsupported for what has no integer form."""
    return Symbols(_shape_env([n for n in program.graph.nodes if n.op == "placeholder"])).assumptions()


@alone()
@undisturbed()
def from_fx(module: GraphModule, example_inputs: Sequence[Any], frozen: Mapping[int, torch.Tensor] | None = None) -> Captured:
    """The graph of an FX module of functional ATen calls with fake results in `meta["val"]`, as AOTAutograd's compilers receive it.

    example_inputs: one for each placeholder; used where a placeholder has no fake value. frozen: placeholders (by position) that are
    parameters or buffers; they become watched constants and a call must pass the same tensors there. Calls are flat, results are a
    list. Raises Unsupported.
    """
    nodes = [n for n in module.graph.nodes if n.op == "placeholder"]
    ask(module)
    device = device_of([*example_inputs, *(frozen or {}).values()])
    found = _Signature(Lowering(Symbols(_shape_env(nodes)).unified(), device))
    for position, node in enumerate(nodes):
        if frozen is not None and position in frozen:
            found.lowering.env[node] = constant_value(frozen[position], node.name, True, device)
            found.inputs.append(FixedInput(node.name, frozen[position]))
        else:
            found.user(node, node.meta.get("val", example_inputs[position]))
    results = found.lowering.run(module)
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    copies = found.lowering.copies
    writes = {len(results) + i: found.tensors.index(target) for i, (target, _) in enumerate(copies)}
    returned = pytree.tree_leaves(module.graph.output_node().args[0])
    handed = {n: at for n, node in enumerate(returned) if (at := found.given(node)) is not None}
    made = found.finish([*results, *(source for _, source in copies)], returned, writes, handed=handed)
    return replace(made, assumed=found.lowering.symbols.definitions(), device=device)
