"""What stitching gives the code generators: kernels in execution order and the values that need memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..graph.dims import Dim
from ..graph.ir import Value
from .loops import Body, LoopKernel


def _loaded(body: Body, operands: tuple[Value, ...]) -> tuple[Value, ...]:
    return tuple(operands[node.buffer] for node in body.nodes if node.op == "load")


@dataclass(frozen=True, eq=False)
class LoopItem:
    """A stitched kernel. `operands[i]` is the value in buffer i of the kernel's body; `writes` are those it computes."""

    kernel: LoopKernel
    operands: tuple[Value, ...]
    writes: tuple[Value, ...]
    fused: tuple[Value, ...]  # everything that is evaluated inside, for explain()

    @property
    def reads(self) -> tuple[Value, ...]:
        return _loaded(self.kernel.body, self.operands)


@dataclass(frozen=True, eq=False)
class Strided:
    """An operand of a contraction: element (i0, i1, ...) lies at offset + sum(i * stride) of the buffer of `value`."""

    value: Value
    offset: Dim
    strides: tuple[Dim, ...]


@dataclass(frozen=True, eq=False)
class ContractionItem:
    """A contraction with what is fused into it.

    `pointers`: the operands it reads itself. `epilogue`: loop IR over (r, c) of the result with an `acc` node; for attention it is the
    body that turns a score (acc, r = (b, h, i) row-major, c = key) into the value that softmax sees, its single store going nowhere.
    `operands`/`writes` are those of the epilogue's buffers. `result`: of attention, what its single store stores of its result (acc),
    if it is quantized.
    """

    anchor: Value
    pointers: tuple[Strided, ...]
    epilogue: Body
    params: tuple[float, ...]
    operands: tuple[Value, ...]
    writes: tuple[Value, ...]
    fused: tuple[Value, ...]
    result: Body | None = None

    @property
    def reads(self) -> tuple[Value, ...]:
        return (*(pointer.value for pointer in self.pointers), *_loaded(self.epilogue, self.operands))


@dataclass(frozen=True, eq=False)
class _WholeItem:
    """One operation on the buffers of its operands."""

    value: Value

    @property
    def writes(self) -> tuple[Value, ...]:
        return (self.value,)

    @property
    def reads(self) -> tuple[Value, ...]:
        return self.value.inputs


@dataclass(frozen=True, eq=False)
class CallItem(_WholeItem):
    """What a kernel of its own computes as a whole, the user's or that of an `argsort`: its operands are the buffers of `value.inputs`,
    then that of `value`, all dense and row-major."""


@dataclass(frozen=True, eq=False)
class RecurrenceItem(_WholeItem):
    """A recurrence: `step` is run once for each step in time. Its inputs, in order, are what the operands of `value` are in a step, but for
    those that are constant; `state` is what it computes, the state after the step."""

    step: Program
    state: Value


Item = LoopItem | ContractionItem | CallItem | RecurrenceItem


@dataclass(frozen=True, eq=False)
class Program:
    """One native segment: items in execution order; `stored` are the values that have buffers besides inputs and constants."""

    items: tuple[Item, ...]
    inputs: tuple[Value, ...]
    constants: tuple[Value, ...]
    outputs: tuple[Value, ...]
    stored: tuple[Value, ...] = field(default=())
