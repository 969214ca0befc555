"""Mixtures of experts compiled: rows that choose a matrix each, in every precision, for every size of the groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import sashiko
from sashiko.graph.aten.experts import EXPERTS
from sashiko.platforms.catalogue import CATALOGUE, X86_64_V3, X86_64_VNNI
from sashiko.platforms.host import host
from sashiko.platforms.target import Target
from sashiko.quant import QuantizedModule, Scheme, prepare_qat
from tests.sweeps import swept

COUNT, WIDTH = 5, 40


class Experts(nn.Module):
    """Two products, a gate in between."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(COUNT, 2 * 24, WIDTH, dtype=dtype) / 6)
        self.down = nn.Parameter(torch.randn(COUNT, WIDTH, 24, dtype=dtype) / 4)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        gate, up = EXPERTS(x, self.up, ends).chunk(2, -1)
        return EXPERTS(nn.functional.silu(gate) * up, self.down, ends)


def call(rows: int, seed: int = 0, tail: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, and where groups of random sizes end. tail: rows behind the last group."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, rows - tail + 1, (COUNT - 1,), generator=generator).sort()[0]
    return torch.randn(rows, WIDTH, generator=generator), torch.cat([ends, torch.tensor([rows - tail])]).int()


SIZES = ({0: Dim.AUTO}, None)
ROWS = (40, 1, 2, 7, 100, 333)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 5e-2)])
def test_every_size_of_the_groups(precision: str, tolerance: float) -> None:
    model = Experts().eval()
    compiled = sashiko.compile(model, call(40), dynamic_shapes=SIZES, precision=precision, strict=True)
    with torch.no_grad():
        for seed, rows in enumerate((*ROWS, *ROWS)):
            for tail in {0, rows // 3}:
                given = call(rows, seed, tail)
                torch.testing.assert_close(compiled(*given), model(*given), rtol=0, atol=tolerance)
        assert not compiled(*call(9, tail=9)).any()
        assert compiled(torch.randn(0, WIDTH), torch.zeros(COUNT, dtype=torch.int32)).shape == (0, WIDTH)


def test_numbers_that_are_no_rows_do_no_harm() -> None:
    compiled = sashiko.compile(Experts().eval(), call(40))
    for ends in ([2**31 - 1, 3, -7, 2, 40], [-(2**31)] * 5):
        assert compiled(torch.randn(40, WIDTH), torch.tensor(ends, dtype=torch.int32)).shape == (40, WIDTH)


def test_known_rows_and_two_threads() -> None:
    model, before = Experts().eval(), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for rows in (3, 14, 512):
            compiled = sashiko.compile(model, call(rows))
            for seed in range(4):
                with torch.no_grad():
                    torch.testing.assert_close(compiled(*call(rows, seed)), model(*call(rows, seed)), rtol=0, atol=1e-5)
    finally:
        torch.set_num_threads(before)


HERE = [target for target in CATALOGUE if not target.why_not_on(host())]


@pytest.mark.parametrize("target", swept(HERE, (X86_64_V3, X86_64_VNNI)), ids=lambda target: target.name)
def test_other_targets(target: Target) -> None:
    model, given = Experts().eval(), call(40)
    small, few = (sashiko.quantize(model, [given], preset=preset) for preset in ("int8", "int4-weight"))
    for each, tolerance in ((model, 1e-5), (small, 1e-4), (few, 1e-4)):
        with torch.no_grad():
            difference = (sashiko.compile(each, given, target=target)(*given) - each(*given)).abs()
        # Where a number lies between two integers of its row, the other one may be taken: what that does to a row is small.
        assert (difference.amax(1) > tolerance).sum() <= (4 if each is small else 0) and difference.max() < 0.05


class Turns(nn.Module):
    def __init__(self, ends: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.ends, self.w = ends, nn.Parameter(torch.randn(COUNT, 7, WIDTH) / 6)

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return EXPERTS(x, self.w, self.ends(given))


@pytest.mark.parametrize("ends", [
    lambda given: torch.arange(0, 25, 6), lambda given: given[1:], lambda given: given[:5].view(5), lambda given: (given + 4)[:5],
    lambda given: given[::2].repeat(2)[:5].sort()[0],
])  # fmt: skip
def test_numbers_of_the_rows_come_from_anywhere(ends: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, given = Turns(ends).eval(), (torch.randn(24, WIDTH), torch.tensor([0, 3, 3, 9, 14, 20]))
    compiled = sashiko.compile(model, given, strict=True)
    torch.testing.assert_close(compiled(*given), model(*given).detach(), rtol=0, atol=1e-5)


class GivenWeights(nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return EXPERTS(x, w, ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_that_no_kernel_takes_are_spelled_out(dtype: torch.dtype) -> None:
    (x, ends), w = call(12), torch.randn(COUNT, 7, WIDTH, dtype=dtype)
    compiled = sashiko.compile(GivenWeights().eval(), (x.to(dtype), w, ends), strict=True)
    torch.testing.assert_close(compiled(x.to(dtype), w, ends), EXPERTS(x.to(dtype), w, ends), rtol=0, atol=1e-5)


def test_weights_that_change_are_noticed() -> None:
    model, given = Experts().eval(), call(40)
    compiled = sashiko.compile(model, given)
    with torch.no_grad():
        model.up.mul_(-1)
        torch.testing.assert_close(compiled(*given), model(*given), rtol=0, atol=1e-5)


@pytest.mark.parametrize("preset", ["int8", "int8-dynamic", "int8-static", "int8-symmetric", "int8-weight", "int4-weight"])
def test_quantized(preset: str, tmp_path: Path) -> None:
    # One range for all rows saturates; 4 bits in groups of 8 leave 5 % of normal weights in each of two products.
    model, bound = Experts().eval(), 0.05 if preset in ("int8", "int8-dynamic", "int8-weight") else 0.2
    small = sashiko.quantize(model, [call(rows, seed) for seed, rows in enumerate(ROWS)], preset=preset)
    assert [(s.site.name, s.site.operation, s.site.features) for s in small.record.sites] == [
        ("up", "experts", (WIDTH, 48)), ("down", "experts", (24, WIDTH)),
    ]
    small.save(tmp_path / "small")
    compiled = sashiko.compile(small, call(64), dynamic_shapes=SIZES, strict=True)
    assert compiled.built is not None
    assert all(("i4" if preset == "int4-weight" else "i8") in p.kernel for p in compiled.built.products if p is not None)
    with torch.no_grad():
        for module in (small, sashiko.load(tmp_path / "small")):
            assert isinstance(module, QuantizedModule)
            for seed, rows in enumerate(ROWS):
                given = call(rows, seed, rows // 4)
                got, want, real = (f(*given) for f in (compiled, module, model))
                assert (want - real).norm() < bound * real.norm()
                # A number between the products that is rounded the other way is a step of 255 of its row, or of all rows.
                assert (got - want).norm() < 0.01 * want.norm()


class Batch(nn.Module):
    """A matrix for each part of a batch, as the experts of Llama 4 are written."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.b = nn.Parameter(torch.randn(COUNT, WIDTH, 24) / 6), nn.Parameter(torch.randn(COUNT, 1, 24))
        self.down = nn.Parameter(torch.randn(COUNT, 24, WIDTH) / 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.bmm(x, self.up) + self.b) @ self.down


@pytest.mark.parametrize("preset", ["int8", "int8-static", "int8-weight", "int4-weight"])
def test_a_batch_of_products(preset: str) -> None:
    model, bound = Batch().eval(), 0.15 if preset == "int4-weight" else 0.03
    given = [torch.randn(COUNT, rows, WIDTH) for rows in (6, 17, 2, 1, 0)]
    small = sashiko.quantize(model, given[:3], preset=preset)
    assert [(s.site.name, s.site.operation, s.site.features) for s in small.record.sites] == [
        ("up", "experts", (WIDTH, 24)), ("down", "experts", (24, WIDTH)),
    ]
    compiled = sashiko.compile(small, (given[0],), dynamic_shapes=({1: Dim.AUTO},), strict=True)
    assert compiled.built is not None
    assert all(("i4" if preset == "int4-weight" else "i8") in p.kernel for p in compiled.built.products if p is not None)
    with torch.no_grad():
        for x in given:
            got, want, real = compiled(x), small(x), model(x)
            assert (want - real).norm() <= bound * real.norm() and (got - want).norm() <= 0.01 * want.norm()


def test_a_batch_of_products_trains() -> None:
    x = torch.randn(COUNT, 6, WIDTH)
    trained = prepare_qat(Batch().eval(), [x], preset="int8")
    trained(x).square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in trained.parameters())
    with torch.no_grad():
        torch.testing.assert_close(trained.convert()(x), trained(x))


def test_a_batch_of_products_in_bf16() -> None:
    model, x = Batch().bfloat16().eval(), torch.randn(COUNT, 6, WIDTH).bfloat16()
    small = sashiko.quantize(model, [x])
    with torch.no_grad():
        real = model(x).float()
        for each in (small, sashiko.compile(small, (x,), strict=True)):
            result = each(x)
            assert result.dtype == torch.bfloat16 and (result.float() - real).norm() < 0.03 * real.norm()


def test_experts_in_bf16() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 16, 24).bfloat16())

        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(x, self.w, offs=ends)

    model, given = Model().eval(), (torch.randn(32, 16).bfloat16(), torch.tensor([8, 8, 32], dtype=torch.int32))
    small = sashiko.quantize(model, [given])
    assert [s.site.operation for s in small.record.sites] == ["experts"]
    with torch.no_grad():
        real = model(*given).float()
        for each in (sashiko.compile(model, given, strict=True), small, sashiko.compile(small, given, strict=True)):
            result = each(*given)
            assert result.dtype == torch.bfloat16
            assert (result.float() - real).norm() < 0.03 * real.norm()


def test_what_is_left_in_floating_point() -> None:
    model = Experts().eval()
    small = sashiko.quantize(model, [call(16)], preset=Scheme(operations=("linear",)))
    assert ["the scheme leaves experts" in each.reason for each in small.record.left_out] == [True, True]
    torch.testing.assert_close(small(*call(16)), model(*call(16)))


def test_the_search_chooses_for_experts() -> None:
    model = Experts().eval()
    compiled = sashiko.quantize_and_compile(model, [call(64)], preset="auto", budget_s=5)
    assert compiled.search is not None and {site.name for site in compiled.search.sites} == {"up", "down"}
    with torch.no_grad():
        assert (compiled(*call(64)) - model(*call(64))).norm() < 0.05 * model(*call(64)).norm()


@pytest.mark.parametrize("preset", ["int8", "int8-static", "int8-weight", "int4-weight"])
def test_they_train(preset: str) -> None:
    torch.manual_seed(0)
    trained = prepare_qat(Experts().eval(), [call(64)], preset=preset)
    optimizer, losses = torch.optim.SGD(trained.parameters(), lr=0.05), []
    for _ in range(10):
        optimizer.zero_grad()
        loss = (trained(*call(64)) - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0]
    with torch.no_grad():
        after, converted = trained(*call(64)), trained.convert()(*call(64))
    assert (after - converted).norm() < 0.01 * after.norm()


def test_a_model_of_transformers() -> None:
    """Its own operator is known by name, wherever its experts are not those of torch."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )
    torch.manual_seed(0)
    model, words = transformers.MixtralModel(config).eval(), torch.randint(0, 99, (2, 11))
    compiled = sashiko.compile(model, {"input_ids": words})
    with torch.no_grad():
        want = model(input_ids=words).last_hidden_state
        torch.testing.assert_close(compiled(input_ids=words).last_hidden_state, want, rtol=0, atol=1e-5)
        one = {"input_ids": words[:1, :1]}
        token = sashiko.compile(model, one, strict=True)  # sorting and counting two choices is native, too
        torch.testing.assert_close(token(**one).last_hidden_state, model(**one).last_hidden_state, rtol=0, atol=1e-5)
        small = sashiko.quantize(model, [{"input_ids": words}])
        assert sum(s.site.operation == "experts" for s in small.record.sites) == 4
        assert [each.name for each in small.record.left_out if "chooses" in each.reason] == ["layers.0.mlp.gate", "layers.1.mlp.gate"]
        got = sashiko.compile(small, {"input_ids": words})(input_ids=words).last_hidden_state
        assert (got - want).norm() < 0.1 * want.norm()
