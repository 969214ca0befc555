"""What PyTorch asks of sizes for the strides of results, or what is true of all of them, does not bind a program to them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

import pytest
import sympy
import torch
from torch import nn
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import CeilToInt, FloorDiv, TruncToInt
from torch.utils._sympy.value_ranges import ValueRanges

import sashiko
from sashiko.diagnostics.errors import InputError
from sashiko.graph.guards import follows
from sashiko.graph.symbols import Assumption
from tests.graph.captures import capture, module, run


class Lines(nn.Module):
    """Recognizes lines of text of any width: [batch, 1, 8, width] to [batch, width / 2 - 1, 30]."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.conv, self.out = nn.MaxPool2d(2), nn.Conv2d(1, 16, (4, 2)), nn.Linear(16, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns: torch.Tensor = self.conv(self.pool(x)).squeeze(2)
        return torch.as_tensor(self.out(columns.transpose(1, 2)))


class Reshaped(nn.Module):
    """Rows and columns exchanged, and all of them in one dimension, which copies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 1:].transpose(1, 2).reshape(-1) * 2


@torch.no_grad()
def test_sizes_that_reshapes_found_unequal_may_be_equal() -> None:
    torch.manual_seed(0)
    model, sizes = Lines().eval(), {0: Dim("batch", min=1, max=8), 3: Dim("width", min=8, max=128)}
    compiled = sashiko.compile(model, (torch.randn(2, 1, 8, 64),), dynamic_shapes=(sizes,))
    for shape in ((1, 1, 8, 64), (1, 1, 8, 10), (3, 1, 8, 8), (4, 1, 8, 10)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_copies_of_equal_sizes() -> None:
    model, sizes = Reshaped().eval(), {axis: Dim(f"n{axis}", min=3 if axis == 1 else 1, max=9) for axis in range(3)}
    compiled = sashiko.compile(model, (torch.randn(3, 7, 5),), dynamic_shapes=(sizes,))
    for shape in ((1, 7, 5), (4, 5, 4), (4, 4, 4), (2, 3, 1), (1, 3, 1), (2, 3, 2)):
        x = torch.randn(shape)
        assert torch.equal(compiled(x), model(x))


@torch.no_grad()
def test_a_quantized_model_takes_any_batch() -> None:
    torch.manual_seed(0)
    model = Lines().eval()
    quantized = sashiko.quantize(model, [torch.randn(2, 1, 8, 64), torch.randn(1, 1, 8, 48)], progress=False)
    x = torch.randn(1, 1, 8, 40)
    for found in (quantized(x), sashiko.compile(quantized, (x,))(x)):
        assert float((found - model(x)).norm() / model(x).norm()) < 0.05


@torch.no_grad()
@pytest.mark.parametrize("size", [Dim("n", max=64), Dim.AUTO], ids=["declared", "auto"])
def test_strides_need_not_be_multiples_of_one_another(size: object) -> None:
    model = module(lambda self, x: nn.functional.avg_pool2d(x, 2)[:, ::2, ::2] * 2)
    captured = capture(model, (torch.randn(3, 16, 24),), shapes=({1: size, 2: Dim.AUTO},))
    for shape in ((3, 16, 24), (3, 18, 24), (3, 17, 7), (3, 2, 2)):
        x = torch.randn(shape)
        torch.testing.assert_close(run(captured, (x,)), model(x))


@torch.no_grad()
def test_what_the_model_decides_by_sizes_still_binds() -> None:
    class Square(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[0] != x.shape[1] else x * 3

    sizes = {0: Dim("a", min=1, max=9), 1: Dim("b", min=1, max=9)}
    compiled = sashiko.compile(Square().eval(), (torch.randn(3, 4),), dynamic_shapes=(sizes,))
    with pytest.raises(InputError, match="another way"):
        compiled(torch.randn(4, 4))


PARTS = {
    "half": lambda n: n // 2, "seven tenths": lambda n: n * 7 // 10, "by a float": lambda n: torch.sym_int(n * 0.7),
    "rounded up": lambda n: math.ceil(n / 3), "a quarter less": lambda n: n - torch.sym_int(n / 4),
}


@torch.no_grad()
@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_size_is_no_more_than_it(name: str) -> None:
    """torch refuses declared sizes for what it finds no proof of."""
    model = module(lambda self, x: x[: PARTS[name](x.shape[0])] * 2)
    captured = capture(model, (torch.randn(8, 3),), shapes=({0: Dim("n", min=4)},))
    assert not any(isinstance(each, Assumption) for each in captured.assumed)
    for n in (4, 5, 31):
        x = torch.randn(n, 3)
        torch.testing.assert_close(run(captured, (x,)), model(x))


@torch.no_grad()
@pytest.mark.parametrize("split", [lambda x, a: x.chunk(2), lambda x, a: x.split(a.shape[0])], ids=["chunk", "split"])
def test_what_is_joined_is_split_again(split: Callable[..., Sequence[torch.Tensor]]) -> None:
    """Two images go through a network in one batch. What torch asks is true where their declared sizes are one."""
    model = module(lambda self, a, b: operator.matmul(*(part * 2 for part in split(torch.cat([a, b]), a))))
    batch = Dim("batch", max=8)
    captured = capture(model, (torch.randn(3, 4, 4), torch.randn(3, 4, 4)), shapes=({0: batch}, {0: batch}))
    assert not captured.leftovers
    for count in (3, 1, 8):
        args = torch.randn(count, 4, 4), torch.randn(count, 4, 4)
        torch.testing.assert_close(run(captured, args), model(*args))
    with pytest.raises(InputError, match="expected 3, the size of"):
        run(captured, (torch.randn(3, 4, 4), torch.randn(2, 4, 4)))


@torch.no_grad()
def test_what_is_declared_by_itself_stays_free() -> None:
    model = module(lambda self, a, b: torch.cat([a, b]).split(a.shape[0])[0] * 2)
    captured = capture(model, (torch.randn(3, 4), torch.randn(3, 4)), shapes=({0: Dim.AUTO}, {0: Dim.AUTO}))
    for here, there in ((3, 3), (5, 2), (2, 2)):
        args = torch.randn(here, 4), torch.randn(there, 4)
        torch.testing.assert_close(run(captured, args), model(*args))
    with pytest.raises(InputError, match="another way"):
        run(captured, (torch.randn(2, 4), torch.randn(5, 4)))


def test_which_guards_follow() -> None:
    env = ShapeEnv()
    n, m = (sympy.Symbol(name, integer=True, positive=True) for name in "nm")
    env.var_to_range.update({n: ValueRanges(4, 64), m: ValueRanges(2, 64)})
    shown = (sympy.Le(FloorDiv(n, 3), n), sympy.Lt(TruncToInt(n * 0.7), n), sympy.Le(FloorDiv(n * m, 2), n * m),
             sympy.Ne(n - FloorDiv(n, 4), 1), sympy.Eq(FloorDiv(3 * n - 1, n), 2), sympy.Eq(FloorDiv(n + FloorDiv(n, 2), n), 1))
    open_ = (sympy.Le(FloorDiv(n * 5, 4), n), sympy.Lt(CeilToInt(n * 0.9), n), sympy.Le(FloorDiv(n, 3), m), sympy.Le(0.9 * n, 0.8 * n),
             sympy.Le(TruncToInt(5 - n * 0.5), 3 - FloorDiv(n, 4)), sympy.Eq(FloorDiv(n, 4), 2), sympy.Ne(FloorDiv(n, 4), 3),
             sympy.Eq(FloorDiv(3 * n - 1, m), 2), sympy.Le(0.5, 0.1 * n))
    assert [follows(guard, env) for guard in (*shown, *open_)] == [True] * len(shown) + [False] * len(open_)


class Strided(nn.Module):
    """Keeps every second window of 3, again and again, where a mask of all places, strided in another way, lets it."""

    def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        keeps = torch.arange(x.shape[0]) < length
        for _ in range(3):
            x, keeps = x.unfold(0, 3, 2).amax(1), keeps[2::2]
        return x.masked_fill(~keeps, 0.0)


@torch.no_grad()
@pytest.mark.parametrize("size", [Dim("n", min=40, max=200), Dim.AUTO], ids=["declared", "auto"])
def test_equal_sizes_of_repeated_striding(size: object) -> None:
    """sympy raises for the equation of their quotients, which is true of all sizes."""
    model = Strided().eval()
    compiled = sashiko.compile(model, (torch.randn(64), torch.tensor(64)), dynamic_shapes=({0: size}, None), strict=True)
    for n in (40, 53, 64, 151, 200):
        arguments = torch.randn(n), torch.tensor(n - 9)
        assert torch.equal(compiled(*arguments), model(*arguments))
    with pytest.raises(InputError):
        compiled(torch.randn(7), torch.tensor(7))


def test_equations_that_sympy_solves_bind_declared_sizes() -> None:
    model = module(lambda self, x: x * 2 if (x.shape[0] // 2 + 1) // 3 == 5 else x * 3)
    with pytest.raises(InputError):
        sashiko.compile(model, (torch.randn(31),), dynamic_shapes=({0: Dim("n", min=8, max=300)},))
