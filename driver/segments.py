"""Native segments: what the items of a stitched program are computed by, and the steps that call the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from ..cpu_codegen.streams import holds_up
from ..graph import attrs as A
from ..graph.dims import Dim, product
from ..graph.ir import Value
from ..graph.sites import site_of
from ..graph.types import TensorType, i8
from ..graph.updates import IN_PLACE
from ..kernels import table
from ..kernels.attention_spec import AttentionSpec
from ..kernels.sorting import PLACES, WORKSPACE, SortSpec
from ..kernels.spec import GemmSpec
from ..runtime.plan import Buffer, ConstantSource, NativeSegment, Operand, Repeat, SegmentOutput, Step
from ..stitch.constants import compute, watched_tensors
from ..stitch.loops import LoopKernel, in_place
from ..stitch.program import CallItem, ContractionItem, Item, LoopItem, Program, RecurrenceItem
from .grouped import Blocks, blocks_of
from .kernels import Kernels
from .specs import ItemSpec, StepSpecs, beyond, unchosen

Refusals = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Note:
    """What explain() says of one step: the operations behind it and their place, the kernel, and why no earlier row took it. turns: how
    often it runs."""

    label: str
    kernel: str
    ops: tuple[str, ...]
    origin: str
    refusals: Refusals = ()
    turns: Dim = 1


@dataclass(frozen=True)
class Product:
    """What one step computes of a product that has a name: whose, and by which kernel."""

    name: str
    kernel: str


def product_of(note: Note) -> Product | None:
    """The product that a note is about, if it has a name."""
    name = site_of(note.origin)
    return Product(name, note.kernel) if name else None


@dataclass
class Constants:
    """The plan's constants: plain values of constant expressions, and packed weights."""

    sources: list[ConstantSource] = field(default_factory=list)
    _known: dict[tuple[tuple[Value, ...], str], int] = field(default_factory=dict)

    def number(self, value: Value) -> int:
        """Position in the plan's constants of a constant expression."""
        return self._number((value,), torch.Tensor.contiguous, "")

    def as_it_lies(self, value: Value) -> int:
        """The same where the constant may be a view of a weight."""
        return self._number((value,), torch.Tensor.detach, "as it lies", dense=False)

    def packed(self, values: tuple[Value, ...], kernel: table.Kernel, blocks: Blocks | None = None) -> int:
        """The same of a weight, or of one and its group scales, packed for the kernel of a contraction. blocks: how it is cut before."""
        if blocks is None:
            return self._number(values, kernel.pack, kernel.name)
        cut = blocks

        def pack(weight: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
            return torch.cat([kernel.pack(*each) for each in zip(cut.of(weight, kernel.narrow), *(s.chunk(cut.count) for s in scales))])

        return self._number(values, pack, f"{kernel.name} {blocks}")

    def _number(self, values: tuple[Value, ...], derive: Callable[..., torch.Tensor], form: str, dense: bool = True) -> int:
        if (values, form) not in self._known:
            self._known[values, form] = len(self.sources)
            watched = tuple(tensor for value in values for tensor in watched_tensors(value))
            label = f"{values[0].name or values[0].op} {form}".strip()
            self.sources.append(ConstantSource(watched, lambda: derive(*map(compute, values)), label, dense))
        return self._known[values, form]


class SegmentBuilder:
    """Builds the plan of one native segment. specs: `specs_of` its program. given: the caller's types of results that lie in an order of
    their own."""

    def __init__(
        self, program: Program, specs: tuple[ItemSpec, ...], kernels: Kernels, constants: Constants, ids: Mapping[Value, int],
        given: Mapping[Value, TensorType],
    ) -> None:
        self.program, self.specs, self.kernels, self.constants, self.ids = program, specs, kernels, constants, ids
        self._given = given
        self.buffers: list[Buffer] = []
        self.numbers: dict[Value, int] = {}
        self.steps: list[Step] = []
        self.repeats: list[Repeat] = []
        self.notes: list[Note] = []
        self.products: list[Product | None] = []  # of every step
        self.measurable: list[GemmSpec | None] = []  # likewise: what a choice about it would be for
        self._constant_values = set(program.constants)
        self._packed: dict[int, int] = {}
        self._turns: Dim = 1  # of the steps that are being built
        self._parts: dict[Value, Operand] = {}  # of a repeated step: what lies in part of a buffer
        outputs = {v: n for n, v in enumerate(program.outputs)}
        self._updates = self._shared(outputs)
        for n, value in enumerate(program.inputs):
            if value not in self.numbers:
                self._add(value, "input", n)
        for value in program.stored:
            if value not in self.numbers:
                self._add(value, "output" if value in outputs else "arena", outputs.get(value, 0))

    def _shared(self, outputs: Mapping[Value, int]) -> dict[int, int]:
        """Gives all values that are one piece of memory, written by one put after another or joined, one buffer. Returns the inputs that
        outputs are written over."""
        stored, under, pieces = set(self.program.stored), dict[Value, Value](), dict[Value, list[Value]]()

        def lowest(value: Value) -> Value:
            while value in under:
                value = under[value]
            return value

        for value in self.program.stored:
            if value.op in IN_PLACE:
                under[value] = lowest(value.inputs[0])
            if value.op == "joined":
                under.update((lowest(part), under[value]) for part in value.inputs[1:])
        for value in self.program.stored:
            pieces.setdefault(lowest(value), []).append(value)
        updates: dict[int, int] = {}
        for base, values in pieces.items():
            given = [outputs[v] for v in values if v in outputs]
            if base in stored and len(values) == 1:
                continue
            number = self._buffer("output" if given else "arena", given[0] if given else 0, base.tensor.nbytes, base)
            self.numbers.update(dict.fromkeys((base, *values), number))
            if base not in stored:
                updates[given[0]] = self.program.inputs.index(base)
        return updates

    def build(self) -> NativeSegment:
        for item, spec in zip(self.program.items, self.specs, strict=True):
            self._item(item, spec)
        made = enumerate(self.program.outputs)
        outputs = tuple(SegmentOutput(self.ids[v], self._given.get(v, v.tensor), self._updates.get(n)) for n, v in made)
        return NativeSegment(tuple(self.ids[v] for v in self.program.inputs), outputs, tuple(self.buffers), tuple(self.steps),
                             repeats=tuple(self.repeats))

    def _item(self, item: Item, spec: ItemSpec) -> None:
        if isinstance(item, RecurrenceItem):
            assert isinstance(spec, StepSpecs)
            self._recurrence(item, spec)
            return
        made = self._steps(item, spec)
        self.steps += made
        self.products += [None if isinstance(item, LoopItem) else product_of(self.notes[-1])] * len(made)
        self.measurable += [unchosen(spec) if isinstance(spec, GemmSpec) and not spec.routed else None] * len(made)

    def _recurrence(self, item: RecurrenceItem, specs: StepSpecs) -> None:
        """The steps of one step in time, with operands that move through `x` and the states."""
        value, step = item.value, item.step
        assert isinstance(value.attrs, A.RecurrenceAttrs)
        times, way = value.shape[0], -1 if value.attrs.reverse else 1
        x, state, result = (self._operand(v) for v in (*value.inputs[:2], value))

        def walk(start: Operand, each: Value) -> Operand:
            nbytes = product(each.shape[1:]) * each.dtype.bytes
            return replace(start, offset=(times - 1) * nbytes if way < 0 else 0, stride=way * nbytes)

        states = walk(result, value)
        others = [self._operand(v) for v in value.inputs[2:] if v not in self._constant_values]
        first = [walk(x, value.inputs[0]), replace(state, stride=states.stride, later=states), *others]
        self._parts = dict(zip(step.inputs, first))
        for stored in step.stored:
            if stored is item.state:
                self._parts[stored] = states
            else:
                self._add(stored, "arena", 0)
        self._constant_values |= set(step.constants)
        begin, self._turns = len(self.steps), times
        for each, spec in zip(step.items, specs.items, strict=True):
            self._item(each, spec)
        self._turns = 1
        self.repeats.append(Repeat(begin, len(self.steps), times))

    def _steps(self, item: LoopItem | ContractionItem | CallItem, spec: ItemSpec) -> list[Step]:
        if isinstance(item, LoopItem):
            assert isinstance(spec, tuple)
            return self._loop(item, *spec)
        if isinstance(item, CallItem):
            return self._sort(item, spec) if isinstance(spec, SortSpec) else self._call(item)
        if isinstance(spec, AttentionSpec):
            return self._attention(item, spec)
        assert isinstance(spec, GemmSpec)
        return self._gemm(item, spec)

    def _call(self, item: CallItem) -> list[Step]:
        code = self.kernels.call(item.value)
        operands = tuple(self._operand(v) for v in (*item.value.inputs, item.value))
        note = self._note(item.value, (item.value,), code.symbol)
        return [Step(code, operands, (len(operands) - 1,), note.label)]

    def _sort(self, item: CallItem, spec: SortSpec) -> list[Step]:
        code = self.kernels.sort(spec)
        scratch = Operand(self._scratch(spec.workspace_bytes, item.value))
        note = self._note(item.value, (item.value,), code.symbol)
        return [Step(code, (self._operand(item.value.inputs[0]), self._operand(item.value), scratch), (PLACES, WORKSPACE), note.label)]

    def _add(self, value: Value, kind: str, index: int) -> int:
        self.numbers[value] = self._buffer(kind, index, value.tensor.nbytes, value)
        return self.numbers[value]

    def _buffer(self, kind: str, index: int, nbytes: Dim, value: Value) -> int:
        self.buffers.append(Buffer(kind, index, nbytes, value.dtype, value.name or value.op))  # type: ignore[arg-type]
        return len(self.buffers) - 1

    def _operand(self, value: Value, offset: Dim = 0) -> Operand:
        if value in self._parts:
            return self._parts[value].at(offset)
        number = self.numbers.get(value)
        if number is None:
            assert value in self._constant_values, f"{value} has no memory"
            number = self._add(value, "constant", self.constants.number(value))
        return Operand(number, offset)

    def _loop(self, item: LoopItem, usual: LoopKernel, around: LoopKernel) -> list[Step]:
        code, large = self.kernels.loop(usual), self.kernels.loop(around)
        operands = tuple(self._operand(v) for v in item.operands)
        writes = tuple(n for n, v in enumerate(item.operands) if v in item.writes)
        note = self._note(item.writes[-1], item.fused, code.symbol)
        apart = any(v.op == "put" for v in item.writes) or holds_up(self.kernels.target, item.kernel)
        reuses = () if apart else in_place(item.kernel.body)
        large_from = max(beyond(item, value, self.kernels.target) for value in item.writes)
        return [Step(code, operands, writes, note.label, reuses=reuses, large=None if large == code else large, large_from=large_from)]

    def _gemm(self, item: ContractionItem, spec: GemmSpec) -> list[Step]:
        code, selection = self.kernels.gemm(spec)
        lhs, rhs = item.pointers
        note = self._note(item.anchor, (item.anchor, *item.fused), selection.kernel.name, selection.refusals)
        steps: list[Step] = []
        left = self._operand(lhs.value, lhs.offset * lhs.value.dtype.bytes)
        if spec.constant_rhs:
            weight = (item.anchor.inputs[1], *item.anchor.inputs[3:]) if spec.routed else (rhs.value, *item.anchor.inputs[2:])
            constant = self.constants.packed(weight, selection.kernel, blocks_of(item, True))
            if constant not in self._packed:
                self._packed[constant] = self._buffer("constant", constant, code.packed_bytes, rhs.value)
            right = Operand(self._packed[constant])
        else:
            right = self._operand(rhs.value, rhs.offset * rhs.value.dtype.bytes)
            if code.pack is not None:
                packed = Operand(self._scratch(code.packed_bytes, item.anchor))
                steps.append(Step(code.pack, (right, packed), (1,), f"{note.label} (pack)"))
                right = packed
        operands = [left, right, *(self._operand(v) for v in item.operands)]
        if spec.routed:
            operands.append(self._operand(item.anchor.inputs[2]))
        reuses = tuple((2 + written, 2 + read) for written, read in in_place(item.epilogue))
        writes = [2 + n for n, v in enumerate(item.operands) if v in item.writes]
        if code.workspace_bytes != 0:
            writes.append(len(operands))
            operands.append(Operand(self._scratch(code.workspace_bytes, item.anchor)))
        steps.append(Step(code.rows, tuple(operands), tuple(writes), note.label, code.columns, reuses))
        return steps

    def _attention(self, item: ContractionItem, spec: AttentionSpec) -> list[Step]:
        code, selection = self.kernels.attention(spec)
        more = () if item.result is None else ("quantize",)
        note = self._note(item.anchor, (item.anchor, *item.fused), selection.kernel.name, selection.refusals, more)
        pointers = tuple(self._operand(p.value) for p in item.pointers)
        workspace = Operand(self._scratch(code.workspace_bytes if code.workspace_bytes != 0 else 64, item.anchor))
        operands = (*pointers, self._operand(item.anchor), workspace, *(self._operand(v) for v in item.operands))
        steps = []
        if code.pack is not None:
            steps.append(Step(code.pack, operands, (4,), f"{note.label} (pack)"))
        return [*steps, Step(code.run, operands, (3,) if code.pack is not None else (3, 4), note.label)]

    def _scratch(self, nbytes: Dim, value: Value) -> int:
        self.buffers.append(Buffer("arena", 0, nbytes, i8, f"{value.op} scratch"))
        return len(self.buffers) - 1

    def _note(self, value: Value, fused: tuple[Value, ...], kernel: str, refusals: Refusals = (), more: tuple[str, ...] = ()) -> Note:
        ops = tuple(dict.fromkeys(v.op for v in fused if v.op not in ("full", "reshape", "expand", "permute", "window"))) + more
        note = Note(" + ".join(ops) or value.op, kernel, ops, value.origin, refusals, self._turns)
        self.notes.append(note)
        return note
