"""Programs taken apart node by node: what they compute, and what has to be left to torch's own decomposition."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

import sashiko
from sashiko.diagnostics.errors import InputError
from sashiko.graph import exporting
from sashiko.graph.exporting import functional, without_writes
from tests.driver.functions import Apply

aten = torch.ops.aten


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, *args: Tensor) -> Any:
        return self.function(self.weight, *args)


def taken_apart(
    function: Callable[..., Any], *args: Tensor, dynamic_shapes: Any = None, how: Callable[..., Any] = functional
) -> tuple[ExportedProgram, bool]:
    """The functional program of a function, and whether it was made node by node."""
    found: list[bool] = []
    by_node = exporting.by_node

    def seen(*given: Any) -> ExportedProgram | None:
        program = by_node(*given)
        found.append(program is not None)
        return program

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(exporting, "by_node", seen)
        program = torch.export.export(Of(function).eval(), args, dynamic_shapes=dynamic_shapes, strict=False)
        return how(program), all(found)


def check(
    function: Callable[..., Any], *args: Tensor, dynamic_shapes: Any = None, other: tuple[Tensor, ...] = (),
    how: Callable[..., Any] = functional,
) -> bool:
    """Checks the functional program against eager, and returns whether it was made node by node. other: arguments of other sizes."""
    torch.manual_seed(0)
    program, apart = taken_apart(function, *(a.clone() for a in args), dynamic_shapes=dynamic_shapes, how=how)
    nodes = [n for n in program.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    assert not any(n.target._schema.is_mutable for n in nodes)
    torch.manual_seed(0)
    eager = Of(function).eval()
    for given in (args, other) if other else (args,):
        with torch.no_grad():
            written, expected = [a.clone() for a in given], [a.clone() for a in given]
            torch.testing.assert_close((program.module()(*written), written), (eager(*expected), expected), equal_nan=True)
    return apart


@pytest.mark.parametrize("function", [
    lambda w, x: (x + 1).relu_(),
    lambda w, x: F.silu(x * w, inplace=True).add_(x).mul_(2),
    lambda w, x: F.adaptive_avg_pool2d(F.pad(x[None], (1, 1, 1, 1)), 1),
    lambda w, x: torch.einsum("bij,j->bi", x, w),
    lambda w, x: F.group_norm(x, 2).unflatten(1, (2, 2)),
    lambda w, x: F.rms_norm(x, (6,)),
    lambda w, x: F.max_pool2d(x, 2).relu_(),
    lambda w, x: F.dropout(x + 1, 0.5, False).relu_() @ torch.eye(6),
    lambda w, x: x * x.sum().item(),
    lambda w, x: torch.empty_like(x).copy_(x),
    lambda w, x: (torch.unbind(F.pad(x, (1, 1)))[0], x.new_zeros(3)),
    lambda w, x: torch.linalg.inv(F.pad(x, (0, -2)) + 4 * torch.eye(4)),
    lambda w, x: F.hardtanh(x + 1, inplace=True),
    lambda w, x: F.dropout(F.relu(x + 1, inplace=True), 0.5, False, inplace=True).add_(F.dropout2d(x[None], 0.5, False, inplace=True)[0]),
], ids=range(14))
def test_node_by_node(function: Callable[..., Any]) -> None:
    assert check(function, torch.randn(3, 4, 6))


def of_integers(w: Tensor, x: Tensor) -> Tensor:
    k = (x * 30).int()
    k |= 3
    k &= 29
    k ^= 2
    k <<= 1
    k >>= 2
    k //= 2
    k %= 5
    k **= 2
    return k


def of_masks(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    mask = x > 0
    mask |= x < w - 1
    mask &= x < 2
    mask ^= w > 0
    y = x * 1
    y[mask] = 0
    return mask, y


def asserted(w: Tensor, x: Tensor) -> Tensor:
    torch._check_tensor_all(x < 9, lambda: "too large")
    torch._assert_async((x < 9).all(), "too large")
    number = (x[0, 0, 0] * 0).int().item()
    torch._check(number < 3)
    return (x + number).relu_()


@pytest.mark.parametrize("function", [of_integers, of_masks, asserted])
def test_operators_and_assertions(function: Callable[..., Any]) -> None:
    assert check(function, torch.randn(3, 4, 6).clamp(-3, 3))


def before_and_after(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    before = y * w
    z = y.mul_(3)
    return before + y, z


def by_a_view(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    view = y.transpose(0, 1)
    y.mul_(3)
    return view, y


def through_dropout(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    z = F.dropout(y, 0.5, False)
    z.relu_()
    return y, z


def of_the_same_type(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    z = y.type_as(x)
    z.relu_()
    return y, z


def in_parts(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x + 1
    first, *rest = y.split(2)
    first.mul_(5)
    return y, first, *rest


def of_the_parameter(w: Tensor, x: Tensor) -> Tensor:
    return w.detach().clone().mul_(2) + F.linear(x, w[None]).relu_()


def narrower(w: Tensor, x: Tensor) -> Tensor:
    y = x.to(torch.bfloat16) + 1
    return y.add_(w)


def with_itself(w: Tensor, x: Tensor) -> Tensor:
    y = x + 1
    return y.add_(y).mul_(y.flip(0))


def with_its_view(w: Tensor, x: Tensor) -> Tensor:
    y = x[0] @ x[1].transpose(0, 1)
    return y.add_(y.t().clone())


def elements(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    value, index = (x + 1).max(1)
    value.mul_(2)
    again = torch.max_pool2d(x, 2)
    return value, index, again


@pytest.mark.parametrize("function", [
    before_and_after, by_a_view, through_dropout, of_the_same_type, in_parts, of_the_parameter, narrower, with_itself, with_its_view,
    elements,
])
def test_writes_that_others_see(function: Callable[..., Any]) -> None:
    check(function, torch.randn(3, 4, 6))


def test_what_is_written_under_two_names_is_left_to_torch() -> None:
    assert not check(of_the_same_type, torch.randn(3, 4, 6))


@pytest.mark.parametrize("function", [
    lambda w, x: torch.einsum("bij,j->bij", x, w).unsqueeze_(1).mul_(2),
    lambda w, x: torch.einsum("bij,j->b", x, w).add_(w[:3]),
    lambda w, x: F.conv_transpose1d(x, w.reshape(1, 1, 6).expand(4, 2, 6)).relu_(),
    lambda w, x: F.interpolate(F.instance_norm(x).relu_(), scale_factor=2).add_(1),
    lambda w, x: F.adaptive_avg_pool1d(F.prelu(x, w[:1]).add_(x), 1).mul_(3),
    lambda w, x: torch.where(x > 0, x, 0.0).add_(x),
], ids=range(6))
def test_writes_to_what_composites_made(function: Callable[..., Any]) -> None:
    """They are tensors of their own, and not perhaps arguments, which torch would have to see."""
    assert check(function, torch.randn(3, 4, 6), how=without_writes)


def test_a_product_of_one_tensor_may_be_a_view_of_it() -> None:
    assert not taken_apart(lambda w, x: torch.einsum("bij->jib", x).mul_(2), torch.randn(3, 4, 6), how=without_writes)[1]


@pytest.mark.parametrize("function", [
    lambda w, x: F.pad(x, (0, 1)).relu_().unflatten(2, (7, 1)),
    lambda w, x: torch.einsum("bij,j->bi", x, w).add_(1),
    lambda w, x: F.group_norm(x, 2),
    lambda w, x: F.adaptive_avg_pool2d(x, 1),
], ids=range(4))
def test_free_sizes(function: Callable[..., Any]) -> None:
    shapes = ((({0: Dim("batch", max=64)}),),)
    assert check(function, torch.randn(3, 4, 6), dynamic_shapes=shapes, other=(torch.randn(7, 4, 6),))


def test_what_checks_its_result_is_kept_whole() -> None:
    """Its parts are a computation and a check, which is an operation without a result."""
    program, apart = taken_apart(lambda w, x: torch.linalg.inv(F.pad(x, (0, 1))), torch.randn(4, 3))
    assert apart and aten.linalg_inv.default in {node.target for node in program.graph.nodes}


def test_what_a_decomposition_gives_beside_is_not_asked_for() -> None:
    """The places of maxima, which it shapes as it does these."""
    program, apart = taken_apart(lambda w, x: F.adaptive_max_pool1d(x, 2), torch.randn(3, 4, 6))
    assert apart and all(node.users for node in program.graph.nodes if node.op == "call_function")


def random_program(seed: int) -> Callable[..., Any]:
    """A function that makes, looks at and overwrites tensors of [4, 4] at random."""

    def run(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        draw = random.Random(seed)
        held = [x * 1.5, x - 0.25]
        makes: list[Callable[[Tensor, Tensor], Tensor]] = [
            lambda a, b: a + b, lambda a, b: a * 0.5, lambda a, b: torch.where(a > b, a, b), lambda a, b: a.clone(),
            lambda a, b: F.pad(a, (1, -1)), lambda a, b: torch.einsum("ij,kj->ik", a, b), lambda a, b: F.softmax(a, 1),
        ]
        views: list[Callable[[Tensor, Tensor], Tensor]] = [
            lambda a, b: a.t(), lambda a, b: a.reshape(4, 4), lambda a, b: F.dropout(a, 0.5, False), lambda a, b: a.contiguous(),
            lambda a, b: a.unflatten(0, (2, 2)).flatten(0, 1), lambda a, b: a.to(b.dtype), lambda a, b: a.type_as(b),
            lambda a, b: torch.cat(a.chunk(2)), lambda a, b: a.expand(4, 4), lambda a, b: a[:, :], lambda a, b: a.split(4)[0],
        ]
        writes: list[Callable[[Tensor, Tensor], Tensor]] = [
            lambda a, b: a.add_(b), lambda a, b: a.relu_(), lambda a, b: a.mul_(0.5), lambda a, b: a.copy_(b),
            lambda a, b: a.masked_fill_(b > 0, 0.5), lambda a, b: F.silu(a, inplace=True), lambda a, b: a.clamp_(-1, 1),
            lambda a, b: a.fill_(0.25),
        ]
        for _ in range(draw.randrange(2, 9)):
            kind = draw.choices((makes, views, writes), (4, 2, 3))[0]
            held.append(draw.choice(kind)(draw.choice(held[-4:]), draw.choice(held)))
        return tuple(held)

    return run


def test_random_programs() -> None:
    apart = [check(random_program(seed), torch.randn(4, 4)) for seed in range(20)]
    assert 10 < sum(apart) < 20  # both ways are taken


def test_operations_that_come_later_are_taken_apart_too() -> None:
    """The table of torch is collected once; libraries may be loaded after that."""
    taken_apart(lambda w, x: F.softplus(x, 2.0), torch.randn(6))
    library = torch.library.Library("loaded_later", "DEF")
    library.define("scaled(Tensor x) -> Tensor")
    library.impl("scaled", lambda x: torch.exp(x) * 2, "CompositeImplicitAutograd")
    program, _ = taken_apart(lambda w, x: torch.ops.loaded_later.scaled(x), torch.randn(6))
    assert [node.target for node in program.graph.nodes if node.op == "call_function"] == [aten.exp.default, aten.mul.Tensor]


PERHAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "reshape": lambda y: y[:, 1:].reshape(-1), "contiguous": lambda y: y.transpose(0, 1).contiguous(),
    "flatten": lambda y: y[:, :-1].flatten(), "ravel": lambda y: y[:, 1:].ravel(),
}


@torch.no_grad()
@pytest.mark.parametrize("name", PERHAPS)
def test_sizes_of_one_that_make_a_copy_a_view(name: str) -> None:
    """What is written to it is seen in the tensor then."""
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        PERHAPS[name](y).add_(1)
        return y

    model = sashiko.compile(Apply(forward).eval(), (torch.randn(3, 5),), dynamic_shapes={"args": ({0: Dim.AUTO, 1: Dim.AUTO},)})
    for sizes in ((2, 4), (3, 3)):
        x = torch.randn(sizes)
        torch.testing.assert_close(model(x), forward(x))
    with pytest.raises(InputError, match="takes another way"):
        model(torch.randn(1, 4))


@torch.no_grad()
def test_sizes_of_one_in_strides_that_make_a_copy_a_view() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        y[:, 0].contiguous().add_(1)
        return y

    model = sashiko.compile(Apply(forward).eval(), (torch.randn(3, 9, 8),), dynamic_shapes={"args": ({1: Dim.AUTO},)})
    x = torch.randn(3, 2, 8)
    torch.testing.assert_close(model(x), forward(x))
    with pytest.raises(InputError, match="takes another way"):
        model(torch.randn(3, 1, 8))
