"""What calibration knows of a model: enough to build it in any mix of precisions without seeing the data again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch.fx import Graph

from ..diagnostics.errors import InputError
from ..diagnostics.surroundings import undisturbed
from ..graph.sites import name_node
from ..platforms.target import Target
from .bias import correct
from .calibrate import watch
from .constants import Constants
from .gptq import GramObserver, compensating
from .histograms import with_histograms
from .insert import Inserter, Weigher, plain_weight
from .masking import observed_whole
from .module import QuantizedModule
from .observers import Observer, Range, Watcher, make_observer
from .placement import dynamic, fitted, unknown
from .program import Call, Program, copied, scratch_attributes
from .record import LeftOut, Placement, QuantRecord, QuantSite
from .scheme import FP32, ActivationScheme, OpScheme, Scheme

ObserverKey = tuple[str, ActivationScheme]
"""The name of an activation's node, and what is to be found out for it."""


@dataclass(frozen=True)
class Calibration:
    """A model after its calibration data.

    program: the exported model in floating point, smoothed where the scheme says so; original: as it was before, with the same names of
    operations. placement: every site with its scheme. target: the machine that it is for.
    observers: of the activations with fixed ranges. sample: the first calls, `scheme.sample` at most. batches: how many were seen.
    weigh: what makes weights integers. means: of each site's result in floating point, by channel, where biases are to be corrected.
    """

    program: Program
    original: Program
    placement: Placement
    scheme: Scheme
    target: Target
    observers: Mapping[ObserverKey, Observer]
    sample: tuple[Call, ...]
    batches: int
    weigh: Weigher = plain_weight
    means: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @undisturbed()
    def build(self, choice: Mapping[str, OpScheme] | None = None) -> QuantizedModule:
        """The quantized model. choice: other schemes for some sites, by name.

        What smoothing added serves integers only: without any, the model is the original one. Raises InputError for a choice that is none,
        or none for an operation, and for one that needs ranges which calibration did not look for.
        """
        sites, left = self.chosen(choice or {})
        program = self.program if any(site.scheme.quantized for site in sites) else self.original
        graph, attributes = copied(program.graph), dict(scratch_attributes(program))
        _name_operations(graph, self.placement)
        inserter = Inserter(graph, attributes, Constants(graph, attributes), self.ranges, self.weigh)
        results = inserter.run(sites)
        # What a choice leaves in floating point has no error of quantization to take off.
        means = {site.name: self.means[site.name] for site in sites if site.scheme.quantized and site.name in self.means}
        if means:
            correct(replace(program, graph=graph, attributes=attributes), attributes, sites, inserter.made, means, self.sample)
        results = with_histograms(results, self.observers)
        notes = program.notes if results else (*program.notes, "nothing was quantized")
        return QuantizedModule.build(attributes, graph, program.gate, QuantRecord(self.scheme, results, left, self.batches, notes))

    def _check(self, choice: Mapping[str, object]) -> None:
        """Raises InputError for what is no scheme, a name that no operation has, and one that calibration has left in floating point."""
        sites, left = {site.name for site in self.placement.sites}, {item.name: item.reason for item in self.placement.left_out}
        for name, scheme in choice.items():
            if not isinstance(scheme, OpScheme):
                what = f"{scheme!r:.60}, chosen for {name!r}, is no scheme of an operation"
                raise InputError(what, "build(...)", "pass an OpScheme of sashiko.quant, such as FP32 or BF16")
            if name not in sites and name not in left:
                raise unknown(name, (*sites, *left), "build(...)")
            if name in left and scheme != FP32:
                raise InputError(f"{name!r} was left as it was: {left[name]}", "build(...)", "calibrate with an Override for it")

    @cached_property
    def ranges(self) -> dict[ObserverKey, Range]:
        """The fixed ranges of the activations that calibration gave values."""
        found = {key: observer.range() for key, observer in self.observers.items()}
        return {key: limits for key, limits in found.items() if limits is not None}

    def chosen(self, choice: Mapping[str, OpScheme]) -> tuple[tuple[QuantSite, ...], tuple[LeftOut, ...]]:
        """The sites with the schemes that `choice` gives them, and everything else. Raises InputError as `build` does."""
        self._check(choice)
        sites: list[QuantSite] = []
        left = list(self.placement.left_out)
        for site in self.placement.sites:
            scheme, small = choice.get(site.name, site.scheme), self.target.sums16 and site.integers
            scheme, why = fitted(scheme, site.operation, site.features[0], small)
            chosen = replace(site, scheme=scheme)
            if why:
                raise InputError(f"the scheme chosen for {site.name!r} is none for it: {why}", "build(...)", "choose another, or FP32")
            if chosen.scheme == FP32:
                left.append(LeftOut(site.name, site.op, "fp32 was chosen for it", site.source))
            elif any(key not in self.observers for key in observed(chosen)):
                what = f"the scheme chosen for {site.name!r} needs ranges that calibration did not look for"
                raise InputError(what, "build(...)", "calibrate with an Override for it")
            elif any(key not in self.ranges for key in observed(chosen)):
                left.append(LeftOut(site.name, site.op, "calibration gave it no values", site.source))
            else:
                sites.append(chosen)
        return tuple(sites), tuple(left)


def _name_operations(graph: Graph, placement: Placement) -> None:
    """Gives the operations the names of their sites, which compiled code reports its times and kernels by."""
    nodes = {node.name: node for node in graph.nodes}
    for site in placement.sites:
        name_node(nodes[site.node], site.name)


def observed(site: QuantSite) -> tuple[ObserverKey, ...]:
    """What calibration has to find out for a site."""
    activation = site.scheme.activation
    if activation is None or dynamic(activation):
        return ()
    return tuple((name, activation) for name in site.activations)


def not_masked(program: Program, placement: Placement, scheme: Scheme) -> tuple[str, ...]:
    """A note on the operations that learn from padding, though the program has a mask."""
    nodes = {node.name: node for node in program.graph.nodes}
    smoothed = {s.name for s in placement.sites if scheme.smooth is not None and s.scheme.quantized and s.operation == "linear"}
    learning = [s for s in placement.sites if observed(s) or compensating(s) or s.name in smoothed]
    names = [s.name for s in learning if any(observed_whole(program.gate, program.masks, nodes[name]) for name in s.activations)]
    if not names:
        return ()
    few = f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
    return (f"padding was observed with the rest, for the layout does not tell where it is: {few}",)


def calibrated(
    program: Program, placement: Placement, calls: Iterable[Call]
) -> tuple[dict[ObserverKey, Observer], dict[str, GramObserver], int]:
    """One observer for each activation and scheme, and one for each activation that GPTQ needs; and the number of calls."""
    observers = {key: make_observer(key[1]) for site in placement.sites for key in observed(site)}
    grams = {name: GramObserver() for site in placement.sites if compensating(site) for name in site.activations}
    shown: dict[str, list[Watcher]] = {}
    for name, observer in [*((name, observer) for (name, _), observer in observers.items()), *grams.items()]:
        shown.setdefault(name, []).append(observer)
    return observers, grams, watch(program, shown, calls)
