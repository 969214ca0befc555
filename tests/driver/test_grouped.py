"""Products whose columns are in groups: how their weights are cut, and that the epilogue finds its rows and columns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sashiko
from sashiko.driver.contractions import gemm_spec
from sashiko.driver.grouped import Blocks, blocks_of
from sashiko.graph import build as b
from sashiko.graph.dims import evaluate, symbols
from sashiko.graph.ir import Value
from sashiko.graph.types import f32
from sashiko.platforms.catalogue import X86_64_V3
from sashiko.stitch.program import ContractionItem
from sashiko.stitch.stitcher import stitch


def test_joined_groups_are_blocks_on_the_diagonal() -> None:
    weight = torch.arange(1.0, 25.0).reshape(4, 6)  # 4 groups of one column, 3 windows of 2 channels
    first, second = Blocks(2, 2, 2).of(weight)
    zero = torch.zeros(2)
    rows = [torch.cat([torch.cat((turn, zero) if n == 0 else (zero, turn)) for turn in weight[n].split(2)]) for n in (0, 1)]
    assert torch.equal(first, torch.stack(rows))
    assert torch.equal(second.count_nonzero(1), torch.tensor([6, 6]))
    assert [part.tolist() for part in Blocks(4, 1, 6).of(weight)] == weight.unsqueeze(1).tolist()
    assert [part.tolist() for part in Blocks(2, 2, 2).of(weight, own=True)] == weight.view(2, 2, 6).tolist()


def item_of(image: Value, x: Value, w: Value) -> ContractionItem:
    """The stitched product of a view of an input and a constant weight."""
    program = stitch((b.add(b.linear(x, w), 1.0),), (image,), (w,))
    found = program.items[-1]
    assert isinstance(found, ContractionItem)
    return found


def grouped_windows(groups: int, columns: int) -> ContractionItem:
    """3 x 3 windows over 9 x 9 pixels of 24 channels."""
    image, width = b.input_(0, f32, (2, 9, 9, 24)), 24 // groups
    patches = b.permute(b.window(b.window(image, 1, 3, 1, 1), 3, 3, 1, 1), (0, 1, 3, 2, 4, 5))
    split = b.permute(b.reshape(patches, (2, 7, 7, 3, 3, groups, width)), (0, 1, 2, 5, 3, 4, 6))
    return item_of(image, b.reshape(split, (2, 7, 7, 9 * 24)), b.constant(torch.randn(groups * columns, 9 * width)))


def test_narrow_groups_share_a_panel_and_are_read_in_long_pieces() -> None:
    item = grouped_windows(12, 4)
    assert blocks_of(item, True) == Blocks(3, 4, 2) and blocks_of(item, False) == Blocks(12, 1, 2)
    spec = gemm_spec(item, {item.anchor.inputs[1]}, X86_64_V3)
    assert (spec.batch, spec.weights, spec.m, spec.n, spec.k) == (3, 3, 98, 16, 72)
    assert spec.diagonal == (4, 2) and gemm_spec(item, set(), X86_64_V3).diagonal == (1, 0)  # a weight that comes with the call
    assert spec.lhs_pieces is not None and spec.lhs_pieces.run == 8 and evaluate(spec.lhs_strides.batch, {"b": 2}) == 16


def test_wide_groups_are_products_of_their_own() -> None:
    item = grouped_windows(2, 24)
    assert blocks_of(item, True) == Blocks(2, 1, 12)
    spec = gemm_spec(item, {item.anchor.inputs[1]}, X86_64_V3)
    assert (spec.batch, spec.weights, spec.m, spec.n, spec.k) == (2, 2, 98, 24, 108)


def test_results_of_groups_lie_side_by_side() -> None:
    item = grouped_windows(3, 10)
    spec = gemm_spec(item, {item.anchor.inputs[1]}, X86_64_V3)
    (store,) = spec.epilogue.stores
    assert {s.name for s in symbols(store.index)} == {"r", "c"}
    for matrix, row, column in ((0, 0, 0), (1, 5, 3), (2, 97, 9)):
        assert evaluate(store.index, {"r": matrix * 98 + row, "c": column}) == row * 30 + matrix * 10 + column


def test_the_columns_of_a_plain_linear_are_in_one_group() -> None:
    image = b.input_(0, f32, (2, 9, 9, 24))
    item = item_of(image, image, b.constant(torch.randn(8, 24)))
    assert blocks_of(item, True) is None
    assert gemm_spec(item, {item.anchor.inputs[1]}, X86_64_V3).weights == 1


@torch.no_grad()
@pytest.mark.isa("avx2")
@pytest.mark.parametrize("stride", [1, 2])
def test_permuted_words_are_faster_than_zeros(stride: int) -> None:
    """The weights are packed for that row, watched, and used by any number of images; the image has a border of zeros."""
    first, second = nn.Conv2d(8, 32, 1), nn.Conv2d(32, 32, 3, stride, padding=1, groups=8)
    model, x = nn.Sequential(first, nn.ReLU(), second, nn.ReLU()).eval(), torch.randn(2, 8, 17, 19)
    compiled = sashiko.compile(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=8)},))
    assert "narrow_f32_f32_f32" in str(compiled.explain())
    for images in (x, torch.randn(3, 8, 17, 19), x[:1]):
        torch.testing.assert_close(compiled(images), model(images), rtol=1e-5, atol=1e-5)
    second.weight.mul_(-1.5)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
