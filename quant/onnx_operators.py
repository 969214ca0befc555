"""The operators of quantized modules that torch's ONNX exporter does not know, in the operators of opset 18."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..graph.aten.recurrent import RECURRENCE
from ..graph.rows import LEAST, MOST
from . import ops

_FLOAT, _INT8, _INT64, _DOUBLE = 1, 3, 7, 11  # element types of the ONNX standard
_REMEMBERING = (
    "s = Add(p, x) i, f, g, o = Split<axis=1, num_outputs=4>(s) is = Sigmoid(i) fs = Sigmoid(f) gt = Tanh(g) os = Sigmoid(o) "
    "kept = Mul(fs, m) fresh = Mul(is, gt) c = Add(kept, fresh) ct = Tanh(c) y = Mul(os, ct)"
)
# A step of each cell of `graph/recurrence.py` in the text form of ONNX: from the state to its hidden part h, and on to the next state from
# the product p with that and x.
_FIRST = {
    "lstm": "hidden, memory = Split<axis=0, num_outputs=2>(state) h = Squeeze(hidden, zero) m = Squeeze(memory, zero)",
    "lstm_projected": "row = Squeeze(state, zero) sizes = Shape(r) h, m = Split<axis=1>(row, sizes)",
}
_STEPS = {
    "lstm": f"{_REMEMBERING} yu = Unsqueeze(y, zero) cu = Unsqueeze(c, zero) next = Concat<axis=0>(yu, cu)",
    "lstm_projected": f"{_REMEMBERING} yr = Gemm<transB=1>(y, r) after = Concat<axis=1>(yr, c) next = Unsqueeze(after, zero)",
    "gru": "xr, xz, xn = Split<axis=1, num_outputs=3>(x) pr, pz, pn = Split<axis=1, num_outputs=3>(p) rs = Add(xr, pr) r = Sigmoid(rs) "
           "zs = Add(xz, pz) z = Sigmoid(zs) pnr = Mul(r, pn) ns = Add(xn, pnr) n = Tanh(ns) hn = Sub(h, n) zh = Mul(z, hn) "
           "y = Add(n, zh) next = Unsqueeze(y, zero)",
    "rnn_tanh": "s = Add(p, x) y = Tanh(s) next = Unsqueeze(y, zero)",
    "rnn_relu": "s = Add(p, x) y = Relu(s) next = Unsqueeze(y, zero)",
}


# What is left of the rows of the hidden state h where it is multiplied: the functions of `graph/rows.py` in the text form of ONNX.
_ROUNDINGS = {
    "none": "rounded = Identity(h)",
    "rows": "size = Abs(h) most = ReduceMax<keepdims=1>(size, last) end = Max(most, least) scale = Div(end, top) "
            "inverse = Reciprocal(scale) real = Mul(h, inverse) whole = Round(real) held = Clip(whole, bottom, top) "
            "rounded = Mul(held, scale)",
    "affine_rows": "lowest = ReduceMin<keepdims=1>(h, last) highest = ReduceMax<keepdims=1>(h, last) low = Min(lowest, nought) "
                   "high = Max(highest, nought) range = Sub(high, low) step = Div(range, steps) scale = Max(step, least) "
                   "below = Div(low, scale) above = Div(high, scale) both = Add(below, above) from_low = Greater(both, one) "
                   "by_low = Sub(bottom, below) by_high = Sub(top, above) point = Where(from_low, by_low, by_high) "
                   "near = Clip(point, bottom, top) origin = Round(near) inverse = Reciprocal(scale) real = Mul(h, inverse) "
                   "moved = Add(real, origin) whole = Round(moved) held = Clip(whole, bottom, top) back = Sub(held, origin) "
                   "rounded = Mul(back, scale)",
}
_LEAST = {"none": 0.0, "rows": 127 * LEAST, "affine_rows": LEAST}


def _rounding(name: str) -> str:
    """With the numbers that it names."""
    bottom = -128.0 if name == "affine_rows" else -127.0
    numbers = {"bottom": bottom, "top": 127.0, "steps": 255.0, "nought": 0.0, "one": 1.0, "least": _LEAST[name]}
    made = " ".join(f"{key} = Constant<value_float={value}>()" for key, value in numbers.items())
    return f"last = Constant<value_ints=[-1]>() {made} {_ROUNDINGS[name]}"


def _step(cell: str, rounding: str, fixed: int) -> Any:
    """The body of a Scan whose state holds what does not change, too, so many tensors: it names nothing outside."""
    from onnx import parser
    from onnx_ir import serde

    names = ("float[H, G] w", "float[K] b", "float[P, R] r")[:fixed]
    same = " ".join(f"{name[-1]}_next = Identity({name[-1]})" for name in names)
    text = f"""step (float[S, B, W] state, {", ".join(names)}, float[B, G] x)
        => (float[S, B, W] next, {", ".join(f"{name}_next" for name in names)}, float[S, B, W] states) {{
        zero = Constant<value_ints=[0]>() {_FIRST.get(cell, "h = Squeeze(state, zero)")} {_rounding(rounding)}
        hw = MatMul(rounded, w) p = Add(hw, b) {_STEPS[cell]} {same} states = Identity(next) }}"""
    return serde.deserialize_graph(parser.parse_graph(text))


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """From operators to functions that call those of ONNX; made on use, since onnxscript is optional."""
    from onnxscript import opset18

    op: Any = opset18

    def real(value: float) -> Any:
        return op.Constant(value_float=value)

    def ends(x: Any, low: float, high: float) -> Any:
        return op.Clip(x, op.CastLike(real(low), x), op.CastLike(real(high), x))

    last = {"keepdims": 1}

    def choose_rows(x: Any, affine: bool) -> Any:
        axes = op.Constant(value_ints=[-1])
        if not affine:
            scales = op.Div(op.Max(op.ReduceMax(op.Abs(x), axes, **last), real(127 * LEAST)), real(127.0))
            return op.Min(scales, real(MOST)), op.Sub(scales, scales)  # NaN where the row holds infinity, which makes it NaN
        low = op.Min(op.ReduceMin(x, axes, **last), real(0.0))
        high = op.Max(op.ReduceMax(x, axes, **last), real(0.0))
        halves = op.Sub(op.Mul(high, real(0.5)), op.Mul(low, real(0.5)))
        scales = op.Min(op.Max(op.Div(halves, real(127.5)), real(LEAST)), real(MOST))
        below, above = op.Div(low, scales), op.Div(high, scales)
        nearer = op.Greater(op.Sub(op.Add(below, above), real(1.0)), real(0.0))
        zeros = op.Where(nearer, op.Sub(real(-128.0), below), op.Sub(real(127.0), above))
        return op.Cast(scales, to=_DOUBLE), op.Cast(op.Round(ends(zeros, -128, 127)), to=_INT64)

    def quantize_rows(x: Any, scales: Any, zero_points: Any, low: int, high: int, dtype: int) -> Any:
        wide = op.CastLike(x, scales)
        shifted = op.Add(op.Mul(wide, op.Reciprocal(scales)), op.CastLike(zero_points, scales))
        return op.Cast(ends(op.Round(shifted), low, high), to=dtype)

    def dequantize_rows(q: Any, scales: Any, zero_points: Any, low: int, high: int, dtype: int, out_dtype: int) -> Any:
        return op.Cast(op.Mul(op.Sub(op.CastLike(q, scales), op.CastLike(zero_points, scales)), scales), to=out_dtype)

    def dequantize_groups(
        q: Any, scales: Any, zero_points: Any, low: int, high: int, dtype: int, group: int, out_dtype: int = _FLOAT
    ) -> Any:
        flat = op.Constant(value_ints=[-1])
        rows = op.Reshape(q, op.Constant(value_ints=[-1, group]))
        zeros = op.Cast(op.Reshape(zero_points, flat), to=_INT8)
        grouped = op.DequantizeLinear(rows, op.Reshape(scales, flat), zeros, axis=0)
        return op.Cast(op.Reshape(grouped, op.Shape(q)), to=out_dtype)

    def recurrence(cell: str, x: Any, state: Any, w: Any, b: Any, reverse: bool, rounding: str = "none", projection: Any = None) -> Any:
        last = () if projection is None else (projection,)
        fixed = op.Transpose(w, perm=[1, 0]), op.Constant(value_floats=[0.0]) if b is None else b, *last
        ways = {"scan_input_directions": [int(reverse)], "scan_output_directions": [int(reverse)]}
        node = op.Scan(state, *fixed, x, body=_step(cell, rounding, len(fixed)), num_scan_inputs=1, **ways).producer()
        node.resize_outputs(2 + len(fixed))  # the exporter does not know how many a Scan has
        return node.outputs[-1]

    return {
        RECURRENCE: recurrence,
        ops.choose_per_row: choose_rows,
        ops.quantize_per_row: quantize_rows,
        ops.dequantize_per_row: dequantize_rows,
        ops.dequantize_per_group: dequantize_groups,
    }
