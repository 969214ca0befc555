"""SmoothQuant: difficulty moved from activations to weights, before anything is quantized.

An activation with a few large channels wastes the integers of all others. x W^T = (x / s)(W s)^T for any positive s [K], and s can be
chosen so that both factors quantize well: s_k = max|x_k|^alpha / max|W_k|^(1 - alpha). The division is hidden in what comes before where
possible. All factors are rounded to powers of two: the smoothed model computes the same bits, whatever its type.
Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", 2022.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from . import ops
from .calibrate import watch
from .constants import Constants
from .observers import affine, make_observer, rows
from .placement import dynamic
from .program import Call, Program
from .record import Placement, QuantSite
from .rescale import Rescaling, rescalable
from .scheme import ActivationScheme, SmoothQuant
from .weights import simulated

_ROWS = 2048
_GAIN = 1.1
"""How many times less error the best alpha must have. Smoothing moves the greatest value of every channel to the edge of the range, where
unseen data saturates; it must pay for that, and does where there are outliers."""
_MOST = 12
"""Factors are between 2^-12 and 2^12."""


class RowSample:
    """The greatest magnitude of each channel, [K], and some rows, [R, K], R at most `_ROWS`: every n-th of all, n a power of two.

    Neither depends on the grouping of rows into batches.
    """

    def __init__(self) -> None:
        self.peak = torch.zeros(0, dtype=torch.float32)
        self.rows = torch.zeros(0, 0, dtype=torch.float32)
        self._seen = 0
        self._step = 1

    def observe(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        seen = rows(x, mask)
        if not len(seen):
            return
        peak = seen.abs().amax(0)
        self.peak = torch.maximum(self.peak, peak) if self.peak.numel() else peak
        kept = seen[-self._seen % self._step :: self._step]
        self._seen += len(seen)
        self.rows = torch.cat([self.rows, kept]) if self.rows.numel() else kept.clone()
        while len(self.rows) > _ROWS:
            self.rows, self._step = self.rows[::2].clone(), 2 * self._step


@dataclass(frozen=True)
class _Product:
    """A linear of the smoothed activation: its site and its weight, float32 [N, K]."""

    site: QuantSite
    weight: torch.Tensor


def smoothed(program: Program, placement: Placement, options: SmoothQuant, sample: Iterable[Call]) -> tuple[Program, Placement]:
    """The same function with smoothed inputs of its quantized linears; names of sites and of their operations stay.

    sample: calls. Linears of one activation share the factors. Unless alpha is fixed, the sample's first
    half gives factors and ranges to try, and its second half judges them; an activation for which no alpha has clearly less error than
    none stays as it is.
    """
    products = _products(program, placement)
    samples = {name: RowSample() for name in products}
    watch(program, {name: [seen] for name, seen in samples.items()}, sample)
    rescaling = Rescaling(program, placement)
    renamed: dict[str, str] = {}
    for name, linears in products.items():
        factors = _factors(samples[name], linears, options)
        if factors is not None:
            renamed |= dict.fromkeys((p.site.name for p in linears), rescaling.divide(name, [p.site for p in linears], factors))
    sites = tuple(replace(s, activations=(renamed[s.name],)) if s.name in renamed else s for s in placement.sites)
    return rescaling.program(), replace(placement, sites=sites)


def _products(program: Program, placement: Placement) -> dict[str, list[_Product]]:
    """The quantized linears of each activation, in program order."""
    constants = Constants(program.graph, program.attributes)
    nodes = {node.name: node for node in program.graph.nodes}
    products: dict[str, list[_Product]] = {}
    for site in placement.sites:
        weight = rescalable(nodes[site.node], constants) if site.scheme.quantized and site.operation == "linear" else None
        if weight is not None:
            products.setdefault(site.activations[0], []).append(_Product(site, weight))
    return products


def _factors(seen: RowSample, products: Sequence[_Product], options: SmoothQuant) -> torch.Tensor | None:
    """The powers of two to divide the channels by, float32 [K]; None when nothing is gained."""
    of_weights = torch.stack([p.weight.abs().amax(0) for p in products]).amax(0)
    if not seen.peak.numel() or not bool(of_weights.isfinite().all()):  # weights that are not numbers are refused later, by name
        return None
    if options.alpha is not None:
        return _powers(seen.peak, of_weights, options.alpha)
    # Factors and ranges that have seen the data they are judged on would look better than they are.
    half = max(len(seen.rows) // 2, 1)
    seen_rows, fresh = seen.rows[:half], seen.rows[half:] if len(seen.rows) > 1 else seen.rows
    exact = [fresh @ p.weight.t() for p in products]
    best, least = None, _error(seen_rows, fresh, products, exact, torch.ones_like(seen.peak)) / _GAIN
    for alpha in options.alphas:
        error = _error(seen_rows, fresh, products, exact, _powers(seen_rows.abs().amax(0), of_weights, alpha))
        if error < least:
            best, least = alpha, error
    return None if best is None else _powers(seen.peak, of_weights, best)


def _powers(of_inputs: torch.Tensor, of_weights: torch.Tensor, alpha: float) -> torch.Tensor:
    """Rounded factors, 1 on geometric average; a channel that was always zero keeps its scale, and a weight of zero counts as small."""
    live = of_inputs > 0
    least = of_weights[of_weights > 0].amin() if bool((of_weights > 0).any()) else torch.ones((), dtype=torch.float32)
    of_weights = torch.where(of_weights > 0, of_weights, least)
    logarithm = torch.where(live, alpha * of_inputs.double().log2() - (1.0 - alpha) * of_weights.double().log2(), 0.0)
    mean = logarithm.sum() / live.sum().clamp_min(1)
    return torch.exp2(torch.where(live, logarithm - mean, 0.0).round().clamp(-_MOST, _MOST)).to(torch.float32)


def _error(
    seen: torch.Tensor, x: torch.Tensor, products: Sequence[_Product], exact: Sequence[torch.Tensor], factors: torch.Tensor
) -> float:
    """The squared error of the quantized products of rows x [R, K], each relative to the exact one [R, N]; static ranges are those of
    `seen`."""
    total = 0.0
    rounded = {scheme: _rounded(seen / factors, x / factors, scheme) for scheme in {p.site.scheme.activation for p in products}}
    for product, want in zip(products, exact, strict=True):
        scheme = product.site.scheme
        assert scheme.weight is not None
        # Clipping and compensation come later and are slow; they move all candidates alike.
        weight = simulated(product.weight * factors, replace(scheme.weight, clip="none", compensate=False))
        noise = (rounded[scheme.activation] @ weight.t()).sub_(want)
        total += float(noise.square_().sum() / want.square().sum().clamp_min(1e-30))
    return total


def _rounded(seen: torch.Tensor, x: torch.Tensor, scheme: ActivationScheme | None) -> torch.Tensor:
    """What the scheme makes of rows x when it was calibrated on `seen`."""
    if scheme is None:
        return x
    if dynamic(scheme):
        return ops.rounded_rows(x, scheme.signed)
    observer = make_observer(scheme)
    observer.observe(seen)
    limits = observer.range()
    assert limits is not None
    fixed = (*affine(limits, scheme), scheme.qmin, scheme.qmax, scheme.dtype)
    return torch.as_tensor(ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *fixed), *fixed))
