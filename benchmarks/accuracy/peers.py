"""The peers on the same calibration data: OpenVINO with NNCF, and ONNX Runtime with its static quantization."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from accuracy.jobs import Job, Peer, reason


def eager(job: Job) -> Peer:
    return Peer(job.model)


def openvino(precision: str, job: Job) -> Peer:
    """fp32, or int8 by NNCF's preset for transformers, whose SmoothQuant it includes; the rest in fp32."""
    import openvino as ov

    first = job.batches[0]
    model = ov.convert_model(job.model, example_input=first, input=[(name, [-1, -1], ov.Type.i64) for name in first])
    if precision == "int8":
        import nncf

        data = nncf.Dataset([{name: t.numpy() for name, t in batch.items()} for batch in job.batches])
        model = nncf.quantize(model, data, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(job.batches))
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"}
    request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()

    def call(**batch: torch.Tensor) -> torch.Tensor:
        result = request.infer({name: t.numpy() for name, t in batch.items()}, share_inputs=True)
        return torch.from_numpy(next(iter(result.values())))

    return Peer(call)


def onnxruntime(precision: str, job: Job) -> Peer:
    """fp32, or int8 by `quantize_static`: quantize and dequantize nodes, weights per channel, prepared as its manual says if that works."""
    import onnxruntime as ort

    ort.set_default_logger_severity(3)
    with tempfile.TemporaryDirectory() as folder:
        path, note = Path(folder) / "model.onnx", ""
        names = list(job.batches[0])
        shapes = {name: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for name in names}
        torch.onnx.export(
            job.model, (), path, kwargs=job.batches[0], dynamo=True, external_data=False, verbose=False, dynamic_shapes=shapes
        )
        if precision == "int8":
            path, note = _static_int8(path, job)
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = ort.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])

    def call(**batch: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(session.run(None, {name: t.numpy() for name, t in batch.items()})[0])

    return Peer(call, note)


def _static_int8(path: Path, job: Job) -> tuple[Path, str]:
    """The quantized file, and a note when it could not be prepared in full."""
    from onnxruntime.quantization import QuantFormat, quantize_static

    prepared, note = _prepared(path)
    small = path.with_name("int8.onnx")
    quantize_static(prepared, small, _Reader(job.batches), quant_format=QuantFormat.QDQ, per_channel=True)
    return small, note


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """The working directory is `folder`."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _prepared(path: Path) -> tuple[Path, str]:
    """The file after `quant_pre_process`, with as much of it as works, and a note on what does not."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    result, note = path.with_name("prepared.onnx"), ""
    for skip in (False, True):
        try:
            with _inside(path.parent):  # it leaves files of its own in the working directory
                quant_pre_process(path, result, skip_symbolic_shape=skip)
        except Exception as error:
            note = f"quant_pre_process failed: {reason(error)}"
        else:
            return result, "prepared without symbolic shapes" if skip else ""
    return path, note


class _Reader:
    """Calibration data as ONNX Runtime asks for it."""

    def __init__(self, batches: Any) -> None:
        self._batches: Iterator[Mapping[str, torch.Tensor]] = iter(batches)

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self._batches, None)
        return None if batch is None else {name: t.numpy() for name, t in batch.items()}


def _at(make: Callable[[str, Job], Peer], precision: str) -> Callable[[Job], Peer]:
    return lambda job: make(precision, job)


PEERS: dict[tuple[str, str], Callable[[Job], Peer]] = {
    ("eager", "fp32"): eager,
    ("openvino", "fp32"): _at(openvino, "fp32"),
    ("openvino", "int8"): _at(openvino, "int8"),
    ("onnxruntime", "fp32"): _at(onnxruntime, "fp32"),
    ("onnxruntime", "int8"): _at(onnxruntime, "int8"),
}
