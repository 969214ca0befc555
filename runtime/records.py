"""What a plan's expressions are for one set of input shapes: numbers, buffer places, output shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..diagnostics.errors import InvalidGraph
from ..graph.dims import Dim, evaluate
from .arena import Life, arrange
from .plan import NativeSegment, OutputDim, Plan, Section

Numbers = Mapping[Dim, int]


@dataclass(frozen=True)
class OutputShape:
    """What `torch.empty_strided` needs for one output of a segment."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class SegmentRecord:
    """Byte offsets in the arena by buffer (0 for buffers that are elsewhere), bytes of arena, output shapes, input shapes."""

    offsets: tuple[int, ...]
    arena_bytes: int
    outputs: tuple[OutputShape, ...]


@dataclass(eq=False)
class ShapeRecord:
    """One set of input shapes. `segments[i]` is None for an ATen step. `ints`: results of the call that are Python ints, by
    their position. `used` grows with each use and tells which record is the oldest."""

    numbers: Numbers
    segments: tuple[SegmentRecord | None, ...]
    arena_bytes: int
    ints: dict[int, int] = field(default_factory=dict)
    used: int = 0


def number(numbers: Numbers, dim: Dim) -> int:
    """The value of an expression of the plan."""
    return dim if isinstance(dim, int) else numbers[dim]


def make_record(plan: Plan, env: Mapping[str, int]) -> ShapeRecord:
    """Returns the record for the symbols' values `env`. InvalidGraph when the plan has a symbol that no input defines."""
    try:
        numbers = {dim: evaluate(dim, env) for dim in plan.dims}
    except KeyError as error:
        raise InvalidGraph(f"no input defines the size {error.args[0]}", f"plan {plan.name}") from error
    segments = tuple(_segment(s, numbers) if isinstance(s, NativeSegment) else None for s in plan.segments)
    ints = {n: number(numbers, output.dim) for n, output in enumerate(plan.outputs) if isinstance(output, OutputDim)}
    return ShapeRecord(numbers, segments, max((s.arena_bytes for s in segments if s is not None), default=0), ints)


def _segment(segment: NativeSegment, numbers: Numbers) -> SegmentRecord:
    used = lives(segment, numbers)
    layout = arrange(tuple(used.values()))
    places = dict(zip(used, layout.offsets, strict=True))
    outputs = tuple(
        OutputShape(
            tuple(number(numbers, d) for d in output.type.shape),
            tuple(number(numbers, d) for d in output.type.strides),
            output.type.dtype.torch,
        )
        for output in segment.outputs
    )
    return SegmentRecord(tuple(places.get(n, 0) for n in range(len(segment.buffers))), layout.nbytes, outputs)


def lives(segment: NativeSegment, numbers: Numbers) -> dict[int, Life]:
    """Size and life of each arena buffer that is used, by buffer number; `inherits` counts in the order of this dict.

    Lives are counted in sections: steps of one section interleave over blocks and threads.
    """
    spans: dict[int, tuple[int, int]] = {}
    takes: dict[int, int] = {}
    for at, section in enumerate(segment.sections):
        for step in section.steps:
            for operand in step.operands:
                if segment.buffers[operand.buffer].kind == "arena":
                    first, _ = spans.get(operand.buffer, (at, at))
                    spans[operand.buffer] = first, at
        takes.update(_reuses(section, segment))
    order = {buffer: position for position, buffer in enumerate(spans)}
    return {
        buffer: Life(number(numbers, segment.buffers[buffer].nbytes), first, last, order.get(takes.get(buffer, -1)))
        for buffer, (first, last) in spans.items()
    }


def _reuses(section: Section, segment: NativeSegment) -> dict[int, int]:
    """Buffers written in place of one read, for a section of one step; in others a later block may still read what goes."""
    if len(section.steps) != 1:
        return {}
    (step,) = section.steps
    found: dict[int, int] = {}
    for written, read in step.reuses:
        target, source = step.operands[written], step.operands[read]
        # Only whole buffers, and a source that this step reads once: other operands may be read at other places.
        readers = [o for o in step.operands if o.buffer == source.buffer]
        whole = target.offset == 0 and source.offset == 0 and len(readers) == 1
        if whole and segment.buffers[source.buffer].kind == "arena" == segment.buffers[target.buffer].kind:
            found.setdefault(target.buffer, source.buffer)
    return found
