"""`quantize_`: the linear layers of any model, in place, each by itself. Nothing is captured, and whatever calls the model still can.

What needs to know what comes before a layer or behind it, such as smoothing and ranges for all calls, is for `quantize`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..diagnostics.errors import CalibrationError, InputError
from ..graph.exporting import check_module
from ..platforms.host import resolve as resolve_target
from ..platforms.target import Target
from .calibrate import call_of, is_count, numbered
from .experts import matrices, of_integers, put
from .inputs import Layer, compensated_weights
from .linear import QuantizedLinear
from .masking import USUAL, MaskArgument
from .module import check_converted
from .placement import EXCLUDED, check_used, dynamic, fitted, is_named
from .presets import resolve
from .program import Call, named
from .quantize import check_evaluating, typical
from .record import LeftOut, QuantRecord, QuantSite, SiteResult
from .scheme import FP32, Operation, OpScheme, Override, Scheme, WeightScheme, Where, several
from .weights import QuantizedWeight, quantize_weight

_PLACE = "quantize_"
_READERS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Classes that read the weights of their linear layers instead of calling these."""
_DONE = "it holds integers already"
_EMPTY = "the weight is empty"
_MEMORY = 2**31
_OTHERS = (nn.RNNBase, nn.RNNCellBase, nn.modules.conv._ConvNd)


def quantize_(
    model: nn.Module,
    preset: str | Scheme,
    batches: Iterable[Any] | None = None,
    *,
    exclude: Where | Iterable[Where] = (),
    transform: Callable[[Any], Any] | None = None,
    mask: str | Literal[False] | None = None,
    max_batches: int | None = None,
    target: Target | str | None = None,
    memory: int | None = None,
) -> QuantRecord:
    """Puts a `QuantizedLinear` in the place of every linear layer of `model`, and integers in that of the matrices of experts of
    transformers, and returns what was done; `quant.report` shows it.

    For models that are called by others, as transformers' `generate` does, and for those that cannot be captured as a whole:
    `torch.compile(model, backend="sashiko")` makes products with integers of the layers.

    preset: `int4-weight`, `int8-weight`, `int8-dynamic`, or a Scheme without smoothing, bias correction and ranges for all calls.
    batches: for a scheme that compensates rounding errors (GPTQ, as `int4-weight` does), what the model is called with, as in `quantize`.
        They are kept, and the model runs over them once, and again for each part of the layers whose sums of inputs fit `memory` bytes;
        None: 2 GiB.
        None: weights are rounded to nearest.
    exclude: what to leave in floating point: names, modules that contain them, compiled patterns, module classes.
    transform, mask, max_batches, target: as in `quantize`; the first three, and memory, with batches alone.

    A layer whose weight something else reads or changes stays as it is, in `left_out` with the reason. A linear layer that chooses experts
    cannot be told from others here, as `quantize` does: exclude it. The model is changed when all that can be wrong with the arguments has
    been looked at.

    Errors: CalibrationError for weights or data that are not finite or do not fit, InputError for options.
    """
    scheme, machine = resolve(preset), resolve_target(target)
    _check(model, scheme, batches, {"transform": transform, "mask": mask, "max_batches": max_batches, "memory": memory})
    if memory is not None and not is_count(memory):
        raise InputError(f"memory={memory!r:.60} is no number of bytes", f"{_PLACE}(memory=...)", "1 or more, or None for 2 GiB")
    layers, sites, left = _placed(model, scheme, machine, exclude)
    notes: tuple[str, ...] = () if sites else ("nothing was quantized",)
    calls: list[Call] = []
    made: dict[str, QuantizedWeight] = {}
    if batches is not None:
        calls = [call_of(model, batch, number).own() for number, batch in numbered(batches, max_batches, transform)]
        typical(tuple(calls))
        # All before any is put in its place: the model runs several times, and quantized layers are slow before they are compiled.
        made = compensated_weights(model, _compensating(layers), calls, _masks(model, calls, mask), memory or _MEMORY)
    notes += _rounded_to_nearest(layers, made, bool(calls))
    noise: dict[str, float] = {}
    for name in tuple(layers):  # a layer that is replaced is forgotten, so that its weight goes before the next one has integers
        layer = layers.pop(name)
        rows = layer.weight.reshape(-1, layer.weight.shape[-1])
        weight = made.pop(name) if name in made else quantize_weight(rows, layer.scheme)
        del rows
        if sites[name].operation == "experts":
            put(layer.module, name.rpartition(".")[2], weight, layer.scheme)
            noise[name] = weight.sqnr
        else:
            noise[name] = _replace(model, layer.module, weight, sites[name])
        del layer
    results = tuple(SiteResult(site, (), noise[name]) for name, site in sites.items())
    return QuantRecord(scheme, results, tuple(left), len(calls), notes)


def _check(model: nn.Module, scheme: Scheme, batches: Iterable[Any] | None, of_batches: Mapping[str, object]) -> None:
    if batches is None:
        check_module(model)
        check_converted(model)
        for option in (name for name, value in of_batches.items() if value is not None):
            raise InputError(f"{option} is given without batches", f"{_PLACE}({option}=...)", "give batches, or leave it out")
    else:
        check_evaluating(model)
    schemes = [scheme.default, *(override.scheme for override in scheme.overrides)]
    beyond = {
        "smooths activations": scheme.smooth is not None,
        "corrects biases": scheme.correct_bias,
        "looks for outliers": scheme.outliers is not None,
        "has ranges for all calls": any(s.activation is not None and not dynamic(s.activation) for s in schemes if s.quantized),
        "keeps operations in bf16": any(not s.quantized and s.floating == "bf16" for s in schemes),
    }
    for what in (what for what, found in beyond.items() if found):
        hint = "quantize(model, batches) captures the model for that; layer by layer there are int8-dynamic, int8-weight and int4-weight"
        raise InputError(f"the scheme {what}, which takes more than a layer by itself", f"{_PLACE}(preset=...)", hint)
    if batches is not None and not any(s.weight is not None and s.weight.compensate for s in schemes):
        raise InputError("the scheme has nothing to learn from batches", f"{_PLACE}(batches=...)", "leave them out")


def _placed(
    model: nn.Module, scheme: Scheme, target: Target, exclude: Where | Iterable[Where]
) -> tuple[dict[str, Layer], dict[str, QuantSite], list[LeftOut]]:
    """The layers to quantize and what happens to them, by name, and what stays as it is."""
    excluded = tuple(Override(where, FP32) for where in several(exclude))
    overrides = (*scheme.overrides, *excluded)
    layers: dict[str, Layer] = {}
    sites: dict[str, QuantSite] = {}
    left: list[LeftOut] = []
    used: set[int] = set()
    names: list[str] = []
    for owner, module, name, weight, operation in _weights(model, left):
        names.append(name)
        hits = [i for i, override in enumerate(overrides) if _matches(override.where, name, owner, model)]
        used.update(hits)
        chosen, why = fitted(overrides[hits[-1]].scheme if hits else scheme.default, operation, weight.shape[-1], target.sums16)
        if hits and overrides[hits[-1]] in excluded:
            reason = EXCLUDED
        elif operation not in scheme.operations or not chosen.quantized:
            reason = "the scheme keeps it in floating point"
        else:
            refusal = _refusal(model, name, module, weight) if operation == "linear" else _refusal_of_experts(weight, chosen)
            reason = refusal or why
        if reason:
            left.append(LeftOut(name, type(module).__name__, reason, ""))
            continue
        assert chosen.weight is not None
        _check_finite(name, weight)
        layers[name] = Layer(module, weight, chosen.weight)
        op, parameter = ("linear", f"{name}.weight") if operation == "linear" else ("grouped_mm", name)
        features = weight.shape[-1], weight.shape[-2]
        sites[name] = QuantSite(name, operation, op, chosen, "", (), parameter, features, "", owner=name)
    kept = [item.name for item in left]
    used.update(i for i, o in enumerate(overrides) if not isinstance(o.where, type) and any(is_named(o.where, name, name) for name in kept))
    check_used(overrides, used, (*names, *kept))
    return layers, sites, left


def _weights(model: nn.Module, left: list[LeftOut]) -> Iterator[tuple[str, nn.Module, str, torch.Tensor, Operation]]:
    """The weights that there are: the name of a module, the module, what the weight is called in a report, the weight, and what multiplies
    with it. What is no such module, but could be quantized otherwise, goes to `left`."""
    for name, module in model.named_modules():
        weight, experts = _weight(module), matrices(module)
        if weight is not None:
            yield name, module, name, weight, "linear"
        for parameter, each in experts.items():
            yield name, module, f"{name}.{parameter}".removeprefix("."), each, "experts"
        if isinstance(module, QuantizedLinear):
            left.append(LeftOut(name, "QuantizedLinear", _DONE, ""))
        left.extend(LeftOut(f"{name}.{parameter}".removeprefix("."), "experts", _DONE, "") for parameter in of_integers(module))
        if isinstance(module, _OTHERS) or (not experts and any(p.dim() == 3 for p in module.parameters(recurse=False))):
            what = "it is no linear layer; quantize(model, batches) takes other operations"
            left.append(LeftOut(name, type(module).__name__, what, ""))


def _weight(module: nn.Module) -> torch.Tensor | None:
    """The weight [N, K] of a linear layer."""
    if isinstance(module, nn.Linear):
        return module.weight.detach()
    kind = type(module)
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):  # GPT-2's
        assert isinstance(module.weight, torch.Tensor)
        return module.weight.detach().t()
    return None


def _refusal(model: nn.Module, name: str, module: nn.Module, weight: torch.Tensor) -> str:
    """Why a linear layer stays as it is, or an empty string."""
    if not name:
        return "it is the model itself, which cannot be put in the place of itself; quantize its owner"
    reader = next((type(m).__name__ for m in _around(name, model) if isinstance(m, _READERS)), None)
    if reader:
        return f"nn.{reader} reads its weight instead of calling it; quantize(model, batches) takes it apart"
    if parametrize.is_parametrized(module):
        return "its weight is computed by a parametrization; remove_parametrizations() makes it a plain one"
    if module._forward_pre_hooks or module._forward_hooks:
        return "it has hooks, which may change its weight or its results"
    if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
        return f"{type(module).__name__} has a forward of its own"
    if "forward" in vars(module):  # as accelerate does
        return "its forward was replaced by another, which may change its weight or its results"
    meant = sorted(_names_of_quantized().intersection(dir(module)))
    if meant:
        return f"it has {', '.join(meant)}, which is something else in a quantized layer"
    if type(weight) is not torch.Tensor or not weight.is_floating_point():
        return f"its weight is a {type(weight).__name__} of {weight.dtype}"
    return "" if weight.numel() else _EMPTY


@cache
def _names_of_quantized() -> frozenset[str]:
    """What a quantized layer has and a plain one has not: whoever put such a name on a layer would read another value in its place."""
    scheme = WeightScheme()
    made = QuantizedLinear(quantize_weight(torch.ones(1, 1, device="cpu"), scheme), None, OpScheme(None, scheme))
    return frozenset(dir(made)).difference(dir(nn.Linear(1, 1, device="meta")))


def _refusal_of_experts(weight: torch.Tensor, chosen: OpScheme) -> str:
    """Why matrices of experts stay as they are, or an empty string."""
    if not weight.numel():
        return _EMPTY
    if chosen.activation is not None:
        return "rows are rounded inside of the module; int8-weight takes its weights alone, quantize(model, batches) both"
    return "" if weight.is_floating_point() else f"they are of {weight.dtype}"


def _around(name: str, model: nn.Module) -> Iterator[nn.Module]:
    """The modules that a module is in, from the model on, and itself."""
    parts = name.split(".") if name else []
    return (model.get_submodule(".".join(parts[:n])) for n in range(len(parts) + 1))


def _matches(where: Where, name: str, owner: str, model: nn.Module) -> bool:
    return any(isinstance(m, where) for m in _around(owner, model)) if isinstance(where, type) else is_named(where, name, name)


def _check_finite(name: str, weight: torch.Tensor) -> None:
    if not bool(weight.isfinite().all()):
        what = f"the weight of {name} holds NaN or infinity"
        raise CalibrationError(what, "the model", "repair the weight, or exclude the layer")


def _compensating(layers: Mapping[str, Layer]) -> dict[str, Layer]:
    """Those whose errors data can compensate, which those of experts' matrices are not."""
    return {name: layer for name, layer in layers.items() if layer.scheme.compensate and layer.weight.dim() == 2}


def _rounded_to_nearest(layers: Mapping[str, Layer], made: Mapping[str, QuantizedWeight], data: bool) -> tuple[str, ...]:
    """Notes on layers whose scheme compensates errors and whose weights were not."""
    nearest = [name for name, layer in layers.items() if layer.scheme.compensate and name not in made]
    experts = [name for name in nearest if layers[name].weight.dim() == 3] if data else []
    others = [name for name in nearest if name not in experts]
    reasons = (
        (others, "the calls do not reach them" if data else "without data there are no errors to compensate"),
        (experts, "which rows an expert sees, its inputs alone do not tell"),
    )
    some = ((f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}", why) for names, why in reasons if names)
    return tuple(f"weights were rounded to nearest, for {why}: {which}" for which, why in some)


def _masks(model: nn.Module, calls: list[Call], mask: str | Literal[False] | None) -> list[MaskArgument]:
    """The arguments that say which positions count; where there are none, all do."""
    if mask is not None and mask is not False and not all(mask in named(model, call) for call in calls):
        raise InputError(f"the mask {mask!r} is not an argument of the batches", f"{_PLACE}(mask=...)")
    return [] if mask is False else [MaskArgument(name, mask is not None) for name in ([mask] if mask else USUAL)]


def _replace(model: nn.Module, module: nn.Module, weight: QuantizedWeight, site: QuantSite) -> float:
    """Puts a quantized layer wherever the module is, and says how many decibels are left of its weight."""
    like = (module.weight.dtype, not isinstance(module, nn.Linear))
    made = QuantizedLinear(weight, module.bias, site.scheme, *like).train(module.training)  # type: ignore[arg-type]
    for owner in list(model.modules()):
        for key in [key for key, part in owner._modules.items() if part is module]:
            setattr(owner, key, made)
    return weight.sqnr
