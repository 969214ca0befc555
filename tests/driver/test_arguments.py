"""How the arguments of a compiled model may be given: by position, by name, or not at all, as those of the model itself."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import sashiko


class Gained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) * scale


def test_positional_and_keyword_arguments(tmp_path: Path) -> None:
    model, x, scale = Gained().eval(), torch.randn(5, 32), torch.randn(32)
    with torch.no_grad():
        expected = model(x, scale)
    positional = sashiko.compile(model, (x, scale))
    assert_close(positional(x, scale), expected)
    assert_close(sashiko.compile(model, [x, scale])(x, scale), expected)
    named = sashiko.compile(model, {"x": x, "scale": scale})
    assert_close(named(x=x, scale=scale), expected)
    assert_close(named(scale=scale, x=x), expected)
    named.save(tmp_path / "named")
    quantized = sashiko.compile(sashiko.quantize(model, [(x, scale)]), (x, scale))
    for compiled in (positional, named, sashiko.load(tmp_path / "named"), quantized):
        for args, kwargs in (((x, scale), {}), ((x,), {"scale": scale}), ((), {"x": x, "scale": scale})):
            assert_close(compiled(*args, **kwargs), expected, rtol=0.05, atol=0.05)
        for args, kwargs in (((x,), {"x": x}), ((x, scale), {"scale": scale}), ((x, scale), {"more": x}), ((x, scale, x), {})):
            with pytest.raises(sashiko.InputError, match=r"called with|expected 2 arguments, got 3"):
                compiled(*args, **kwargs)
    with pytest.raises(sashiko.InputError, match=r"keyword arguments \['x'\], compiled for \['scale', 'x'\]"):
        named(x=x)


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None, times: int = 2, *, flag: bool = False) -> torch.Tensor:
        y = x * times if scale is None else x * scale
        return -y if flag else y


def test_arguments_with_defaults(tmp_path: Path) -> None:
    model, x = Scaled().eval(), torch.randn(3)
    sashiko.compile(model, (x,)).save(tmp_path / "model")
    for compiled in (sashiko.compile(model, (x,)), sashiko.compile(model, (x, None, 2)), sashiko.load(tmp_path / "model")):
        for args, kwargs in (((x,), {}), ((x, None), {}), ((x,), {"times": 2, "flag": False}), ((), {"scale": None, "x": x})):
            assert_close(compiled(*args, **kwargs), x * 2)
        for args, kwargs in (((x, x), {}), ((x,), {"times": 3}), ((x, None, 2.0), {}), ((x,), {"flag": True}), ((), {"times": 2})):
            with pytest.raises(sashiko.InputError):
                compiled(*args, **kwargs)


class Nameless(nn.Module):
    def forward(self, x: torch.Tensor, /, y: torch.Tensor | None = None, times: float = 2.0) -> torch.Tensor:
        return (x if y is None else x * y) * times + (1 if y is None else 2)


def test_arguments_that_are_given_by_position_only(tmp_path: Path) -> None:
    model, x, y = Nameless().eval(), torch.randn(3), torch.randn(3)
    for example in ((), (y,), (y, 2.0), (None, 3.0)):
        fast = sashiko.compile(model, (x, *example))
        fast.save(tmp_path / "model")
        wanted, scale = (*example, None, 2.0)[0], (*example, 2.0, 2.0)[1]
        for compiled in (fast, sashiko.load(tmp_path / "model")):
            for other, times in ((None, 2.0), (y, 2.0), (None, 3.0), (y, 3.0)):
                calls = [((x, other, times), {}), ((x, other), {"times": times}), ((x,), {"y": other, "times": times})]
                calls += [((x, other), {}), ((x,), {"y": other})] if times == 2.0 else [((x,), {"times": times})] if other is None else []
                for args, kwargs in calls:
                    if other is wanted and times == scale:
                        assert_close(compiled(*args, **kwargs), model(*args, **kwargs))
                    else:
                        with pytest.raises(sashiko.InputError):
                            compiled(*args, **kwargs)
            with pytest.raises(sashiko.InputError, match=r"keyword arguments \['x'\]"):
                compiled(x=x)


def test_a_keyword_that_is_called_like_an_argument_without_a_name() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, /, scale: float = 2.0, **more: torch.Tensor) -> torch.Tensor:
            return x * scale - more.get("x", x)

    model, x, y = Model().eval(), torch.randn(3), torch.randn(3)
    assert_close(sashiko.compile(model, (x, 2.0))(x), model(x))
    for args, kwargs in (((x, 2.0), {"x": y}), ((x,), {"x": y, "scale": 2.0}), ((x, 3.0), {})):
        with pytest.raises(sashiko.InputError):
            sashiko.compile(model, (x,))(*args, **kwargs)


class Folded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, *xs: torch.Tensor, mode: str = "sum") -> torch.Tensor:
        return self.linear(sum(xs) if mode == "sum" else xs[0])


def test_defaults_beside_any_number_of_arguments(tmp_path: Path) -> None:
    model, x, y = Folded().eval(), torch.randn(2, 3), torch.randn(2, 3)
    sashiko.compile(model, (x, y)).save(tmp_path / "model")
    for called in (sashiko.compile(model, (x, y)), sashiko.load(tmp_path / "model"), sashiko.quantize(model, [(x, y)])):
        for kwargs in ({}, {"mode": "sum"}):
            assert_close(called(x, y, **kwargs), model(x, y), rtol=0.05, atol=0.05)
            for args in ((x,), (x, y, x)):
                with pytest.raises(sashiko.InputError):
                    called(*args, **kwargs)
        with pytest.raises(sashiko.InputError):
            called(x, y, mode="first")


class Multiplied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, by: float = 2.0, flag: bool | None = None) -> torch.Tensor:
        return self.linear(x) * by


def test_a_quantized_model_is_compiled_with_its_defaults(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    small = sashiko.quantize(Multiplied().eval(), [(x,)])
    compiled = sashiko.compile(small, (x,))
    compiled.save(tmp_path / "model")
    for called in (compiled, sashiko.load(tmp_path / "model"), small):
        for args, kwargs in (((x,), {"by": 2.0}), ((x, 2.0), {}), ((x, 2.0, None), {}), ((), {"x": x, "flag": None})):
            assert_close(called(*args, **kwargs), called(x))
        with pytest.raises(sashiko.InputError):
            called(x, by=3.0)


class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, by: float) -> torch.Tensor:
        return self.linear(x) / by


def test_a_number_is_the_one_it_was_bit_for_bit(tmp_path: Path) -> None:
    """Zeros differ by their signs, and NaN is itself."""
    model, x, inf = Divided().eval(), torch.randn(2, 3), float("inf")
    for by, others in ((0.0, (-0.0, 0, False)), (-0.0, (0.0,)), (float("nan"), (0.0, inf)), (2.0, (2, 3.0)), (inf, (-inf,))):
        sashiko.compile(model, (x, by)).save(tmp_path / "model")
        quantized = sashiko.quantize(model, [(x, by)])
        again = float(repr(by))
        for called in (sashiko.compile(model, (x, by)), sashiko.load(tmp_path / "model"), quantized, sashiko.compile(quantized, (x, by))):
            assert_close(called(x, again), model(x, again), rtol=0.05, atol=0.05, equal_nan=True)
            for other in others:
                with pytest.raises(sashiko.InputError):
                    called(x, other)


def test_examples_that_are_one_tensor() -> None:
    """A trace tells tensors apart by identity; a call of the same model passes others."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
            y += 1
            return self.linear(x) + 2 * y + 3 * more["z"]

    model, x = Model().eval(), torch.randn(4, 4)
    other = torch.randn(4, 4), torch.randn(4, 4), {"z": torch.randn(4, 4)}
    for same in (x, model.linear.weight.detach(), model.linear.weight):
        compiled = sashiko.compile(model, (same, same, {"z": same}))
        written = other[1].clone()
        with torch.no_grad():
            assert_close(compiled(other[0], written, other[2]), model(*other))
        assert_close(written, other[1])


Pair = namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize(
    "build",
    [
        lambda a, b: {"b": b, "a": a},
        lambda a, b: [a, b],
        lambda a, b: Pair(b, a),
        lambda a, b: (a, None, 3, b),
        lambda a, b: {"pair": (a, b), "none": None},
        lambda a, b: torch.stack([a, b]).max(0),
    ],
)
def test_results_are_built_as_the_model_builds_them(build: Callable[[torch.Tensor, torch.Tensor], Any], tmp_path: Path) -> None:
    class Building(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, flag: bool = False) -> Any:
            return build(x + y, x * y)

    model, x, y = Building().eval(), torch.randn(3), torch.randn(3)
    expected, flag = model(x, y), {"flag": False}
    compiled = [sashiko.compile(model, (x, y)), sashiko.compile(model, {"y": y, "x": x} | flag)]
    if not isinstance(expected, torch.return_types.max | Pair):  # which have no form in a file
        compiled[1].save(tmp_path / "model")
        compiled.append(sashiko.load(tmp_path / "model"))
    for fast in compiled:
        for got in (fast(x, y), fast(x=x, y=y), fast(y=y, x=x), fast(x, y=y), fast(x, y, **flag), fast(flag=False, x=x, y=y)):
            assert type(got) is type(expected)
            assert_close(pytree.tree_leaves(got), pytree.tree_leaves(expected), rtol=0, atol=0)
            assert pytree.tree_structure(got) == pytree.tree_structure(expected)
        for wrong in ({"x": [x], "y": y}, {"x": x, "y": None}, {"x": x, "y": (y,)}, {"x": x, "y": y, "flag": True}):
            with pytest.raises(sashiko.InputError):
                fast(**wrong)


def test_a_dictionary_in_another_order() -> None:
    class Difference(nn.Module):
        def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
            return x["z"] - x["a"] * 2

    z, a = torch.randn(3), torch.randn(3)
    compiled = sashiko.compile(Difference().eval(), ({"z": z, "a": a},))
    assert_close(compiled({"a": a, "z": z}), z - a * 2)
    for other in ({"a": a}, {"a": a, "z": [z]}, {"a": a, "z": z, "b": a}, [z, a]):
        with pytest.raises(sashiko.InputError):
            compiled(other)


@pytest.mark.parametrize("dim", [torch.export.Dim.AUTO, torch.export.Dim("n", max=9)], ids=["auto", "named"])
def test_an_example_with_gaps_in_memory(dim: Any) -> None:
    """Its distances in memory are no sizes that a call would have to tell."""
    model, memory = nn.Linear(8, 4).eval(), torch.randn(4, 12)
    compiled = sashiko.compile(model, (memory[:, :8],), dynamic_shapes=({0: dim},))
    for x in (memory[:, 2:10], torch.randn(7, 8), torch.randn(16, 9)[::2].t()):
        assert_close(compiled(x), model(x).detach())


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(xs[0])) + self.linear(xs[1])


def test_sizes_of_any_number_of_arguments() -> None:
    model, few = Summed().eval(), {0: Dim("n", max=16)}
    first, second = ((torch.randn(n, 8), torch.randn(n, 8)) for n in (4, 5))
    assert_close(sashiko.compile(model, first, dynamic_shapes=((few, few),))(*second), model(*second))
    small = sashiko.quantize(model, [first])
    for shapes in ((few, few), {"xs_0": few, "xs_1": few}):
        assert_close(sashiko.compile(small, first, dynamic_shapes=shapes)(*second), small(*second))
        fast = sashiko.quantize_and_compile(model, [first], dynamic_shapes=shapes, precision="fp32")
        assert_close(fast(*second), small(*second))
