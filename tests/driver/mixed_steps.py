"""Steps between element types, for random compositions: what is promoted, wraps, is rounded before it is computed with, or cast.

To be drawn wild (see `compositions.py`): with the extremes of every type. No integer is divided by 0, which raises, or by -1, which for the
least integer ends the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.driver.compositions import FLOATS, Draw, Refused, Tensor
from tests.driver.steps import COMPARE, cut, join, permute, reshape

WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
EVERY = (*FLOATS[2:], *WHOLE, torch.bool)
NUMBERS = (True, 0, 1, 2, -3, 7, 100, 127, 200, 300, -129, 40000, 1 << 31, 2.5, 0.1, -0.7, -1e6, 1e30, float("inf"), float("nan"))


def divisor(y: Any) -> Any:
    if isinstance(y, Tensor):
        return y if y.is_floating_point() else torch.where((y == 0) | (y == -1), torch.full_like(y, 1 if y.dtype == torch.bool else 3), y)
    return 3 if y == 0 else y


DIVISIONS: dict[str, Callable[[Any, Any], Tensor]] = {
    "floor_divide": lambda x, y: torch.floor_divide(x, divisor(y)),
    "truncated": lambda x, y: torch.div(x, divisor(y), rounding_mode="trunc"),
    "remainder": lambda x, y: torch.remainder(x, divisor(y)),
    "fmod": lambda x, y: torch.fmod(x, divisor(y)),
}
BINARY: dict[str, Callable[[Any, Any], Tensor]] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", *COMPARE)},
    **{f"bitwise_{name}": getattr(torch, f"bitwise_{name}") for name in ("and", "or", "xor")},
    **DIVISIONS,
    "rsub": lambda x, y: y - x,
    "clamp min": lambda x, y: x.clamp(min=y),
    "clamp max": lambda x, y: x.clamp(max=y),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "where of the other": lambda x, y: torch.where(x > 1, y, x),
    "x + 2 * y": lambda x, y: torch.add(x, y, alpha=2),
    "x - 3 * y": lambda x, y: torch.sub(x, y, alpha=3),
}
OF_TENSORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **BINARY,
    **{name: getattr(torch, name) for name in ("maximum", "minimum", "atan2", "logical_and", "logical_or", "logical_xor")},
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "copy": lambda x, y: x.clone().copy_(y),
    "cat": lambda x, y: torch.cat((x, y), -1),
    "y of type x": lambda x, y: y.type_as(x) + x,
}
IN_PLACE = ("add_", "sub_", "mul_", "div_", "bitwise_and_", "bitwise_or_", "bitwise_xor_", "eq_", "lt_", "clamp_min_")
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in ("neg", "abs", "sign", "square", "bitwise_not", "logical_not", "isnan", "floor", "trunc")},
    **{name: getattr(torch, name) for name in ("round", "sigmoid", "tanh", "atan", "isfinite", "frac")},
    "signbit of numbers": lambda x: x.masked_fill(x.isnan(), 0).signbit(),  # that of NaN means nothing
    "relu": F.relu, "rsqrt of abs + 1": lambda x: (x.abs() + 1).rsqrt(), "cube": lambda x: x**3, "log1p of abs": lambda x: x.abs().log1p(),
    "nan_to_num": lambda x: x.nan_to_num(0, 1, -1),
    "full_like": lambda x: torch.full_like(x, 1),
    "pad": lambda x: F.pad(x, (1, 2), value=1),
}
OVER = ("sum", "prod", "mean", "cumsum", "cumprod")
CHOOSE: dict[str, Callable[[Tensor, int], Tensor]] = {
    **{name: getattr(torch, name) for name in ("amax", "amin", "argmax", "argmin", "any", "all", "count_nonzero")},
    "max": lambda x, axis: x.max(axis)[0], "index of min": lambda x, axis: x.min(axis)[1],
}


def two(d: Draw) -> int:
    x, dtype = d.any_rank(0), d.rng.choice(EVERY)
    name = d.rng.choice(list(OF_TENSORS))
    y = d.leaf(dtype, ()) if d.rng.random() < 0.25 and name != "cat" else d.partner(x, dtype)
    return d.step(name, OF_TENSORS[name], *d.rng.sample([x, y], 2))


def with_number(d: Draw) -> int:
    name, k = d.rng.choice(list(BINARY)), d.rng.choice(NUMBERS)
    fn = BINARY[name]
    return d.step(f"{name} {k}", lambda x: fn(x, k), d.any_rank(0))


def in_place(d: Draw) -> int:
    name, x = d.rng.choice(IN_PLACE), d.any_rank(0)
    return d.step(name, lambda x, y: getattr(x.clone(), name)(y), x, d.partner(x, d.rng.choice(EVERY)))


def put(d: Draw) -> int:
    """A slice of a tensor, overwritten with elements of another type or with a number."""
    x, k = d.any_rank(), d.rng.choice(NUMBERS)
    size = d.values[x].shape[-1]
    start = d.rng.randrange(size)

    def written(x: Tensor, y: Any = k) -> Tensor:
        x = x.clone()
        x[..., start:] = y
        return x

    if d.rng.random() < 0.4:
        return d.step(f"x[{start}:] = {k}", written, x)
    return d.step(f"x[{start}:] = y", written, x, d.leaf(d.rng.choice(EVERY), (size - start,)))


def one(d: Draw) -> int:
    name = d.rng.choice(list(UNARY))
    return d.step(name, UNARY[name], d.any_rank(1 if name == "pad" else 0))


def over(d: Draw) -> int:
    """A sum or product in a type of its own; those of floats as large as they come are left out."""
    name, x = d.rng.choice(OVER), d.any_rank()
    dtype = d.rng.choice((None, *EVERY))
    axis, wide = d.axis(x), dtype if dtype is not None else d.values[x].dtype
    if name in ("prod", "cumprod") and wide.is_floating_point:
        raise Refused
    return d.step(f"{name} {axis} {dtype}", lambda x: getattr(torch, name)(x, axis, dtype=dtype), x)


def choose(d: Draw) -> int:
    name, x = d.rng.choice(list(CHOOSE)), d.any_rank()
    axis = d.axis(x)
    return d.step(f"{name} {axis}", lambda x: CHOOSE[name](x, axis), x)


def shift(d: Draw) -> int:
    x = d.pick(lambda t: t.dtype in WHOLE)
    by, left = d.rng.randrange(torch.iinfo(d.values[x].dtype).bits), d.rng.random() < 0.5
    return d.step(f"{'<<' if left else '>>'} {by}", lambda x: x << by if left else x >> by, x)


def cast(d: Draw) -> int:
    return d.step("cast", lambda x: x, d.any_rank(0), cast=d.rng.choice(EVERY))


MIXED = (
    *(two,) * 6, *(with_number,) * 5, *(one,) * 3, *(cast,) * 3, *(over,) * 2, in_place, put, choose, shift, permute, reshape, cut, join,
)
