"""Calls that torch's operator database has no samples of, as (operation, arguments)."""

from __future__ import annotations

from typing import Any

import torch

from sashiko.graph.aten.experts import EXPERTS
from sashiko.graph.aten.recurrent import RECURRENCE

aten = torch.ops.aten
torch.manual_seed(1)
WORDS, OTHERS = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
JOINT = (torch.randn(24, 8), torch.randn(24), torch.randn(8, 8), torch.randn(8))
NORMS = tuple(torch.randn(8) for _ in range(4))
FEED = (torch.randn(12, 8), torch.randn(12), torch.randn(8, 12), torch.randn(8))
PADDED = torch.tensor([[False, False, True, False, True], [True] * 5])  # all of the second row: NaN
LATER = torch.ones(5, 5).triu(1).bool()
FUSED: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (aten._native_multi_head_attention.default, (WORDS, WORDS, WORDS, 8, 2, *JOINT)),
    (aten._native_multi_head_attention.default, (WORDS, OTHERS, WORDS, 8, 4, *JOINT, PADDED, True, False, 1)),
    (aten._transformer_encoder_layer_fwd.default, (WORDS, 8, 2, *JOINT, True, False, 1e-5, *NORMS, *FEED, PADDED, 1)),
    (aten._transformer_encoder_layer_fwd.default, (WORDS, 8, 2, *JOINT, False, True, 1e-5, *NORMS, *FEED, LATER, 0)),
    (aten._transformer_encoder_layer_fwd.default, (WORDS, 8, 2, *JOINT, True, True, 1e-5, *NORMS, *FEED, LATER.expand(2, 2, 5, 5), 2)),
)
TABLE_OF, BAG = torch.randn(9, 5), torch.tensor([3, 0, 8, 2, 2, 2, 5, 2, 7, 1, 1, 6])
BAGS: tuple[tuple[Any, tuple[Any, ...]], ...] = (  # of 3, and of 4 indices
    *((op, (TABLE_OF, BAG, range(0, 12, 3), False, mode, False, None, False, -1))
      for op in (aten._embedding_bag.default, aten._embedding_bag_forward_only.default) for mode in range(3)),
    *((aten.embedding_bag.padding_idx, (TABLE_OF, BAG, range(0, 12, 4), False, mode, False, None, False, 2)) for mode in (0, 1)),
    (aten._embedding_bag.default, (TABLE_OF, BAG, range(0, 12, 4), False, 0, False, torch.rand(12), False, -1)),
    *((aten.embedding_bag.padding_idx, (TABLE_OF, BAG, range(0, 12, 4), False, 2, False, None, False, number)) for number in (2, 4)),
    *((aten.embedding_bag.padding_idx, (TABLE_OF, BAG, torch.tensor([0, 0, 5, 9, 12]), False, mode, False, None, last, 2))
      for mode in range(3) for last in (False, True)),
    (aten._embedding_bag.default, (TABLE_OF, BAG, torch.tensor([0, 4, 4, 11]), False, 2, False, None, False, -1)),
)
GATES, STATES, RECURRENT = torch.randn(4, 2, 12), torch.randn(2, 2, 3), torch.randn(12, 3)
RECURRENCES: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (RECURRENCE, ("lstm", GATES, STATES, RECURRENT, torch.randn(12), True)),
    (RECURRENCE, ("lstm_projected", GATES, torch.randn(1, 2, 5), RECURRENT[:, :2].clone(), None, True, "none", torch.randn(2, 3))),
    (RECURRENCE, ("gru", GATES[:, :, :9].clone(), STATES[:1], RECURRENT[:9], None, False)),
    (RECURRENCE, ("rnn_tanh", GATES[:, :, :3].clone(), STATES[:1], RECURRENT[:3], None, False)),
    (RECURRENCE, ("rnn_relu", GATES[:, :, :3].clone(), STATES[:1], RECURRENT[:3], torch.randn(3), True)),
)
ENDS = torch.tensor([2, 2, 5])
NARROW = torch.randn(16, 16).bfloat16()
EXPERT_CALLS: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (EXPERTS, (torch.randn(7, 12), torch.randn(3, 4, 12), ENDS)),
    (EXPERTS, (torch.randn(7, 12), torch.randn(3, 4, 12), torch.tensor([0, 7, 7], dtype=torch.int32))),
    (aten._grouped_mm.default, (NARROW, torch.randn(2, 16, 24).bfloat16(), torch.tensor([5, 16], dtype=torch.int32))),
)
BOTH, TWICE = torch.tensor([0, 1, 1]), torch.tensor([2, 0, 2])[:, None].expand(2, 3, 4)
HEADS, ROWS = torch.randn(2, 4, 5, 8), torch.randn(2, 3, 4)
PUTS: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (aten._unsafe_index_put.default, (HEADS, [None, None, torch.tensor([3, -5])], HEADS[:, :, :2])),
    (aten.index_put.default, (HEADS, [torch.tensor([[0], [1]]), None, torch.tensor([3, -5])], HEADS[0, 0, 0, 0])),
    (aten.scatter.value, (ROWS, 1, torch.zeros(2, 1, 4, dtype=torch.int64), 0.5)),
    (aten.slice_scatter.default, (HEADS, HEADS[:, :, ::2] + 1, 2, 0, 9, 2)),
    *((aten.index_add.default, (HEADS, axis, torch.tensor([1, 0, 1]), HEADS.index_select(axis, BOTH))) for axis in (0, 3)),
    (aten.index_put.default, (HEADS, [None, torch.tensor([3, -1, 3])], HEADS[:, :3], True)),
    (aten.scatter_add.default, (ROWS, 1, TWICE, ROWS)),
    *((aten.scatter_reduce.two, (ROWS, 1, TWICE, ROWS * 2, kind)) for kind in ("sum", "prod", "amax", "amin", "mean")),
    (aten.roll.default, (ROWS, [-1], [0])),
)
IMAGE, VOLUME = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5, 3)
POINTS = torch.rand(2, 6, 4, 3) * 3 - 1.5
NOWHERE = POINTS[..., :2].clone()
NOWHERE[0, :, 0, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e20, -1e20, 3e9])
SAMPLED: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    *((aten.grid_sampler_2d.default, (IMAGE, POINTS[..., 1:], mode, padding, aligned))
      for mode in range(3) for padding in range(3) for aligned in (False, True)),
    *((aten.grid_sampler_2d.default, (IMAGE[:, :1, :, :1].clone(), NOWHERE, mode, padding, False))
      for mode in range(2) for padding in range(3)),
    *((aten.grid_sampler_3d.default, (VOLUME, POINTS[:, :, None], mode, padding, aligned))
      for mode in range(2) for padding in range(3) for aligned in (False, True)),
)
FOLDED: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    *((aten.im2col.default, (image, (2, 3), (2, 1), (1, 2), (1, 2))) for image in (IMAGE, IMAGE[0])),
    (aten.col2im.default, (torch.randn(2, 12, 21), (7, 5), (3, 2), (1, 2), (1, 2), (3, 1))),
    (aten.col2im.default, (torch.randn(12, 6), (8, 5), (3, 2), (1, 2), (0, 0), (3, 1))),
    (aten.unfold_backward.default, (torch.randn(1, 4, 3, 5), [2, 12, 3], -2, 5, 2)),
    (aten.unfold_backward.default, (torch.randn(2, 3, 2), [2, 8], 1, 2, 3)),
    *((aten.adaptive_max_pool2d.default, (IMAGE, out)) for out in ((2, 5), (3, 4), (7, 2))),
    *((aten.adaptive_max_pool3d.default, (VOLUME, out)) for out in ((2, 5, 1), (3, 2, 3))),
)
AROUND: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    *((op, (IMAGE[0], amounts)) for op in (aten.reflection_pad1d.default, aten.replication_pad1d.default) for amounts in ((4, 2), (0, 3))),
    *((op, (IMAGE, (1, 3, 2, 0))) for op in (aten.reflection_pad2d.default, aten.replication_pad2d.default)),
    *((op, (VOLUME, (1, 2, 0, 3, 3, 1))) for op in (aten.reflection_pad3d.default, aten.replication_pad3d.default)),
    (aten.replication_pad2d.default, (IMAGE, (-1, 2, 3, -2))),
    *((aten.upsample_bicubic2d.vec, (IMAGE, None, aligned, [2.0, 1.5])) for aligned in (False, True)),
    *((op.vec, (IMAGE, None, False, [0.5, 1.5])) for op in (aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa)),
    (aten._upsample_bicubic2d_aa.default, (IMAGE, [3, 4], True)),
)
