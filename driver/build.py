"""From a captured graph to an executable."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..diagnostics.collector import paused
from ..diagnostics.dump import say
from ..diagnostics.errors import Outdated, Unsupported
from ..diagnostics.surroundings import CPU, undisturbed, unobserved
from ..graph import attrs as A
from ..graph.captured import Captured, GraphOutput, IntInput, SymbolicOutput, TensorInput
from ..graph.ir import Graph, Value
from ..graph.memory_format import as_they_lie, row_by_row_where_made_so
from ..graph.passes import Pass, PassReport, run
from ..graph.sites import site_of
from ..graph.types import Order, TensorType, inverse
from ..kernels.custom import CustomKernel
from ..kernels.spec import GemmSpec
from ..platforms.target import Target
from ..rewrite import RuleSet, Trace
from ..rewrite.rules.outside import VIEW, views_outside
from ..rewrite.rules.parts import in_parts
from ..runtime.executable import Executable, with_runner
from ..runtime.gpu import GpuExecutable
from ..runtime.plan import AtenStep, ConstantSource, Input, InputInt, InputTensor, Output, OutputDim, OutputTensor, Plan, Segment
from ..stitch.layout import choose_layouts, spread_rows
from ..stitch.partition import Extern, Native, Part, partition
from ..stitch.places import in_their_places
from ..stitch.program import CallItem, Program
from ..stitch.stitcher import stitch
from .gpu import GpuKernels, target_of
from .kernels import Kernels
from .pipeline import passes
from .recall import Spec
from .recurrences import Passes, recurrence_item
from .segments import Constants, Note, Product, SegmentBuilder
from .specs import Choices, ItemSpec, flat, lengths_assumed, specs_of


@dataclass(frozen=True)
class Options:
    """What a compilation depends on besides the graph. wide: names of operations that stay in fp32 whatever the precision. choices: of
    products that have been measured. record: whether calls on a GPU may be recorded as CUDA graphs."""

    target: Target
    precision: str = "fp32"
    strict: bool = False
    rules: RuleSet = ()
    kernels: tuple[CustomKernel, ...] = ()
    name: str = "model"
    wide: frozenset[str] = frozenset()
    choices: Choices = field(default_factory=dict)
    record: bool = True


@dataclass(eq=False)
class Built:
    """An executable and the story of its making, for explain().

    products: for everything that `executable.times` times, in its order, the named product that it computes, or None. measurable: likewise
    the specification of the product, named or not. tuning: what measuring has shown, in lines. overwritten: names of the arguments and
    buffers that a call writes into.
    """

    executable: Executable
    graph: Graph
    notes: tuple[tuple[Note, ...] | AtenStep, ...]
    trace: Trace
    reports: tuple[PassReport, ...]
    products: tuple[Product | None, ...]
    measurable: tuple[GemmSpec | None, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    tuning: tuple[str, ...] = ()
    overwritten: tuple[str, ...] = ()


def build(captured: Captured, options: Options) -> Built:
    """Compile. Raises Unsupported with `strict` when an operation would be left to PyTorch."""
    # Constants of a graph for a GPU are made there, which PyTorch asks a mode about.
    with paused(), unobserved() if captured.device == CPU else undisturbed(captured.device):
        return _build(captured, options)


def _build(captured: Captured, options: Options) -> Built:
    clock = time.perf_counter
    start = clock()
    captured = as_they_lie(captured)
    trace, reports = Trace(), list[PassReport]()
    graph = replace(captured.graph, name=options.name)
    writes = {m.output: m.input for m in captured.mutations}
    kernels: Kernels = Kernels(options.target, options.kernels)
    if captured.device != CPU:
        # What is written into arguments is made beside them, and copied.
        kernels, writes = GpuKernels(target_of(captured.device)), {}
    planned = passes(options.precision, kernels.target, options.rules, trace, options.wide, writes)
    if captured.device != CPU:
        planned += (Pass("parts", in_parts), Pass("views", views_outside))
    graph, captured = row_by_row_where_made_so(run(graph, planned, declared=captured.declared, reports=reports), captured)
    if options.strict:
        _refuse_leftovers(graph)
    graph = _laid_out(graph)
    if captured.device == CPU:
        graph = in_their_places(graph)
    rewritten = clock()
    step = passes(options.precision, kernels.target, options.rules, trace, options.wide)
    planner = _Planner(graph, captured, kernels, options.choices, lambda g: _laid_out(run(g, step)))
    plan = planner.plan()
    emitted = clock()
    if isinstance(kernels, GpuKernels):
        ptx, compiled = kernels.ptx(options.name) if plan.symbols else "", clock()
        executable: Executable = GpuExecutable(plan, ptx, captured.device, options.record)
    else:
        objects, compiled = [kernels.compiled(options.name)] if plan.symbols else [], clock()
        executable = Executable(plan, with_runner(objects, options.target))
    seconds = {
        "rewrite": rewritten - start,
        "stitch and emit": emitted - rewritten,
        "machine code": compiled - emitted,
        "load": clock() - compiled,
    }
    say(1, f"{options.name}: " + ", ".join(f"{what} {took * 1e3:.0f} ms" for what, took in seconds.items()))
    story = (tuple(planner.notes), trace, tuple(reports), tuple(planner.products), tuple(planner.measurable))
    return Built(executable, graph, *story, seconds, overwritten=tuple(graph.inputs[number].name for number in writes.values()))


def _laid_out(graph: Graph) -> Graph:
    return spread_rows(choose_layouts(graph))


def _refuse_leftovers(graph: Graph) -> None:
    for part in partition(graph)[0]:
        if isinstance(part, Extern) and isinstance(part.value.attrs, A.AtenAttrs):
            raise Unsupported(
                f"{part.value.attrs.target} has no native form: {part.value.attrs.reason}",
                part.value.origin,
                "compile without strict=True to leave it to PyTorch",
            )


def _unchanged(value: Value) -> ConstantSource:
    """A watch over numbers that are part of the code, such as quantization scales: other numbers need another compilation."""
    assert isinstance(value.attrs, A.ConstantAttrs)
    tensor = value.attrs.tensor
    then = tensor.detach().clone()

    def derive() -> torch.Tensor:
        if not _same(tensor, then):
            raise Outdated(f"{value.name or 'a scale'} changed after the model was compiled", value.origin, "compile the model again")
        return then

    return ConstantSource((tensor,), derive, f"{value.name} (compiled in)")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the numbers are the same, NaN among them."""
    same_type = one.dtype == other.dtype and one.shape == other.shape
    return same_type and bool(((one == other) | ((one != one) & (other != other))).all())


class _Planner:
    """Numbers the values that torch sees and builds the segments over them."""

    def __init__(self, graph: Graph, captured: Captured, kernels: Kernels, choices: Choices, step_passes: Passes) -> None:
        self.graph, self.captured, self.kernels, self._choices, self._step_passes = graph, captured, kernels, choices, step_passes
        self.constants = Constants()
        self.notes: list[tuple[Note, ...] | AtenStep] = []
        self.products: list[Product | None] = []
        self.measurable: list[GemmSpec | None] = []
        self._ids: dict[Value, int] = {}
        self._constant_values: dict[int, int] = {}
        self._orders = {o.index: o.order for o in captured.outputs if isinstance(o, GraphOutput) and o.order is not None}
        self._given: dict[Value, TensorType] = {}

    def plan(self) -> Plan:
        parts, constants = partition(self.graph)
        self._known_constants = set(constants)
        self._made = {v for part in parts if isinstance(part, Native) for v in part.outputs}  # row by row
        self._given = self._given_alone(parts)
        programs = {part: self._stitched(part) for part in parts if isinstance(part, Native)}
        specs = {part: specs_of(program, self.kernels.target, self._choices) for part, program in programs.items()}
        every = list(flat(spec for item in specs.values() for spec in item))
        self._expect(every)
        segments = tuple(self._native(p, programs[p], specs[p]) if isinstance(p, Native) else self._extern(p) for p in parts)
        outputs: list[Output] = [self._output(n, v) for n, v in enumerate(self.graph.outputs)]
        self.constants.sources += [_unchanged(v) for v in self.captured.baked]
        outputs += [OutputDim(o.dim) for o in self.captured.outputs if isinstance(o, SymbolicOutput)]
        return Plan(
            tuple(self._inputs()),
            tuple(outputs),
            segments,
            tuple(self.constants.sources),
            tuple(self._constant_values.items()),
            self.graph.name,
            (*self.captured.assumed, *lengths_assumed(every)),
        )

    def _stitched(self, part: Native) -> Program:
        program = stitch(part.outputs, part.inputs, part.constants)
        constants = set(part.constants)
        items = [
            recurrence_item(i.value, constants, self._step_passes) if isinstance(i, CallItem) and i.value.op == "recurrence" else i
            for i in program.items
        ]
        return replace(program, items=tuple(items))

    def _id(self, value: Value) -> int:
        return self._ids.setdefault(value, len(self._ids))

    def _visible(self, value: Value) -> int:
        """The number of a value that torch sees: also constants, which the plan hands out."""
        number = self._id(value)
        if value in self._known_constants and number not in self._constant_values:
            on_cpu = self.captured.device == CPU
            self._constant_values[number] = self.constants.number(value) if on_cpu else self.constants.as_it_lies(value)
        return number

    def _given_alone(self, parts: Sequence[Part]) -> dict[Value, TensorType]:
        """What native code makes for the caller alone, in an order of its own: the types of the caller's tensors."""
        read = {v for part in parts for v in (part.inputs if isinstance(part, Native) else part.value.inputs)}
        orders: dict[Value, set[Order | None]] = {}
        for number, value in enumerate(self.graph.outputs):
            orders.setdefault(value, set()).add(self._orders.get(number))
        found: dict[Value, TensorType] = {}
        for value, wanted in orders.items():
            order = wanted.pop()
            if order is not None and not wanted and value in self._made and value not in read:
                found[value] = TensorType(value.dtype, tuple(value.shape[axis] for axis in inverse(order)), order=order)
        return found

    def _output(self, number: int, value: Value) -> Output:
        order = self._orders.get(number)
        return OutputTensor(self._visible(value), None if order is None or value in self._given else inverse(order))

    def _inputs(self) -> list[Input]:
        result: list[Input] = []
        for spec in self.captured.inputs:
            if isinstance(spec, TensorInput):
                kind = TensorType(spec.dtype, spec.shape, order=spec.order)
                result.append(InputTensor(spec.name, kind, self._id(self.graph.inputs[spec.index])))
            elif isinstance(spec, IntInput):
                result.append(InputInt(spec.name, spec.dim))
        for state in self.captured.state:
            value = self.graph.inputs[state.index]
            result.append(InputTensor(state.name, value.tensor, self._id(value)))
        return result

    def _expect(self, specs: Sequence[Spec | None]) -> None:
        """Tells which kernels will be asked for."""
        known = [spec for spec in specs if spec is not None]
        if len(known) == len(specs):
            self.kernels.expect(known)

    def _native(self, part: Native, program: Program, specs: tuple[ItemSpec, ...]) -> Segment:
        ids = {v: self._id(v) for v in (*part.inputs, *part.outputs)}
        builder = SegmentBuilder(program, specs, self.kernels, self.constants, ids, self._given)
        segment = builder.build()
        self.notes.append(tuple(builder.notes))
        self.products += builder.products
        self.measurable += builder.measurable
        return segment

    def _shares(self, value: Value) -> bool:
        """Whether what PyTorch returns is a view of memory that is known by another name, too."""
        schema = getattr(getattr(value.attrs, "target", None), "_schema", None)
        if isinstance(value.attrs, A.AtenAttrs) and value.attrs.reason == VIEW:
            return False
        if schema is None or all(result.alias_info is None for result in schema.returns):
            return False
        return not all(v.op in ("aten", "get") and len(self.graph.users[v]) == 1 and not self.graph.is_output(v) for v in value.inputs)

    def _extern(self, part: Extern) -> AtenStep:
        attrs = part.value.attrs
        assert isinstance(attrs, A.AtenAttrs)
        operands = tuple(self._visible(v) for v in part.value.inputs)
        several = not isinstance(part.value.type, TensorType)
        results: Sequence[int | None] = [self._id(part.value)]
        if not isinstance(part.value.type, TensorType):
            taken = {u.attrs.index: u for u in part.elements if isinstance(u.attrs, A.GetAttrs)}
            results = [self._id(taken[n]) if n in taken else None for n in range(len(part.value.type.elements))]
        dense = tuple(n for n in attrs.dense if part.value.inputs[n] not in self._made)
        shares = self._shares(part.value)
        step = AtenStep(attrs.target, attrs.args, attrs.kwargs, operands, tuple(results), attrs.reason, several, shares, dense)
        self.notes.append(step)
        name = site_of(part.value.origin)
        self.products.append(Product(name, str(attrs.target)) if name else None)
        self.measurable.append(None)
        return step
