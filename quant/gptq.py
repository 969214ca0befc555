"""GPTQ: integer weights whose rounding errors make up for one another over the calibration data.

The error of a linear's results over all inputs x is sum_n d_n H d_n^T, with d_n the rounding error of row n of the weight and H the sum of
x^T x. Columns are rounded one after the other; what each error does to the results is taken out again, as far as possible, by moving the
columns that are still to come; the columns with the largest inputs go first, when there is most to move. All that takes is the Cholesky
factor of the inverse of H. Scales are those of the weight as it was: with this order they do no worse than scales of moved columns.
Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", ICLR 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .constants import Constants
from .observers import rows
from .operands import Operands, operands
from .program import Program
from .record import Placement, QuantSite
from .scheme import WeightScheme
from .weights import QuantizedWeight, dequantized, limited, quantize_weight, settled, spread, sqnr

_DAMPING = 0.05
"""Share of the mean of the diagonal that is added to it. Five per cent is more than usual: it costs a tenth of the gain on the calibration
data and is worth as much on data not seen, where there are fewer rows than inputs."""
_BLOCK, _ROWS = 128, 1024


class GramObserver:
    """Sums x^T x over all rows: float64 [K, K], the only thing GPTQ needs to know of the data."""

    def __init__(self) -> None:
        self.gram = torch.zeros(0, 0, dtype=torch.float64)

    def observe(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        seen = rows(x, mask).to(torch.float64)
        self._add(seen.t() @ seen)

    def merge(self, other: GramObserver) -> None:
        self._add(other.gram)

    def _add(self, gram: torch.Tensor) -> None:
        if self.gram.numel() and gram.numel():
            self.gram += gram
        elif gram.numel():
            self.gram = gram.clone()


def compensating(site: QuantSite) -> bool:
    """Whether the scheme of a site asks for GPTQ; convolutions, and tables that no linear is tied to, are rounded to nearest."""
    return site.operation == "linear" and site.scheme.weight is not None and site.scheme.weight.compensate


class Compensation:
    """A `Weigher` that does GPTQ where the scheme asks for it and the activation was observed, and else rounds to nearest.

    A weight that several operations share is rounded once, for the inputs of all of them.
    """

    def __init__(self, program: Program, placement: Placement, grams: Mapping[str, GramObserver]) -> None:
        self._grams = grams
        self._inputs = _inputs(program, placement)
        self._last: tuple[tuple[str, ...], Inputs] | None = None

    def __call__(self, site: QuantSite, weight: torch.Tensor, scheme: WeightScheme) -> QuantizedWeight:
        names = tuple(name for name in self._inputs.get(site.name, ()) if name in self._grams and self._grams[name].gram.numel())
        if not scheme.compensate or not names:
            return quantize_weight(weight, scheme)
        if self._last is None or self._last[0] != names:  # query, key and value follow one another
            self._last = names, Inputs.of(sum((self._grams[name].gram for name in names[1:]), self._grams[names[0]].gram))
        return compensated(weight, self._last[1], scheme)


def _inputs(program: Program, placement: Placement) -> dict[str, tuple[str, ...]]:
    """For each linear, and each table that is tied to one, the activations that the weight is multiplied with, wherever it is used."""
    constants = Constants(program.graph, program.attributes)
    nodes = {node.name: node for node in program.graph.nodes}
    weights: dict[str, tuple[str, bool]] = {}
    inputs: dict[tuple[str, bool], dict[str, None]] = {}
    for site in placement.sites:
        found = operands(nodes[site.node], constants)
        if isinstance(found, Operands) and found.operation in ("linear", "embedding") and found.weight is not None:
            weight = found.weight
            weights[site.name] = str(weight.target) if weight.op == "get_attr" else weight.name, found.transposed
            inputs.setdefault(weights[site.name], {}).update(dict.fromkeys(site.activations if found.operation == "linear" else ()))
    return {name: tuple(inputs[key]) for name, key in weights.items()}


@dataclass(frozen=True)
class Inputs:
    """What GPTQ has to know of the inputs of a linear.

    gram: H, damped, float64 [K, K]. order: that of its columns, [K]. factor: the upper triangular U with U^T U = H^-1 in this order.
    """

    gram: torch.Tensor
    order: torch.Tensor
    factor: torch.Tensor

    @staticmethod
    def of(gram: torch.Tensor) -> Inputs:
        """gram: the sum of x^T x. Inputs that were always zero are nobody's business: their weights round to nearest."""
        mean = gram.diagonal().mean().item()
        damped = gram + torch.eye(len(gram), dtype=gram.dtype) * (_DAMPING * mean if mean > 0 else 1.0)
        order = torch.argsort(gram.diagonal(), descending=True, stable=True)
        # From last to first, H = R R^T with R upper triangular, so that H^-1 = R^-T R^-1: one factorization, and no inverse of H.
        back = order.flip(0)
        return Inputs(damped, order, _inverse(torch.linalg.cholesky(damped[back][:, back]).flip(0, 1)))


def _inverse(upper: torch.Tensor) -> torch.Tensor:
    """Of an upper triangular matrix, by its four quarters."""
    n = len(upper)
    if n <= _BLOCK:
        quarter: torch.Tensor = torch.linalg.solve_triangular(upper, torch.eye(n, dtype=upper.dtype), upper=True)
        return quarter
    half = n // 2
    first, last = _inverse(upper[:half, :half]), _inverse(upper[half:, half:])
    result = torch.zeros_like(upper, memory_format=torch.contiguous_format)
    result[:half, :half], result[half:, half:] = first, last
    result[:half, half:] = first @ upper[:half, half:] @ last.neg()
    return result


def compensated(weight: torch.Tensor, inputs: Inputs, scheme: WeightScheme) -> QuantizedWeight:
    """Weights [N, K] as integers. Each row is the better of GPTQ's and the nearest integers."""
    whole = weight.detach()
    scheme = settled(whole.to(torch.float32), scheme) if scheme.sums16 == "most" else scheme
    nearest = quantize_weight(whole, scheme)
    gram = inputs.gram.to(torch.float32)
    values = []
    for real, near, scales in zip(*(torch.split(t, _ROWS) for t in (whole, nearest.values, nearest.scales)), strict=True):
        real = real.to(torch.float32)
        made = _columns(real, scales, inputs, scheme)
        better = _errors(real, made, scales, gram) < _errors(real, near, scales, gram)
        values.append(torch.where(better[:, None], made, near))
    found = torch.cat(values)
    return QuantizedWeight(found, nearest.scales, sqnr(whole.to(torch.float32), dequantized(found, nearest.scales)))


def _errors(real: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """d H d^T of each row [N]."""
    error = dequantized(values, scales) - real
    return ((error @ gram) * error).sum(1)


def _columns(real: torch.Tensor, scales: torch.Tensor, inputs: Inputs, scheme: WeightScheme) -> torch.Tensor:
    """Integers [N, K]. The columns of a block see one another's errors at once, those behind it all errors of the block together.
    A column is in one piece of memory meanwhile."""
    factor, k = inputs.factor, real.shape[1]
    moved, steps = (t.t().to(factor.dtype)[inputs.order] for t in (real, spread(scales, k).expand(real.shape)))
    integers = torch.empty_like(moved)
    for start in range(0, k, _BLOCK):
        end = min(start + _BLOCK, k)
        errors = torch.empty(end - start, len(real), dtype=factor.dtype)
        for j in range(start, end):
            integers[j] = torch.clamp(torch.round(moved[j] / steps[j]), -scheme.qmax, scheme.qmax)
            errors[j - start] = (moved[j] - integers[j] * steps[j]) / factor[j, j]
            moved[j + 1 : end] -= torch.outer(factor[j, j + 1 : end], errors[j - start])
        moved[end:] -= factor[start:end, end:].t() @ errors
    values = torch.empty_like(integers)
    values[inputs.order] = integers
    return limited(values.t().contiguous(), scheme).to(torch.int8)
