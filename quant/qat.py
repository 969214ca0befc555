"""Quantization-aware training: a model that computes as its quantized form will, with scales that are learned beside the weights.

Learned step sizes (LSQ): the gradient of a scale is that of the quantizer by the straight-through estimator, times 1 / sqrt(count * qmax).
Source: Esser et al., "Learned Step Size Quantization", ICLR 2020.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import Node

from ..diagnostics.errors import InputError, Unsupported
from ..platforms.target import Target
from . import ops
from .calibration import Calibration, ObserverKey
from .constants import Constants
from .insert import Inserter, activation_range, matrix_of, plain_weight
from .module import QuantizedModule, attribute_name
from .observers import Range, affine, covered
from .operands import Operands
from .presets import resolve
from .program import copied
from .quantize import calibrate
from .record import ActivationRange, QuantRecord, QuantSite
from .scheme import ActivationScheme, Scheme, WeightScheme, Where
from .weights import QuantizedWeight, dequantized, rounded, settled, sqnr

aten = torch.ops.aten
_QAT = "sashiko.qat"
_LEAST_SCALE = 2.0**-126


def prepare_qat(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    preset: str | Scheme = "int8",
    exclude: Where | Iterable[Where] = (),
    transform: Callable[[Any], Any] | None = None,
    mask: str | Literal[False] | None = None,
    sharded: bool = False,
    max_batches: int | None = None,
    target: Target | str | None = None,
    progress: bool | None = None,
) -> QATModule:
    """A copy of `model` to fine-tune: its parameters train, but for those that do not require gradients, and so does a scale for each
    static activation and each weight channel.

    Arguments and errors as in `quantize`; the data gives the scales to begin with, and the integers, where the scheme compensates rounding
    errors. The model is taken as it is in evaluation: dropout is off and batch statistics stay. Any optimizer over `parameters()` will do;
    a tenth of the rate of the weights suits the scales (`scale_parameters()`). `convert()` gives the quantized model. To go on in another
    process, prepare the same model there, with the same data, and load the `state_dict()`: a model that still trains is not pickled as a
    whole.
    """
    scheme = resolve(preset)
    if scheme.correct_bias:
        scheme = replace(scheme, correct_bias=False)  # training does it
    found = calibrate(
        model, batches, scheme, exclude=exclude, transform=transform, mask=mask, sharded=sharded, max_batches=max_batches,
        target=target, progress=progress,
    )
    graph = copied(found.program.graph)
    frozen = {attribute_name(name) for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    attributes = {name: _trainable(value, name not in frozen) for name, value in found.program.attributes.items()}
    sites, left = found.chosen({})
    inserter = _FakeInserter(graph, attributes, Constants(graph, attributes), found.ranges, found.weigh)
    results = inserter.run(sites)
    record = QuantRecord(scheme, results, left, found.batches, found.program.notes)
    module = QATModule.build(attributes, graph, found.program.gate, record)
    assert isinstance(module, QATModule)
    module.meta[_QAT] = Plan(_settled(found, inserter.weight_schemes), inserter.activation_scales, inserter.weight_scales)
    return module


def _settled(found: Calibration, schemes: Mapping[str, WeightScheme]) -> Calibration:
    """The same with the schemes of weights as training has begun with them."""
    sites = [replace(s, scheme=replace(s.scheme, weight=schemes[s.name])) if s.name in schemes else s for s in found.placement.sites]
    return replace(found, placement=replace(found.placement, sites=tuple(sites)))


def _trainable(value: Any, trains: bool) -> Any:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().clone(), requires_grad=trains and value.is_floating_point())
    return value.clone() if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class Plan:
    """How a trained module becomes a quantized one. The names of the learned scales, by activation and by site."""

    calibration: Calibration
    activation_scales: Mapping[ObserverKey, str]
    weight_scales: Mapping[str, str]


@dataclass(frozen=True)
class _Fixed:
    """An observer that has made up its mind."""

    limits: Range

    def observe(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Has seen enough."""

    def merge(self, other: _Fixed) -> None:
        """Has nothing to learn."""

    def range(self) -> Range:
        return self.limits


class QATModule(QuantizedModule):
    """A model with fake quantizers: floating point that rounds as the quantized model does, and that gradients flow through."""

    def scale_parameters(self) -> list[nn.Parameter]:
        """The learned scales, for an optimizer group of their own."""
        plan = _plan_of(self)
        names = {*plan.activation_scales.values(), *plan.weight_scales.values()}
        return [p for name, p in self.named_parameters() if name in names]

    def convert(self) -> QuantizedModule:
        """The quantized model with the weights and scales as they are now. Raises InputError when training made them NaN or infinite."""
        plan = _plan_of(self)
        held = {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers(remove_duplicate=False))}
        for name, value in held.items():
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise InputError(f"{name} is not finite", "convert()", "training has diverged; a lower learning rate may help")
        program = plan.calibration.program
        kept = {name: held.get(name, value) for name, value in program.attributes.items()}
        once = {id(value): _frozen(value) for value in kept.values()}  # what is tied stays so
        attributes = {name: once[id(value)] for name, value in kept.items()}
        observers = dict(plan.calibration.observers)
        for key, name in plan.activation_scales.items():
            zero_point = round(held[_zero_of(name)].item())  # that of training, which `load_state_dict` may have brought
            observers[key] = _Fixed(covered(_scale(held[name]).item(), zero_point, key[1]))

        def learned(site: QuantSite, weight: torch.Tensor, scheme: WeightScheme) -> QuantizedWeight:
            if site.name not in plan.weight_scales:
                return plain_weight(site, weight, scheme)
            scales = _scale(held[plan.weight_scales[site.name]]).detach().reshape(-1)
            if scheme.granularity == "group":
                scales = scales.reshape(weight.shape[0], -1)
            real = weight.detach().to(torch.float32)
            moved = held.get(_moved_of(plan.weight_scales[site.name]))
            real = real if moved is None else real + moved.reshape(real.shape)
            values = rounded(real, scales, scheme)
            return QuantizedWeight(values, scales, sqnr(real, dequantized(values, scales)))

        trained = replace(program, attributes=attributes)
        return replace(plan.calibration, program=trained, original=trained, observers=observers, weigh=learned).build()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of any module. Raises InputError for a state that does not fit."""
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            hint = "prepare the same model with the same data: what is smoothed, and so has factors of its own, depends on them"
            raise InputError(str(error), "load_state_dict(...)", hint) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Raises Unsupported."""
        raise _unfinished()

    def __reduce__(self) -> tuple[Any, ...]:
        raise _unfinished()


def _plan_of(module: QATModule) -> Plan:
    plan = module.meta[_QAT]
    assert isinstance(plan, Plan)
    return plan


def _unfinished() -> Unsupported:
    """What `convert` needs, data of calibration among it, has no form in a file."""
    hint = "save its state_dict(), to be loaded into what prepare_qat makes of the same model and data, or what convert() returns"
    return Unsupported("a model that still trains cannot be saved or pickled as a whole", "QATModule", hint)


def _zero_of(scale: str) -> str:
    """The name of the zero point that belongs to the scale of an activation."""
    return f"{scale.removesuffix('_scale')}_zero"


def _moved_of(scale: str) -> str:
    """The name of what is added to the weight that has this scale, before it is rounded."""
    return f"{scale.removesuffix('_scale')}_moved"


def _frozen(value: Any) -> Any:
    own = value.detach().clone() if isinstance(value, torch.Tensor) else value
    return nn.Parameter(own, requires_grad=False) if isinstance(value, nn.Parameter) else own


def _scale(parameter: torch.Tensor) -> torch.Tensor:
    """A learned scale as it is used: positive."""
    return parameter.detach().abs().clamp_min(_LEAST_SCALE)


class _FakeInserter(Inserter):
    """Puts differentiable quantizers where an `Inserter` puts integers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.activation_scales: dict[ObserverKey, str] = {}
        self.weight_scales: dict[str, str] = {}
        self.weight_schemes: dict[str, WeightScheme] = {}
        self._learnt: dict[Node, tuple[str, WeightScheme]] = {}

    def _static(self, activation: Node, name: str, like: Node, chosen: ActivationScheme) -> tuple[Node, ActivationRange]:
        limits = self.ranges[name, chosen]
        scale, zero_point = affine(limits, chosen)
        learned = f"{self._free_name(f'{name}_activation')}_scale"
        self.activation_scales[name, chosen] = learned
        parameter = self._learned(learned, torch.tensor([scale], dtype=torch.float32), like)
        self.attributes[_zero_of(learned)] = torch.tensor([float(zero_point)], dtype=torch.float32)
        zero = self._read(_zero_of(learned), self.attributes[_zero_of(learned)], like)
        features = int(activation.meta["val"].shape[-1]) if activation.meta["val"].dim() else 1
        factor = 1.0 / math.sqrt(features * chosen.qmax)
        arguments = (self._float(activation, like), parameter, zero, chosen.qmin, chosen.qmax, factor)
        node = self._fake(aten._fake_quantize_learnable_per_tensor_affine.default, arguments)
        return node, activation_range(scale, zero_point, chosen)

    def _dynamic(self, activation: Node, like: Node, chosen: ActivationScheme) -> tuple[Node, None]:
        """x + constant(q(x) - x): the straight-through estimator; saturation cannot happen."""
        real = self._float(activation, like)
        outside = self._call(aten.detach.default, (real,), like)
        rounded_rows, _ = super()._dynamic(outside, like, chosen)
        moved = self._call(aten.sub.Tensor, (rounded_rows, outside), like)
        return self._call(aten.add.Tensor, (real, moved), like), None

    def _weight(self, found: Operands, site: QuantSite, like: Node) -> tuple[Node, float]:
        """The parameter through a quantizer, [N, K] of a linear; operations with the same weight share scales."""
        weight, scheme = found.weight, site.scheme.weight
        assert weight is not None and scheme is not None
        key = str(weight.target) if weight.op == "get_attr" else weight, found.transposed, scheme
        if key not in self._weights:
            value = self.constants.value(weight)
            matrix = matrix_of(value, found)
            scheme = settled(matrix.detach().to(torch.float32), scheme)
            quantized = self.weigh(site, matrix, scheme)
            name = self._free_name(f"{site.owner}.{weight.name}")
            if scheme.compensate:  # a constant beside it: the parameter may be frozen, computed, or read by others
                moved = dequantized(quantized.values, quantized.scales) - matrix.detach().to(torch.float32)
                self.attributes[_moved_of(f"{name}_scale")] = moved.reshape(quantized.scales.numel(), -1)
            node = self._fake_weight(weight, found, quantized, scheme, f"{name}_scale", like)
            self._learnt[node] = f"{name}_scale", scheme
            self._weights[key] = node, quantized.sqnr
        self.weight_scales[site.name], self.weight_schemes[site.name] = self._learnt[self._weights[key][0]]
        return self._weights[key]

    def _fake_weight(self, weight: Node, found: Operands, quantized: QuantizedWeight, scheme: WeightScheme, name: str, like: Node) -> Node:
        weight = self._call(aten.transpose.int, (weight, 1, 2), like) if found.operation == "experts" and found.transposed else weight
        shape = list(weight.meta["val"].shape)
        if found.operation == "linear":
            weight = self._call(aten.reshape.default, (weight, shape[-2:]), like) if len(shape) > 2 else weight
            weight = self._call(aten.t.default, (weight,), like) if found.transposed else weight
            shape = list(weight.meta["val"].shape)
        elif found.operation == "convolution":
            weight = self._call(aten.movedim.int, (weight, 1, -1), like)
        scales = quantized.scales.reshape(-1)
        rows = self._call(aten.reshape.default, (self._float(weight, like), [len(scales), -1]), like)
        if (moved := _moved_of(name)) in self.attributes:
            rows = self._call(aten.add.Tensor, (rows, self._read(moved, self.attributes[moved], like)), like)
        zeros = f"{name}_zero"
        self.attributes[zeros] = torch.zeros(len(scales), dtype=torch.float32)
        factor = 1.0 / math.sqrt(quantized.values.numel() / len(scales) * scheme.qmax)
        parameters = self._learned(name, scales, like), self._read(zeros, self.attributes[zeros], like)
        arguments = (rows, *parameters, 0, -scheme.qmax, scheme.qmax, factor)
        fake = self._fake(aten._fake_quantize_learnable_per_channel_affine.default, arguments)
        if scheme.sums16 in (2, 4):
            outside = [self._call(aten.detach.default, (x,), like) for x in (rows, parameters[0], fake)]
            small = self._call(ops.small_weight, (*outside[:2], scheme.sums16), like)
            fake = self._call(aten.add.Tensor, (fake, self._call(aten.sub.Tensor, (small, outside[2]), like)), like)
        if found.operation == "convolution":
            last = self._call(aten.reshape.default, (fake, [shape[0], *shape[2:], shape[1]]), like)
            return self._call(aten.movedim.int, (last, -1, 1), like)
        return self._call(aten.reshape.default, (fake, shape), like)

    def _fake(self, target: Any, arguments: tuple[Any, ...]) -> Node:
        """A fake quantizer; torch knows no shape function for it, but its result is like its first argument."""
        node = self.graph.call_function(target, arguments)
        node.meta["val"] = arguments[0].meta["val"]
        return node

    def _learned(self, name: str, value: torch.Tensor, like: Node) -> Node:
        """|parameter|: an optimizer's step past zero must not turn a scale negative."""
        self.attributes[name] = nn.Parameter(value.clone())
        magnitude = self._call(aten.abs.default, (self._read(name, value, like),), like)
        return self._call(aten.clamp_min.default, (magnitude, _LEAST_SCALE), like)
