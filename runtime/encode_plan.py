"""The classes of `plan.py` as JSON and back; `graph/encode.py` and `cpu_codegen/encode.py` have their parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import torch

from ..cpu_codegen.encode import kernel_from, kernel_json
from ..diagnostics.errors import ArtifactError
from ..graph.encode import (
    Json,
    dim_from,
    dim_json,
    ints,
    order_from,
    target_from,
    target_json,
    template_from,
    template_json,
    type_from,
    type_json,
)
from ..graph.floats import Definition, Tree, function
from ..graph.symbols import Assumed, Assumption
from ..graph.types import BY_NAME
from .plan import (
    AtenStep,
    Buffer,
    BufferKind,
    ConstantSource,
    Input,
    InputInt,
    InputTensor,
    NativeSegment,
    Operand,
    Output,
    OutputDim,
    OutputTensor,
    Plan,
    Repeat,
    Segment,
    SegmentOutput,
    Step,
)


def plan_json(plan: Plan) -> Json:
    """Everything but the constants' tensors; of these the labels. Unsupported when an ATen step has no form in a file."""
    return {
        "name": plan.name,
        "inputs": [_input_json(item) for item in plan.inputs],
        "outputs": [_output_json(item) for item in plan.outputs],
        "segments": [_segment_json(segment) for segment in plan.segments],
        "constants": [source.label for source in plan.constants],
        "constant_values": plan.constant_values,
        "assumed": [_assumed_json(each) for each in plan.assumed],
    }


def plan_from(data: Json, constants: Sequence[torch.Tensor]) -> Plan:
    """The plan of `plan_json`, its constants the given tensors. Raises what malformed data makes Python raise."""
    sources = tuple(ConstantSource((), _giver(tensor), str(label)) for tensor, label in zip(constants, data["constants"], strict=True))
    return Plan(
        tuple(map(_input_from, data["inputs"])),
        tuple(map(_output_from, data["outputs"])),
        tuple(map(_segment_from, data["segments"])),
        sources,
        tuple((int(value), int(constant)) for value, constant in data["constant_values"]),
        str(data["name"]),
        tuple(map(_assumed_from, data.get("assumed", ()))),  # none before version 4
    )


def _assumed_json(item: Assumed) -> Json:
    if isinstance(item, Assumption):
        return [dim_json(item.dim), item.relation]
    return {"name": item.name, "low": item.low, "high": item.high, "tree": _tree_json(item.tree)}


def _assumed_from(data: Json) -> Assumed:
    if isinstance(data, list):
        return Assumption(dim_from(data[0]), str(data[1]))
    high = data["high"]
    return Definition(str(data["name"]), _tree_from(data["tree"]), int(data["low"]), None if high is None else int(high))


def _tree_json(tree: Tree) -> Json:
    kind, *rest = tree
    if kind == "dim":
        return [kind, dim_json(rest[0])]
    return [kind, *(rest if kind == "number" else map(_tree_json, rest))]


def _tree_from(data: Json) -> Tree:
    kind, *rest = data
    if kind == "dim":
        return (kind, dim_from(rest[0]))
    return (kind, float(rest[0])) if kind == "number" else (function(kind), *map(_tree_from, rest))


def _giver(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


def _input_json(item: Input) -> Json:
    if isinstance(item, InputTensor):
        return {"label": item.label, "type": type_json(item.type), "value": item.value}
    return {"label": item.label, "dim": dim_json(item.dim)}


def _input_from(data: Json) -> Input:
    if "type" in data:
        return InputTensor(str(data["label"]), type_from(data["type"]), int(data["value"]))
    return InputInt(str(data["label"]), dim_from(data["dim"]))


def _output_json(item: Output) -> Json:
    return {"dim": dim_json(item.dim)} if isinstance(item, OutputDim) else {"value": item.value, "order": item.order}


def _output_from(data: Json) -> Output:
    if "dim" in data:
        return OutputDim(dim_from(data["dim"]))
    return OutputTensor(int(data["value"]), order_from(data.get("order")))  # none before version 6


def _segment_json(segment: Segment) -> Json:
    if isinstance(segment, AtenStep):
        return {
            "target": target_json(segment.target),
            "args": template_json(segment.args),
            "kwargs": [[name, template_json(item)] for name, item in segment.kwargs],
            "operands": segment.operands, "results": segment.results, "reason": segment.reason, "several": segment.several,
            "copies": segment.copies, "dense": segment.dense,
        }
    return {
        "inputs": segment.inputs,
        "outputs": [{"value": output.value, "type": type_json(output.type), "updates": output.updates} for output in segment.outputs],
        "buffers": [_buffer_json(buffer) for buffer in segment.buffers],
        "steps": [_step_json(step) for step in segment.steps],
        "repeats": [[repeat.first, repeat.end, dim_json(repeat.times)] for repeat in segment.repeats],
    }


def _segment_output_from(data: Json) -> SegmentOutput:
    updates = data.get("updates")  # files of version 1 have none
    return SegmentOutput(int(data["value"]), type_from(data["type"]), None if updates is None else int(updates))


def _segment_from(data: Json) -> Segment:
    if "target" in data:
        results = tuple(None if value is None else int(value) for value in data["results"])
        kwargs = tuple((str(name), template_from(item)) for name, item in data["kwargs"])
        target, args = target_from(str(data["target"])), template_from(data["args"])
        several, copies = bool(data["several"]), bool(data.get("copies"))  # none before version 5
        dense = ints(data.get("dense", ()))  # none before version 8
        return AtenStep(target, args, kwargs, ints(data["operands"]), results, str(data["reason"]), several, copies, dense)
    return NativeSegment(
        ints(data["inputs"]),
        tuple(map(_segment_output_from, data["outputs"])),
        tuple(map(_buffer_from, data["buffers"])),
        tuple(map(_step_from, _steps_of(data))),
        tuple(Repeat(int(first), int(end), dim_from(times)) for first, end, times in data.get("repeats", ())),  # none before version 5
    )


def _buffer_json(buffer: Buffer) -> Json:
    return [buffer.kind, buffer.index, dim_json(buffer.nbytes), buffer.dtype.name, buffer.label]


def _buffer_from(data: Json) -> Buffer:
    kind, index, nbytes, dtype, label = data
    if kind not in get_args(BufferKind):
        raise ArtifactError(f"{kind!r} is no kind of buffer")
    return Buffer(kind, int(index), dim_from(nbytes), BY_NAME[dtype], str(label))


def _steps_of(segment: Json) -> list[Json]:
    """In files of versions 1 and 2 steps came in sections, whose steps may as well run one after the other."""
    return [step for section in segment["sections"] for step in section["steps"]] if "sections" in segment else segment["steps"]


def _operand_json(operand: Operand) -> Json:
    moves = [dim_json(operand.stride), operand.later and _operand_json(operand.later)] if operand.stride != 0 or operand.later else []
    return [operand.buffer, dim_json(operand.offset), *moves]


def _operand_from(data: Json) -> Operand:
    buffer, offset, stride, later = (*data, 0, None)[:4]
    return Operand(int(buffer), dim_from(offset), dim_from(stride), None if later is None else _operand_from(later))


def _step_json(step: Step) -> Json:
    return {
        "kernel": kernel_json(step.kernel),
        "operands": [_operand_json(operand) for operand in step.operands],
        "writes": step.writes, "label": step.label,
        "alternative": kernel_json(step.alternative), "reuses": step.reuses,
        "large": kernel_json(step.large), "large_from": step.large_from,
    }


def _step_from(data: Json) -> Step:
    return Step(
        kernel_from(data["kernel"]),
        tuple(map(_operand_from, data["operands"])),
        ints(data["writes"]),
        str(data["label"]),
        None if data["alternative"] is None else kernel_from(data["alternative"]),
        tuple((int(written), int(read)) for written, read in data["reuses"]),
        None if data.get("large") is None else kernel_from(data["large"]),  # files of version 1 may lack both
        int(data.get("large_from", 0)),
    )
