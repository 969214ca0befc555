"""Quantized modules as ONNX models in QDQ form: QuantizeLinear/DequantizeLinear pairs around floating-point operations.

torch's exporter translates the graph, with `onnx_operators.py` for the operators that it does not know.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
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
from ..graph.axes import marks_kept
from ..graph.examples import example
from ..graph.exporting import any_names, quiet
from ..graph.nesting import parts
from ..graph.nodes import origin_of
from ..graph.refusals import translated
from ..graph.symbols import require
from .module import FreeDim, Gate, QuantizedModule, TensorLeaf, check_converted, gate_of
from .onnx_operators import translations

_PACKAGES = ("onnx", "onnxscript")
_PLACE = "export_onnx"
_FREE_SIZE = 4
aten = torch.ops.aten
_CONVERSIONS = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten._assert_tensor_metadata.default)


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
    check_converted(given, _PLACE)
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
            exported = torch.onnx.export(program, custom_translation_table=translations(), verbose=False, optimize=False)
            assert exported is not None
            _fix_sizes(exported.model)
            _shortened(exported.model)
    except Exception as error:  # the exporter raises what its parts raise
        raise Unsupported(f"the model has no form in ONNX: {_cause(error)}", _PLACE) from error
    double = next((node for node in nodes if _dtype(node) is torch.float64 and getattr(node.target, "namespace", "") == "aten"), None)
    if double is not None:
        _try(exported, program, double)
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
        with alone(), torch.no_grad(), quiet(), marks_kept((args, kwargs)):
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


def _try(exported: torch.onnx.ONNXProgram, program: ExportedProgram, double: Node) -> None:
    """Raises Unsupported where ONNX Runtime does not run a model with f64, which some of its operators take. Which, only it knows."""
    given = [leaf for leaf in pytree.tree_leaves(program.example_inputs) if isinstance(leaf, torch.Tensor)]
    try:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        load = partial(onnxruntime.InferenceSession, sess_options=options, providers=["CPUExecutionProvider"])
        exported.initialize_inference_session(load)
        exported(*given)
    except Exception as error:  # onnxruntime has many of its own
        what = f"the model computes in f64, and ONNX Runtime does not run it: {_cause(error)}"
        raise Unsupported(what, origin_of(double) or _PLACE, "quantize model.float()") from error
    finally:
        exported.release()


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
