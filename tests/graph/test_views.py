"""Writes to views, as operations on values."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from sashiko.diagnostics.errors import Unsupported
from sashiko.graph.exporting import functional, without_transforms
from tests.graph.test_decompose import Of, check


def slices(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    before, y[:, 1] = y[0], w
    y[..., :2] += 1
    y[..., 1:5:2].masked_fill_(x[..., 1:5:2] > 0, 0.5)
    return before, y, y[:, 1]


def nested(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = torch.empty(2, 3, 6)
    for n in range(3):
        y[0][n], y[-1][n] = x[n, 0], w * n
    view = y[0]
    view[1][2:4].zero_()
    return view, y


def overlapping(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x + 1
    one, other = y[:, :3], y[:, 2:]
    one.mul_(2)
    total = other.sum()
    other.add_(w)
    one.copy_(one.flip(0))
    return one, other, total


def in_another_order(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x * 1
    turned = y.permute(2, 0, 1)
    turned[1] = w[:4]
    y.transpose(0, 1)[2].t()[0] = 3
    turned.movedim(0, 1).mul_(2)
    return y, turned


def in_another_shape(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x * 1
    flat, deep = y.view(-1), y.unsqueeze(1).detach()
    flat[::5] = 0
    deep[:, 0, 1:2].squeeze(1).add_(w)
    y.unflatten(2, (2, 3))[..., 0, :] = 7
    return y, flat, deep


def in_parts(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x * 1
    (a, b), (c, d), rows, two = y.split(2, 1), y.split_with_sizes([1, 5], -1), y.unbind(1), y.chunk(2)
    b.add_(1)
    c.zero_()
    rows[-1].mul_(w)
    two[1].fill_(2)
    return a, b, d, *rows, y


def read_in_other_ways(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x[0] + 1
    y[1:3, 1:3] = 0
    seen = y.expand(2, 4, 6), y.unfold(1, 3, 2), y.diagonal()
    y[2] = w
    return seen


def other_types(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = (x * 1).bfloat16()
    y[0].add_(x[0])
    y[1].copy_(w.double())
    y[2, 0] = torch.arange(6)
    z = y > 0
    z[:, :2].logical_not_()
    return y, z


def after_a_change_of_shape(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = (x[0] * 1).detach_().unsqueeze_(0)
    y[0, 2].add_(w)
    y.squeeze_(0).t_()
    y[1] = 3
    y[:, 0].mul_(2)
    return y, y[0]


def in_windows(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y, z = x * 1, x > 0
    y.unfold(2, 1, 4).add_(w[:2, None])  # of the last window only the beginning is there
    y.unfold(-2, 1, 3)[:, 1].mul_(3)
    y.unfold(0, 2, 2)[..., 1] = w
    apart = y.unfold(2, 2, 2).unfold(2, 2, 9)
    apart[..., 0, 0].copy_(w[:4, None])
    z.unfold(2, 3, 3).logical_not_()
    x.unfold(1, 1, 2).zero_()
    return apart, y, z, y.unfold(2, 4, 1)


def of_arguments(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    x[:, 1] = w
    first = x[0]
    first.relu_()
    return x[0, 1] + 1, first


@pytest.mark.parametrize("function", [
    slices, nested, overlapping, in_another_order, in_another_shape, in_parts, read_in_other_ways, other_types, after_a_change_of_shape,
    in_windows, of_arguments,
])
def test_writes_to_views_are_followed(function: Callable[..., Any]) -> None:
    assert check(function, torch.randn(3, 4, 6))


def of_a_diagonal(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x[0] + 1
    y.diagonal().zero_()
    return y, w


def of_strides(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x + 1
    y.as_strided((3, 6), (24, 1)).copy_(w)
    return y, w


def of_a_copy(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x + 1
    y.transpose(0, 1).reshape(-1)[3] = 7
    return y, w


def of_no_copy(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x + 1
    y.reshape(-1)[3] = 7
    return y, w


def of_a_name_that_changes(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x[0] * 1
    z = y[:]
    y.t_()
    y[1].fill_(3)
    return y, z


def read_before_a_name_changes(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x[0, :, :4] * 1
    row = y[1]
    y.mul_(2)
    y.t_()
    return y, row


@pytest.mark.parametrize("function", [
    of_a_diagonal, of_strides, of_a_copy, of_no_copy, of_a_name_that_changes, read_before_a_name_changes,
])
def test_other_writes_are_left_to_torch(function: Callable[..., Any]) -> None:
    assert not check(function, torch.randn(3, 4, 6))


def in_windows_of_known_sizes(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x * 1
    y.unfold(2, 1, 4).add_(w[:2, None])
    y.unfold(1, 2, 2)[:, 1].zero_()
    return y, w


def in_common(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x * w
    y.unfold(1, 3, 1)[:, 0] = 5
    return y, w


def after_another_write(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x + 1
    y[0].diagonal().zero_()
    y.unfold(1, 1, 2).reshape(3, 2, 6).add_(w)
    return y, w


def in_a_transform(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return torch.vmap(lambda part: part.unfold(0, 1, 2).add_(1))(x * 2), w


def of_what_is_expanded(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return (x + 1)[:, None].expand(-1, 2, -1, -1)[:, 1].add_(1), w


@pytest.mark.parametrize("function", [in_common, after_another_write, in_a_transform, of_what_is_expanded])
def test_writes_to_windows_that_torch_gets_wrong_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(Unsupported, match="windows"):
        functional(without_transforms(torch.export.export(Of(function).eval(), (torch.randn(3, 4, 6),), strict=False)))


def seen_in_windows(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x + 1
    y[0].diagonal().zero_()
    y.expand(1, 3, -1, -1)[0].mul_(2)  # no axis is repeated
    seen = y.unfold(1, 3, 1)
    own = seen.contiguous()
    own.add_(1)
    x.add_(seen.sum(-1).sum())
    return seen, own * w[:3]


def test_windows_that_are_read_beside_writes_are_left_to_torch() -> None:
    assert not check(seen_in_windows, torch.randn(3, 4, 6))


@pytest.mark.parametrize("function", [slices, in_another_shape, in_windows_of_known_sizes])
def test_free_sizes(function: Callable[..., Any]) -> None:
    assert check(function, torch.randn(3, 4, 6), dynamic_shapes=((({0: Dim("batch", max=64)}),),), other=(torch.randn(7, 4, 6),))


class Caches(nn.Module):
    """Two buffers that calls write to, perhaps with memory in common."""

    def __init__(self, common: bool) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(4, 6))
        self.register_buffer("values", self.keys[1:] if common else torch.ones(3, 6), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[1:3] = x
        self.values[0].add_(x[0])
        return self.keys.sum(0), self.values * 2


def test_buffers_keep_what_is_written_to_them() -> None:
    x, eager = torch.randn(2, 6), Caches(False)
    program = functional(torch.export.export(Caches(False).eval(), (x,), strict=False))
    assert [spec.target for spec in program.graph_signature.output_specs] == ["keys", "values", None, None]
    ours = program.module()
    for _ in range(2):
        torch.testing.assert_close(ours(x), eager(x))
    torch.testing.assert_close(dict(ours.named_buffers())["keys"], eager.keys)


def test_buffers_with_memory_in_common_are_an_error() -> None:
    with pytest.raises(Unsupported):
        functional(torch.export.export(Caches(True).eval(), (torch.randn(2, 6),), strict=False))


def viewed(draw: random.Random, a: Tensor) -> Tensor:
    """A view of a tensor, or a copy where that is what PyTorch makes of such a call."""
    def of_any() -> list[Callable[[], Tensor]]:
        return [
            lambda: a.unsqueeze(draw.randint(-a.ndim - 1, a.ndim)), a.squeeze, a.detach, lambda: a[...],
            lambda: a.permute(draw.sample(range(a.ndim), a.ndim)), lambda: a.reshape(-1), a.contiguous, a.flatten,
            lambda: a.view(-1) if a.is_contiguous() else a.view_as(a), lambda: a.to(torch.float32), lambda: a.reshape(*a.shape, 1),
        ]

    def of_axes() -> list[Callable[[], Tensor]]:
        axis = draw.randrange(-a.ndim, a.ndim)
        n = a.shape[axis]
        start, step, part = draw.randint(-n, n - 1), draw.choice((1, 1, 2)), draw.randint(1, n)
        return [
            lambda: a.select(axis, start), lambda: torch.ops.aten.slice.Tensor(a, axis, start, None, step),
            lambda: torch.ops.aten.slice.Tensor(a, axis, None, part), lambda: torch.ops.aten.slice.Tensor(a, axis, start, 99),
            lambda: a.narrow(axis, n - part, part), lambda: a.squeeze(axis), lambda: a.transpose(axis, draw.randrange(a.ndim)),
            lambda: a.unbind(axis)[start], lambda: draw.choice(a.split(part, axis)), lambda: draw.choice(a.chunk(2, axis)),
            lambda: draw.choice(a.split([part, n - part], axis) if part < n else (a,)), lambda: a.movedim(axis, 0),
            lambda: a.unflatten(axis, (2, n // 2)) if n % 2 == 0 else a[0], lambda: a[start:], lambda: a[..., ::2],
            lambda: torch.diagonal(a) if a.ndim > 1 and draw.random() < 0.3 else a[0], lambda: a.t() if a.ndim < 3 else a.mT,
        ]

    return draw.choice(of_axes() if a.ndim and draw.random() < 0.8 else of_any())()


def written(draw: random.Random, a: Tensor, b: Tensor) -> Tensor:
    """The result of overwriting a tensor by what is made of another."""
    like = b.flatten().repeat(a.numel() // max(b.numel(), 1) + 1)[: a.numel()].reshape(a.shape) if b.numel() else torch.ones_like(a)
    row = like[:1].sum(0) if a.ndim else like

    def assigned() -> Tensor:
        a[...] = row
        return a

    def in_part() -> Tensor:
        a[..., :2] += 1
        return a

    def by_index() -> Tensor:
        a[torch.tensor([0, -1])] = row.to(a.dtype)
        return a

    def by_mask() -> Tensor:
        a[a > 0.5] = 0.5
        return a

    return draw.choice([
        assigned, *([by_mask, in_part, by_index] if a.ndim and a.shape[0] else []),
        lambda: a.copy_(like), lambda: a.copy_(row.double()), lambda: a.copy_((like * 3).long()), lambda: a.copy_(b.sum()),
        lambda: a.add_(like), lambda: a.add_(row.double()), lambda: a.mul_(torch.tensor(2)), lambda: a.sub_((row * 3).long()),
        lambda: a.mul_(0.5), a.relu_, lambda: a.masked_fill_(like > 0, 0.25), a.zero_, lambda: a.fill_(0.75),
        lambda: a.clamp_(-1, 1), lambda: a.addcmul_(like, row, value=0.5), lambda: a.add_(a), lambda: a.copy_(a * 2),
        lambda: torch.nn.functional.silu(a, inplace=True), lambda: a.fill_(row.sum()),
    ])()


def random_program(seed: int) -> Callable[..., tuple[Tensor, ...]]:
    """A function that makes tensors and views of views, overwrites them and reads them at random. Of a view that has elements more than
    once it only makes values: PyTorch does not write to such."""

    def run(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        draw = random.Random(seed)
        held, results = draw.sample([x * 1.5, (x - 0.25).t(), x, x.double() + 1], 2), []
        for _ in range(draw.randrange(4, 14)):
            a, b = draw.choice(held[-5:]), draw.choice(held)
            kind = draw.choices(("view", "write", "value", "read", "spread", "shape"), (20, 20, 4, 4, 4, 1))[0]
            if kind == "view":
                held.append(viewed(draw, a))
            elif kind == "write":
                result = written(draw, a, b)
                held += [result] if draw.random() < 0.3 else []
            elif kind == "value":
                held.append(draw.choice([a * 0.5, a.clone(), a + b.sum(), torch.zeros_like(a) * 1, a.flip(0) if a.ndim else -a]))
            elif kind == "read":
                results.append(draw.choice([a.sum(), a * 2, a.reshape(-1)[:1] * 3]))
            elif kind == "spread":
                results.append(a.expand(2, *a.shape) if draw.random() < 0.5 or not a.ndim else a.unfold(0, 1, 1))
            elif a is not x:
                a.t_() if a.ndim == 2 and draw.random() < 0.5 else a.unsqueeze_(0)
        return (*held, *results)

    return run


def test_random_programs() -> None:
    apart = [check(random_program(seed), torch.randn(4, 4)) for seed in range(10)]
    assert 5 < sum(apart) < 10  # both ways are taken
