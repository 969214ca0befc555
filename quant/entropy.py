"""The part of a histogram whose quantized form tells least from the whole one: the Kullback-Leibler criterion of calibration.

Source: Migacz, "8-bit Inference with TensorRT", GTC 2017; for ranges with two free ends as well. The divergence of a candidate needs only
sums over as many groups of bins as there are levels, so prefix sums give those of all candidates at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_CANDIDATES = 256


def least_divergence(counts: torch.Tensor, zero: int, levels: int) -> tuple[int, int]:
    """The bins [begin, end) to represent with `levels` integers; counts outside them saturate.

    counts: int64 [bins], not all 0. zero: the bin that begins at 0. The side that is longer from there is cut first, then the other.
    Among equals the widest wins. begin <= zero <= end.
    """
    occupied = torch.nonzero(counts).flatten()
    begin, end = min(int(occupied[0]), zero), max(int(occupied[-1]) + 1, zero)
    flat = _without_spike(counts, zero)
    if not bool(flat.any()):
        return begin, end
    sums = _Sums.of(flat)
    sides = ("high", "low") if end - zero >= zero - begin else ("low", "high")
    for side in sides:
        # Narrower than one bin for each level, nothing would be rounded, and a saturated bin alone would fit itself perfectly.
        if side == "high":
            ends = _edges(end, max(zero, begin + levels), -1)
            end = int(ends[sums.best(torch.full_like(ends, begin), ends, levels)])
        else:
            begins = _edges(begin, min(zero, end - levels), 1)
            begin = int(begins[sums.best(begins, torch.full_like(begins, end), levels)])
    return begin, end


def _edges(widest: int, narrowest: int, step: int) -> torch.Tensor:
    """Candidates from `widest`, which is always one, to `narrowest`; step: 1 or -1."""
    span = max((narrowest - widest) * step, 0)
    return widest + step * torch.arange(0, span + 1, max(1, span // _CANDIDATES))


def _without_spike(counts: torch.Tensor, zero: int) -> torch.Tensor:
    """Zeros, which ReLU and padding give in plenty, are exact under every range, and would hide all else: no more than beside them."""
    flat = counts.clone()
    beside = counts[max(zero - 1, 0) : zero + 2].clone()
    beside[min(zero, 1)] = 0
    flat[zero] = torch.minimum(flat[zero], beside.max())
    return flat


@dataclass(frozen=True)
class _Sums:
    """Prefix sums over bins, float64 [bins + 1]: of the counts c, of the occupied bins, and of c log c. `counts`: float64 [bins]."""

    counts: torch.Tensor
    total: torch.Tensor
    occupied: torch.Tensor
    information: torch.Tensor

    @classmethod
    def of(cls, counts: torch.Tensor) -> _Sums:
        real = counts.to(torch.float64)
        return cls(real, *(_prefix(x) for x in (real, (real > 0).to(torch.float64), torch.xlogy(real, real))))

    def best(self, begins: torch.Tensor, ends: torch.Tensor, levels: int) -> int:
        """The first candidate with the least divergence, up to the rounding of sums."""
        found = self.divergences(begins, ends, levels)
        return int(torch.nonzero(found <= found.min() + 1e-9)[0])

    def divergences(self, begins: torch.Tensor, ends: torch.Tensor, levels: int) -> torch.Tensor:
        """KL(P | Q) of candidates [begin, end). P: the bins, with what lies outside added to the first and to the last.

        Q: `levels` groups of neighbouring bins, each spread evenly over those of its bins that P occupies. Where P holds what Q does not,
        the divergence is infinite; so it is where most counts lie outside, which would make few bins of them, and these fit themselves.
        """
        width = ends - begins
        edges = begins[:, None] + torch.arange(levels + 1) * width[:, None] // levels
        held, bins = self.total[edges].diff(), self.occupied[edges].diff()
        weight = held.clone()
        information = self.information[ends] - self.information[begins]
        count = self.total[-1]
        for at, group, tail in ((begins, 0, self.total[begins]), (ends - 1, -1, count - self.total[ends])):
            own = self.counts[at]
            information = information - torch.xlogy(own, own) + torch.xlogy(own + tail, own + tail)
            # A saturated count in an empty bin occupies it; the group that holds it is the one at that end which has bins.
            place = _first_filled(edges, group)
            weight.scatter_add_(1, place, tail[:, None])
            bins = bins.scatter_add(1, place, ((own == 0) & (tail > 0)).to(torch.float64)[:, None])
        # sum p log p - sum p log q, with p = P / count and q = Q / kept.
        kept = self.total[ends] - self.total[begins]
        cross = torch.where(weight > 0, weight * torch.log(held / bins.clamp_min(1.0)), 0.0).sum(1)
        found = (information - cross) / count - torch.log(count / kept)
        return torch.where(2 * kept >= count, found, torch.inf)


def _prefix(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.new_zeros(1), torch.cumsum(x, 0)])


def _first_filled(edges: torch.Tensor, end: int) -> torch.Tensor:
    """The index [candidates, 1] of the group that holds the first bin (end 0) or the last (end -1): narrow ranges leave groups empty."""
    last = edges.shape[1] - 2
    if end == 0:
        return (edges == edges[:, :1]).sum(1, keepdim=True) - 1
    return last - ((edges == edges[:, -1:]).sum(1, keepdim=True) - 1)
