"""Results of `torch.compile(backend="sashiko")` that are views of arguments or of one another: the same elements, in the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing import assert_close


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Dynamo remembers what it compiled; every test starts without."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


VIEWS: dict[str, Callable[..., Any]] = {
    "of an argument": lambda x, y: (x.t()[:, : y.shape[0]], x + 1),
    "repeated": lambda x, y: (x + 1, x[:, None].expand(-1, y.shape[0], -1)),
    "alone": lambda x, y: x.t()[:, : y.shape[0]],
    "one of several": lambda x, y: (x.t().split(y.shape[0], 1)[1], y * 2),
    "of what is written": lambda x, y: (x.add_(1), x.t()[:, : y.shape[0]], y * 2)[1:],
    "of what is copied": lambda x, y: (y.new_zeros(x.shape[1], x.shape[0]).t().copy_(x), x.t()[:, : y.shape[0]]),
    "of what is copied to an argument": lambda x, y: (y.copy_(x.t()[0, : y.shape[0]]), x.t()[:, : y.shape[0]], x.sum())[1:],
    "of a result": lambda x, y: (lambda z: (z, z.t()[:, : y.shape[0]], z[1:]))(x + 1),
    "in complex numbers": lambda x, y: (torch.view_as_complex(x.view(-1, y.shape[0], 2)).t(), x + 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_by_sizes_that_are_not_known(name: str) -> None:
    """PyTorch cannot repeat such a view: it makes its own from the sizes and strides of ours, in the memory of the argument."""
    y, x = torch.randn(3), torch.randn(4, 6)
    compiled = torch.compile(VIEWS[name], backend="sashiko", dynamic=True)
    for rows in (4, 5):
        x = torch.randn(rows, 6)
        other = x.clone()
        with torch.no_grad():
            got, expected = compiled(x, y), VIEWS[name](other, y)
        assert_close(got, expected)
        assert_close(x, other)
        for one, wanted in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, expected)), strict=True):
            shares, should = one.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), wanted._base is not None
            assert shares == (should and wanted.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())


OF_RESULTS: dict[str, Callable[..., Any]] = {
    "after it": lambda x: (lambda y: (y, y.t(), y[0]))(x + 1),
    "before it": lambda x: (lambda y: (y.t()[1:], x * 2, y))(x + 1),
    "in another shape": lambda x: (lambda y: (y, y.view(-1), y.unflatten(1, (3, 2))))(x.exp()),
    "of a view": lambda x: (lambda y: (y, y.t(), y.t()[1], y.t()[2:]))(x + 1),
    "of both kinds": lambda x: (lambda y: (x[1:], y, y[1:], x.t()))(x + 1),
    "of one of several": lambda x: (lambda y: (*y, y[0].t(), y[1][0]))(x.sort(1)),
    "twice": lambda x: (lambda y: (y, y, y.t(), y.t()))(x + 1),
    "parts": lambda x: (lambda y: (y, *y.split(2, 1)))(x + 1),
    "of a transposed one": lambda x: (lambda y: (y, y.t().reshape(-1)))(x.t() + 1),
    "by strides": lambda x: (lambda y: (y, y.as_strided((2, 2), (1, 2))))(x + 1),
}


@torch.no_grad()
@pytest.mark.parametrize("name", OF_RESULTS)
def test_views_of_results(name: str) -> None:
    """What is written into one is seen through the others, as in eager; but for views by strides, which are copies."""
    x = torch.randn(4, 6)
    got, expected = torch.compile(OF_RESULTS[name], backend="sashiko")(x.clone()), OF_RESULTS[name](x.clone())
    assert_close(got, expected)
    if name != "by strides":
        for n in range(len(got)):
            got[n].fill_(n), expected[n].fill_(n)
            assert_close(got, expected)
