"""Numbers and tensors of mixed element types, compiled whole, against eager: what wraps, what is rounded first, what is an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import sashiko
from sashiko.runtime.plan import AtenStep
from tests.driver.functions import Apply, left

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
HALVES = (torch.float16, torch.bfloat16)


def agree(function: Callable[..., Any], *args: Tensor) -> None:
    model = Apply(function).eval()
    assert_close(sashiko.compile(model, args)(*args), model(*args), equal_nan=True)


def test_numbers_beyond_an_integer_type_wrap_in_arithmetic() -> None:
    xs = [torch.arange(7).to(dtype) for dtype in INTEGERS]

    def around(x: Tensor) -> tuple[Tensor, ...]:
        largest = torch.iinfo(x.dtype).max
        twice = x if x.dtype in (torch.uint8, torch.int8) else torch.add(x, 300, alpha=2)
        each = [y for n in (300, -200, (1 << 40) + 5) for y in (x + n, n - x, x * n)]
        return (*each, x & 300, x ^ -200, x * 3 * largest, (x + largest) + largest, twice)

    agree(lambda *xs: [around(x) for x in xs], *xs)
    agree(lambda x: (torch.add(x, 300, alpha=2), torch.sub(x, 200, alpha=-3)), xs[0])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_powers_of_two_whose_bit_is_not_in_the_type_are_0(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    exponents = torch.tensor([info.min, max(info.min, -1), 0, 1, *range(info.bits - 3, info.bits + 2), info.max], dtype=dtype)
    model = Apply(lambda x: (2**x, 2 ** (x > 0))).eval()
    assert_close(sashiko.compile(model, (exponents,), strict=True)(exponents), model(exponents))


def test_nan_and_infinity_as_numbers() -> None:
    xs = [torch.arange(5).to(dtype) for dtype in (*INTEGERS, *HALVES, torch.bool)]
    agree(lambda *xs: [(x / float("nan"), x * float("nan"), x / float("inf"), x + float("nan")) for x in xs], *xs)
    x = torch.tensor([0.0, -0.0, 2, -2, float("nan"), float("-inf")])
    agree(lambda x: [F.elu(x, alpha) for alpha in (1.5, float("inf"), float("nan"))], x)


def test_numbers_are_copied() -> None:
    xs = [torch.arange(5).to(dtype) for dtype in (torch.uint8, torch.bool, torch.float16, torch.int64)]
    agree(lambda *xs: [x.clone().copy_(number) for x in xs for number in (True, 2, 2.7)], *xs)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16])
def test_numbers_that_a_tensor_cannot_hold_are_errors(dtype: torch.dtype) -> None:
    x = torch.arange(5).to(dtype)
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.clone().fill_(1e6), lambda x: x.masked_fill(x > 2, -1e6), lambda x: F.pad(x, (1, 1), value=1e6)]
    functions += [lambda x: x.clamp(-1e6, 1e6)] if x.is_floating_point() else []
    for function in functions:
        with pytest.raises(RuntimeError, match="without overflow"):
            function(x)
        with pytest.raises(RuntimeError, match="without overflow"):
            sashiko.compile(Apply(function).eval(), (x,))(x)


@pytest.mark.parametrize("bounds", [{"max": 1000000}, {"min": -1000, "max": 3}, {"min": -5}, {"min": -5, "max": 3}], ids=str)
def test_bounds_that_a_tensor_cannot_hold(bounds: dict[str, int]) -> None:
    """They are errors or wrap around before torch 2.15, and have no effect since."""
    x = torch.arange(-3, 5).to(torch.uint8)
    model = Apply(lambda x: x.clamp(**bounds)).eval()
    try:
        expected = model(x)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error).splitlines()[0])):
            sashiko.compile(model, (x,))(x)
    else:
        assert torch.equal(sashiko.compile(model, (x,))(x), expected)


def test_numbers_that_a_tensor_holds() -> None:
    agree(lambda x: (x.masked_fill(x > 2, -1), x.clone().fill_(-200), torch.where(x > 2, x, -1)), torch.arange(5, dtype=torch.uint8))
    x = torch.arange(5, dtype=torch.float16)
    lowest = torch.finfo(torch.float16).min
    agree(lambda x: (x.masked_fill(x > 2, lowest), x.masked_fill(x > 2, float("-inf")), x * 1e10, x.clamp(-65504, 65504)), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numbers", [(0.0, 100.0, 0.1), (-5.0, 3000.0, 1.5), (0.0, 5000.0, 1.0)])
def test_what_is_counted_is_rounded_once(numbers: tuple[float, float, float], dtype: torch.dtype) -> None:
    expected = torch.arange(*numbers, dtype=torch.float64).to(dtype)
    model, x = Apply(lambda x: x + torch.arange(*numbers, dtype=dtype)).eval(), torch.zeros_like(expected)
    assert torch.equal(sashiko.compile(model, (x,), strict=True)(x), expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_no_rounding_keeps_subnormal_halves(dtype: torch.dtype) -> None:
    x = (torch.tensor([1.0, -1.0, 5.0, 0.5] * 6) * torch.finfo(dtype).tiny / 7).to(dtype).view(6, 4)
    model = Apply(lambda x: [
        -x, x.abs(), x.relu(), x.clamp(-3, 3), F.relu6(x), torch.maximum(x, -x), torch.minimum(x, x.flip(1)), x.clamp(max=x.abs()),
        x.amax(0), x.amin(1), F.max_pool1d(x, 2), torch.where(x > 0, x, -x), (-x) * 2.0**20]).eval()
    for got, expected in zip(sashiko.compile(model, (x,))(x), model(x), strict=True):
        assert torch.equal(got, expected) and bool(expected.any())


def test_integers_are_rounded_to_the_half_they_are_promoted_to() -> None:
    """Where they may become infinite, or another number than a division leaves the remainder of."""
    numbers = torch.tensor([32766, 1027, -32767, 70000, -65000, 3, 16777217])
    wholes = [numbers.clamp(torch.iinfo(d).min, torch.iinfo(d).max).to(d) for d in (torch.int16, torch.int32, torch.int64)]
    halves = [torch.tensor([127, 3, 0, 0.0, -0.5, 2, -2.5], dtype=d) for d in HALVES]
    functions = (torch.mul, torch.remainder, torch.fmod, torch.floor_divide, torch.maximum, torch.lt, torch.eq, torch.atan2)

    def mixed(x: Tensor, y: Tensor) -> list[Tensor]:
        both = [f(*operands) for f in functions for operands in ((x, y), (y, x))]
        return [*both, x.clamp(min=y), torch.addcmul(y, y, x), y.abs() ** x, torch.xlogy(x, y.abs())]

    agree(lambda *given: [mixed(x, y) for x in given[:3] for y in given[3:]], *wholes, *halves)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit but the sign of 0 and the digits of NaN."""
    return a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("dtype", HALVES)
def test_numbers_are_rounded_to_halves_but_as_factors(dtype: torch.dtype) -> None:
    """Only the second operand of a multiplication or division keeps its digits."""
    functions: dict[str, Callable[[Tensor, Any], Tensor]] = {
        **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "remainder", "fmod")},
        "floor_divide": torch.floor_divide, "truncated": lambda x, k: torch.div(x, k, rounding_mode="trunc"), "k - x": lambda x, k: k - x,
        "k // x": lambda x, k: k // x, "maximum": lambda x, k: torch.maximum(x, torch.tensor(k)),
        "threshold": lambda x, k: F.threshold(x, float(k), 0.0), "hardshrink": lambda x, k: F.hardshrink(x, float(k)),
        "leaky_relu": lambda x, k: F.leaky_relu(x, float(k)),
    }
    number = 0.1  # less than its nearest bfloat16, more than its nearest float16
    x = (torch.randn(64, generator=torch.Generator().manual_seed(7)) * number).to(dtype)
    x[:8] = torch.tensor(number).to(dtype)

    def each(x: Tensor, t: Tensor) -> list[Tensor]:
        of_tensors = [f(x, t) for f in (torch.add, torch.mul, torch.eq)] + [f(t, x) for f in (torch.sub, torch.mul, torch.div)]
        return [f(x, number) for f in functions.values()] + of_tensors

    given = (x, torch.tensor(number, dtype=torch.float64))
    results = zip(sashiko.compile(Apply(each).eval(), given)(*given), each(*given), [*functions, *range(6)], strict=True)
    assert [name for got, expected, name in results if not same(got, expected)] == []


@pytest.mark.parametrize("dtype", HALVES)
def test_powers_of_halves_take_exponents_and_bases_that_are_halves(dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, 3, 70, 180.5, float("-inf"), -0.0, float("inf"), -2, float("nan")], dtype=dtype)
    agree(lambda x: [x**k for k in (2.3, -0.7, 1 / 3, 0.5, -0.5, -1, -2, 2, 3)] + [2.3 ** (x / 50), torch.pow(0.7, x / 50)], x)


def test_what_is_summed_as_halves_is_rounded_before() -> None:
    wide = (torch.tensor([70000, -70000, 3]), torch.tensor([70000.0, -70000.0, 3.0]), torch.tensor([4097, 4097, 4099], dtype=torch.int32))

    def halves(x: Tensor) -> list[Tensor]:
        of_all = [f(x, 0, dtype=dtype) for f in (torch.sum, torch.mean, torch.cumsum, torch.softmax) for dtype in HALVES]
        return [*of_all, x.log_softmax(0, dtype=torch.bfloat16), torch.prod(x, 0, dtype=torch.bfloat16)]

    agree(lambda *xs: [halves(x) for x in xs], *wide)


def test_sums_and_products_of_bools_are_bools() -> None:
    xs = [torch.tensor([[2, 0, 1], [1, 0, 0], [0, 0, 4]]).to(dtype) for dtype in (*INTEGERS, *HALVES, torch.bool)]

    def folded(x: Tensor) -> list[Tensor]:
        return [f(x, axis, dtype=torch.bool) for f in (torch.sum, torch.prod) for axis in (0, 1)]

    agree(lambda *xs: [folded(x) for x in xs], *xs)


@pytest.mark.parametrize(("size", "expected"), [(16, []), (96, ["aten.linear.default", "aten.matmul.default"])])
def test_large_products_of_f64_are_left_to_its_libraries(size: int, expected: list[str]) -> None:
    model, x = Apply(lambda x, w: F.linear(x, w).tanh() @ w).eval(), torch.randn(size, size).double()
    compiled = sashiko.compile(model, (x, x))
    assert left(compiled) == expected
    assert_close(compiled(x, x), model(x, x))


@pytest.mark.parametrize(("precision", "kernel"), [("fp32", "f16_f16"), ("bf16", "bf16_bf16")])
def test_models_of_f16_are_native(precision: str, kernel: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.each = nn.Conv2d(3, 16, 4, 4), nn.Conv2d(16, 16, 3, padding=1, groups=16)
            self.window, self.up = nn.Conv2d(16, 32, 3, padding=1), nn.ConvTranspose2d(32, 16, 2, 2)
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(self.window(self.each(self.first(x)).relu()))
            q, k, v = (part.unsqueeze(1) for part in self.qkv(x.flatten(2).transpose(1, 2)).chunk(3, -1))
            return self.out(F.scaled_dot_product_attention(q, k, v))

    torch.manual_seed(0)
    model, x = Net().half().eval(), torch.randn(2, 3, 32, 32).half()
    compiled = sashiko.compile(model, x, precision=precision, strict=True)
    got = compiled(x)
    exact = model.double()(x.double())
    rounding = 2**-11 if precision == "fp32" else 2**-8
    assert got.dtype == torch.float16 and (got.double() - exact).norm() < 4 * rounding * exact.norm()
    kernels = [note.kernel for notes in compiled.built.notes if not isinstance(notes, AtenStep) for note in notes]
    assert sum(kernel in name for name in kernels) == 6, kernels
