"""Sizes that another program would be traced for are told by where they are among the arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import sashiko
from sashiko.diagnostics.errors import InputError
from tests.graph.captures import capture, module

A, HERE = Dim.AUTO, "it was captured where "


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, :4]
        found: Tensor = self.one(first).sum(1)
        return found if first.shape[1] == x.shape[1] else found + self.other(x[:, 4:]).sum(1)


def test_of_compiled_saved_and_quantized_models(tmp_path: Path) -> None:
    model, x, wrong = Halves().eval(), torch.randn(2, 6, 8), torch.randn(2, 3, 8)
    fast = sashiko.compile(model, (x,), dynamic_shapes=({0: A, 1: A},))
    fast.save(tmp_path / "m.sashiko")
    small = sashiko.quantize(model, [x], progress=False)
    again = sashiko.compile(small, (x,), dynamic_shapes=({0: A, 1: A},))
    says = re.escape(f"{HERE}min(4, x.shape[1]) != x.shape[1], and here x.shape[1] = 3") + "\n"
    for call in (fast, sashiko.load(tmp_path / "m.sashiko"), small, again, lambda x: sashiko.compile(small, (x,))):
        with pytest.raises(InputError, match=says):
            call(wrong)


def nested(self: nn.Module, d: dict[str, Any]) -> Tensor:
    x: Tensor = d["a"][0]
    return x * 2 if x.shape[0] > d["b"].shape[1] * 2 else x


def as_floats(self: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if int(x.shape[0] * 0.3) > 1 else x


def divided(self: nn.Module, x: Tensor) -> Tensor:
    return x.new_ones(torch.sym_int(90.5 / (x.shape[0] - 7)) + 1) + x.sum()


def quarters(self: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return x.view(-1, 4, 3) * y.sum() if x.shape[0] > y.shape[0] else x


def counted(self: nn.Module, x: Tensor, n: int) -> Tensor:
    return x * 2 if x.shape[0] * 3 != n * 6 else x


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


@pytest.mark.parametrize(("forward", "example", "shapes", "wrong", "says"), [
    (nested, ({"a": [ones(9, 3)], "b": ones(3, 4)},), ({"a": [{0: A}], "b": {1: A}},), ({"a": [ones(7, 3)], "b": ones(3, 4)},),
     f"{HERE}d_a_0.shape[0] >= 2*d_b.shape[1] + 1, and here d_a_0.shape[0] = 7, d_b.shape[1] = 4"),
    (as_floats, (ones(9),), ({0: A},), (ones(4),), f"{HERE}TruncToInt(Mul(0.3, ToFloat(x.shape[0]))) == 2, and here x.shape[0] = 4"),
    (divided, (ones(10),), ({0: A},), (ones(7),), "computes TruncToInt(FloatTrueDiv(90.5, ToFloat(x.shape[0] + -7))) of its sizes, "
     "here x.shape[0] = 7: float division by zero"),
    (quarters, (ones(12, 3), ones(5)), ({0: A}, {0: A}), (ones(8, 3), ones(9)),
     f"{HERE}4*floordiv(x.shape[0], 4) >= y.shape[0] + 1, and here x.shape[0] = 8, y.shape[0] = 9"),
    (counted, (ones(9, 3), 4), ({0: A}, A), (ones(8, 3), 4), f"{HERE}x.shape[0] != 2*n, and here x.shape[0] = 8, n = 4"),
], ids=["nested", "floats", "no number", "multiples", "a number"])  # fmt: skip
def test_of_other_sizes(forward: Callable[..., Any], example: Any, shapes: Any, wrong: Any, says: str) -> None:
    captured = capture(module(forward), example, shapes=shapes)
    compiled = sashiko.compile(module(forward), example, dynamic_shapes=shapes)
    for call in (lambda: compiled(*wrong), lambda: captured.bind(captured.flatten(wrong, {}))):
        with pytest.raises(InputError, match=re.escape(says)):
            call()


class Stretched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = self.linear(x) + (y * 2 if x.shape[0] * y.shape[0] > 12 else y)
        return found


def test_sizes_of_1_are_not_told_where_others_are_asked_for() -> None:
    small = sashiko.quantize(Stretched().eval(), [(ones(5, 4), ones(5, 4))], progress=False)
    with pytest.raises(InputError, match=r"and here y.shape\[0\] = 3\n"):
        small(ones(1, 4), ones(3, 4))
    for sizes in ((1, 4), (4, 1)):
        pair = ones(sizes[0], 4), ones(sizes[1], 4)
        torch.testing.assert_close(sashiko.compile(small, pair)(*pair), small(*pair), rtol=1e-5, atol=1e-5)
