"""The inner loops of the AArch64 tiles keep their modelled rate: at least 95 % of two products a cycle."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def script() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "mca.py"
    spec = importlib.util.spec_from_file_location("sashiko_benchmarks_mca", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


MCA = script()


@pytest.mark.parametrize("row", MCA.ROWS, ids=lambda row: row.name)
def test_inner_loops_reach_the_modelled_peak(row: object) -> None:
    path = MCA.tool()
    if path is None:
        pytest.skip(f"not installed: {' or '.join(MCA.TOOLS)} of LLVM {MCA.OLDEST} or newer")
    result = MCA.model(row, path)
    assert result.products == 24
    assert result.share >= 0.95
