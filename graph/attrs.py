"""Attributes of operations: one frozen dataclass for each kind of operation that has any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch

from .dims import Dim, Shape
from .types import DType, QParams

T = TypeVar("T")


@dataclass(frozen=True)
class Attrs:
    """Base of all attribute classes. `has_equals`: whether two of them can be equal without being one."""

    has_equals: ClassVar[bool] = True

    @property
    def exact(self) -> str:
        """Tells apart what == does not, 0.0 and -0.0 or 1 and True, in classes that hold such numbers."""
        return ""


@dataclass(frozen=True)
class NumberAttrs(Attrs):
    """Base of the classes that hold numbers of the model."""

    @property
    def exact(self) -> str:
        return repr(self)


def equal_to_itself(number: float | int | bool) -> float | int | bool:
    """The number, or the one NaN that Python finds equal wherever it is part of something: two of them are not."""
    return number if number == number else math.nan


@dataclass(frozen=True)
class NoAttrs(Attrs):
    """For operations that need none."""


@dataclass(frozen=True)
class InputAttrs(Attrs):
    """`index`: position in the call; the call passes tensors only (symbolic ints are read from their shapes)."""

    index: int


@dataclass(frozen=True, eq=False)
class ConstantAttrs(Attrs):
    """A tensor frozen into the graph. `watched`: a parameter or buffer of the user's model, whose changes are noticed."""

    has_equals: ClassVar[bool] = False
    tensor: torch.Tensor
    watched: bool = False


@dataclass(frozen=True)
class FullAttrs(NumberAttrs):
    """A tensor of one repeated number."""

    value: float | int | bool
    dtype: DType
    shape: Shape

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", equal_to_itself(self.value))


@dataclass(frozen=True)
class IotaAttrs(NumberAttrs):
    """start + step * i for i < length, one-dimensional."""

    length: Dim
    dtype: DType
    start: Dim | float = 0
    step: Dim | float = 1


@dataclass(frozen=True)
class CastAttrs(Attrs):
    """Conversion as torch's `.to(dtype)`: float to int truncates, to bool is `!= 0`."""

    dtype: DType


@dataclass(frozen=True)
class ReduceAttrs(Attrs):
    """`kind`: sum, prod, max, min, any, all, argmax, argmin (the last two over exactly one axis, first on ties)."""

    kind: str
    axes: tuple[int, ...]
    keepdim: bool


@dataclass(frozen=True)
class ScanAttrs(Attrs):
    """`kind`: sum, prod, max or min. Always along the last axis."""

    kind: str


@dataclass(frozen=True)
class ShapeAttrs(Attrs):
    """Target shape of reshape (same elements, row-major) and expand (right-aligned broadcast)."""

    shape: Shape


@dataclass(frozen=True)
class PermuteAttrs(Attrs):
    """result.shape[i] == input.shape[order[i]]"""

    order: tuple[int, ...]


@dataclass(frozen=True)
class SliceAttrs(Attrs):
    """Elements start, start + step, ... along one axis, `length` of them; step may be negative (flip)."""

    axis: int
    start: Dim
    length: Dim
    step: int = 1


@dataclass(frozen=True)
class WindowAttrs(Attrs):
    """Windows of `size` elements, `dilation` apart, along one axis; one begins every `step` elements."""

    axis: int
    size: int
    step: int = 1
    dilation: int = 1

    @property
    def span(self) -> int:
        """From the first element of a window to the one after its last."""
        return self.dilation * (self.size - 1) + 1


@dataclass(frozen=True)
class PadAttrs(NumberAttrs):
    """Constant padding: (low, high) per axis, negative amounts crop."""

    amounts: tuple[tuple[Dim, Dim], ...]
    value: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", equal_to_itself(self.value))


@dataclass(frozen=True)
class AxisAttrs(Attrs):
    """The axis of concat, take and gather."""

    axis: int


@dataclass(frozen=True)
class PutAttrs(Attrs):
    """put: the axes along which positions are given, in ascending order, one operand of positions for each; the shape in which the
    first operand is seen, and that of the result. kind: what becomes of an element and what is put there: their "sum", "prod", "max" or
    "min"; "": the latter."""

    axes: tuple[int, ...]
    shape: Shape
    kind: str = ""


@dataclass(frozen=True)
class QuantizeAttrs(NumberAttrs):
    """quantize: real to `dtype` by round-half-to-even(x * (1 / scale)) + zero_point, saturated to [qmin, qmax]; NaN becomes qmin.
    in_steps: x has been multiplied by 1 / scale before. from_zero: and the zero point has been added, before rounding."""

    dtype: DType
    qparams: QParams
    in_steps: bool = False
    from_zero: bool = False

    @property
    def left(self) -> QParams:
        """The parameters by which x is still to be quantized."""
        scale = (1.0,) if self.in_steps else self.qparams.scale
        return replace(self.qparams, scale=scale, zero_point=0 if self.from_zero else self.qparams.zero_point)


@dataclass(frozen=True)
class PiecewiseAttrs(NumberAttrs):
    """piecewise: a polynomial for each piece of the real line, times a second operand where there is one, rounded to integers of `dtype`.

    u is x, no less than `low` and no more than `high`; k is round-half-even(u * density) in f32, no less than `first` and no more than
    `last`, which bounds that are finite see to.
    The polynomial is sum of coefficients[i][k mod n] * u^i, n numbers for each power and a power of two; with `line` its last product,
    in Horner's scheme, is with x itself, so that it goes on as a line. The result is round-half-even(polynomial), or
    round-half-even(polynomial * factor + zero), saturated to [least, greatest] where they are given (without them it is an integer of
    the type). NaN becomes `least`, or 0 without it; so does what is infinite as u where the highest coefficient is 0. `qparams`: what
    the integers mean. Where `dtype` is f32 the polynomial itself is the result.
    """

    dtype: DType
    qparams: QParams | None
    low: float
    high: float
    density: float
    first: int
    last: int
    coefficients: tuple[tuple[float, ...], ...]
    least: int | None = None
    greatest: int | None = None
    zero: int = 0
    line: bool = False


@dataclass(frozen=True)
class BoundedAttrs(NumberAttrs):
    """bounded: a constant expression as it is, whose magnitudes are in [least, greatest]; what reads it is right for no others."""

    least: float
    greatest: float


@dataclass(frozen=True)
class AttentionAttrs(NumberAttrs):
    """softmax(q @ k^T * scale + mask) @ v. Key j is seen by query i when i - before <= j <= i + after, as far as these are given; `after`
    is not negative, and 0 is torch's causal rule. Where `dtype` and `qparams` are given the result is quantized to them, before anything
    else rounds it. cap: in place of a product x = q @ k^T * scale stands cap tanh(x), which is no larger than that. sink: the last operand
    is the score of one more key, whose value is 0: one for each row of the result, or one for several."""

    scale: float
    before: Dim | None = None
    after: Dim | None = None
    dtype: DType | None = None
    qparams: QParams | None = None
    cap: float | None = None
    sink: bool = False

    def besides(self, operands: Sequence[T]) -> tuple[T | None, T | None]:
        """The mask and the sink among all operands."""
        *masks, sink = operands[3:] if self.sink else (*operands[3:], None)
        return (masks[0] if masks else None), sink


@dataclass(frozen=True)
class ArgsortAttrs(Attrs):
    """argsort: how many places of each row, those that come first."""

    descending: bool
    count: Dim


@dataclass(frozen=True)
class RecurrenceAttrs(Attrs):
    """A row of `recurrence.CELLS`, whether time runs backwards, and how the hidden state is rounded before its product: a row of
    `rows.ROUNDINGS`."""

    cell: str
    reverse: bool
    rounding: str = "none"


@dataclass(frozen=True)
class CallAttrs(NumberAttrs):
    """A custom kernel by name; `options` are name/number pairs that the kernel's `emit` receives."""

    kernel: str
    options: tuple[tuple[str, float | int | str], ...] = ()


@dataclass(frozen=True, eq=False)
class AtenAttrs(Attrs):
    """An operation left to PyTorch. `args`/`kwargs` are as in the call, with `Slot(i)` where operand i goes and a
    Dim wherever a symbolic int goes; `reason` says why there is no native form; `dense`: operands that lie row by row, whatever made
    them."""

    has_equals: ClassVar[bool] = False
    target: torch._ops.OpOverload | Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    reason: str
    dense: tuple[int, ...] = ()


@dataclass(frozen=True)
class Slot:
    """Place of operand `index` in AtenAttrs.args."""

    index: int


@dataclass(frozen=True)
class GetAttrs(Attrs):
    """Element of a tuple-typed value."""

    index: int
