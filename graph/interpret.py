"""The reference interpreter: what every operation means, said with torch, one row each. Slow, exact, and independent of any backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..diagnostics.errors import InvalidGraph, Outdated
from . import attrs as A
from . import products
from .binding import bind_symbols
from .dims import Dim, Poly, evaluate
from .ir import Graph, Value
from .polynomials import piecewise
from .recurrence import CELLS, reference
from .types import QParams, boolean, identity

Env = Mapping[str, int]
Kernels = Mapping[str, Callable[..., Any]]
Tensor = torch.Tensor


def _modulo(op: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    """In f64, for f32 and less: vectors of PyTorch's make NaN of a remainder where the quotient is infinite in their type."""
    wide = torch.float64 if a.is_floating_point() else a.dtype
    return op(a.to(wide), b.to(wide)).to(a.dtype)


def _pack_bytes(*parts: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(*(part.shape for part in parts))  # type: ignore[no-untyped-call]
    beside = torch.stack([part.expand(shape) for part in parts], -1)
    return torch.nn.functional.pad(beside, (0, 4 - len(parts))).view(torch.int32)[..., 0]


def _dot_bytes(a: Tensor, b: Tensor) -> Tensor:
    """Of the unsigned bytes of one and the signed bytes of the other."""
    factors = (x.unsqueeze(-1).contiguous().view(dtype).int() for x, dtype in ((a, torch.uint8), (b, torch.int8)))
    return torch.mul(*factors).sum(-1, dtype=torch.int32)


ELEMENTWISE: dict[str, Callable[..., Tensor]] = {
    "neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "log": torch.log,
    "log2": torch.log2, "log10": torch.log10, "log1p": torch.log1p, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "erf": torch.erf, "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc, "round": torch.round, "relu": torch.relu,
    "logical_not": torch.logical_not, "bitwise_not": torch.bitwise_not, "isnan": torch.isnan, "isinf": torch.isinf,
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"), "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": partial(_modulo, torch.remainder), "fmod": partial(_modulo, torch.fmod), "pow": torch.pow, "atan2": torch.atan2,
    "maximum": torch.maximum, "minimum": torch.minimum, "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "where": torch.where,
    **dict.fromkeys(("normal_cdf", "normal_cdf_short"), lambda x: torch.special.erfc(x * -math.sqrt(0.5)) / 2),
    "pack_bytes": _pack_bytes, "dot_bytes": _dot_bytes,
    "sigmoid_short": torch.sigmoid, "exp_weight": torch.exp, "gelu": torch.nn.functional.gelu,
}


def _reduce(v: Value, env: Env, x: Tensor) -> Tensor:
    a = v.attrs
    assert isinstance(a, A.ReduceAttrs)
    if a.kind in ("argmax", "argmin"):
        return (torch.argmax if a.kind == "argmax" else torch.argmin)(x, dim=a.axes[0] if a.axes and x.dim() else None, keepdim=a.keepdim)
    shape = tuple(evaluate(d, env) for d in v.shape)
    if not x.numel() and a.kind in ("max", "min"):
        return torch.full(shape, identity(a.kind, v.dtype), dtype=v.dtype.torch)
    if not a.axes:
        return x.to(v.dtype.torch)
    if a.kind == "sum":
        return torch.sum(x, a.axes, keepdim=True, dtype=v.dtype.torch).reshape(shape)
    if a.kind in ("max", "min"):
        return (torch.amax if a.kind == "max" else torch.amin)(x, a.axes, keepdim=True).reshape(shape)
    for axis in a.axes:
        if a.kind == "prod":
            x = torch.prod(x, axis, keepdim=True, dtype=v.dtype.torch)
        else:
            x = (torch.any if a.kind == "any" else torch.all)(x, axis, keepdim=True)
    return x.reshape(shape)


def _slice(v: Value, env: Env, x: Tensor) -> Tensor:
    a = v.attrs
    assert isinstance(a, A.SliceAttrs)
    start, length = evaluate(a.start, env), evaluate(a.length, env)
    return x.index_select(a.axis, torch.arange(length) * a.step + start)


def _window(v: Value, env: Env, x: Tensor) -> Tensor:
    a = v.attrs
    assert isinstance(a, A.WindowAttrs)
    return x.unfold(a.axis, a.span, a.step)[..., :: a.dilation].movedim(-1, a.axis + 1)


def _concat(v: Value, env: Env, *xs: Tensor) -> Tensor:
    assert isinstance(v.attrs, A.AxisAttrs)
    return torch.cat(xs, v.attrs.axis)


def _pad(v: Value, env: Env, x: Tensor) -> Tensor:
    a = v.attrs
    assert isinstance(a, A.PadAttrs)
    flat = [evaluate(amount, env) for pair in reversed(a.amounts) for amount in pair]
    if v.dtype == boolean:
        return F.pad(x.to(torch.uint8), flat, value=float(bool(a.value))).bool()
    return F.pad(x, flat, value=a.value)


def _in_range(index: Tensor, size: int, op: str) -> Tensor:
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= size):
        raise IndexError(f"{op}: index {int(index.min())} or {int(index.max())} is out of range [0, {size})")
    return index.long()


def _take(v: Value, env: Env, table: Tensor, index: Tensor) -> Tensor:
    assert isinstance(v.attrs, A.AxisAttrs)
    axis = v.attrs.axis
    flat = _in_range(index, table.shape[axis], "take").reshape(-1)
    return table.index_select(axis, flat).reshape(table.shape[:axis] + index.shape + table.shape[axis + 1:])


def _gather(v: Value, env: Env, x: Tensor, index: Tensor) -> Tensor:
    assert isinstance(v.attrs, A.AxisAttrs)
    return torch.gather(x, v.attrs.axis, _in_range(index, x.shape[v.attrs.axis], "gather"))


_SCATTERED = {"sum": "sum", "prod": "prod", "max": "amax", "min": "amin"}


def _put(v: Value, env: Env, x: Tensor, part: Tensor, *positions: Tensor) -> Tensor:
    assert isinstance(v.attrs, A.PutAttrs)
    at = [torch.arange(size).reshape(-1, *[1] * (part.dim() - axis - 1)) for axis, size in enumerate(part.shape)]
    for axis, given in zip(v.attrs.axes, positions, strict=True):
        at[axis] = _in_range(given, evaluate(v.shape[axis], env), "put")
    x = x.reshape(_shape(v, env))
    if not v.attrs.kind:
        return x.index_put(tuple(at), part)
    places = torch.arange(x.numel()).reshape(x.shape)[tuple(at)].expand(part.shape)
    return x.flatten().scatter_reduce(0, places.flatten(), part.flatten(), _SCATTERED[v.attrs.kind]).reshape(x.shape)


def _channelwise(numbers: tuple[float, ...], axis: int | None, rank: int) -> Tensor:
    """Per-channel numbers as a tensor that broadcasts along `axis`."""
    shape = [1] * rank
    if axis is not None:
        shape[axis] = len(numbers)
    return torch.tensor(numbers, dtype=torch.float64).reshape(shape if axis is not None else ())


def quantize(x: Tensor, dtype: torch.dtype, q: QParams) -> Tensor:
    """Integers of `x`: round half to even of x * (1 / scale), plus zero point, saturated; NaN becomes qmin."""
    real = torch.round(x.float() * _channelwise(q.scale, q.axis, x.dim()).reciprocal().float()) + q.zero_point
    return torch.where(real.isnan(), torch.full_like(real, q.qmin), real.clamp(q.qmin, q.qmax)).to(dtype)


def dequantize(x: Tensor, q: QParams) -> Tensor:
    """scale * (x - zero_point) in f32."""
    whole = x.to(torch.int32) - q.zero_point if q.zero_point else x
    return whole.float() * _channelwise(q.scale, q.axis, x.dim()).float()


def _quantize(v: Value, env: Env, x: Tensor) -> Tensor:
    assert isinstance(v.attrs, A.QuantizeAttrs)
    return quantize(x, v.dtype.torch, v.attrs.left)


def _attention(v: Value, env: Env, *operands: Tensor) -> Tensor:
    assert isinstance(v.attrs, A.AttentionAttrs)
    found, q = products.attention(v, env, *operands), v.attrs.qparams
    return found if q is None else quantize(found, v.dtype.torch, q)


def _dequantize(v: Value, env: Env, x: Tensor) -> Tensor:
    q = v.inputs[0].tensor.qparams
    assert q is not None
    return dequantize(x, q)


def _piecewise(v: Value, env: Env, x: Tensor, factor: Tensor | None = None) -> Tensor:
    assert isinstance(v.attrs, A.PiecewiseAttrs)
    return piecewise(x, v.attrs, factor)


def _bounded(v: Value, env: Env, x: Tensor) -> Tensor:
    assert isinstance(v.attrs, A.BoundedAttrs)
    if not within(x, v.attrs.least, v.attrs.greatest):
        what = f"{v.name or 'a factor'} is no longer within {v.attrs.least:g} and {v.attrs.greatest:g}, for which the model was compiled"
        raise Outdated(what, v.origin, "compile the model again")
    return x


def within(x: Tensor, least: float, greatest: float) -> bool:
    """Whether all magnitudes are; NaN is not."""
    return bool(((x.abs() >= least) & (x.abs() <= greatest)).all())


def _number(value: Dim | float, env: Env) -> float | int:
    return evaluate(value, env) if isinstance(value, (int, Poly)) else value


def _iota(v: Value, env: Env) -> Tensor:
    a = v.attrs
    assert isinstance(a, A.IotaAttrs)
    wide = torch.float64 if a.dtype.is_float else torch.int64
    steps = torch.arange(evaluate(a.length, env), dtype=wide)
    return (steps * _number(a.step, env) + _number(a.start, env)).to(a.dtype.torch)


def _full(v: Value, env: Env) -> Tensor:
    assert isinstance(v.attrs, A.FullAttrs)
    return torch.full(tuple(evaluate(d, env) for d in v.attrs.shape), v.attrs.value, dtype=v.attrs.dtype.torch)


def _shape(v: Value, env: Env) -> tuple[int, ...]:
    return tuple(evaluate(d, env) for d in v.shape)


def fill_slots(item: Any, operands: Sequence[Any], env: Env) -> Any:
    """An argument of an aten value with its operands and the numbers of this call put in."""
    if isinstance(item, A.Slot):
        return operands[item.index]
    if isinstance(item, Poly):
        return evaluate(item, env)
    if isinstance(item, (list, tuple)):
        return type(item)(fill_slots(i, operands, env) for i in item)
    if isinstance(item, dict):
        return {k: fill_slots(i, operands, env) for k, i in item.items()}
    return item


def call_aten(v: Value, env: Env, *operands: Any) -> Any:
    """What PyTorch gives for an operation that is left to it: a tensor or several."""
    a = v.attrs
    assert isinstance(a, A.AtenAttrs)
    given = [x.contiguous() if n in a.dense else x for n, x in enumerate(operands)]
    result = a.target(*fill_slots(a.args, given, env), **{k: fill_slots(i, given, env) for k, i in a.kwargs})
    return tuple(result) if isinstance(result, list) else result


def _elementwise(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda v, env, *xs: fn(*xs)


def _scan(v: Value, env: Env, x: Tensor) -> Tensor:
    assert isinstance(v.attrs, A.ScanAttrs)
    if v.attrs.kind in ("max", "min"):
        return (torch.cummax if v.attrs.kind == "max" else torch.cummin)(x, -1).values
    return (torch.cumsum if v.attrs.kind == "sum" else torch.cumprod)(x, -1, dtype=x.dtype)


def _get(v: Value, env: Env, items: Any) -> Any:
    assert isinstance(v.attrs, A.GetAttrs)
    return items[v.attrs.index]


def _argsort(v: Value, env: Env, x: Tensor) -> Tensor:
    assert isinstance(v.attrs, A.ArgsortAttrs)
    return x.argsort(dim=-1, descending=v.attrs.descending, stable=True)[..., : evaluate(v.attrs.count, env)]


def _recurrence(v: Value, env: Env, x: Tensor, state: Tensor, w: Tensor, *others: Tensor) -> Tensor:
    assert isinstance(v.attrs, A.RecurrenceAttrs)
    projection, *biases = others if CELLS[v.attrs.cell].projected else (None, *others)
    return reference(v.attrs.cell, x, state, w, biases[0] if biases else None, v.attrs.reverse, v.attrs.rounding, projection)


ROWS: dict[str, Callable[..., Any]] = {
    **{name: _elementwise(fn) for name, fn in ELEMENTWISE.items()},
    "cast": lambda v, env, x: x.to(v.dtype.torch),
    "quantize": _quantize, "dequantize": _dequantize, "piecewise": _piecewise, "bounded": _bounded, "reduce": _reduce, "scan": _scan,
    "reshape": lambda v, env, x: x.reshape(_shape(v, env)),
    "expand": lambda v, env, x: x.expand(_shape(v, env)),
    "permute": lambda v, env, x: x.permute(v.attrs.order),
    "slice": _slice, "window": _window, "pad": _pad, "border": _pad, "put": _put, "copy": lambda v, env, x: x.clone(),
    "concat": _concat, "joined": _concat, "take": _take, "gather": _gather,
    "linear": products.linear, "qlinear": products.qlinear, "int_linear": products.int_linear, "routed_linear": products.routed_linear,
    "dequantize_groups": products.dequantize_groups, "group_linear": products.group_linear,
    "matmul": products.matmul, "int_matmul": products.int_matmul,
    "attention": _attention, "argsort": _argsort,
    "recurrence": _recurrence,
    "constant": lambda v, env: v.attrs.tensor.detach(), "full": _full, "iota": _iota, "aten": call_aten, "get": _get,
}


@torch.no_grad()
def run(graph: Graph, inputs: Sequence[Tensor], symbols: Env | None = None, kernels: Kernels | None = None) -> list[Any]:
    """The graph's outputs for these tensors. Sizes are read from them unless `symbols` gives them.

    kernels: meaning of `call` values by kernel name, a function of the operands. Raises InputError when the tensors do not fit,
    IndexError for an index out of range, InvalidGraph for an operation without a meaning.
    """
    env = bind_symbols(graph.inputs, inputs, symbols)
    results: dict[Value, Any] = dict(zip(graph.inputs, inputs, strict=True))
    for value in graph.order:
        if value not in results:
            operands = [results[v] for v in value.inputs]
            results[value] = evaluate_one(value, operands, env, kernels or {})
    return [results[v] for v in graph.outputs]


def evaluate_one(value: Value, operands: Sequence[Any], env: Env, kernels: Kernels) -> Any:
    """The result of one operation on the given operands."""
    if value.op == "call":
        assert isinstance(value.attrs, A.CallAttrs)
        kernel = kernels.get(value.attrs.kernel)
        if kernel is None:
            raise InvalidGraph(f"the kernel {value.attrs.kernel!r} has no meaning here", value.origin, "pass it in `kernels`")
        return kernel(*operands, **dict(value.attrs.options))
    row = ROWS.get(value.op)
    if row is None:
        raise InvalidGraph(f"the interpreter has no row for {value.op!r}", value.origin)
    return row(value, env, *operands)
