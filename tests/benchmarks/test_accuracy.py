"""The accuracy benchmark: its models learn and are the same every time, its rows tell what works, what fails, and why."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from accuracy import __main__ as command
from accuracy import language
from accuracy.digits import job
from accuracy.jobs import FP32, Job, Peer, Row, in_place_rows, own_rows, peer_rows
from accuracy.models import Digits, DigitsCnn, DigitsTransformer, digits_data, top1, train_digits_cnn, train_digits_transformer
from accuracy.outliers import with_outliers

import sashiko
from sashiko.quant.linear import QuantizedLinear

SMALL = language.Settings(width=32, layers=1, context=32, steps=30, batch=8)


@pytest.fixture(scope="module")
def data() -> Digits:
    return digits_data()


@pytest.fixture(scope="module")
def transformer(data: Digits) -> DigitsTransformer:
    return train_digits_transformer(epochs=6, data=data, width=32)


def test_digits_are_split(data: Digits) -> None:
    assert len(data.train) + len(data.test) == 1797 and len(data.test) == 599
    assert not {t.numpy().tobytes() for t in data.train} & {t.numpy().tobytes() for t in data.test}
    assert set(data.test_labels.tolist()) == set(range(10))
    assert sum(map(len, data.calibration(100, 32))) == 100
    assert torch.equal(digits_data().test, data.test)


def test_networks_learn_and_training_is_repeatable(data: Digits) -> None:
    before = torch.get_rng_state()
    model = train_digits_cnn(epochs=4, data=data)
    assert top1(model, data) >= 0.95
    assert torch.equal(before, torch.get_rng_state()) and not model.training
    short = [train_digits_cnn(seed=seed, epochs=1, data=data, width=4).state_dict() for seed in (1, 1, 2)]
    assert all(torch.equal(short[0][name], short[1][name]) for name in short[0])
    assert not torch.equal(short[0]["0.weight"], short[2]["0.weight"])


def test_outliers_are_planted_and_the_function_is_kept(data: Digits, transformer: DigitsTransformer) -> None:
    hard = with_outliers(transformer)
    with torch.no_grad():
        assert torch.equal(hard(data.test), transformer(data.test))
    seen: list[torch.Tensor] = []
    for model in (transformer, hard):
        block = model.blocks[1]
        with torch.no_grad():
            block.register_forward_pre_hook(lambda _, args, norm=block.attention_norm: seen.append(norm(args[0])))
            model(data.test[:8])
    plain, planted = (x.abs().amax((0, 1)) for x in seen)
    assert int((planted == 256 * plain).sum()) == 3 and int((planted == plain).sum()) == 32 - 3
    assert transformer.blocks[1].attention_norm.weight.abs().max() < 8  # the original is as it was


def test_rows_of_presets_and_failures(data: Digits) -> None:
    network = DigitsCnn(4).eval()
    fp32, int8, unknown = own_rows(job("untrained", network, data), ["int8", "int3"])
    assert fp32.preset == FP32 and fp32.simulated["top-1"] == top1(network, data)
    assert fp32.compiled == fp32.simulated
    assert int8.compiled and not int8.failure
    assert "int3" in unknown.failure and unknown.call is None and not unknown.compiled


def test_rows_in_place(data: Digits, transformer: DigitsTransformer) -> None:
    rows = list(in_place_rows(job("digits", transformer, data), ["int4-weight", "int8", "int8-weight"]))
    names = ["int8-weight, in place, no data", "int4-weight, in place, data", "int4-weight, in place, no data"]
    assert [row.preset for row in rows] == names and not any(row.failure for row in rows)
    assert all(row.compiled["top-1"] >= top1(transformer, data) - 0.05 for row in rows)
    assert not any(isinstance(each, QuantizedLinear) for each in transformer.modules())


def test_what_the_search_finds_is_a_row(data: Digits) -> None:
    network = train_digits_cnn(epochs=1, data=data, width=4)
    fp32, _, searched = own_rows(job("digits", network, data), ["auto"])
    assert searched.preset == "auto, searched" and not searched.failure
    assert searched.compiled["top-1"] >= fp32.compiled["top-1"] - 0.005 and "x bf16" in searched.note


def test_rows_of_peers(data: Digits) -> None:
    def missing(job: Job) -> Peer:
        raise ImportError("no module\nand more")

    network = DigitsCnn(4).eval()
    one, two = peer_rows(job("untrained", network, data), {("a", "int8"): missing, ("b", FP32): lambda job: Peer(job.model, "as it is")})
    assert one.failure == "ImportError: no module" and not one.compiled
    assert two.note == "as it is" and two.compiled["top-1"] == top1(network, data)


def test_language_model_learns_and_perplexity_is_exact() -> None:
    text = torch.tensor(list(b"abcd" * 2000))
    held_out = language.windows(text, SMALL.context)[:32]
    assert torch.equal(held_out[1, :1], held_out[0, -1:]), "windows overlap by the byte that only the next one predicts"
    untrained = language.train_language_model(replace(SMALL, steps=0), text)
    trained = language.train_language_model(SMALL, text)
    assert language.perplexity(untrained, held_out) > 100
    assert language.perplexity(trained, held_out) < 10
    uniform = language.perplexity(lambda ids: torch.zeros(*ids.shape, 256), held_out)
    assert math.isclose(uniform, 256, rel_tol=1e-9)


@pytest.mark.parametrize("cell", ["LSTM", pytest.param("GRU", marks=pytest.mark.sweep)])
def test_recurrent_language_models_learn_and_quantize(cell: str) -> None:
    """The rounding that is fed back at every byte costs a trained model hardly anything."""
    text = language.source_bytes(language.TRAINING, 200_000)
    held_out = language.windows(language.source_bytes(language.HELD_OUT, 20_000), 64)
    model = language.train_language_model(language.Settings(64, 1, 64, steps=120, batch=16, peak=1e-2, cell=cell), text)
    exact = language.perplexity(model, held_out)
    assert exact < 20
    for preset in ("int8", "int8-static", "int8-dynamic"):
        small = sashiko.quantize(model, [held_out[:8, :-1]], preset=preset)
        assert "recurrence" in [item.site.operation for item in small.record.sites]
        assert language.perplexity(small, held_out) < 1.002 * exact


def test_language_model_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SMALL, steps=1)
    monkeypatch.setattr(language, "CACHE", tmp_path / "cache")
    first = language.language_model(settings)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    monkeypatch.setattr(language, "train_language_model", None)  # is not needed again
    second = language.language_model(settings)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True))
    with pytest.raises(TypeError):
        language.language_model(replace(settings, seed=1))


def test_held_out_modules_are_not_trained_on() -> None:
    assert not set(language.TRAINING) & set(language.HELD_OUT)
    assert len(language.source_bytes(language.TRAINING)) > 1_000_000 and len(language.source_bytes(language.HELD_OUT)) > 200_000


def test_command_prints_and_saves(
    data: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "JOBS", {"digits": lambda: iter([job("untrained", DigitsCnn(4).eval(), data)])})
    monkeypatch.setattr(command, "pin", lambda: None)
    path = tmp_path / "accuracy.json"
    command.main(["digits", "--presets", "int8", "--json", str(path)])
    assert "compiled top-1" in capsys.readouterr().out
    saved = json.loads(path.read_text())
    assert [row["preset"] for row in saved["rows"]] == [FP32, "int8"] and saved["machine"]["features"]


def test_table_has_a_line_for_each_row(data: Digits) -> None:
    found = [Row("j", "peer", "int8", failure="missing"), Row("j", "sashiko", "int8", {"top-1": 0.5}, ms=(1.0, 3.0, 2.0))]
    view = command.table(job("j", DigitsCnn(4).eval(), data), found)
    assert [column.header for column in view.columns] == ["", "simulated top-1", "compiled top-1", "ms", "remarks"]
    assert list(view.columns[-1].cells) == ["missing", ""] and list(view.columns[3].cells) == ["-", "2.00"]
