"""`sashiko quantize`: the files it writes, what it prints, and what is said when an argument is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import sashiko
from sashiko.cli.app import run
from sashiko.graph.sums16 import how_many
from sashiko.platforms.catalogue import CATALOGUE
from sashiko.platforms.host import host
from sashiko.quant import QuantizedModule

SOURCE = """
import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).eval()

def data():
    torch.manual_seed(1)
    return (torch.randn(5, 8) for _ in range(6))

def agreement(candidate):
    torch.manual_seed(2)
    x, reference = torch.randn(5, 8), model()
    with torch.no_grad():
        return -float((candidate(x) - reference(x)).abs().max())

def text(candidate):
    return "good"

def tensor(candidate):
    return torch.arange(600.0).view(100, 6)

def nan(candidate):
    return float("nan")

def raises(candidate):
    raise KeyError("labels")

def takes(x):
    return [x]
"""


@pytest.fixture
def user(tmp_path: Path) -> str:
    (tmp_path / "user.py").write_text(SOURCE)
    return str(tmp_path / "user.py")


def test_files_and_report(user: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "deep" / "out", tmp_path / "r.html"
    arguments = ["quantize", f"{user}:model", "--data", f"{user}:data", "--out", str(out), "--report", str(page), "--max-batches", "4"]
    assert run([*arguments, "--eval", f"{user}:agreement"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("2 in int8 per row, 0 left as they were, calibrated on 4 batches")
    assert "agreement: -0 in floating point" in printed and "result dB" in printed
    small = sashiko.load(out / "quantized.sashiko")
    assert isinstance(small, QuantizedModule) and small(torch.randn(3, 8)).shape == (3, 4)
    data = json.loads((out / "summary.json").read_text())
    assert [(site["precision"], site["site"]["name"]) for site in data["sites"]] == [("int8 per row", "0"), ("int8 per row", "2")]
    assert data["batches"] == 4 and data["metric"]["name"] == "agreement" and -0.1 < data["metric"]["quantized"] < 0
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(p.name for p in out.iterdir()) == ["quantized.sashiko", "summary.json"]


@pytest.mark.parametrize("folder", ["made", "made/deep"])
def test_the_report_may_lie_in_the_folder_that_is_made(folder: str, user: str, tmp_path: Path) -> None:
    page = tmp_path / folder / "r.html"
    out = str(tmp_path / "made" / "deep")
    assert run(["quantize", f"{user}:model", "--data", f"{user}:data", "--out", out, "--report", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(("target", "sums"), [("x86_64_v3", {2, 4}), ("x86_64_amx", {1})])
def test_weights_are_for_the_target(user: str, tmp_path: Path, target: str, sums: set[int]) -> None:
    assert run(["quantize", f"{user}:model", "--data", f"{user}:data", "--out", str(tmp_path), "--target", target]) == 0
    weights = [value for value in sashiko.load(tmp_path / "quantized.sashiko").state_dict().values() if value.dtype == torch.int8]
    assert weights and {how_many(weight) for weight in weights} <= sums


def test_a_search_writes_code_too(user: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["quantize", f"{user}:model", "--data", f"{user}:data", "--out", str(out), "--eval", f"{user}:agreement"]
    assert run([*arguments, "--preset", "auto", "--max-drop", "0.5", "--budget", "1"]) == 0
    printed = capsys.readouterr().out
    assert "precision search" in printed and "agreement" in printed
    assert sorted(p.name for p in out.iterdir()) == ["compiled.sashiko", "quantized.sashiko", "summary.json"]
    x = torch.randn(5, 8)
    fast, small = sashiko.load(out / "compiled.sashiko"), sashiko.load(out / "quantized.sashiko")
    assert fast(x).shape == small(x).shape == (5, 4)
    assert run(arguments) == 0  # without a search there is none of this module
    assert sorted(p.name for p in out.iterdir()) == ["quantized.sashiko", "summary.json"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--max-drop", "0.1"), "--max-drop needs"),
        (("--preset", "int7"), "no preset 'int7'"),
        (("--target", "pdp11"), "'pdp11'"),
        (("--data", "absent.py:data"), "no file 'absent.py'"),
        (("--eval", "agreement"), "form MODULE:FUNCTION"),
        (("--eval", ""), "form MODULE:FUNCTION"),
        (("--eval", "..:agreement"), "'..' is no name of a module"),
        (("--out", "/proc/absent"), "'/proc/absent' cannot be made"),
        (("--out", "\0"), "no name of a folder"),
        (("--report", "\0"), "cannot be written"),
        (("--out", __file__), "no folder that can be written"),
        (("--report", f"{__file__}/page.html"), "cannot be written"),
        (("--report", "/absent/page.html"), "'/absent/page.html' cannot be written"),
        (("--report", "/proc/page.html"), "'/proc/page.html' cannot be written"),
        (("--report", f"{'n' * 300}.html"), "n.html' cannot be written"),
        (("--out", "/proc"), "--out: '/proc/quantized.sashiko' cannot be written"),
        (("--max-batches", "0"), "'0' is not a whole number from 1 on"),
        (("--budget", "-1"), "'-1' is not a number of seconds"),
        (("--budget", "3"), "--budget is for a search"),
        (("--max-drop", "nan"), "'nan' is not a number from 0 on"),
        (("--max-drop", "-1"), "'-1' is not a number from 0 on"),
    ],
)
def test_what_is_wrong_is_said(
    changed: tuple[str, str], message: str, user: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["quantize", f"{user}:model", "--data", f"{user}:data", "--out", str(tmp_path / "out"), *changed]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_search_is_for_this_machine(user: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = next(target.name for target in CATALOGUE if target.why_not_on(host()))
    arguments = ["quantize", f"{user}:model", "--data", f"{user}:data", "--out", str(tmp_path / "out"), "--target", foreign]
    for searched in (["--preset", "auto"], ["--eval", f"{user}:agreement", "--max-drop", "0.1"]):
        assert run([*arguments, *searched]) == 2
        assert "a search measures on this machine" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run(arguments) == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--eval", ":text"), "returned 'good', not a number"),
        (("--eval", ":tensor"), "returned tensor([[ 0., 1., 2., 3., 4., 5.], [ 6.,"),
        (("--eval", ":nan"), "user.py:nan returned NaN"),
        (("--eval", ":raises"), "user.py:raises failed: KeyError: 'labels'"),
        (("--eval", ":data"), "cannot be called: too many positional arguments"),
        (("--data", ":takes"), "cannot be called: missing a required argument: 'x'"),
    ],
)
def test_functions_that_do_not_fit_are_named(
    changed: tuple[str, str], message: str, user: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option, function = changed
    arguments = ["quantize", f"{user}:model", "--data", f"{user}:data", "--out", str(tmp_path / "out"), option, f"{user}{function}"]
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert message in said and len(said) < 400


def test_what_is_no_model_is_named(user: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quantize", f"{user}:data", "--data", f"{user}:data", "--out", str(tmp_path / "out")]) == 2
    assert "expected a torch.nn.Module, got generator" in capsys.readouterr().err


def test_data_and_out_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quantize", "user.py:model"]) == 2
    assert "--data" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["quantized.sashiko", "compiled.sashiko", "summary.json"])
@pytest.mark.parametrize("there", [False, True])
def test_the_report_replaces_no_file_of_the_command(
    there: bool, name: str, user: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    if there:
        out.mkdir()
    page = str(out / ".." / "out" / name)
    assert run(["quantize", f"{user}:model", "--data", f"{user}:data", "--out", str(out), "--report", page]) == 2
    assert "is a file that the command writes itself" in capsys.readouterr().err
    assert out.exists() == there and not (there and list(out.iterdir()))


@pytest.mark.parametrize(
    "changed",
    [
        *(("--data", "absent"), ("--data", "takes"), ("--eval", "absent"), ("--eval", "data")),
        *(("--out", "/proc/absent"), ("--out", "n" * 300)),
    ],
)
def test_arguments_are_checked_before_the_model_is_built(
    changed: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "user.py").write_text(SOURCE.replace("def model():", "def model():\n    print('built')"))
    user, (option, value) = str(tmp_path / "user.py"), changed
    given = {"--data": f"{user}:data", "--out": str(tmp_path / "out"), option: value if option == "--out" else f"{user}:{value}"}
    given["--report"] = f"{given['--out']}/report.html"
    assert run(["quantize", f"{user}:model", *(word for pair in given.items() for word in pair)]) == 2
    printed = capsys.readouterr()
    assert value in printed.err and "built" not in printed.out
