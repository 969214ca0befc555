"""The precisions that a search chooses from, for each operation, and the models they make."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx.graph_module import _assign_attr

from ..diagnostics.errors import InputError
from ..quant import BF16, FP32, ActivationScheme, Calibration, OpScheme, QuantizedModule
from ..quant.module import Gate
from ..quant.program import Call, scratch
from ..quant.record import QuantSite
from ..quant.sensitivity import site_sqnr
from .measure import kernels
from .model import CompiledModel

QUANTIZED, FINE, NARROW, FLOAT = "quantized", "fine", "bf16", "fp32"
LEVELS = (QUANTIZED, FINE, NARROW, FLOAT)
"""From the least accurate to the most: what the scheme says, integers that are finer than that, bf16, fp32."""

Mix = Mapping[str, str]
"""The level of every operation, by its name."""
Compile = Callable[[str, frozenset[str]], CompiledModel]
"""(precision of what is in floating point, names that stay in fp32 all the same) -> code."""
Capture = Callable[[QuantizedModule], Compile]
"""Captures a model, which takes several times as long as compiling what was captured."""


@dataclass(frozen=True)
class Unit:
    """Operations that take one level together: one, or those that the compiler fuses into one in floating point, as in attention."""

    name: str
    sites: tuple[QuantSite, ...]


class Runnable(torch.nn.Module):
    """A mix, called as the model is: by its code, and by its simulation where a call does not fit what the code was compiled for.

    floating: has the parameters and buffers of the model, for who asks for them. refused: how many calls the code did not take.
    """

    def __init__(self, code: CompiledModel, floating: torch.nn.Module, gate: Gate, simulate: Callable[[], QuantizedModule]) -> None:
        super().__init__()
        self._code, self._floating, self._gate, self._simulate = code, floating, gate, functools.cache(simulate)
        self.refused = 0
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, without gradients. Raises what the simulation raises."""
        spec = self._code.signature.in_spec
        try:
            values = self._gate.arrange(args, kwargs)
            if spec is None or not spec.child(1).num_children:
                return self._code(*values)
            return self._code(**dict(zip(self._gate.names, values, strict=True)))
        except InputError:
            self.refused += 1
            with torch.no_grad():
                return self._simulate()(*args, **kwargs)


@dataclass(eq=False)
class Lab:
    """Makes the models of mixes; each is compiled once, and mixes that differ in floating point only are captured once.

    quantized: names of the operations that the scheme quantizes.
    """

    calibration: Calibration
    capture: Capture
    quantized: frozenset[str]
    _captured: dict[tuple[str, ...], Compile] = field(default_factory=dict)
    _compiled: dict[tuple[str, ...], CompiledModel] = field(default_factory=dict)

    @property
    def sites(self) -> tuple[QuantSite, ...]:
        return self.calibration.placement.sites

    def scheme(self, site: QuantSite, level: str) -> OpScheme | None:
        """What a level means for a site; None when it has no such level."""
        if level == QUANTIZED:
            return site.scheme if site.name in self.quantized else None
        if level == FINE:
            return _finer(site) if site.name in self.quantized else None
        return BF16 if level == NARROW else FP32

    def label(self, site: QuantSite, level: str) -> str:
        scheme = self.scheme(site, level)
        if scheme is None:
            return level
        return f"{scheme.label}, all bits" if level == FINE and scheme.label == site.scheme.label else scheme.label

    def units(self, timed: Collection[str]) -> tuple[Unit, ...]:
        """All operations in program order. timed: those with a time of their own in floating point; a product of activations without
        one was fused into the next that has one.
        """
        found: list[Unit] = []
        waiting: list[QuantSite] = []
        for site in self.sites:
            waiting.append(site)
            if site.weight or site.name in timed:
                mine = tuple(waiting) if not site.weight else (site,)
                found += [Unit(s.name, (s,)) for s in waiting if s not in mine]
                found.append(Unit(site.name, mine))
                waiting = []
        return (*found, *(Unit(site.name, (site,)) for site in waiting))

    def is_own(self, unit: Unit, level: str) -> bool:
        """Whether the compiler has code for a level of a unit, and does not compute in floating point what it rounds."""
        ours, floats = kernels(self.compiled(self.all_at(level))), kernels(self.compiled(self.all_at(FLOAT)))
        return level == FLOAT or any(ours.get(site.name) != floats.get(site.name) for site in unit.sites)

    def level_of(self, unit: Unit, level: str) -> bool:
        """Whether every operation of a unit has a level."""
        return all(self.scheme(site, level) is not None for site in unit.sites)

    def all_at(self, level: str) -> Mix:
        """Everything at a level; what has no such level in fp32."""
        return {site.name: FLOAT if self.scheme(site, level) is None else level for site in self.sites}

    def noise(self, level: str, sample: tuple[Call, ...]) -> dict[str, float]:
        """Noise to signal, as powers, of each operation's own result at a level, with the floating-point model around it."""
        found = site_sqnr(replace(self.calibration, sample=sample), self._choice(self.all_at(level), FLOAT))
        return {name: 10.0 ** (-decibels / 10.0) for name, decibels in found.items()}

    def simulated(self, mix: Mix) -> QuantizedModule:
        """The mix in simulation, narrow operations included."""
        return self._built(mix, NARROW)

    def compiled(self, mix: Mix) -> CompiledModel:
        """The mix as code. The compiler itself narrows what is to be bf16, after it has fused attention."""
        key = self._key(mix)
        if key not in self._compiled:
            wide = frozenset(name for name, level in mix.items() if level != NARROW)
            floats = tuple(FLOAT if level == NARROW else level for level in key)
            if floats not in self._captured:
                self._captured[floats] = self.capture(self._built(mix, FLOAT))
            self._compiled[key] = self._captured[floats](NARROW if NARROW in key else FLOAT, wide if NARROW in key else frozenset())
        return self._compiled[key]

    def runnable(self, mix: Mix) -> Runnable:
        """The mix, compiled, for calls of any shape."""
        return Runnable(self.compiled(mix), self._floating, self.calibration.program.gate, lambda: self.simulated(mix))

    def judged(self, mix: Mix) -> QuantizedModule:
        """The mix in simulation, with all parameters of the model: a caller asks for their device, and integers in their place are none."""
        module = self.simulated(mix)
        held = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        for name, parameter in self._floating.named_parameters(remove_duplicate=False):
            if name not in held:
                _assign_attr(parameter, module, name)
        return module

    @functools.cached_property
    def _floating(self) -> QuantizedModule:
        return scratch(self.calibration.original)

    def has_compiled(self, mix: Mix) -> bool:
        """Whether `compiled` has the answer at hand."""
        return self._key(mix) in self._compiled

    def _key(self, mix: Mix) -> tuple[str, ...]:
        return tuple(mix[site.name] for site in self.sites)

    def _built(self, mix: Mix, narrow: str) -> QuantizedModule:
        return self.calibration.build(self._choice(mix, narrow))

    def _choice(self, mix: Mix, narrow: str) -> dict[str, OpScheme]:
        """The schemes of a mix. narrow: the level that bf16 stands for."""
        choice: dict[str, OpScheme] = {}
        for site in self.sites:
            level = narrow if mix[site.name] == NARROW else mix[site.name]
            scheme = self.scheme(site, level)
            assert scheme is not None, f"{site.name} has no level {level}"
            choice[site.name] = scheme
        return choice


def _finer(site: QuantSite) -> OpScheme | None:
    """A scale for each row instead of one for the tensor, where that is possible, and weights with all their bits; None where the scheme
    has both."""
    scheme = site.scheme
    if scheme.activation is None or scheme.weight is None:
        return None
    by_row = scheme.activation.granularity == "tensor" and site.operation == "linear"
    activation = ActivationScheme(granularity="row") if by_row else scheme.activation
    finer = OpScheme(activation, replace(scheme.weight, sums16=1))
    return None if finer == scheme else finer


def in_words(mix: Mix, lab: Lab) -> str:
    """`3 fp32, 12 int8`"""
    labels = [lab.label(site, mix[site.name]) for site in lab.sites]
    return ", ".join(f"{labels.count(label)} {label}" for label in sorted(set(labels)))
