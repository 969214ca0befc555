"""Packing a constant weight, once, with whole-tensor operations. `docs/add_a_kernel.md` shows the layout."""

from __future__ import annotations

from math import gcd

import torch

from ..diagnostics.errors import InputError
from ..graph.dims import Dim
from ..graph.types import FROM_TORCH, i4, i8
from .spec import Packing

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def int_of(value: Dim) -> int:
    """A dimension that is a number."""
    assert isinstance(value, int)
    return value


def pack_rhs(weight: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Returns weight [n, k] (f32, bf16 or i8) packed, as a one-dimensional int8 tensor of `packing.bytes(...)` bytes."""
    n, k = weight.shape
    dtype = FROM_TORCH[weight.dtype]
    panels, depth = int_of(packing.panels(n)), int_of(packing.k_padded(k))
    missing = (0, depth - k, 0, panels * packing.nr - n)
    padded = torch.nn.functional.pad(weight.detach(), missing) if any(missing) else weight.detach().contiguous()
    result = torch.empty(int_of(packing.bytes(n, k, dtype)), dtype=torch.int8)
    together = packing.kr * weight.element_size()  # bytes of neighbours, moved as few wide numbers
    wide = gcd(together, 8)
    groups = padded.view(_WHOLE[wide]).view(panels, packing.nr, depth // packing.kr, together // wide).transpose(1, 2)
    result[: padded.nbytes].view(_WHOLE[wide]).view(groups.shape).copy_(groups)
    rest = result[padded.nbytes :].zero_()
    if dtype == i8 and packing.sums:
        sums = padded.sum(dim=1, dtype=torch.int32).view(torch.int8)
        rest[: sums.numel()] = sums
    return result


MOST_GROUPED = 256  # more k in one piece would not fit the scratch memory of tall tiles


def packed_group(group: int) -> int:
    """How many neighbours have a scale of their own in packed i4, for groups of `group` in the user's weight: as many, or a part of them.

    A multiple of 8 when `group` is one.
    """
    return next((size for size in range(min(group, MOST_GROUPED) // 8 * 8, 7, -8) if group % size == 0), group)


def pack_grouped(weight: torch.Tensor, scales: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Returns weight [n, k], integers from -8 to 7 held as int8, and its scales f32 [n, groups] packed as i4 with `packing.group`.

    A word of 32 bits holds 8 neighbours along k, the first in the lowest bits. Raises InputError for other integers.
    """
    n, k = weight.shape
    if weight.numel() and (int(weight.min()) < -8 or int(weight.max()) > 7):
        raise InputError(f"4-bit weights go from {int(weight.min())} to {int(weight.max())}", hint="they must lie in [-8, 7]")
    panels, nr, groups = int_of(packing.panels(n)), packing.nr, k // packing.group
    missing = panels * nr - n
    integers = torch.nn.functional.pad(weight.detach(), (0, 0, 0, missing)).view(panels, nr, k // packing.kr, packing.kr).transpose(1, 2)
    nibbles = (integers[..., 0::2] & 15) | (integers[..., 1::2] << 4)
    repeated = scales.detach().float().repeat_interleave(groups // scales.shape[1], 1)
    factors = torch.nn.functional.pad(repeated, (0, 0, 0, missing)).view(panels, nr, groups).transpose(1, 2).contiguous()
    parts = (factors.view(torch.int8).view(panels, groups, -1), nibbles.reshape(panels, groups, -1))
    data = torch.cat(parts, 2).view(-1)
    return torch.nn.functional.pad(data, (0, int_of(packing.bytes(n, k, i4)) - data.numel()))
