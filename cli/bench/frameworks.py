"""The candidates: what compiles and runs a model, as a literal table. Each is used inside a process of its own (`worker.py`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ...diagnostics.errors import InputError
from .cases import Example, Tensors

PACKAGE = __name__.partition(".")[0]
Runner = Callable[..., Any]
"""A compiled model: called with the example's arguments, returns torch tensors or numpy arrays in the structure it likes."""


class Framework(ABC):
    """One way to run a model. libraries: the modules it needs. precisions: those it has. caches: whether a second process compiles faster.

    folder: for files, empty at first. tune: seconds to measure ways to compute products, for those of ours.
    """

    libraries: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ("fp32",)
    caches = True

    def __init__(self, threads: int, folder: Path, tune: float = 0.0) -> None:
        self.threads, self.folder, self.tune = threads, folder, tune

    @classmethod
    def offers(cls, precision: str) -> bool:
        return precision in cls.precisions

    def load(self) -> None:
        """Imports the libraries, so that no import is timed. ImportError where one is missing."""
        for name in self.libraries:
            import_module(name)

    def quantize(self, example: Example, precision: str) -> Any:
        """The calibrated model in the framework's own form, for integer precisions; it goes to `compile`."""
        raise InputError(f"{type(self).__name__} has no precision {precision!r}")

    @abstractmethod
    def compile(self, source: Any, example: Example, precision: str) -> Runner:
        """source: the example's model, or what `quantize` returned."""


class Eager(Framework):
    """PyTorch as it is; bf16 by autocast."""

    precisions = ("fp32", "bf16")
    caches = False

    def compile(self, source: Any, example: Example, precision: str) -> Runner:
        return source if precision == "fp32" else autocast(source)


class Inductor(Framework):
    """torch.compile with frozen weights; bf16 by autocast."""

    libraries = ("torch._inductor.compile_fx",)
    precisions = ("fp32", "bf16")

    def compile(self, source: Any, example: Example, precision: str) -> Runner:
        from torch._inductor import config

        config.freezing = True
        fast = torch.compile(source)
        return fast if precision == "fp32" else autocast(fast)


class OpenVino(Framework):
    """OpenVINO on the converted model; int8 by NNCF, with its settings for transformers where there is attention."""

    libraries = ("nncf", "openvino")
    precisions = ("fp32", "bf16", "int8")

    def _converted(self, example: Example) -> Any:
        import openvino as ov

        return ov.convert_model(example.model, example_input=example.args, input=[list(t.shape) for t in example.args])

    def quantize(self, example: Example, precision: str) -> Any:
        import nncf

        data = nncf.Dataset([{n: t.numpy() for n, t in enumerate(batch)} for batch in example.batches])
        model = self._converted(example)
        kind = nncf.ModelType.TRANSFORMER if attends(model) else None
        return nncf.quantize(model, data, model_type=kind, subset_size=len(example.batches))

    def compile(self, source: Any, example: Example, precision: str) -> Runner:
        import openvino as ov

        model = self._converted(example) if source is example.model else source
        settings = {
            "INFERENCE_PRECISION_HINT": "f32" if precision == "fp32" else "bf16",
            "INFERENCE_NUM_THREADS": self.threads,
            "PERFORMANCE_HINT": "LATENCY",
            "CACHE_DIR": str(self.folder),
        }
        request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()

        def run(*args: torch.Tensor) -> Any:
            return list(request.infer([t.numpy() for t in args], share_inputs=True, share_outputs=True).values())

        return run


def attends(model: Any) -> bool:
    """Whether a model of OpenVINO has attention: as one operation, or as a softmax and products of two activations."""
    operations = model.get_ops()
    kinds = {operation.get_type_name() for operation in operations}
    products = (operation for operation in operations if operation.get_type_name() == "MatMul")
    written_out = "Softmax" in kinds and any(not any(map(_is_constant, product.input_values())) for product in products)
    return "ScaledDotProductAttention" in kinds or written_out


def _is_constant(output: Any) -> bool:
    node = output.get_node()
    while node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Constant")


class OnnxRuntime(Framework):
    """ONNX Runtime on the exported model; int8 by its own tools: static for convolutions, else dynamic, as its manual recommends."""

    libraries = ("onnx", "onnxscript", "onnxruntime.quantization")
    precisions = ("fp32", "int8")
    caches = False

    def _exported(self, example: Example) -> Path:
        path = self.folder / "model.onnx"
        torch.onnx.export(example.model, example.args, path, dynamo=True, external_data=False, verbose=False)
        return path

    def quantize(self, example: Example, precision: str) -> Any:
        import onnx
        from onnxruntime.quantization import QuantFormat, quantize_dynamic, quantize_static

        path, small = self._exported(example), self.folder / "int8.onnx"
        if any(node.op_type == "Conv" for node in onnx.load(path).graph.node):
            quantize_static(path, small, _Reader(path, example.batches), quant_format=QuantFormat.QDQ, per_channel=True)
        else:
            quantize_dynamic(path, small, per_channel=True)
        return small

    def compile(self, source: Any, example: Example, precision: str) -> Runner:
        import onnxruntime as ort

        path = self._exported(example) if source is example.model else source
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        names = [item.name for item in session.get_inputs()]

        def run(*args: torch.Tensor) -> Any:
            return session.run(None, {name: t.numpy() for name, t in zip(names, args, strict=True)})

        return run


class _Reader:
    """Calibration data as ONNX Runtime asks for it."""

    def __init__(self, path: Path, batches: tuple[Tensors, ...]) -> None:
        import onnxruntime as ort

        names = [item.name for item in ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).get_inputs()]
        self._batches = iter([{name: t.numpy() for name, t in zip(names, batch, strict=True)} for batch in batches])

    def get_next(self) -> Mapping[str, Any] | None:
        return next(self._batches, None)


class Sashiko(Framework):
    """This compiler. Every preset of quantization is a precision; the rest of a quantized model is in what `precision="auto"` chooses.
    "auto" is the search of `quantize_and_compile`, with its usual bounds."""

    libraries = (f"{PACKAGE}.driver.compile", f"{PACKAGE}.driver.quantized", f"{PACKAGE}.quant")
    precisions = ("fp32", "bf16")

    @classmethod
    def offers(cls, precision: str) -> bool:
        from ...quant import PRESETS

        return precision in cls.precisions or precision in PRESETS

    def quantize(self, example: Example, precision: str) -> Any:
        from ...driver.quantized import quantize_and_compile
        from ...quant import quantize
        from ...quant.presets import AUTO

        if precision == AUTO:
            return quantize_and_compile(example.model, example.batches, preset=AUTO, progress=False)
        return quantize(example.model, example.batches, preset=precision, progress=False)

    def compile(self, source: Any, example: Example, precision: str) -> Runner:
        from ...driver.compile import compile as compiled
        from ...driver.model import CompiledModel

        if isinstance(source, CompiledModel):
            return source
        return compiled(source, example.args, precision=precision if precision in self.precisions else "auto", tune=self.tune)


def autocast(call: Runner) -> Runner:
    """The same call with matrix products in bf16."""

    def run(*args: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return call(*args)

    return run


OURS = "sashiko"
YARDSTICK = "eager"
FRAMEWORKS: dict[str, type[Framework]] = {
    YARDSTICK: Eager,
    "inductor": Inductor,
    "openvino": OpenVino,
    "onnxruntime": OnnxRuntime,
    OURS: Sashiko,
}
