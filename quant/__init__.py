"""Quantization: schemes, observers, calibration, placement, and the simulated model that the compiler makes real."""

from .calibration import Calibration
from .in_place import quantize_
from .linear import QuantizedLinear
from .measured import measured
from .module import QuantizedModule
from .presets import PRESETS
from .qat import QATModule, prepare_qat
from .quantize import calibrate, quantize
from .record import ActivationRange, Histogram, LeftOut, Metric, Placement, QuantRecord, QuantSite, SiteResult
from .reporting import report
from .save import load
from .scheme import BF16, FP32, ActivationScheme, OpScheme, Override, Scheme, SmoothQuant, WeightScheme
from .sensitivity import end_sqnr, site_sqnr
from .to_onnx import export_onnx

__all__ = [
    "BF16",
    "FP32",
    "PRESETS",
    "ActivationRange",
    "ActivationScheme",
    "Calibration",
    "Histogram",
    "LeftOut",
    "Metric",
    "OpScheme",
    "Override",
    "Placement",
    "QATModule",
    "QuantRecord",
    "QuantSite",
    "QuantizedLinear",
    "QuantizedModule",
    "Scheme",
    "SiteResult",
    "SmoothQuant",
    "WeightScheme",
    "calibrate",
    "end_sqnr",
    "export_onnx",
    "load",
    "measured",
    "prepare_qat",
    "quantize",
    "quantize_",
    "report",
    "site_sqnr",
]
