"""Checks a plan once, before it runs: a wrong number in it would be a wild pointer later."""

from __future__ import annotations

from ..cpu_codegen.contract import BufferSlot
from ..diagnostics.errors import InvalidGraph
from .plan import AtenStep, Buffer, InputTensor, NativeSegment, OutputTensor, Plan, Step


def verify(plan: Plan) -> None:
    """InvalidGraph when a segment uses what does not exist or is not made yet, or leaves an output unwritten."""
    known = {item.value for item in plan.inputs if isinstance(item, InputTensor)}
    for value, constant in plan.constant_values:
        _require(0 <= constant < len(plan.constants), f"value {value} is constant {constant} of {len(plan.constants)}", plan.name)
        known.add(value)
    for at, segment in enumerate(plan.segments):
        where = f"segment {at} of plan {plan.name}"
        used = segment.inputs if isinstance(segment, NativeSegment) else segment.operands
        unknown = sorted(set(used) - known)
        _require(not unknown, f"values {unknown} are used before they are made", where)
        if isinstance(segment, NativeSegment):
            _verify_native(segment, len(plan.constants), where)
            made = [output.value for output in segment.outputs]
        else:
            made = _verify_aten(segment, where)
        _require(len(set(made)) == len(made) and not known & set(made), "a value is made twice", where)
        known.update(made)
    unknown = sorted({o.value for o in plan.outputs if isinstance(o, OutputTensor)} - known)
    _require(not unknown, f"values {unknown} are returned but never made", f"plan {plan.name}")


def _verify_aten(step: AtenStep, where: str) -> list[int]:
    _require(step.several or len(step.results) == 1, f"{step.target} returns one tensor, {len(step.results)} results are expected", where)
    return [value for value in step.results if value is not None]


def _verify_native(segment: NativeSegment, constants: int, where: str) -> None:
    limits = {"input": len(segment.inputs), "output": len(segment.outputs), "constant": constants}
    for number, buffer in enumerate(segment.buffers):
        _require(
            buffer.kind == "arena" or 0 <= buffer.index < limits[buffer.kind],
            f"buffer {number} is {buffer.kind} {buffer.index} of {limits.get(buffer.kind)}", where,
        )
    updated = {number for number, output in enumerate(segment.outputs) if output.updates is not None}
    taken = [output.updates for output in segment.outputs if output.updates is not None]
    _require(len(set(taken)) == len(taken) and all(0 <= n < len(segment.inputs) for n in taken), f"outputs update inputs {taken}", where)
    ready = {
        number for number, buffer in enumerate(segment.buffers)
        if buffer.kind in ("input", "constant") or (buffer.kind == "output" and buffer.index in updated)
    }
    ends = [0, *(bound for repeat in segment.repeats for bound in (repeat.first, repeat.end)), len(segment.steps)]
    _require(ends == sorted(ends) and all(r.first < r.end for r in segment.repeats), "repeated steps overlap or do not exist", where)
    for at, step in enumerate(segment.steps):
        moving = any(len(operand.places) > 1 for operand in step.operands)
        _require(not moving or segment.repeat(at) is not None, "operands move from turn to turn of a step that has one", where)
        _verify_step(step, segment.buffers, ready, f"{step.label or step.kernel.symbol} in {where}")
    unwritten = {b.index for n, b in enumerate(segment.buffers) if b.kind == "output" and n in ready}
    lacking = sorted(set(range(len(segment.outputs))) - unwritten)
    _require(not lacking, f"outputs {lacking} are never written", where)


def _verify_step(step: Step, buffers: tuple[Buffer, ...], ready: set[int], where: str) -> None:
    """Checks one step; `ready` gains the buffers that it writes."""
    for number in (place.buffer for operand in step.operands for place in operand.places):
        _require(0 <= number < len(buffers), f"there is no buffer {number}", where)
    used: set[int] = set()  # a kernel may leave some operands alone, which need not hold anything yet
    for code in step.variants:
        taken = {slot.index for slot in code.slots if isinstance(slot, BufferSlot)}
        top = max(taken, default=-1)
        _require(top < len(step.operands), f"{code.symbol} takes operand {top} of {len(step.operands)}", where)
        _require(code.grain > 0, f"{code.symbol} has no grain", where)
        used |= taken
    for operand_number, operand in enumerate(step.operands):
        if operand_number in used and operand_number not in step.writes:
            _require(operand.buffer in ready, f"buffer {operand.buffer} is read before it is written", where)
    for operand_number in step.writes:
        _require(0 <= operand_number < len(step.operands), f"there is no operand {operand_number}", where)
        written = step.operands[operand_number].buffer
        kind = buffers[written].kind
        _require(kind in ("output", "arena"), f"buffer {written} is {kind} and must not be written", where)
        ready.add(written)
    for written, read in step.reuses:
        _require(written in step.writes and read not in step.writes, f"operands {written} and {read} cannot share memory", where)


def _require(condition: bool, what: str, where: str) -> None:
    if not condition:
        raise InvalidGraph(what, where, "report this; the plan is written by the compiler")
