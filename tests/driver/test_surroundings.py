"""What the caller has switched on for tensors (a default device, autocast, a default dtype) changes neither code nor numbers of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import sashiko
from tests.sweeps import swept


class Folded(nn.Module):
    """A product of weights, which is computed outside the code, and an operation that is left to PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(32, 32) / 6) for _ in range(2))
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(nn.functional.gelu(self.up(x @ (self.a @ self.b))))
        return y @ torch.linalg.matrix_exp(y.t() @ y / 100)


@contextmanager
def dtype(default: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "another device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "bf16 by default": lambda: dtype(torch.bfloat16),
    "double by default": lambda: dtype(torch.float64),
}
each = pytest.mark.parametrize("surroundings", SURROUNDINGS.values(), ids=SURROUNDINGS)


@each
def test_calls_and_changed_weights(surroundings: Callable[[], AbstractContextManager[object]]) -> None:
    torch.manual_seed(0)
    model, x = Folded().eval(), torch.randn(8, 32)
    compiled = sashiko.compile(model, (x,))
    expected = compiled(x)
    compiled = sashiko.compile(model, (x,))
    with torch.no_grad(), surroundings():
        assert_close(compiled(x), expected, rtol=0, atol=0)  # the first call, for which its memory is laid out
        model.a.add_(0)
        assert_close(compiled(x), expected, rtol=0, atol=0)
    assert_close(compiled(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", swept(SURROUNDINGS, ("another device", "double by default")))
def test_quantizing_and_compiling(name: str) -> None:
    surroundings = SURROUNDINGS[name]
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).eval(), torch.randn(8, 32)
    expected = {preset: sashiko.quantize(model, [x], preset=preset) for preset in ("int8", "int8-static", "int4-weight")}
    for preset, module in expected.items():
        code = sashiko.compile(module, (x,))(x)
        with surroundings():
            again = sashiko.quantize(model, [x], preset=preset)
            assert_close(sashiko.compile(again, (x,))(x), code, rtol=0, atol=0)
        assert_close(again(x), module(x), rtol=0, atol=0)


class Cast(nn.Module):
    """Casts to the type of what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.norm(self.up(x)).relu().to(x.dtype))
        return result


def test_quantized_modules_compute_in_the_types_of_the_model() -> None:
    torch.manual_seed(0)
    model, x = Cast().eval(), torch.randn(8, 32)
    found = sashiko.quant.calibrate(model, [x], "int8-static")
    small, student, decibels = found.build(), sashiko.quant.prepare_qat(model, [x], preset="int8-static"), sashiko.quant.end_sqnr(found)
    expected, code, trained = small(x), sashiko.compile(small, (x,))(x), student(x)
    part = nn.Sequential(small, nn.Linear(32, 8)).eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(student(x), trained, rtol=0, atol=0)
        student(x).square().mean().backward()
        assert all(parameter.grad is not None for parameter in student.parameters())
        assert sashiko.quant.end_sqnr(found) == decibels
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert_close(small(x), expected, rtol=0, atol=0)
        assert_close(sashiko.compile(small, (x,))(x), code, rtol=0, atol=0)
        assert_close(torch.compile(small, backend="sashiko")(x), code, rtol=0, atol=0)
        assert_close(sashiko.compile(part, (x,))(x), part(x))
