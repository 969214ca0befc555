"""Arguments of the verbs of quantization that are none: an InputError that says what to pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import sashiko
from sashiko.quant import BF16, FP32, PRESETS, ActivationScheme, OpScheme, Override, WeightScheme, calibrate, export_onnx, prepare_qat
from sashiko.quant.sensitivity import site_sqnr
from tests.quant.models import mlp

X = torch.randn(5, 8)


def test_a_choice_of_schemes() -> None:
    found = calibrate(mlp(), [X], PRESETS["int8"], exclude="2")
    average = OpScheme(ActivationScheme("average"), WeightScheme())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"classifier": FP32}, r"'classifier' matches no operation of the model\n(.|\n)*report\(\) lists the names"),
        ({"0.": FP32}, r"did you mean 0\?"),
        ({"0": "fp32"}, r"'fp32', chosen for '0', is no scheme of an operation\n(.|\n)*FP32 or BF16"),
        ({"2": BF16}, r"'2' was left as it was: excluded by the caller\n(.|\n)*Override"),
        ({"0": average}, r"'0' needs ranges that calibration did not look for\n(.|\n)*Override"),
    ]
    for choice, says in wrong:
        with pytest.raises(sashiko.InputError, match=says):
            found.build(choice)
    assert [item.site.name for item in found.build({"2": FP32}).record.sites] == ["0"]
    assert not found.build({"0": FP32, "2": FP32}).record.sites


def test_a_choice_means_what_a_scheme_of_an_operation_does() -> None:
    """Groups are made to divide the inputs, and what `quantize` leaves out with a reason is refused for it."""
    groups, x = OpScheme(None, WeightScheme(4, "group", 64)), torch.randn(1, 5, 8, 8)
    model = torch.nn.Sequential(torch.nn.Conv2d(5, 4, 3), torch.nn.Flatten(2), torch.nn.Linear(36, 40), torch.nn.Linear(40, 4)).eval()
    scheme = PRESETS["int8-minmax"]
    found, small = calibrate(model, [x], scheme), sashiko.quantize(model, [x], preset=scheme.overriding(Override("3", groups)))
    assert torch.equal(found.build({"3": groups})(x), small(x)) and site_sqnr(found, {"3": groups})["3"] > 15
    wrong = ("2", groups, "groups of 8 do not divide its 36 inputs"), ("0", OpScheme(None), "weights alone are quantized in linears")
    for name, scheme, says in wrong:
        for answer in (found.build, partial(site_sqnr, found)):
            with pytest.raises(sashiko.InputError, match=f"the scheme chosen for '{name}' is none for it: {says}"):
                answer({name: scheme})


def test_calibration_takes_the_name_of_a_preset() -> None:
    model = mlp()
    assert torch.equal(calibrate(model, [X], "int8-static").build()(X), sashiko.quantize(model, [X], preset="int8-static")(X))
    with pytest.raises(sashiko.InputError, match="there is no preset 'int9'"):
        calibrate(model, [X], "int9")


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_a_number_of_batches(count: Any) -> None:
    with pytest.raises(sashiko.InputError, match=f"max_batches={count} is no number of batches"):
        sashiko.quantize(mlp(), [X], max_batches=count)


@pytest.mark.parametrize(("given", "says"), [
    ({"sharded": "yes"}, "sharded='yes' is not True or False"), ({"sharded": None}, "sharded=None is not"),
    ({"progress": "x"}, "progress='x' is not True, False or None"), ({"transform": "a"}, "transform='a' cannot be called"),
])  # fmt: skip
def test_options_that_would_be_taken_for_others(given: dict[str, Any], says: str) -> None:
    verbs: list[Callable[..., Any]] = [sashiko.quantize, prepare_qat, *([] if "sharded" in given else [sashiko.quantize_and_compile])]
    for verb in verbs:
        with pytest.raises(sashiko.InputError, match=says):
            verb(mlp(), [X], **given)


@pytest.mark.parametrize(("given", "says"), [({"transform": "a"}, "transform='a' cannot be called"), ({"mask": ""}, "the mask '' is not")])
def test_options_of_what_is_done_in_place(given: dict[str, Any], says: str) -> None:
    with pytest.raises(sashiko.InputError, match=says):
        sashiko.quantize_(mlp(), "int4-weight", [X], **given)


@pytest.mark.parametrize("memory", [0, -1, 2e9, "2G", True])
def test_a_number_of_bytes(memory: Any) -> None:
    with pytest.raises(sashiko.InputError, match=f"memory={memory!r} is no number of bytes"):
        sashiko.quantize_(mlp(), "int4-weight", [X], memory=memory)
    with pytest.raises(sashiko.InputError, match="memory is given without batches"):
        sashiko.quantize_(mlp(), "int4-weight", memory=memory)


def test_what_is_explained_and_exported(tmp_path: Path) -> None:
    model = mlp()
    small, trains = sashiko.quantize(model, [X]), prepare_qat(model, [X])
    explain: Callable[[Any], Any] = sashiko.explain
    for given, says in (
        (model, "a Sequential has nothing to explain"), (small, r"a QuantizedModule has(.|\n)*model\.report\(\)"),
        (torch.compile(model, backend="sashiko"), r"a OptimizedModule has(.|\n)*SASHIKO_DEBUG=3"), (None, "a NoneType has nothing"),
    ):  # fmt: skip
        with pytest.raises(sashiko.InputError, match=says):
            explain(given)
    pytest.importorskip("onnxscript")
    export: Callable[..., Any] = export_onnx
    for given, says in (
        (model, "expected what quantize returns, got a Sequential"), (sashiko.compile(model, X), "got a CompiledModel"),
        (trains, r"still trains(.|\n)*convert\(\)"),
    ):  # fmt: skip
        with pytest.raises(sashiko.InputError, match=says):
            export(given, tmp_path / "model.onnx")
