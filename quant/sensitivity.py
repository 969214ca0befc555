"""How much of an operation's result, or of the model's, survives quantization: signal-to-noise ratios over the calibration sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from .calibration import Calibration
from .constants import Constants
from .insert import Inserter
from .program import Call, Program, copied
from .record import LeftOut, Placement
from .run import Run, attribute, output_values
from .scheme import OpScheme


@dataclass
class _Ratio:
    """Energies of a signal and of the noise on it."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, exact: torch.Tensor, approximate: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Tensors of one shape; the mask says from the left what of them counts. What is not finite and the same in both is no noise."""
        exact, approximate = exact.detach().double(), approximate.detach().double()
        if mask is not None:
            counts = mask.reshape(*mask.shape, *[1] * (exact.dim() - mask.dim()))
            exact, approximate = torch.where(counts, exact, 0.0), torch.where(counts, approximate, 0.0)
        same = (exact == approximate) | (exact.isnan() & approximate.isnan())
        self.signal += torch.where(exact.isfinite(), exact, 0.0).square().sum().item()
        self.noise += torch.where(same, 0.0, exact - approximate).square().sum().item()

    @property
    def decibels(self) -> float:
        """Infinite without noise, minus infinity where the noise is more than any signal."""
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal > 0 and math.isfinite(self.noise) else -math.inf


def site_sqnr(calibration: Calibration, choice: Mapping[str, OpScheme] | None = None) -> dict[str, float]:
    """The signal-to-noise ratio of each site's own result in decibels, by name: its inputs are those of the floating-point model.

    choice: other schemes for some sites, as in `Calibration.build`; sites that it leaves in fp32 are not in the answer. One pass over the
    sample measures all sites, at about twice the cost of running the model. Padding does not count where the program knows a mask.
    """
    program = calibration.program
    sites, _ = calibration.chosen(choice or {})
    graph, attributes = copied(program.graph), dict(program.attributes)
    nodes = {node.name: node for node in graph.nodes}
    shadows = {}
    for site in sites:
        with graph.inserting_after(nodes[site.node]):
            shadows[site.name] = graph.node_copy(nodes[site.node])
    output = graph.output_node()
    output.args = ((output.args[0], tuple(shadows.values())),)
    inserter = Inserter(graph, attributes, Constants(graph, attributes), calibration.ranges, calibration.weigh)
    inserter.run(tuple(replace(site, node=shadows[site.name].name) for site in sites))
    pairs = {inserter.made[site.name]: (nodes[site.node], site.name) for site in sites}
    ratios = {site.name: _Ratio() for site in sites}
    for call in calibration.sample:
        _Meter(replace(program, graph=graph, attributes=attributes), call, pairs, ratios).finish()
    return {name: ratio.decibels for name, ratio in ratios.items()}


class _Meter(Run):
    """Compares pairs of nodes. pairs: from the quantized node to the exact one, which comes before it, and the name of their ratio."""

    def __init__(self, program: Program, call: Call, pairs: Mapping[Node, tuple[Node, str]], ratios: Mapping[str, _Ratio]) -> None:
        super().__init__(program, call)
        self.pairs = pairs
        self.ratios = ratios

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n not in self.pairs:
            return result
        exact, name = self.pairs[n]
        self.ratios[name].add(self.env[exact], result, self.select(exact, self.env[exact]))
        return None  # nobody needs it any more


Results = Sequence[Sequence[Any]]
"""For each call the results of a model as a flat list."""


def float_results(calibration: Calibration) -> Results:
    """The results of the floating-point model over the sample."""
    return [Run(calibration.program, call).finish() for call in calibration.sample]


def end_sqnr(calibration: Calibration, choice: Mapping[str, OpScheme] | None = None, reference: Results | None = None) -> float:
    """The signal-to-noise ratio of the whole model's results in decibels: all floating-point tensors that it returns, over the sample.

    choice: as in `Calibration.build`. reference: from `float_results`, for callers that ask more than once.
    """
    module, program = calibration.build(choice), calibration.program
    attributes = {str(node.target): attribute(module, str(node.target)) for node in module.graph.nodes if node.op == "get_attr"}
    quantized = replace(program, graph=module.graph, attributes=attributes)
    nodes = output_values(program.graph)
    ratio = _Ratio()
    for call, exact in zip(calibration.sample, reference or float_results(calibration), strict=True):
        run = Run(quantized, call)
        for node, mine, other in zip(nodes, exact, run.finish(), strict=True):
            if isinstance(mine, torch.Tensor) and mine.is_floating_point():
                ratio.add(mine, other, run.select(node, mine))
    return ratio.decibels


def without_outliers(calibration: Calibration) -> Calibration:
    """The same without the sites whose results fall below the scheme's threshold; they are left out with their ratio as the reason."""
    least = calibration.scheme.outliers
    ratios = site_sqnr(calibration)
    placement = calibration.placement
    bad = [site for site in placement.sites if least is not None and ratios.get(site.name, math.inf) < least]
    left = [
        LeftOut(site.name, site.op, f"its result would keep only {ratios[site.name]:.1f} dB, less than {least:g}", site.source)
        for site in bad
    ]
    sites = tuple(site for site in placement.sites if site not in bad)
    return replace(calibration, placement=Placement(sites, (*placement.left_out, *left)))
