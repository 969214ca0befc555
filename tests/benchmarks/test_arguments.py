"""What the scripts are called with is looked at before anything is measured."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = ("callers", "convolutions", "decode", "fused", "gpu", "operations", "products", "rows", "vendors", "weight_only")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"sashiko_benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def refuses(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    module = script(name)
    for measures in ("pin", "measure", "Table"):  # where it would go on
        monkeypatch.setattr(module, measures, lambda *_: pytest.fail("something is measured"), raising=False)
    with pytest.raises(SystemExit, match=r"^2$"):
        module.main()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_file_that_cannot_be_written_is_refused(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refuses(name, ["--json", "/absent/run.json"], monkeypatch)
    assert "'/absent/run.json' cannot be written" in capsys.readouterr().err
