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


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("callers", "--precision", "fp32,fp8", "'fp8' is none of fp32, bf16"),
        ("convolutions", "--only", "foo", "'foo' is none of dense"),
        ("convolutions", "--kinds", "foo", "'foo' is none of fp32"),
        ("decode", "--models", "foo", "'foo' is none of llama"),
        ("decode", "--caches", "static,foo", "'foo' is none of static, growing"),
        ("decode", "--weights", "foo", "'foo' is none of float"),
        ("decode", "--tokens", "0", "'0' is not a whole number from 1 on"),
        ("fused", "--levels", "L9", "'L9' is none of L2, memory"),
        ("fused", "--only", "foo", "none of residual"),
        ("gpu", "--only", "foo", "'foo' is none of chains, models"),
        ("operations", "--only", ",", "nothing is named"),
        ("operations", "--only", "foo", "'foo' is none of images"),
        ("products", "--kinds", "foo", "'foo' is none of fp32"),
        ("products", "--targets", "foo", "'foo' is none of host"),
        ("rows", "--rows", "1,x", "'x' is not a whole number"),
        ("vendors", "--kinds", "foo", "'foo' is none of fp32"),
        ("weight_only", "--only", "foo", "'foo' is none of products, decode"),
    ],
)
def test_what_means_nothing_is_refused(
    name: str, option: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuses(name, [option, value], monkeypatch)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["demo", "mca"])
def test_help_measures_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    module = script(name)
    for measures in ("load_encoder", "tool"):
        monkeypatch.setattr(module, measures, lambda: pytest.fail("something is measured"), raising=False)
    with pytest.raises(SystemExit, match=r"^0$"):
        module.main()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_file_that_cannot_be_written_is_refused(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refuses(name, ["--json", "/absent/run.json"], monkeypatch)
    assert "'/absent/run.json' cannot be written" in capsys.readouterr().err
