"""Quantization: schemes, observers, calibration, placement, and the simulated model that the compiler makes real."""

from .module import QuantizedModule
from .quantize import quantize
from .record import LeftOut, Placement, QuantRecord, QuantSite, SiteResult
from .report import report
from .scheme import PRESETS, ActivationScheme, Scheme, WeightScheme

__all__ = [
    "PRESETS",
    "ActivationScheme",
    "LeftOut",
    "Placement",
    "QuantRecord",
    "QuantSite",
    "QuantizedModule",
    "Scheme",
    "SiteResult",
    "WeightScheme",
    "quantize",
    "report",
]
