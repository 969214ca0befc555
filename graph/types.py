"""Element types and tensor types. A quantized tensor is a type: integers plus the `QParams` that give them meaning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from .dims import Dim, Shape, product

if torch.__version__ < "2.12":  # compares versions; pip would have refused it
    raise ImportError(f"sashiko needs torch 2.12 or newer, and this is torch {torch.__version__}")


Order = tuple[int, ...]
"""Axes as they lie in memory, outermost first."""

Room = tuple[tuple[int, int], ...]
"""For each axis, how many elements there are before and behind those of a tensor."""


@dataclass(frozen=True, eq=False)
class DType:
    """An element type; `kind` is float, int, uint, bool or complex (which only `aten` values have). There is one object of each."""

    name: str
    kind: str
    bits: int

    @property
    def bytes(self) -> int:
        return self.bits // 8

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def torch(self) -> torch.dtype:
        return _TO_TORCH[self]

    def wrapped(self, value: int) -> int:
        """The integer of this type that `value` becomes: its low bits."""
        low = -(1 << self.bits >> 1) if self.kind == "int" else 0
        return (value - low) % (1 << self.bits) + low

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    def __reduce__(self) -> str:
        return "boolean" if self.kind == "bool" else self.name  # the variable below, for copies and pickles


f64 = DType("f64", "float", 64)
f32 = DType("f32", "float", 32)
f16 = DType("f16", "float", 16)
bf16 = DType("bf16", "float", 16)
i64 = DType("i64", "int", 64)
i32 = DType("i32", "int", 32)
i16 = DType("i16", "int", 16)
i8 = DType("i8", "int", 8)
i4 = DType("i4", "int", 4)  # in packed weights alone: a tensor holds such integers as i8
u8 = DType("u8", "uint", 8)
boolean = DType("bool", "bool", 8)
c64 = DType("c64", "complex", 64)
c128 = DType("c128", "complex", 128)

_TO_TORCH: dict[DType, torch.dtype] = {
    f64: torch.float64, f32: torch.float32, f16: torch.float16, bf16: torch.bfloat16, i64: torch.int64,
    i32: torch.int32, i16: torch.int16, i8: torch.int8, u8: torch.uint8, boolean: torch.bool, c64: torch.complex64,
    c128: torch.complex128,
}
FROM_TORCH: dict[torch.dtype, DType] = {t: d for d, t in _TO_TORCH.items()}
BY_NAME: dict[str, DType] = {d.name: d for d in _TO_TORCH}


@dataclass(frozen=True)
class QParams:
    """real = scale * (integer - zero_point); `axis` is the channel axis of a per-channel scale, None for per tensor.

    `scale` has one entry per tensor or one per channel. Symmetric schemes have zero_point 0 and range [-127, 127].
    """

    scale: tuple[float, ...]
    zero_point: int = 0
    axis: int | None = None
    qmin: int = -127
    qmax: int = 127

    def __str__(self) -> str:
        text = f"scale={self.scale[0]:.6g}" if len(self.scale) == 1 else f"scale=[{len(self.scale)}]"
        text += f", zero_point={self.zero_point}" if self.zero_point else ""
        return text + (f", axis={self.axis}" if self.axis is not None else "")


@dataclass(frozen=True)
class TensorType:
    """Element type, shape (ints or symbolic) and, for quantized tensors, what the integers mean.

    `order` is the physical order of the logical dimensions, outermost first; None is row-major. `room`: for each dimension how much longer
    the buffer is, before the elements and behind them; () where it is dense.
    """

    dtype: DType
    shape: Shape
    qparams: QParams | None = None
    order: Order | None = None
    room: Room = ()

    @cached_property
    def _hash(self) -> int:
        return hash((self.dtype.name, self.shape, self.qparams, self.order, self.room))

    def __hash__(self) -> int:
        return self._hash

    @property
    def rank(self) -> int:
        return len(self.shape)

    @cached_property
    def strides(self) -> tuple[Dim, ...]:
        """Element strides of the buffer that holds a value of this type."""
        result: list[Dim] = [0] * self.rank
        step: Dim = 1
        for axis in reversed(self.order if self.order is not None else range(self.rank)):
            result[axis] = step
            step = step * self.extents[axis]
        return tuple(result)

    @cached_property
    def extents(self) -> Shape:
        """The shape of the buffer, with all the room in it."""
        return tuple(low + extent + high for extent, (low, high) in zip(self.shape, self.room, strict=True)) if self.room else self.shape

    @cached_property
    def start(self) -> Dim:
        """The first element's position in the buffer."""
        return sum((step * low for step, (low, _) in zip(self.strides, self.room, strict=True)), 0) if self.room else 0

    @cached_property
    def nbytes(self) -> Dim:
        """Bytes of the buffer."""
        return product(self.extents) * self.dtype.bytes

    def with_shape(self, shape: Shape) -> TensorType:
        return TensorType(self.dtype, shape, self.qparams)

    def with_dtype(self, dtype: DType) -> TensorType:
        return TensorType(dtype, self.shape)

    def __str__(self) -> str:
        text = f"{self.dtype}[{', '.join(map(str, self.shape))}]"
        if self.order is not None:
            text += f" order={list(self.order)}"
        if self.room:
            text += f" room={list(self.room)}"
        return text + (f" <{self.qparams}>" if self.qparams else "")


@dataclass(frozen=True)
class TupleType:
    """Results of an operation with several; elements are taken with the `get` op. None: a result that is no tensor."""

    elements: tuple[TensorType | None, ...]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.elements))})"


Type = TensorType | TupleType


def inverse(order: Sequence[int]) -> Order:
    """Where each axis lies."""
    return tuple(order.index(axis) for axis in range(len(order)))


def identity(kind: str, dtype: DType) -> float | int | bool:
    """What a reduction over no elements gives."""
    if kind in ("sum", "any"):
        return 0
    if kind in ("prod", "all"):
        return 1
    if dtype.is_float:
        return float("-inf") if kind == "max" else float("inf")
    if dtype == boolean:
        return kind == "min"
    info = torch.iinfo(dtype.torch)
    return info.min if kind == "max" else info.max
