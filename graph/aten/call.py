"""What a row of the ATen tables may ask about the call it translates, and how operands are brought to one dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, Union

import torch

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import Dim, Poly, Shape, bounds
from ..ir import Value
from ..types import FROM_TORCH, DType, TensorType, Type, bf16, boolean, f16, f32


@dataclass(frozen=True, eq=False)
class SymScalar:
    """A number computed from sizes, or read by `item()`, as a tensor of shape (): f64 for a float of Python, i64 for an int, boolean for a
    bool; it takes part in type promotion as that does."""

    value: Value

    def _unknown(self, *_: object) -> NoReturn:
        raise Unsupported("it takes a number computed from sizes or data where one must be known")

    __float__ = __int__ = __index__ = __bool__ = __neg__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _unknown
    __lt__ = __le__ = __gt__ = __ge__ = __floordiv__ = __mod__ = _unknown


Operand = Union[Value, Dim, float, bool, SymScalar]
Result = Union[Value, tuple[Union[Value, None], ...]]
Row = Callable[..., Result]


@dataclass(frozen=True)
class Call:
    """One ATen call: the type that torch says it has, and which elements of a tuple result are read. decided: the constants whose numbers
    decided what the row made of it, for the row to add; it is wrong once they change."""

    type: Type
    used: frozenset[int]
    decided: list[Value] = field(default_factory=list)

    @property
    def tensor(self) -> TensorType:
        """The result's type. Raises Unsupported when it is no single tensor."""
        if not isinstance(self.type, TensorType):
            raise Unsupported("the result is not one tensor")
        return self.type

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    @property
    def shape(self) -> Shape:
        return self.tensor.shape

    def element(self, index: int) -> TensorType:
        """The type of one element of a tuple result."""
        if isinstance(self.type, TensorType):
            raise Unsupported("the result is no tuple")
        element = self.type.elements[index]
        if element is None:
            raise Unsupported(f"element {index} of the result is no tensor")
        return element

    @property
    def count(self) -> int:
        """How many elements a tuple result has."""
        return 1 if isinstance(self.type, TensorType) else len(self.type.elements)

    def need_only(self, *indices: int) -> None:
        """Raises Unsupported when an element that the row does not produce is read."""
        extra = sorted(self.used - set(indices))
        if extra:
            raise Unsupported(f"result number {extra[0]} is used")


def opmath(dtype: DType) -> DType:
    """The dtype torch computes in: f32 for narrower floats."""
    return f32 if dtype in (f16, bf16) else dtype


def promote(x: Operand, y: Operand) -> DType:
    """torch's type promotion of two operands."""
    if isinstance(x, Value) and isinstance(y, Value) and x.dtype == y.dtype:
        return x.dtype
    return FROM_TORCH[torch.result_type(_stand_in(x), _stand_in(y))]


def _stand_in(x: Operand) -> Any:
    """Something with the same say in type promotion."""
    if isinstance(x, Value):
        return torch.empty((1,) if x.tensor.rank else (), dtype=x.dtype.torch, device="meta")
    if isinstance(x, SymScalar):
        return 1.0 if x.value.dtype.is_float else True if x.value.dtype is boolean else 1
    return 1 if isinstance(x, Poly) else x


def as_value(x: Operand, dtype: DType) -> Value:
    """An operand as a value of `dtype`."""
    if isinstance(x, Value):
        return b.cast(x, dtype)
    if isinstance(x, SymScalar):
        return b.cast(x.value, dtype)
    if isinstance(x, Poly):
        return b.scalar(x, dtype)
    return b.full(float(x) if dtype.is_float else bool(x) if dtype.kind == "bool" else int(x), dtype)


def computing(x: Operand, dtype: DType) -> Value:
    """An operand of a computation in `dtype`, in the dtype that torch computes it in: what has another dtype, such as a number, is rounded
    to `dtype` first, as torch does."""
    exact = isinstance(x, Value) and x.dtype.bits <= 8  # which every dtype that it is promoted to holds
    return as_value(x if exact else as_value(x, dtype), opmath(dtype))


def factor(x: Operand, dtype: DType) -> Value:
    """The second operand of a multiplication or division in `dtype`. Where it is one number, torch does not round it to `dtype`."""
    return computing(x, dtype) if isinstance(x, Value) and not is_one(x) else as_value(x, opmath(dtype))


def is_one(x: Operand) -> bool:
    """True for one number: of Python, or a tensor of one element."""
    return not isinstance(x, Value) or all(d == 1 for d in x.shape)


def known_number(x: Operand) -> float | None:
    """The number that an operand is known to be."""
    if isinstance(x, (int, float)):
        return x
    if isinstance(x, Value) and x.op == "full":
        return getattr(x.attrs, "value", None)
    return None


def need_fitting(dtype: DType, *numbers: Operand | None) -> None:
    """Raises Unsupported for a number that is stored, not computed with, and lies beyond the dtype; PyTorch raises there."""
    for x in numbers:
        if isinstance(x, (int, float)) and dtype.kind in ("float", "int", "uint"):
            info = torch.finfo(dtype.torch) if dtype.is_float else torch.iinfo(dtype.torch)
            low = -info.max if dtype.kind == "uint" and isinstance(x, int) else info.min
            if not low <= x <= info.max and (not dtype.is_float or math.isfinite(x)):
                raise Unsupported(f"the number {x} in a tensor of {dtype}")


def need_alike(*items: Value | None) -> None:
    """Raises Unsupported for several element types where PyTorch takes one alone: it says so itself."""
    types = sorted({str(item.dtype) for item in items if item is not None})
    if len(types) > 1:
        raise Unsupported(f"operands of {' and '.join(types)}")


def need_divisor(x: Operand, dtype: DType) -> None:
    """Raises Unsupported when an integer division by `x` might be by zero, or overflow; PyTorch raises there, a CPU traps."""
    number = known_number(x)
    positive = isinstance(x, Poly) and (bounds(x)[0] or 0) > 0
    if not dtype.is_float and not positive and (number is None or number in (0, -1)):
        raise Unsupported("integer division by a number that may be 0")
