"""Other ways to compute a product: what is offered, what a choice does, and that all of them give the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sashiko
from sashiko.driver import build as building
from sashiko.driver.specs import unchosen
from sashiko.graph.types import DType, bf16, f32, i8, u8
from sashiko.kernels import table, x86_vector
from sashiko.kernels.alternatives import alternatives
from sashiko.kernels.blocking import choose
from sashiko.kernels.spec import Choice, GemmSpec
from sashiko.platforms.catalogue import CATALOGUE, NEOVERSE_N2, X86_64_AMX
from sashiko.platforms.host import host
from sashiko.platforms.target import Target
from tests.kernels.products import Case, spec_of

AVX512 = replace(CATALOGUE[0], features=X86_64_AMX.features - {"amx_tile", "amx_int8", "amx_bf16"}, l1d=32 << 10, l2=1 << 20)


def chosen(spec: GemmSpec, **choice: int | str) -> GemmSpec:
    return replace(spec, choice=Choice(**choice))  # type: ignore[arg-type]


def test_a_choice_decides_how_a_product_is_cut() -> None:
    spec = spec_of(Case(512, 256, 256), f32, f32, m=512)
    usual, tall, cut = (choose(AVX512, each, x86_vector.fma(16)) for each in (spec, chosen(spec, tiles=7), chosen(spec, pieces=4)))
    assert tall.variants[0].rows == 7 * 14 != usual.variants[0].rows
    assert (cut.pieces, cut.k_block) == (4, 64) and usual.pieces != 4


def test_a_choice_of_tiles_keeps_to_the_room_there_is() -> None:
    spec = chosen(spec_of(Case(512, 256, 30_000), f32, f32, m=512), tiles=1000)
    assert choose(AVX512, spec, x86_vector.fma(16)).variants[0].rows <= 16 * 14


def test_a_choice_names_the_row() -> None:
    spec = spec_of(Case(512, 256, 256), u8, i8, m=512)
    first = table.select(X86_64_AMX, spec)
    other = next(row for row in table.accepting(X86_64_AMX, spec) if row is not first.kernel)
    found = table.select(X86_64_AMX, chosen(spec, row=other.name))
    assert found.kernel is other
    assert found.refusals[-1] == (first.kernel.name, "took longer when it was measured")
    assert table.select(X86_64_AMX, chosen(spec, row="one of another version")).kernel is first.kernel


@pytest.mark.parametrize("target", [AVX512, X86_64_AMX, NEOVERSE_N2], ids=lambda t: t.name)
@pytest.mark.parametrize("types", [(f32, f32), (bf16, bf16), (u8, i8), (f32, i8)], ids=str)
def test_alternatives_differ_from_the_estimate_and_from_one_another(target: Target, types: tuple[DType, DType]) -> None:
    spec = spec_of(Case(100, 200, 3000), *types, m=100)
    found = alternatives(target, spec)
    assert Choice() not in found and len(set(found)) == len(found)
    assert alternatives(target, chosen(spec, tiles=4)) == found
    assert all(choice.row != table.select(target, spec).kernel.name for choice in found)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8-static"])
def test_every_alternative_computes_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(700, 90), torch.nn.ReLU()).eval(), torch.randn(75, 700)
    source = model if kind in ("fp32", "bf16") else sashiko.quantize(model, [x], preset=kind, progress=False)
    precision = kind if source is model else "auto"
    usual = sashiko.compile(source, (x,), precision=precision)
    assert usual.built is not None
    (spec,) = [each for each in usual.built.measurable if each is not None]
    largest = float((x.abs() @ model[0].weight.detach().abs().mT).max())
    # Integers that stand for bf16 have 12 bits beside their sign, those of the largest of 128 neighbours.
    rounding = {"fp32": 700 * 2.0**-24, "bf16": 700 * 2.0**-24 + 2 * 2.0**-12, "int8-static": 0.0}[kind]
    expected, tolerance = usual(x), rounding * largest
    original = building.specs_of
    for choice in alternatives(host(), spec):
        monkeypatch.setattr(building, "specs_of", lambda program, target, _, c=choice: original(program, target, {spec: c}))
        other = sashiko.compile(source, (x,), precision=precision)
        assert other.built is not None and unchosen(spec) in other.built.measurable
        assert torch.allclose(other(x), expected, rtol=0, atol=tolerance), choice
