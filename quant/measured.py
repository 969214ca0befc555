"""A quantized module with measurements in its record, for the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .calibration import Calibration
from .module import QuantizedModule
from .scheme import OpScheme
from .sensitivity import site_sqnr


def measured(calibration: Calibration, choice: Mapping[str, OpScheme] | None = None) -> QuantizedModule:
    """`calibration.build(choice)`, and how exact each operation's result is; takes about twice as long as the model over the sample."""
    module = calibration.build(choice)
    ratios = site_sqnr(calibration, choice)
    sites = tuple(replace(item, result_db=ratios.get(item.site.name)) for item in module.record.sites)
    module.record = replace(module.record, sites=sites)
    return module
