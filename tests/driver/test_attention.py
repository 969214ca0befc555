"""Attention whose heads are long, of unknown size, or lie across memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.export import Dim
from torch.testing import assert_close

import sashiko
from tests.driver.functions import Apply

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
LEAST_HALF = torch.finfo(torch.float16).min


def _over_channels(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Channels attend to each other: rows of queries, keys and values are columns of x [batch, rows, 3 * channels]."""
    batch, rows, _ = x.shape
    q, k, v = x.reshape(batch, rows, 3, heads, -1).permute(2, 0, 3, 4, 1).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(-1, -2)


def _labels(compiled: sashiko.CompiledModel, *inputs: torch.Tensor) -> list[str]:
    return [step.label for step in compiled.times(*inputs, repeat=1)]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["causal", "mask", "added", "shared", "wide"])
def test_heads_longer_than_the_kernels_keep(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 24, 1100).to(dtype) for _ in range(3))
    options: dict[str, Any] = {"is_causal": kind == "causal", "enable_gqa": kind == "shared"}
    if kind == "mask":
        options["attn_mask"] = torch.rand(2, 1, 24, 24) > 0.3
        options["attn_mask"][0, 0, 3] = False  # a query that may see nothing
    elif kind == "added":
        options["attn_mask"] = torch.randn(24, 24).to(dtype)
    if kind == "shared":
        k, v = k[:, :2], v[:, :2]
    elif kind == "wide":
        q, k = q[..., :32], k[..., :32]
    model = Apply(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)).eval()
    compiled = sashiko.compile(model, (q, k, v), strict=True)
    labels = _labels(compiled, q, k, v)
    assert "attention" not in labels and sum(label.startswith("matmul") and "pack" not in label for label in labels) == 2
    assert_close(compiled(q, k, v), model(q, k, v), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@torch.no_grad()
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_heads_of_unknown_size(dtype: torch.dtype) -> None:
    model = Apply(lambda x: _over_channels(x, 4)).eval()
    compiled = sashiko.compile(model, (torch.randn(2, 50, 96).to(dtype),), dynamic_shapes=(({1: Dim("rows", min=2)},),), strict=True)
    for rows in (2, 50, 1500):
        x = torch.randn(2, rows, 96).to(dtype)
        assert_close(compiled(x), model(x), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@torch.no_grad()
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_heads_across_memory_are_copied_first(dtype: torch.dtype) -> None:
    """The keys are read again for every block of queries."""
    x = torch.randn(2, 48, 96).to(dtype)
    model = Apply(lambda x: _over_channels(x, 4)).eval()
    compiled = sashiko.compile(model, (x,), strict=True)
    labels = _labels(compiled, x)
    assert labels[0] == "permute" and labels[-1] == "attention"
    assert_close(compiled(x), model(x), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@torch.no_grad()
def test_heads_along_memory_are_read_in_place() -> None:
    x = torch.randn(2, 48, 96)

    def attention(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v)

    compiled = sashiko.compile(Apply(attention).eval(), (x,), strict=True)
    assert _labels(compiled, x) == ["attention"]
    assert_close(compiled(x), attention(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("low", [-1e9, -1e20, torch.finfo(torch.float32).min])
def test_rows_whose_keys_are_all_hidden_by_an_added_mask(low: float, precision: Any) -> None:
    """Such as those of padding in front: every key counts the same, as in eager mode, and no score overflows."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 64, 64) for _ in range(3))
    mask = torch.zeros(2, 1, 64, 64)
    mask[0, :, :3] = low
    mask[1, :, :, 40:] = low
    compiled = sashiko.compile(Apply(F.scaled_dot_product_attention).eval(), (q, k, v, mask), precision=precision)
    assert_close(compiled(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask), rtol=0, atol=1e-5 if precision == "fp32" else 2e-2)


@torch.no_grad()
@pytest.mark.parametrize("masked", [
    lambda s, keep: s + torch.where(keep, 0.0, LEAST_HALF).half(),
    lambda s, keep: s - (~keep).half() * -LEAST_HALF,
    lambda s, keep: torch.where(keep, s, LEAST_HALF),
])
def test_the_least_number_of_f16_hides(masked: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Scores are lost beside it: a query that sees no key weighs all alike."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 32, 16).half() for _ in range(3))
    keep = torch.ones(2, 1, 32, 32, dtype=torch.bool).tril()
    keep[0, :, :, :5] = False
    model = Apply(lambda q, k, v, keep: masked(q @ k.mT * 0.25, keep).softmax(-1, dtype=torch.float32).half() @ v).eval()
    compiled = sashiko.compile(model, (q, k, v, keep), strict=True)
    assert "attention" in _labels(compiled, q, k, v, keep)[-1]
    assert_close(compiled(q, k, v, keep), model(q, k, v, keep), rtol=0, atol=2e-3)


@torch.no_grad()
@pytest.mark.parametrize(("batch", "keys", "results", "expected"), [
    ((2, 2), 8, 1, 0.0), ((2, 2), 8, 2, torch.nan), ((2, 2), 1, 1, torch.nan), ((2, 2, 2), 8, 1, torch.nan),
], ids=["attention", "probabilities", "one key", "five axes"])
def test_a_row_whose_scores_are_all_minus_infinity(batch: tuple[int, ...], keys: int, results: int, expected: float) -> None:
    """0 where it becomes attention, NaN as in PyTorch where it stays a softmax."""
    q, k, keep = torch.randn(*batch, 8, 16), torch.randn(*batch, keys, 16), torch.ones(8, keys, dtype=torch.bool).tril(-1)

    def attention(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        p = (q @ k.mT).masked_fill(~keep, -torch.inf).softmax(-1)
        return (p @ k, p)[:results]

    row = sashiko.compile(Apply(attention).eval(), (q, k), strict=True)(q, k)[0][..., 0, :]
    assert_close(row, torch.full_like(row, expected), rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
@pytest.mark.parametrize("queries", [1, 3, 40])
def test_masks_that_are_looked_up_are_checked_where_they_hide(queries: int) -> None:
    table, at = torch.ones(2, 300, dtype=torch.bool), torch.arange(300)
    table[:, 200:] = False
    q, k, v = torch.randn(1, 2, queries, 32), torch.randn(1, 2, 300, 32), torch.randn(1, 2, 300, 32)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=table[:1][:, at])

    compiled = sashiko.compile(Apply(attention).eval(), (q, k, v, table, at))
    assert_close(compiled(q, k, v, table, at), attention(q, k, v, table, at), rtol=1e-5, atol=1e-5)
    at[299] = 1 << 40
    with pytest.raises(IndexError):
        compiled(q, k, v, table, at)


@torch.no_grad()
@pytest.mark.parametrize("queries", [1, 40])
def test_scores_as_large_as_a_mask_count(queries: int) -> None:
    q, k, v = torch.randn(1, 1, queries, 64) * 1e19, torch.randn(1, 1, 300, 64) * 1e12, torch.randn(1, 1, 300, 64)
    mask = torch.zeros(queries, 300)
    mask[:, 150:] = -1e30
    compiled = sashiko.compile(Apply(F.scaled_dot_product_attention).eval(), (q, k, v, mask))
    assert_close(compiled(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask), rtol=1e-5, atol=1e-5)
