"""Between segments: values by number, ATen steps, and what a native segment demands of the tensors it is given."""

from __future__ import annotations

from typing import Any

import torch

from ..diagnostics.errors import InvalidGraph
from ..diagnostics.surroundings import CPU
from ..graph.attrs import Slot
from ..graph.dims import Poly
from .plan import AtenStep, Buffer, InputTensor, NativeSegment, OutputTensor, Plan
from .records import Numbers, number

Values = dict[int, torch.Tensor]


def run_aten(step: AtenStep, values: Values, numbers: Numbers) -> None:
    """Calls the operation and puts its results into `values`. Exceptions of the operation pass through."""
    operands = [values[value] for value in step.operands]
    for n in step.dense:
        operands[n] = operands[n].contiguous()
    arguments = [
        operands[item.index] if type(item) is Slot else fill(item, operands, numbers) if filled else item
        for item, filled in zip(step.args, step.filled)
    ]
    if step.kwargs:
        result = step.target(*arguments, **{name: fill(item, operands, numbers) for name, item in step.kwargs})
    else:
        result = step.target(*arguments)
    for value, tensor in zip(step.results, result if step.several else (result,), strict=True):
        if value is not None:
            values[value] = tensor.clone() if step.copies else tensor


def fill(template: Any, operands: list[torch.Tensor], numbers: Numbers) -> Any:
    """The arguments of one call: slots become operands, expressions become ints."""
    if isinstance(template, Slot):
        return operands[template.index]
    if isinstance(template, (list, tuple)):
        return type(template)([fill(item, operands, numbers) for item in template])
    return numbers[template] if isinstance(template, Poly) else template


def take_inputs(
    segment: NativeSegment, values: Values, doubtful: tuple[Buffer, ...], numbers: Numbers, device: torch.device = CPU
) -> list[torch.Tensor]:
    """The segment's inputs, row-major. `doubtful`: buffers of inputs that ATen made.

    Kernels take size and type on trust, so these are checked here: InvalidGraph when one is not what the kernels were compiled for. Floats
    of another width are converted: PyTorch itself tells of some results that they are f32 and makes bf16 (statistics of norms).
    """
    held = [values[value].contiguous() for value in segment.inputs]
    for buffer in doubtful:
        tensor = held[buffer.index].resolve_neg()
        if tensor.is_floating_point() and buffer.dtype.is_float:
            tensor = tensor.to(buffer.dtype.torch)
        held[buffer.index] = tensor
        if tensor.dtype is not buffer.dtype.torch or tensor.nbytes < number(numbers, buffer.nbytes) or tensor.device != device:
            expected = f"{number(numbers, buffer.nbytes)} bytes of {buffer.dtype}"
            what = f"{buffer.label or 'a value'} is {tensor.dtype}{list(tensor.shape)}, expected {expected}"
            raise InvalidGraph(what, "between segments")
    return held


def untrusted(plan: Plan) -> tuple[tuple[Buffer, ...], ...]:
    """For each segment, the buffers of inputs that an ATen step made or that are constants; none for ATen steps."""
    native = [segment for segment in plan.segments if isinstance(segment, NativeSegment)]
    trusted = {output.value for segment in native for output in segment.outputs}
    trusted |= {item.value for item in plan.inputs if isinstance(item, InputTensor)}

    def doubtful(segment: NativeSegment) -> tuple[Buffer, ...]:
        return tuple(b for b in segment.buffers if b.kind == "input" and segment.inputs[b.index] not in trusted)

    return tuple(doubtful(segment) if isinstance(segment, NativeSegment) else () for segment in plan.segments)


def written(plan: Plan) -> frozenset[int]:
    """Positions of the arguments that segments write into."""
    positions = {item.value: position for position, item in enumerate(plan.inputs) if isinstance(item, InputTensor)}
    memory: dict[int, int] = {}  # of values that are others, written over
    for segment in (s for s in plan.segments if isinstance(s, NativeSegment)):
        for output in segment.outputs:
            if output.updates is not None:
                source = segment.inputs[output.updates]
                memory[output.value] = memory.get(source, source)
    return frozenset(positions[value] for value in memory.values() if value in positions)


def touched(plan: Plan) -> frozenset[int]:
    """Positions of the arguments that a call reads or writes into."""
    used = {output.value for output in plan.outputs if isinstance(output, OutputTensor)}
    for segment in plan.segments:
        used.update(segment.inputs if isinstance(segment, NativeSegment) else segment.operands)
    return frozenset(n for n, item in enumerate(plan.inputs) if isinstance(item, InputTensor) and item.value in used)


def last_uses(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """For each segment, the values that nothing needs after it."""
    needed = {output.value for output in plan.outputs if isinstance(output, OutputTensor)}
    result: list[tuple[int, ...]] = []
    for segment in reversed(plan.segments):
        if isinstance(segment, NativeSegment):
            touched = [*segment.inputs, *(output.value for output in segment.outputs)]
        else:
            touched = [*segment.operands, *(value for value in segment.results if value is not None)]
        result.append(tuple(dict.fromkeys(value for value in touched if value not in needed)))
        needed.update(touched)
    return tuple(reversed(result))
