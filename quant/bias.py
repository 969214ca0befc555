"""Bias correction: the mean error that quantization gives each channel of a result is taken off again.

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019 (its empirical variant).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ..diagnostics.errors import CalibrationError
from .calibrate import watch
from .constants import Constants
from .edit import add_attribute, call, drop_unread
from .observers import NonFinite, rows
from .placement import source_of
from .program import Call, Program
from .record import Placement, QuantSite
from .run import Run

aten = torch.ops.aten


class MeanObserver:
    """The mean of each channel, the last axis: float64 [N]."""

    def __init__(self) -> None:
        self.sum = torch.zeros((), dtype=torch.float64)
        self.count = 0

    def observe(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        seen = rows(x, mask)
        self.sum = self.sum + seen.sum(0, dtype=torch.float64)
        self.count += len(seen)

    def mean(self) -> torch.Tensor:
        return self.sum / max(self.count, 1)


def output_means(program: Program, placement: Placement, sample: Sequence[Call]) -> dict[str, torch.Tensor]:
    """The mean result of each quantized linear in floating point, by the name of its site: float64 [N]."""
    observers = {site.name: MeanObserver() for site in placement.sites if site.operation == "linear" and site.scheme.quantized}
    nodes = {site.node: [observers[site.name]] for site in placement.sites if site.name in observers}
    watch(program, nodes, sample)
    return {name: observer.mean() for name, observer in observers.items() if observer.count}


def correct(
    program: Program, attributes: dict[str, Any], sites: Iterable[QuantSite], made: Mapping[str, Node], means: Mapping[str, torch.Tensor],
    sample: Sequence[Call],
) -> None:
    """Moves the biases of a quantized program so that its linears have these means over the sample.

    The program's graph and `attributes`, which are its own, are changed. made: the results of its sites, by name.
    Each linear is corrected for the error that is left when those before it are. All calls run side by side, operation by operation, so
    that one pass is enough.
    """
    names = {node: name for name, node in made.items() if name in means}
    runs = [Run(program, call) for call in sample]
    changes: dict[str, torch.Tensor] = {}
    for node in program.graph.nodes:
        for run in runs:
            run.step(node)
        if node in names:
            change = _change(runs, node, means[names[node]], names[node])
            changes[names[node]] = change
            for run in runs:
                run.env[node] = run.env[node] + change
        for run in runs:
            run.forget(node)
    for site in sites:
        if site.name in changes:
            _add(program.graph, attributes, site.owner, made[site.name], changes[site.name])


def _change(runs: Sequence[Run], node: Node, mean: torch.Tensor, name: str) -> torch.Tensor:
    """What the result of `node`, of the site of that name, lacks to have this mean, in its type."""
    seen = MeanObserver()
    for run in runs:
        try:
            seen.observe(run.env[node], run.select(node, run.env[node]))
        except NonFinite:
            what = f"{run.batch}: once quantized, {name} gives NaN or infinity, where it gave none in floating point"
            hint = "exclude it or the layers before it, or leave correct_bias out of the scheme"
            raise CalibrationError(what, source_of(node), hint) from None
    return (mean - seen.mean()).to(node.meta["val"].dtype)


def _add(graph: Graph, attributes: dict[str, Any], name: str, result: Node, change: torch.Tensor) -> None:
    """Adds a constant to the linear of a site, whose result may still be added to or change its type."""
    linear = result
    while linear.target != aten.linear.default:
        linear = linear.all_input_nodes[0]
    x, weight, *others = linear.args
    bias = others[0] if others else None
    constants = Constants(graph, attributes)
    with graph.inserting_before(linear):
        if isinstance(bias, Node) and not constants.is_constant(bias):
            addend = add_attribute(graph, attributes, f"{name}.bias", change, linear)
            linear.args = (x, weight, call(graph, aten.add.Tensor, (bias, addend), linear))
            return
        value = change.to(torch.float32) + (constants.value(bias).to(torch.float32) if isinstance(bias, Node) else 0.0)
        linear.args = (x, weight, None)
        drop_unread(graph, attributes)  # the old bias leaves its name to the new one
        linear.args = (x, weight, add_attribute(graph, attributes, f"{name}.bias", torch.nn.Parameter(value, requires_grad=False), linear))
