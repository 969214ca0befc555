"""What a plan's expressions are for one set of input shapes: numbers, buffer places, output shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from math import prod

import torch

from ..diagnostics.errors import InvalidGraph
from ..graph.asked import told
from ..graph.dims import Dim, evaluate
from ..graph.symbols import require
from .arena import Life, arrange
from .memory import HUGE
from .plan import NativeSegment, OutputDim, Plan, SegmentOutput

Numbers = Mapping[Dim, int]

# Bytes of a result whose memory is kept for the next call, on huge pages. Calls of x + 1.5 on Zen 4 with such results take 0.8 of the time
# at 6 MB, 0.1 at 32 MB; below, the C library keeps memory too, and costs 5 us less (1.1 at 2 MB).
LARGE = 2 * HUGE


# Inductor's allocator skips the dispatcher: 0.3 instead of 0.9 us. It is not part of torch's stable interface, hence the fallback.
_EMPTY = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cpu", None)


@dataclass(frozen=True)
class OutputShape:
    """What `torch.empty_strided` needs for one output of a segment, and its bytes; none where it is the segment's input `updates`."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    updates: int | None = None

    @cached_property
    def new(self) -> Callable[[], torch.Tensor]:
        """Makes a tensor in torch's own memory."""
        if _EMPTY is not None:
            return partial(_EMPTY, self.shape, self.strides, self.dtype)
        return partial(torch.empty_strided, self.shape, self.strides, dtype=self.dtype, device="cpu")


@dataclass(frozen=True)
class SegmentRecord:
    """Byte offsets in the arena by buffer (0 for buffers that are elsewhere), bytes of arena, outputs, bytes of the large ones."""

    offsets: tuple[int, ...]
    arena_bytes: int
    outputs: tuple[OutputShape, ...]
    large_bytes: int

    @cached_property
    def updates(self) -> bool:
        """Whether an output is an input that is written into."""
        return any(output.updates is not None for output in self.outputs)


@dataclass(eq=False)
class ShapeRecord:
    """One set of input shapes. `segments[i]` is None for an ATen step. `ints`: results of the call that are Python ints, by
    their position. `large_bytes`: of all large outputs of segments. `used` grows with each use and tells which record is the oldest."""

    numbers: Numbers
    segments: tuple[SegmentRecord | None, ...]
    arena_bytes: int
    large_bytes: int
    ints: dict[int, int] = field(default_factory=dict)
    used: int = 0


def number(numbers: Numbers, dim: Dim) -> int:
    """The value of an expression of the plan."""
    return dim if isinstance(dim, int) else numbers[dim]


def make_record(plan: Plan, env: Mapping[str, int]) -> ShapeRecord:
    """Returns the record for the symbols' values `env`. InputError for sizes that another program would be captured for, InvalidGraph when
    the plan has a symbol that no input defines."""
    try:
        with told(plan.assumed, env, plan.places):
            env = require(plan.assumed, env)
        numbers = {dim: evaluate(dim, env) for dim in plan.dims}
    except KeyError as error:
        raise InvalidGraph(f"no input defines the size {error.args[0]}", f"plan {plan.name}") from error
    segments = tuple(_segment(s, numbers) if isinstance(s, NativeSegment) else None for s in plan.segments)
    ints = {n: number(numbers, output.dim) for n, output in enumerate(plan.outputs) if isinstance(output, OutputDim)}
    native = [segment for segment in segments if segment is not None]
    arena = max((segment.arena_bytes for segment in native), default=0)
    return ShapeRecord(numbers, segments, arena, sum(segment.large_bytes for segment in native), ints)


def _segment(segment: NativeSegment, numbers: Numbers) -> SegmentRecord:
    used = lives(segment, numbers)
    layout = arranged(tuple(used.values()))
    places = dict(zip(used, layout.offsets, strict=True))
    outputs = tuple(_output(output, numbers) for output in segment.outputs)
    large = sum(output.nbytes for output in outputs if output.nbytes >= LARGE)
    return SegmentRecord(tuple(places.get(n, 0) for n in range(len(segment.buffers))), layout.nbytes, outputs, large)


def _output(output: SegmentOutput, numbers: Numbers) -> OutputShape:
    kind = output.type
    shape = tuple(number(numbers, d) for d in kind.shape)
    strides = tuple(number(numbers, d) for d in kind.strides)
    nbytes = prod(shape) * kind.dtype.bytes if output.updates is None else 0
    return OutputShape(shape, strides, kind.dtype.torch, nbytes, output.updates)


arranged = lru_cache(maxsize=64)(arrange)


def lives(segment: NativeSegment, numbers: Numbers) -> dict[int, Life]:
    """Size and life of each arena buffer that is used, by buffer number; `inherits` counts in the order of this dict.

    Lives are counted in steps. Sizes that depend on the shapes are rounded up, so that similar shapes have the same places.
    """

    def size(dim: Dim) -> int:
        return dim if isinstance(dim, int) else roomy(numbers[dim])

    return {buffer: Life(size(segment.buffers[buffer].nbytes), *span) for buffer, span in segment.spans.items()}


def roomy(nbytes: int) -> int:
    """So many bytes or up to an eighth more, or 1024."""
    step = 1 << max(10, nbytes.bit_length() - 4)
    return -(-nbytes // step) * step
