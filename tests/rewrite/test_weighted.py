"""Weighted sums of quantized integers: one scale for each sum, and dot products of bytes where a processor has them."""

from __future__ import annotations

import pytest
import torch

from sashiko.graph import build as b
from sashiko.graph.aten.windows import surrounded, windows
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import QParams, f32, i8, u8
from sashiko.rewrite import apply
from sashiko.rewrite.rules import INTEGER
from sashiko.rewrite.rules.weighted import sums_of_bytes

CHANNELS = 5
UNSIGNED, SIGNED = QParams((0.03,), 64, None, 0, 255), QParams((0.04,))
BY_CHANNEL = QParams(tuple(0.01 * (n + 1) for n in range(CHANNELS)), axis=2)
X = b.input_(0, f32, (2, 9, 8, CHANNELS))


def taps_of(*shape: int) -> Value:
    return b.constant(torch.randn(shape, generator=torch.Generator().manual_seed(0)), "w")


def taps(*size: int, q: QParams = BY_CHANNEL) -> Value:
    integers = torch.randint(-127, 128, (*size, CHANNELS), generator=torch.Generator().manual_seed(sum(size))).to(torch.int8)
    return b.dequantize(b.quantize(b.constant(0.01 * integers.float(), "w"), i8, q))


def depthwise(*size: int, q: QParams = UNSIGNED, w: Value | None = None, kept: bool = False) -> Value:
    image = surrounded(b.dequantize(b.quantize(X, u8 if q.qmin == 0 else i8, q)), (1, 1), (1, 1))
    patches = windows(image, size, (1, 1), (1, 1))
    return b.reduce(b.mul(patches, taps(*size) if w is None else w), "sum", (3, 4), kept)


def rewritten(root: Value) -> Graph:
    return apply(Graph((X,), (root,)), INTEGER)


def numbers() -> torch.Tensor:
    return torch.randn(2, 9, 8, CHANNELS, generator=torch.Generator().manual_seed(0)) * 2


def ops(graph: Graph) -> list[str]:
    return [v.op for v in graph.order]


@pytest.mark.parametrize("q", [UNSIGNED, SIGNED], ids=["u8", "s8"])
@pytest.mark.parametrize("size", [(3, 3), (2, 5), (5, 2), (6, 4), (4, 1), (1, 4), (8, 3)], ids=str)
def test_sums_stay_what_they_are(size: tuple[int, int], q: QParams) -> None:
    """As f32 numbers with one scale, and as integers: apart by what f32 sums of so many products of the largest integers round."""
    root = depthwise(*size, q=q)
    scaled = rewritten(root)
    in_bytes = sums_of_bytes(scaled)
    products = [v for v in scaled.order if v.op == "mul" and v.tensor.rank == 6]
    assert len(products) == 1 and products[0].inputs[0].op == "cast", "the windows are multiplied as integers"
    assert ("dot_bytes" in ops(in_bytes)) == (1 not in size), "along one axis alone nothing is shared"
    assert ops(in_bytes).count("dot_bytes") == (0 if 1 in size else -(-size[0] // 4))
    expected = run(Graph((X,), (root,)), (numbers(),))[0]
    weights = run(Graph((), (taps(*size),)), ())[0].abs().sum((0, 1)).max()
    apart = 2 * (size[0] * size[1] + 2) * 2.0**-24 * 255 * q.scale[0] * float(weights)
    for graph in (scaled, in_bytes):
        torch.testing.assert_close(run(graph, (numbers(),))[0], expected, rtol=0, atol=apart)


def test_one_scale_for_all_channels_and_kept_axes() -> None:
    for root in (depthwise(3, 3, w=taps(3, 3, q=QParams((0.02,)))), depthwise(3, 3, kept=True)):
        graph = sums_of_bytes(rewritten(root))
        assert "dot_bytes" in ops(graph) and graph.outputs[0].type == root.type
        torch.testing.assert_close(run(graph, (numbers(),))[0], run(Graph((X,), (root,)), (numbers(),))[0], rtol=1e-4, atol=1e-4)


def test_a_factor_with_more_axes() -> None:
    """Whose axes are not those of the integers."""
    x = b.input_(0, f32, (4, 4))
    product = b.mul(b.dequantize(b.quantize(x, u8, UNSIGNED)), b.dequantize(b.quantize(taps_of(3, 4, 4), i8, SIGNED)))
    for axes in ((1,), (0, 1), (1, 2), (2,)):
        total = b.reduce(product, "sum", axes)
        graph = sums_of_bytes(apply(Graph((x,), (total,)), INTEGER))
        data = (torch.randn(4, 4),)
        torch.testing.assert_close(run(graph, data), run(Graph((x,), (total,)), data))


@pytest.mark.parametrize(("size", "packed"), [(255, True), (257, False)])
def test_sums_that_32_bits_do_not_hold_stay_in_f32(size: int, packed: bool) -> None:
    x, q = b.input_(0, f32, (1, size, size, 1)), QParams((1.0,))
    largest = b.dequantize(b.quantize(b.constant(torch.full((size, size, 1), 127.0), "w"), i8, q))
    white = b.dequantize(b.quantize(x, u8, QParams((1.0,), 0, None, 0, 255)))
    graph = sums_of_bytes(apply(Graph((x,), (b.reduce(b.mul(white, largest), "sum", (1, 2)),)), INTEGER))
    assert ("dot_bytes" in ops(graph)) == packed
    (got,) = run(graph, (torch.full(x.shape, 255.0),))  # type: ignore[arg-type]
    torch.testing.assert_close(got, torch.full((1, 1), 255.0 * 127 * size**2))


def test_what_stays() -> None:
    """A weight that a call gives, or of numbers that are no integers; terms that have a weight in common; the greatest of all."""
    given, plain = b.input_(1, f32, (3, 3, CHANNELS)), b.constant(torch.randn(3, 3, CHANNELS), "w")
    assert "dequantize" in ops(apply(Graph((X, given), (depthwise(3, 3, w=given),)), INTEGER))
    graph = rewritten(depthwise(3, 3, w=plain))
    assert "dequantize" not in ops(graph) and "dot_bytes" not in ops(sums_of_bytes(graph))
    assert sum(v.op == "dequantize" for v in rewritten(depthwise(3, 3, w=taps(1, 3))).order) == 2
    image = windows(b.dequantize(b.quantize(X, u8, UNSIGNED)), (3, 3), (1, 1), (1, 1))
    greatest = b.reduce(b.mul(image, taps(3, 3)), "max", (3, 4))
    assert "dot_bytes" not in ops(sums_of_bytes(rewritten(greatest)))
