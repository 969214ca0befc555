"""The plan: what a compiled model does on every call, as data. `docs/decisions/0001-plan-as-data.md` says why.

A plan is a list of segments over *values*, which are torch tensors with a number. A native segment is a table of steps that one
native function runs; everything inside it lives in the arena. An ATen step is one call of a PyTorch operation. Sizes are
expressions (`Dim`) over the symbols that the shapes of the inputs define.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from ..cpu_codegen.contract import DimSlot, KernelCode
from ..graph.attrs import Slot
from ..graph.dims import Dim, Poly
from ..graph.symbols import Assumed
from ..graph.types import DType, Order, TensorType

BufferKind = Literal["input", "output", "constant", "arena"]


@dataclass(frozen=True)
class Buffer:
    """Memory that steps read or write.

    `index`: position among the segment's inputs or outputs, or in the plan's constants; of no meaning for the arena, where the
    buffer's place is found from its life. `nbytes` is its size.
    """

    kind: BufferKind
    index: int
    nbytes: Dim
    dtype: DType
    label: str = ""


@dataclass(frozen=True)
class Operand:
    """Part of a buffer: buffer number in the segment, and the byte where the part starts.

    In a repeated step it is the part of the first turn. `later`: that of the second turn where it is not the same buffer `stride` bytes on;
    each turn after that reads or writes `stride` bytes on from the one before.
    """

    buffer: int
    offset: Dim = 0
    stride: Dim = 0
    later: Operand | None = None

    @property
    def places(self) -> tuple[Operand, ...]:
        """The part of the first turn, and that of the second if it is another."""
        if self.later is None and self.stride == 0:
            return (self,)
        return self, self.later or Operand(self.buffer, self.offset + self.stride)

    def at(self, offset: Dim) -> Operand:
        """What lies so many bytes on, in every turn."""
        return replace(self, offset=self.offset + offset, later=None if self.later is None else self.later.at(offset))


@dataclass(frozen=True)
class Step:
    """One kernel on its operands: `BufferSlot(i)` of `kernel.slots` is `operands[i]`.

    `writes`: numbers of the operands that are written. `reuses`: pairs (written operand, read operand) that may be the same
    memory, for kernels that read every element before they write it. `alternative`: the same work cut along another domain,
    used when that gives the threads more even shares; it has the same operands. `large`: the same kernel for results of
    `large_from` bytes and more, which it stores around the caches.
    """

    kernel: KernelCode
    operands: tuple[Operand, ...]
    writes: tuple[int, ...]
    label: str = ""
    alternative: KernelCode | None = None
    reuses: tuple[tuple[int, int], ...] = ()
    large: KernelCode | None = None
    large_from: int = 0

    @property
    def variants(self) -> tuple[KernelCode, ...]:
        return tuple(code for code in (self.kernel, self.alternative, self.large) if code is not None)


@dataclass(frozen=True)
class Repeat:
    """Steps [first, end) run `times` times, at least once, before the step after them."""

    first: int
    end: int
    times: Dim


@dataclass(frozen=True)
class SegmentOutput:
    """A value that a native segment makes: a tensor allocated for the call, dense in the order of its type; or the segment's input number
    `updates`, which steps write into."""

    value: int
    type: TensorType
    updates: int | None = None


@dataclass(frozen=True)
class NativeSegment:
    """Steps in order of execution, some of them repeated. `inputs` are values: row-major tensors (others are copied first)."""

    inputs: tuple[int, ...]
    outputs: tuple[SegmentOutput, ...]
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    repeats: tuple[Repeat, ...] = ()

    def repeat(self, at: int) -> Repeat | None:
        """What step `at` is repeated by."""
        return next((r for r in self.repeats if r.first <= at < r.end), None)

    @cached_property
    def spans(self) -> dict[int, tuple[int, int, int | None]]:
        """For each arena buffer that is used the first and the last step that touch it, and which buffer's memory it may take over, by
        the position of that one in this dict."""
        spans: dict[int, tuple[int, int]] = {}
        takes: dict[int, int] = {}
        for at, step in enumerate(self.steps):
            repeat = self.repeat(at)  # the first turn meets what the last one leaves
            first, last = (at, at) if repeat is None else (repeat.first, repeat.end - 1)
            for buffer in (place.buffer for operand in step.operands for place in operand.places):
                if self.buffers[buffer].kind == "arena":
                    spans[buffer] = spans.get(buffer, (first, last))[0], last
            takes.update(self._reuses(step) if repeat is None else {})
        order = {buffer: position for position, buffer in enumerate(spans)}
        return {buffer: (*span, order.get(takes.get(buffer, -1))) for buffer, span in spans.items()}

    def _reuses(self, step: Step) -> dict[int, int]:
        """Buffers that a step writes in place of one that it reads."""
        found: dict[int, int] = {}
        for written, read in step.reuses:
            target, source = step.operands[written], step.operands[read]
            # Only whole buffers, and a source that this step reads once: other operands may be read at other places.
            readers = [o for o in step.operands if o.buffer == source.buffer]
            whole = target.offset == 0 and source.offset == 0 and len(readers) == 1
            if whole and self.buffers[source.buffer].kind == "arena" == self.buffers[target.buffer].kind:
                found.setdefault(target.buffer, source.buffer)
        return found


@dataclass(frozen=True, eq=False)
class AtenStep:
    """One PyTorch operation on values. `args` and `kwargs` are as in the call, with `graph.attrs.Slot(i)` where `operands[i]`
    goes and a Dim where an integer depends on the shapes.

    `results`: the values it makes; more than one, or None among them, for an operation that returns a tuple or list.
    `copies`: it gives a view of memory that others read or write, so that its results are copied. `dense`: numbers of the operands
    that are made row-major first, where they are not.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operands: tuple[int, ...]
    results: tuple[int | None, ...]
    reason: str = ""
    several: bool = False
    copies: bool = False
    dense: tuple[int, ...] = ()

    @cached_property
    def filled(self) -> tuple[bool, ...]:
        """For each of `args` whether it differs from call to call: it holds slots or expressions."""
        return tuple(any(isinstance(leaf, (Slot, Poly)) for leaf in tree_leaves(item)) for item in self.args)


Segment = NativeSegment | AtenStep


@dataclass(frozen=True, eq=False)
class ConstantSource:
    """A constant and where it comes from: `derive()` makes it (packed, cast, quantized) from the `watched` tensors.

    It is derived again when a watched tensor was changed in place, as far as `constants.py` notices, or got other storage. dense: it is
    made row-major; else it stays as it lies.
    """

    watched: tuple[torch.Tensor, ...]
    derive: Callable[[], torch.Tensor]
    label: str = ""
    dense: bool = True


@dataclass(frozen=True)
class InputTensor:
    """Argument of the call that is a tensor. It becomes value `value`; one of a type with an order becomes the row-major tensor of its axes
    in that order, copied where it does not lie so."""

    label: str
    type: TensorType
    value: int


@dataclass(frozen=True)
class InputInt:
    """Argument of the call that is a Python int: the value of `dim`."""

    label: str
    dim: Dim


@dataclass(frozen=True)
class OutputTensor:
    """Result of the call: a value. order: which axis of the result each of the value's axes is, None where they are the same."""

    value: int
    order: Order | None = None


@dataclass(frozen=True)
class OutputDim:
    """Result of the call: a Python int."""

    dim: Dim


Input = InputTensor | InputInt
Output = OutputTensor | OutputDim


@dataclass(frozen=True, eq=False)
class Plan:
    """A compiled model without its code. `constant_values`: pairs (value, constant) for constants that ATen steps read or
    that are returned. `assumed`: what must hold of the sizes of a call, and the symbols that are computed from them."""

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    segments: tuple[Segment, ...]
    constants: tuple[ConstantSource, ...] = ()
    constant_values: tuple[tuple[int, int], ...] = ()
    name: str = "plan"
    assumed: tuple[Assumed, ...] = ()

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """Names of all kernels, each once, in order of first use."""
        native = (segment for segment in self.segments if isinstance(segment, NativeSegment))
        return tuple(dict.fromkeys(code.symbol for segment in native for step in segment.steps for code in step.variants))

    @property
    def places(self) -> Iterator[tuple[str, Dim]]:
        """The sizes of the inputs, and other numbers among them, and what they are called."""
        for position, item in enumerate(self.inputs):
            name = item.label or f"argument {position}"
            if isinstance(item, InputTensor):
                yield from ((f"{name}.shape[{axis}]", dim) for axis, dim in enumerate(item.type.shape))
            else:
                yield name, item.dim

    @property
    def sizes(self) -> Iterator[Dim]:
        """Every size of the inputs, and other number among them, that differs from call to call, each once."""
        return (dim for dim in dict.fromkeys(dim for _, dim in self.places) if not isinstance(dim, int))

    @cached_property
    def dims(self) -> tuple[Dim, ...]:
        """Every expression whose number the plan needs, each once; plain ints are left out."""
        found: dict[Dim, None] = dict.fromkeys(_dims(self))
        return tuple(dim for dim in found if not isinstance(dim, int))


def _dims(plan: Plan) -> Iterator[Dim]:
    yield from plan.sizes
    yield from (item.dim for item in plan.outputs if isinstance(item, OutputDim))
    for segment in plan.segments:
        yield from _native_dims(segment) if isinstance(segment, NativeSegment) else template_dims((segment.args, segment.kwargs))


def _native_dims(segment: NativeSegment) -> Iterator[Dim]:
    for output in segment.outputs:
        yield from output.type.shape
        yield from output.type.strides
    yield from (buffer.nbytes for buffer in segment.buffers)
    yield from (repeat.times for repeat in segment.repeats)
    for step in segment.steps:
        yield from (dim for operand in step.operands for place in operand.places for dim in (place.offset, place.stride))
        for code in step.variants:
            yield from (code.domain, code.work)
            yield from (slot.dim for slot in code.slots if isinstance(slot, DimSlot))


def template_dims(item: Any) -> Iterator[Dim]:
    """The expressions in the arguments of an ATen step."""
    if isinstance(item, (tuple, list)):
        for part in item:
            yield from template_dims(part)
    elif isinstance(item, Poly):
        yield item
