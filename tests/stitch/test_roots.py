"""Which contraction computes which elementwise values: kernels that exchange results, and none that waits for itself."""

from __future__ import annotations

import random

import pytest
import torch

from sashiko.graph import build as b
from sashiko.graph.ir import Value
from sashiko.graph.types import QParams, bf16, f32, i8
from tests.stitch.test_stitch import check, kinds


def layer(x: Value) -> Value:
    return b.linear(x, b.constant(torch.randn(16, 16) / 4))


def moved(x: Value) -> Value:
    """Elements in another order, which no epilogue follows."""
    return b.slice_(x, 1, 15, 16, -1)


def test_two_branches_that_add_each_other_are_two_kernels_in_one_order() -> None:
    x = b.input_(0, f32, (4, 16))
    left, right = b.relu(layer(x)), b.relu(layer(x))
    sums = [b.relu(b.add(mine, moved(layer(other)))) for mine, other in ((left, right), (right, left))]
    program = check(sums, [x], [torch.randn(4, 16)], atol=1e-4)
    (joint,) = [item for item in program.items if sums[0] in item.writes or sums[1] in item.writes if len(item.writes) == 2]
    assert kinds(program) == ["linear"] * 4 + ["loop"] and {v.op for v in joint.writes} == {"relu"}


@pytest.mark.parametrize("seed", range(12))
def test_branches_that_exchange_results(seed: int) -> None:
    """As in networks that keep several resolutions: each branch adds what others found, in any order, a few times."""
    torch.manual_seed(seed)
    choose = random.Random(seed)
    x = b.input_(0, f32, (4, 16))
    branches = [x] * choose.randint(2, 4)
    for _ in range(choose.randint(1, 3)):
        branches = [b.add(b.relu(layer(v)), v) if choose.random() < 0.5 else b.relu(layer(v)) for v in branches]
        exchanged: list[Value] = []
        for mine in range(len(branches)):
            parts = [v if n == mine else moved(layer(v)) if choose.random() < 0.7 else layer(v) for n, v in enumerate(branches)]
            choose.shuffle(parts)
            total = parts[0]
            for part in parts[1:]:
                total = b.add(total, part)
            exchanged.append(b.relu(total))
        branches = exchanged
    check(branches, [x], [torch.randn(4, 16)], atol=1e-3)


def test_what_was_widened_is_stored_as_it_was_before() -> None:
    x = b.input_(0, f32, (4, 16))
    shared = b.cast(b.cast(b.relu(layer(x)), bf16), f32)
    program = check([b.add(shared, layer(b.exp(x)))], [x], [torch.randn(4, 16)], atol=1e-4)
    written = [v.dtype for item in program.items for v in item.writes if v.op == "cast"]
    assert written == [bf16]


def test_bytes_of_rows_are_stored_side_by_side() -> None:
    """As those of an image by planes, which is quantized for a product over its channels."""
    image, integers = b.input_(0, f32, (2, 16, 5, 4)), b.constant(torch.randint(-127, 128, (8, 16)).to(torch.int8))
    rows = b.permute(b.quantize(image, i8, QParams((0.05,))), (0, 2, 3, 1))
    program = check([b.int_linear(rows, integers)], [image], [torch.randn(2, 16, 5, 4)])
    assert kinds(program) == ["loop", "int_linear"] and program.items[0].writes == (rows,)


@pytest.mark.parametrize("rows", [2, 3])
def test_windows_of_a_constant_are_one_where_the_weight_is_computed(rows: int) -> None:
    """As of what StyleGAN2 begins with: the constant is broadcast, which nothing strided is, so that its windows are the constant."""
    image, w = b.constant(torch.randn(1, 4, 4, 8)), b.input_(0, f32, (6, 72))
    windows = b.window(b.window(b.expand(image, (rows, 4, 4, 8)), 1, 3), 3, 3)
    k = b.reshape(b.permute(windows, (0, 1, 3, 2, 4, 5)), (rows, 2, 2, 72))
    program = check([b.linear(k, b.mul(w, 0.5))], [w], [torch.randn(6, 72)], atol=1e-4)
    assert program.constants == (k,) and kinds(program) == ["loop", "linear"]
