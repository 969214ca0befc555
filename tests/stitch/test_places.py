"""What products store as part of something larger: images with a border, and concatenations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sashiko
from sashiko.graph import build as b
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import bf16, f32
from sashiko.quant import quantize
from sashiko.stitch.partition import Native, partition
from sashiko.stitch.places import in_their_places
from sashiko.stitch.stitcher import stitch
from tests.driver.functions import Apply
from tests.sweeps import swept

SIDE, CHANNELS = 12, 48
ROUNDING = 3e-6  # of sums of some hundred terms in f32, relative to the largest result


def image() -> Value:
    return b.input_(0, f32, (1, SIDE, SIDE, CHANNELS))


def product(x: Value, columns: int = CHANNELS) -> Value:
    return b.linear(x, b.constant(torch.randn(columns, x.shape[-1]) / 8))


def windows(x: Value) -> Value:
    """A product over windows of 3 x 3, which wants them in memory."""
    height, width, channels = x.shape[1:]
    taken = b.permute(b.window(b.window(x, 1, 3), 3, 3), (0, 1, 3, 2, 4, 5))
    assert isinstance(height, int) and isinstance(width, int) and isinstance(channels, int)
    return product(b.reshape(taken, (1, height - 2, width - 2, 9 * channels)))


def around(x: Value, low: int = 1, high: int = 1) -> Value:
    return b.pad(x, ((0, 0), (low, high), (low, high), (0, 0)), 0.25)


def found(graph: Graph) -> dict[str, int]:
    """The graph with its places: how many there are of each, once it is known to mean the same."""
    placed = in_their_places(graph)
    x = torch.randn(1, SIDE, SIDE, CHANNELS)
    for one, other in zip(run(graph, [x]), run(placed, [x]), strict=True):
        assert torch.equal(one, other)
    ops = [v.op for v in placed.order]
    return {op: ops.count(op) for op in ("pad", "border", "concat", "joined", "copy") if op in ops}


def test_padding_around_what_a_product_makes() -> None:
    x = image()
    assert found(Graph((x,), (windows(around(b.relu(product(x)))),))) == {"border": 2}
    assert found(Graph((x,), (around(product(x)),))) == {"border": 2}  # also in what is returned
    inner = next(v for v in in_their_places(Graph((x,), (windows(around(product(x), 2, 1)),))).order if v.tensor.room)
    assert inner.op == "linear" and inner.tensor.room == ((0, 0), (2, 1), (2, 1), (0, 0))
    assert inner.tensor.strides == (15 * 15 * 48, 15 * 48, 48, 1) and inner.tensor.start == (2 * 15 + 2) * 48


def test_padding_that_is_computed_together_with_its_operand_stays() -> None:
    x = image()
    assert found(Graph((x,), (windows(around(b.relu(x))),))) == {"pad": 1}
    seen = product(x)  # the caller's
    assert found(Graph((x,), (windows(around(seen)), seen))) == {"pad": 1}
    cropped = b.pad(product(x), ((0, 0), (-1, 2), (0, 0), (0, 0)), 0.0)
    assert found(Graph((x,), (windows(cropped),))) == {"pad": 1}


def test_parts_of_a_concatenation() -> None:
    x = image()
    parts = [product(x), b.relu(product(x, 24))]
    assert found(Graph((x,), (product(b.concat(parts, 3)),))) == {"joined": 1}
    # The argument is copied to its place; so is what is there twice.
    assert found(Graph((x,), (product(b.concat([*parts, x], 3)),))) == {"joined": 1, "copy": 1}
    assert found(Graph((x,), (product(b.concat([*parts, parts[0]], 3)),))) == {"joined": 1, "copy": 2}
    assert found(Graph((x,), (product(b.concat([x, b.relu(x)], 3)),))) == {"concat": 1}  # nothing is saved
    constant = b.constant(torch.randn(1, SIDE, SIDE, 8))
    assert found(Graph((x,), (product(b.concat([parts[0], constant], 3)),))) == {"joined": 1, "copy": 1}


def test_a_concatenation_within_a_padding_within_another() -> None:
    x = image()
    inner = b.concat([product(x), product(x)], 3)
    outer = b.concat([around(inner), around(b.relu(x))], 3)
    assert found(Graph((x,), (windows(around(inner)),))) == {"border": 2, "joined": 1}
    assert found(Graph((x,), (product(outer),))) == {"border": 2, "pad": 1, "joined": 2}


def test_what_is_rounded_afterwards_is_rounded_before() -> None:
    x, w = image(), b.constant(torch.randn(16, 2 * CHANNELS).bfloat16())
    joined = b.concat([product(x), x], 3)
    assert found(Graph((x,), (b.linear(b.cast(joined, bf16), w),))) == {"joined": 1}
    assert found(Graph((x,), (b.linear(b.cast(joined, bf16), w), b.exp(joined)))) == {"concat": 1}  # both would be stored


def test_a_border_comes_after_what_is_within_it() -> None:
    """Also where the product has another shape: nothing but its border waits for it."""
    x = b.input_(0, f32, (1, SIDE, SIDE, CHANNELS))
    rows = product(b.reshape(x, (SIDE * SIDE, CHANNELS)))
    padded = around(b.reshape(rows, (1, SIDE, SIDE, CHANNELS)))
    graph = in_their_places(Graph((x,), (windows(padded),)))
    parts, constants = partition(graph)
    (native,) = parts
    assert isinstance(native, Native)
    program = stitch(native.outputs, native.inputs, constants)
    written = [item.writes[0].op for item in program.items]
    assert written[-3:] == ["border", "border", "linear"] and written[-4] in ("reshape", "linear")


def test_operators_with_several_results_beside_it() -> None:
    """They have no type that a walk through the whole graph could ask for."""

    def beside(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([x @ w, x], 1), torch.linalg.qr(x)[0]

    x, w = torch.randn(3, 4, 8), torch.randn(8, 8)
    for got, expected in zip(sashiko.compile(Apply(lambda x: beside(x, w)).eval(), (x,))(x), beside(x, w), strict=True):
        torch.testing.assert_close(got, expected)


def test_many_within_one_another_are_left_to_loops() -> None:
    """As a loop makes them that adds to what it has collected: more than Python's stack is deep."""
    x = image()
    grown = product(x)
    for _ in range(1200):
        grown = b.concat([grown, x], 1)
    ops = [v.op for v in in_their_places(Graph((x,), (product(b.relu(grown), 8),))).order]
    assert ops.count("concat") > 1100


class Net(nn.Module):
    """Convolutions with what is between them. channels: of each."""

    def __init__(self, between: Callable[..., Tensor], *channels: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Conv2d(*each, 3, padding=1) for each in channels)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.between(x, *self.layers)


def residuals(x: Tensor, first: nn.Module, second: nn.Module, third: nn.Module) -> Tensor:
    """Each sum is read with its border by a product, and without by the next sum."""
    x = first(x).relu()
    x = x + second(x)
    x = x + third(x).relu()
    return x + second(x)


def chunks(x: Tensor, first: nn.Module, second: nn.Module, third: nn.Module) -> Tensor:
    """Half of a part goes through a product and is added to what comes of it; all three are side by side."""
    x = F.silu(first(x))
    half = x.chunk(2, 1)[1]
    result: Tensor = third(torch.cat([x, half + second(half)], 1))
    return result


def branches(x: Tensor, first: nn.Module, second: nn.Module, third: nn.Module) -> Tensor:
    """Pooled, from an earlier layer, uneven padding, and the image itself."""
    y = first(x)
    both = torch.cat([y, second(y).relu(), F.max_pool2d(y, 3, 1, 1), x], 1)
    result: Tensor = third(F.pad(both, (2, 1, 0, 1), value=0.5))
    return result


NETS: Sequence[tuple[Callable[..., Tensor], tuple[tuple[int, int], ...]]] = (
    (residuals, ((16, 48), (48, 48), (48, 48))),
    (chunks, ((16, 64), (32, 32), (96, 40))),
    (branches, ((16, 40), (40, 24), (120, 20))),
)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("net", NETS, ids=lambda net: net[0].__name__)
def test_compiled_against_eager(net: tuple[Callable[..., Tensor], tuple[tuple[int, int], ...]], precision: str) -> None:
    model = Net(net[0], *net[1]).eval()
    x = torch.randn(2, 16, 15, 18)
    compiled = sashiko.compile(model, (x,), precision=precision, dynamic_shapes=({0: torch.export.Dim("n", min=2, max=8)},), strict=True)
    assert any(v.op in ("border", "joined") for v in compiled.built.graph.order)
    for batch in (2, 5):
        x = torch.randn(batch, 16, 15, 18)
        with torch.no_grad():
            expected = model(x)
        assert (compiled(x) - expected).abs().max() <= (ROUNDING if precision == "fp32" else 2e-2) * expected.abs().max()


@pytest.mark.parametrize("net", NETS, ids=lambda net: net[0].__name__)
@pytest.mark.parametrize("target", swept(("host", "x86_64_v3"), ("host",)))
def test_quantized_against_what_is_simulated(net: tuple[Callable[..., Tensor], tuple[tuple[int, int], ...]], target: str) -> None:
    quantized = quantize(Net(net[0], *net[1]).eval(), [(torch.randn(2, 16, 15, 18),)], preset="int8-static", progress=False)
    x = torch.randn(2, 16, 15, 18)
    expected = quantized(x)
    error = (sashiko.compile(quantized, (x,), target=target)(x) - expected).norm() / expected.norm()
    assert error < 5e-3  # a few integers are rounded the other way


def test_rows_of_a_product_with_room_between_them() -> None:
    """A part that another product reads as rows, without windows."""

    def beside(x: Tensor, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
        y = x @ first
        return torch.cat([y, y @ second], -1) @ third

    operands = [torch.randn(size) / 8 for size in ((100, 64), (64, 96), (96, 32), (128, 50))]
    x, *weights = operands
    model = Apply(lambda x: beside(x, *weights)).eval()
    compiled = sashiko.compile(model, (x,), strict=True)
    assert any(v.op == "joined" for v in compiled.built.graph.order)
    assert (compiled(x) - beside(x.double(), *(w.double() for w in weights))).abs().max() < 1e-4
