"""Packing a constant weight, once, with whole-tensor operations. `docs/add_a_kernel.md` shows the layout."""

from __future__ import annotations

import torch

from ..graph.dims import Dim
from ..graph.types import FROM_TORCH, i8
from .spec import Packing


def int_of(value: Dim) -> int:
    """A dimension that is a number."""
    assert isinstance(value, int)
    return value


def pack_rhs(weight: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Returns weight [n, k] (f32, bf16 or i8) packed, as a one-dimensional int8 tensor of `packing.bytes(...)` bytes."""
    n, k = weight.shape
    dtype = FROM_TORCH[weight.dtype]
    panels, depth = int_of(packing.panels(n)), int_of(packing.k_padded(k))
    padded = torch.nn.functional.pad(weight.detach(), (0, depth - k, 0, panels * packing.nr - n))
    groups = padded.view(panels, packing.nr, depth // packing.kr, packing.kr)
    data = groups.transpose(1, 2).contiguous().view(-1).view(torch.int8)
    result = torch.zeros(int_of(packing.bytes(n, k, dtype)), dtype=torch.int8)
    result[: data.numel()] = data
    if dtype == i8:
        sums = padded.sum(dim=1, dtype=torch.int32).view(torch.int8)
        result[data.numel() : data.numel() + sums.numel()] = sums
    return result


def unpack_rhs(packed: torch.Tensor, packing: Packing, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weight [n, k] that `pack_rhs` packed."""
    panels, depth = int_of(packing.panels(n)), int_of(packing.k_padded(k))
    size = int_of(packing.sums_offset(n, k, FROM_TORCH[dtype]))
    groups = packed[:size].view(dtype).view(panels, depth // packing.kr, packing.nr, packing.kr)
    return groups.transpose(1, 2).reshape(panels * packing.nr, depth)[:n, :k].contiguous()
