"""Products of few columns, or of one row with what is no weight: sums along memory instead of tiles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sashiko
from sashiko.platforms.target import Target
from tests.driver.functions import Apply

PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "matrix and vector": (lambda x, y: x @ y, ((37, 70), (70,))),
    "scores": (lambda x, y: (x @ y).softmax(1), ((3, 29, 40), (40,))),
    "three columns": (lambda x, y: x @ y.mT, ((37, 70), (3, 70))),
    "a column for each matrix": (lambda x, y: x @ y, ((5, 9, 33), (5, 33, 1))),
    "vector and matrix": (lambda x, y: x @ y, ((70,), (70, 37))),
    "a row for each matrix": (lambda x, y: x @ y, ((2, 3, 1, 20), (2, 3, 20, 31))),
    "a row for each transposed matrix": (lambda x, y: x @ y.mT, ((2, 3, 1, 20), (2, 3, 31, 20))),
    "one row for all transposed matrices": (lambda x, y: x @ y.mT, ((1, 20), (4, 31, 20))),
    "eight rows for each matrix": (lambda x, y: x @ y, ((5, 8, 20), (5, 20, 31))),
    "four rows for each transposed matrix": (lambda x, y: x @ y.mT, ((5, 4, 20), (5, 31, 20))),
    "small matrices": (lambda x, y: x @ y, ((60, 3, 3), (60, 3, 17))),
    "a row and a transposed matrix": (lambda x, y: x @ y.mT, ((1, 20), (31, 20))),
}


def labels(compiled: sashiko.CompiledModel, *args: Tensor) -> str:
    return " ".join(step.label for step in compiled.times(*args))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_sums_along_memory(name: str, precision: str) -> None:
    function, shapes = PRODUCTS[name]
    args = [torch.randn(shape) for shape in shapes]
    compiled = sashiko.compile(Apply(function).eval(), args, precision=precision, strict=True)
    assert "reduce" in labels(compiled, *args) and "matmul" not in labels(compiled, *args) and "linear" not in labels(compiled, *args)
    # Nothing is rounded to bf16: the sum waits for memory, and a cast would be another pass.
    exact = function(*(a.double() for a in args))
    magnitude = function(*(a.double().abs() for a in args)) if name != "scores" else torch.ones(())
    assert ((compiled(*args) - exact).abs() <= 80 * 2.0**-24 * magnitude).all()


@pytest.mark.isa("avx2")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("rows", [1, 8])
def test_tiles_read_whole_panels_in_place(rows: int, precision: str, target: Target) -> None:
    """Packed they are not, nor rounded to bf16."""
    x, y = torch.randn(5, rows, 20), torch.randn(5, 20, 32)
    compiled = sashiko.compile(Apply(torch.matmul).eval(), (x, y), precision=precision, target=target, strict=True)
    assert "matmul" in labels(compiled, x, y) and "pack" not in labels(compiled, x, y)
    difference = (compiled(x, y) - x.double() @ y.double()).abs()
    assert (difference <= 80 * 2.0**-24 * (x.double().abs() @ y.double().abs())).all()


@pytest.mark.parametrize("outputs", [1, 4])
def test_a_layer_of_few_outputs_follows_its_weight(outputs: int) -> None:
    layer, x = nn.Linear(50, outputs).eval(), torch.randn(7, 50)
    compiled = sashiko.compile(layer, (x,), strict=True)
    assert "linear" not in labels(compiled, x)
    with torch.no_grad():
        layer.weight.mul_(2)
    torch.testing.assert_close(compiled(x), layer(x).detach())


@pytest.mark.parametrize("model", [nn.Conv2d(8, 1, 3, padding=1), nn.Linear(50, 5)])
def test_other_products_have_tiles(model: nn.Module) -> None:
    x = torch.randn(2, 8, 12, 50)
    compiled = sashiko.compile(model.eval(), (x,), strict=True)
    assert "linear" in labels(compiled, x)
    torch.testing.assert_close(compiled(x), model(x).detach(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("groups", [6, 2])
def test_one_query_reads_keys_and_values_that_tiles_could_read_in_place(groups: int) -> None:
    """Heads may share them: tiles would have a copy for each."""
    q, k, v = (torch.randn(1, heads, length, 64) for heads, length in ((6, 1), (groups, 48), (groups, 48)))
    model = Apply(lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)).eval()
    compiled = sashiko.compile(model, (q, k, v), strict=True)
    assert "matmul" not in labels(compiled, q, k, v)
    torch.testing.assert_close(compiled(q, k, v), model(q, k, v), rtol=1e-5, atol=1e-5)


SEEN = torch.tensor([[True, False, True, True, False] * 9])


@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "groups"), [(torch.float32, 6), (torch.float32, 2), (torch.bfloat16, 3), (torch.bfloat16, 2), (torch.float16, 2)]
)
@pytest.mark.parametrize("mask", ["none", "bool", "added", "nothing", "causal"])
def test_attention_of_one_query(mask: str, groups: int, dtype: torch.dtype) -> None:
    """It reads keys and values once, in order, and needs no tiles; nothing that is left unseen becomes NaN."""
    query, keys, values = (torch.randn(2, heads, length, 40).to(dtype) for heads, length in ((6, 1), (groups, 45), (groups, 45)))
    masks = {"bool": SEEN, "added": torch.randn(1, 45).to(dtype), "nothing": torch.zeros(1, 45, dtype=torch.bool)}
    given = {"attn_mask": masks[mask]} if mask in masks else {"is_causal": mask == "causal"}

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Tensor | bool) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)  # type: ignore[arg-type]

    compiled = sashiko.compile(Apply(lambda q, k, v: attention(q, k, v, **given)).eval(), (query, keys, values), strict=True)
    assert "  attention_" in (said := str(compiled.explain())) and "_few\n" in said and "not attention" not in said
    wide = {name: m.double() if isinstance(m, Tensor) and m.is_floating_point() else m for name, m in given.items()}
    exact = attention(*(x.double() for x in (query, keys, values)), **wide)
    exact = torch.zeros_like(exact) if mask == "nothing" else exact
    unit = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert ((compiled(query, keys, values) - exact).abs() <= 200 * 2.0**-24 * values.abs().max() + 4 * unit * values.abs().max()).all()


@torch.no_grad()
def test_the_keys_of_one_query_stay_as_they_are() -> None:
    """A cache in fp32 is not converted at every step."""
    q, k, v = (torch.randn(1, 4, length, 32) for length in (1, 50, 50))
    function = nn.functional.scaled_dot_product_attention
    compiled = sashiko.compile(Apply(function).eval(), (q, k, v), precision="bf16", strict=True)
    assert "cast" not in labels(compiled, q, k, v)
    torch.testing.assert_close(compiled(q, k, v), function(q, k, v), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("queries", "groups", "few"), [(3, 6, True), (2, 3, True), (30, 3, False)])
def test_attention_of_few_queries(queries: int, groups: int, few: bool) -> None:
    q, k, v = (torch.randn(2, heads, length, 24) for heads, length in ((6, queries), (groups, 33), (groups, 33)))

    def attention(*args: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(*args, is_causal=True, enable_gqa=True)

    compiled = sashiko.compile(Apply(attention).eval(), (q, k, v), strict=True)
    assert ("  attention_f32_f32_few" in str(compiled.explain())) == few
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("keys", "few"), [(23, False), (24, True)])
def test_one_query_beside_few_keys(keys: int, few: bool) -> None:
    """A query has things done once, which take longer than products with a few keys."""
    q, k, v = (torch.randn(2, 3, length, 24) for length in (1, keys, keys))
    function = nn.functional.scaled_dot_product_attention
    compiled = sashiko.compile(Apply(function).eval(), (q, k, v), strict=True)
    assert ("  attention_f32_f32_few" in str(compiled.explain())) == few == ("attention" in labels(compiled, q, k, v))
    torch.testing.assert_close(compiled(q, k, v), function(q, k, v), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_one_query_reads_what_keys_are_made_of() -> None:
    """A quantized cache is not written in full for it, nor one that lies column by column copied."""
    q, scales = torch.randn(1, 4, 1, 32), torch.rand(1, 4, 50, 1)
    k, v = (torch.randint(-128, 128, (1, 4, 50, 32), dtype=torch.int8) for _ in range(2))
    function = nn.functional.scaled_dot_product_attention
    for read, keys in ((lambda x: x * scales, (k, v)), (lambda x: x.mT, (torch.randn(1, 4, 32, 50), torch.randn(1, 4, 32, 50)))):
        model = Apply(lambda q, k, v, read=read: function(q, read(k), read(v))).eval()
        compiled = sashiko.compile(model, (q, *keys), strict=True)
        assert "attention" not in labels(compiled, q, *keys)
        torch.testing.assert_close(compiled(q, *keys), model(q, *keys), rtol=1e-4, atol=1e-3)
