"""What `import sashiko` alone offers, in a process that has loaded nothing else of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sashiko

NAMES = [*sashiko.__all__, "quant.PRESETS", "quant.calibrate", "quant.export_onnx", "quant.prepare_qat", "quant.report"]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)


@pytest.mark.parametrize("names", [["quant.prepare_qat"], NAMES], ids=["one", "all"])
def test_names_are_loaded_when_asked_for(names: list[str]) -> None:
    result = python(f"import sashiko, operator\nfor name in {names}: operator.attrgetter(name)(sashiko)")
    assert result.returncode == 0, result.stderr


def test_nothing_is_loaded_before_and_other_names_are_errors() -> None:
    result = python("import sys, sashiko; assert 'torch' not in sys.modules; sashiko.nothing")
    assert "AttributeError: module 'sashiko' has no attribute 'nothing'" in result.stderr
