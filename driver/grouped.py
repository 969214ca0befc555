"""Linears whose columns are in groups (`graph.build.linear`): a batch of products, one for each group, whose results lie side by side.

Where groups are so narrow that one does not fill a panel, some of them are one product with a block-diagonal weight: as many
multiplications, since columns that a panel lacks are multiplied too, and fewer and longer rows to pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..graph.dims import Dim, divides, evaluate, floordiv, mod, substitute, symbol
from ..graph.products import column_groups
from ..stitch.loops import Body
from ..stitch.program import ContractionItem
from ..stitch.roots import PIECEWISE
from ..stitch.views import unmerged

Axis = tuple[Dim, Dim]
"""How many, and how many elements apart."""

_COLUMNS = 16  # of a panel, in the rows of the kernel table that are used most


@dataclass(frozen=True)
class Blocks:
    """A weight[N, K] as `count` matrices, each of the columns of `joined` groups: their k take turns of `run`."""

    count: int
    joined: int
    run: int

    def of(self, weight: torch.Tensor, own: bool = False) -> tuple[torch.Tensor, ...]:
        """The matrices, [N / count, joined * K]. own: [N / count, K], only what the columns multiply of their own group."""
        if own:
            return weight.detach().reshape(self.count, -1, weight.shape[1]).unbind(0)
        parts = weight.detach().reshape(self.count, self.joined, -1, weight.shape[1] // self.run, self.run)
        whole = parts.new_zeros(self.count, self.joined, *parts.shape[2:4], self.joined, self.run)
        for block in range(self.joined):
            whole[:, block, :, :, block] = parts[:, block]
        return whole.reshape(self.count, -1, self.joined * weight.shape[1]).unbind(0)


def blocks_of(item: ContractionItem, constant: bool) -> Blocks | None:
    """How the weight of a product is cut; None where its columns are in one group. constant: it is known before any call."""
    x, w = item.anchor.inputs[:2]
    if item.anchor.op == "routed_linear":
        return Blocks(evaluate(item.anchor.inputs[2].shape[0], {}), 1, evaluate(w.shape[1], {}))
    groups = column_groups(x.shape, w.shape) if item.anchor.op in PIECEWISE else 1
    if groups == 1:
        return None
    n, k = (evaluate(d, {}) for d in w.shape)
    outer, inner = lhs_axes(item)
    last = evaluate(outer[-1][0], {})
    joined = max(d for d in range(1, last + 1) if last % d == 0 and (d == 1 or (constant and d * (n // groups) <= _COLUMNS)))
    run = evaluate(inner[-1][0], {})
    return Blocks(groups // joined, joined, run if inner[-1][1] == 1 and outer[-1][1] == run else k)


def lhs_axes(item: ContractionItem) -> tuple[list[Axis], list[Axis]]:
    """Where the groups of a row of the left operand begin, and the elements of a group, the last axis innermost. See `joint`."""
    x, w = item.anchor.inputs[:2]
    strides, lead = item.pointers[0].strides, x.tensor.rank - 1
    shape = (x if len(strides) == x.tensor.rank else unmerged(x)).shape
    axes = list(zip(shape[lead:], strides[lead:], strict=True))
    inner: list[Axis] = []
    left = w.shape[1]
    if column_groups(x.shape, w.shape) == 1:
        return [(1, 0)], joint(axes) or [(1, 1)]
    while axes and left != 1:
        extent, stride = axes.pop()
        part = left if isinstance(extent, int) and isinstance(left, int) and extent > left else extent
        if part != extent:
            axes.append((floordiv(extent, part), stride * part))
        inner.insert(0, (part, stride))
        assert divides(part, left) and divides(part, extent), f"groups of {w.shape[1]} end within an axis of {shape}"
        left = floordiv(left, part)
    return joint(axes) or [(1, 0)], joint(inner) or [(1, 1)]


def joint(axes: Sequence[Axis]) -> list[Axis]:
    """The axes with neighbours that one stride serves as one, and without those of one element."""
    found: list[Axis] = []
    for extent, stride in axes:
        if found and found[-1][1] == extent * stride:
            found[-1] = (found[-1][0] * extent, stride)
        elif extent != 1:
            found.append((extent, stride))
    return found


def matrices(outer: Sequence[Axis], inner: Sequence[Axis], blocks: Blocks) -> tuple[list[Axis], list[Axis]]:
    """The axes of `lhs_axes` where some groups are joined: their k in the order of `Blocks.of`."""
    *others, (extent, stride) = outer
    at = len(inner) - 1 if inner[-1][0] == blocks.run else 0
    together = [*inner[:at], (blocks.joined, stride), *inner[at:]]
    return [*others, (floordiv(extent, blocks.joined), stride * blocks.joined)], joint(together) or [(1, 1)]


def side_by_side(epilogue: Body, rows: Dim, columns: Dim, count: int, samples: Dim) -> Body:
    """The epilogue of a product in groups for the batch of `samples` times `count` matrices, [rows, columns] each."""
    r = symbol("r", 0, None, samples * count * rows)
    matrix = floordiv(r, rows)
    column = symbol("c", 0, None, columns) + mod(matrix, count) * columns
    env = {"r": floordiv(matrix, count) * rows + mod(r, rows), "c": column}
    nodes = tuple(replace(node, index=substitute(node.index, env)) for node in epilogue.nodes)
    return replace(epilogue, nodes=nodes, stores=tuple(replace(store, index=substitute(store.index, env)) for store in epilogue.stores))
