"""Quantized modules as ONNX models in QDQ form: QuantizeLinear/DequantizeLinear pairs around floating-point operations.

torch's exporter translates the graph; the operators that it does not know are written out here in the operators of opset 18.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind
from torch.fx import GraphModule, Node
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _pytree as pytree

from ..diagnostics.errors import InputError, Unsupported
from ..diagnostics.files import writing
from ..diagnostics.surroundings import undisturbed
from ..graph.alone import alone
from ..graph.aten.recurrent import RECURRENCE
from ..graph.examples import example
from ..graph.exporting import any_names, quiet
from ..graph.nesting import parts
from ..graph.nodes import origin_of
from ..graph.refusals import translated
from ..graph.rows import LEAST, MOST
from ..graph.symbols import require
from . import ops
from .module import FreeDim, Gate, QuantizedModule, TensorLeaf, gate_of
from .qat import QATModule

_PACKAGES = ("onnx", "onnxscript")
_PLACE = "export_onnx"
_FREE_SIZE = 4
aten = torch.ops.aten
_CONVERSIONS = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten._assert_tensor_metadata.default)
_FLOAT, _INT8, _INT64, _DOUBLE = 1, 3, 7, 11  # element types of the ONNX standard


@undisturbed()
def export_onnx(
    quantized: QuantizedModule, path: str | os.PathLike[str], example_inputs: torch.Tensor | Sequence[Any] | Mapping[str, Any] | None = None
) -> None:
    """Writes a quantized module to an ONNX file whose outputs in ONNX Runtime are within one int8 step of the module's own.

    Activations with one scale become QuantizeLinear and DequantizeLinear; those with a scale for each row the arithmetic that finds it;
    integer weights DequantizeLinear of an int8 initializer, per channel or per group. Sizes that calibration left free stay free.
    example_inputs: as for `compile`; without, zeros of sizes that the module takes.

    Where weights alone are integers to ONNX Runtime, as with scales for each row, it rounds what they are multiplied by to int8 once more,
    and a step is kept only if its SessionOptions say no: `add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")`.

    Raises InputError when the packages are not installed or the file cannot be written, Unsupported for what has no form in ONNX.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"{' and '.join(missing)} cannot be imported", _PLACE, "pip install 'sashiko[onnx]'")
    given: object = quantized
    if isinstance(given, QATModule):
        raise InputError("the model still trains: its quantizers have no integers", _PLACE, "export what model.convert() returns")
    if not isinstance(given, QuantizedModule):
        raise InputError(f"expected what quantize returns, got a {type(given).__name__}", _PLACE, "torch.onnx.export is for other models")
    for item in quantized.record.sites:
        if item.site.scheme.floating == "bf16":
            raise Unsupported(f"{item.site.name} is in bf16, which ONNX Runtime does not run on CPUs", _PLACE, "keep it in fp32")
    program = _traced(quantized, example_inputs)
    _check_results(program)
    nodes = [node for module in program.graph_module.modules() if isinstance(module, GraphModule) for node in module.graph.nodes]
    for node in nodes:
        _refuse(node)
    try:
        with alone(), quiet(), any_names(), _silent():
            exported = torch.onnx.export(program, custom_translation_table=_table(), verbose=False, optimize=False)
            assert exported is not None
            _fix_sizes(exported.model)
            _shortened(exported.model)
    except Exception as error:  # the exporter raises what its parts raise
        raise Unsupported(f"the model has no form in ONNX: {_cause(error)}", _PLACE) from error
    double = next((node for node in nodes if _dtype(node) is torch.float64 and getattr(node.target, "namespace", "") == "aten"), None)
    if double is not None:
        _try(exported, double)
    with writing(path):
        exported.save(os.fspath(path))


def _fix_sizes(model: Any) -> None:
    """Makes numbers of dimensions that the program fixes: torch's exporter takes these for free ones with names such as "3"."""
    from onnx_ir.traversal import RecursiveGraphIterator

    made = (value for node in RecursiveGraphIterator(model.graph) for value in node.outputs)
    for value in (*model.graph.inputs, *made):
        for axis, size in enumerate(value.shape or ()):
            if str(size).isdecimal():
                value.shape[axis] = int(str(size))


def _shortened(model: Any) -> None:
    """Computes what is constant in an ONNX model, and once what is there twice. onnxscript's `optimize` also looks for patterns, in a time
    that grows with the square of the number of operations; ONNX Runtime looks for its own when it loads a model."""
    from onnx_ir.passes import common
    from onnxscript import optimizer

    optimizer.inline(model)
    optimizer.fold_constants(model)
    optimizer.remove_unused_nodes(model)
    common.DeduplicateInitializersPass()(model)
    common.CommonSubexpressionEliminationPass()(model)


def _traced(quantized: QuantizedModule, example_inputs: Any) -> ExportedProgram:
    args, named = _examples(quantized) if example_inputs is None else example(example_inputs, _PLACE)
    kwargs = {name: named[name] for name in gate_of(quantized).names if name in named}
    shapes = pytree.tree_map(_freedom, (args, kwargs))
    try:
        with alone(), torch.no_grad(), quiet():
            return torch.export.export(quantized, args, kwargs, dynamic_shapes=(*shapes[0], *shapes[1].values()), strict=False)
    except Exception as error:
        reason = translated(error)
        raise Unsupported(reason.what, reason.where or _PLACE, "give example_inputs of a typical call") from error


def _check_results(program: ExportedProgram) -> None:
    """Raises Unsupported for a result that is no tensor and no size; torch's exporter leaves out a None."""
    results = [spec.arg for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    for path, result in parts(pytree.tree_unflatten(results, program.call_spec.out_spec)).items():
        if isinstance(result, ConstantArgument) and result.value is not None:
            what = f"the result{path} is {result.value!r:.60}, and ONNX returns tensors alone"
            raise Unsupported(what, _PLACE, "leave it out of what the model returns")


def _refuse(node: Node) -> None:
    """Raises Unsupported for what torch's exporter writes and ONNX Runtime does not run."""
    if node.target is aten.lstm.input and _projects(node):
        what = "the model has an LSTM with proj_size, for which ONNX has no operator"
        raise Unsupported(what, origin_of(node) or _PLACE, "build it without proj_size")
    types = {_dtype(node), *(() if node.target in _CONVERSIONS else map(_dtype, node.all_input_nodes))}
    if node.op == "call_function" and torch.bfloat16 in types:
        what = f"the model computes {node.target} in bf16, which ONNX Runtime does not run on CPUs"
        raise Unsupported(what, origin_of(node) or _PLACE, "quantize model.float(), without operations in bf16")


def _dtype(node: Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _try(exported: torch.onnx.ONNXProgram, double: Node) -> None:
    """Raises Unsupported where ONNX Runtime does not load a model with f64, which some of its operators take. Which, only it knows."""
    try:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        with tempfile.TemporaryDirectory() as folder:
            exported.save(file := os.path.join(folder, "model.onnx"))
            onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has many of its own
        what = f"the model computes in f64, and ONNX Runtime does not load it: {_cause(error)}"
        raise Unsupported(what, origin_of(double) or _PLACE, "quantize model.float()") from error


def _projects(node: Node) -> bool:
    """Whether the hidden state of an LSTM is smaller than its cells. torch's exporter writes an LSTM that ONNX Runtime refuses to run."""
    hidden, cells = (state.meta["val"].shape[-1] for state in node.args[1])  # type: ignore[union-attr]
    return bool(hidden != cells)


def _examples(quantized: QuantizedModule) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Zeros that the gate accepts, in the structure of the arguments."""
    gate = gate_of(quantized)
    sizes, leaves = _sizes(gate), [leaf for _, part in gate.arguments for leaf in part]
    codegen = quantized.graph._codegen
    assert isinstance(codegen, _PyTreeCodeGen)
    values = [_zeros(leaf, sizes) if isinstance(leaf, TensorLeaf) else leaf.value for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(values, codegen.pytree_info.in_spec)
    return tuple(args), kwargs


def _zeros(leaf: TensorLeaf, sizes: Mapping[str, int]) -> torch.Tensor:
    return torch.zeros([sizes[dim.symbol] if isinstance(dim, FreeDim) else dim for dim in leaf.dims], dtype=leaf.dtype)


def _sizes(gate: Gate) -> dict[str, int]:
    """What the symbols stand for: sizes that differ, or those of calibration where the program does not take these."""
    sizes: dict[str, int] = {}
    for dim in gate.free:
        if dim.symbol not in sizes:
            sizes[dim.symbol] = _size(dim, sizes.values())
    try:
        require(gate.assumed, sizes)
    except InputError:
        sizes.update({dim.symbol: dim.seen for dim in gate.free if dim.seen})
    return sizes


def _size(dim: FreeDim, taken: Collection[int]) -> int:
    """A size within the range, that of calibration or a multiple: what is small enough becomes 1 on its way through a network of
    convolutions, and is taken for 1 always. Each symbol has its own, lest torch takes two for one."""
    usual = max(dim.low, dim.seen or _FREE_SIZE)
    fitting = (size for size in (*(usual << n for n in range(8)), *range(usual, 1, -1)) if dim.high is None or size <= dim.high)
    return next((size for size in fitting if size not in taken), usual)


def _freedom(value: Any) -> Any:
    return {axis: Dim.AUTO for axis, size in enumerate(value.shape) if size > 1} if isinstance(value, torch.Tensor) else None


@contextmanager
def _silent() -> Iterator[None]:
    """Hides what the exporter logs about optional packages."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


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


def _table() -> dict[Callable[..., Any], Callable[..., Any]]:
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
