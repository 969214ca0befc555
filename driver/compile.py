"""The public verbs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..diagnostics.errors import InputError
from ..graph.capture import from_exported
from ..graph.exporting import export
from ..kernels.custom import CustomKernel
from ..platforms.host import resolve
from ..platforms.target import Target
from ..quant import QuantizedModule, Scheme, quantize
from ..quant.calibrate import check_iterable
from ..rewrite import RuleSet
from .build import Options, build
from .model import CompiledModel
from .pipeline import PRECISIONS
from .signature import signature_of


def compile(
    model: torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    dynamic_shapes: Any = None,
    precision: str = "fp32",
    target: Target | str | None = None,
    strict: bool = False,
    rules: RuleSet = (),
    kernels: tuple[CustomKernel, ...] = (),
) -> CompiledModel:
    """Compile a model in evaluation mode to one native function for the CPU at hand.

    example_inputs: a tuple of positional or a dict of keyword arguments. dynamic_shapes: as in torch.export; without it the shapes are
    those of the example. precision: of matrix products and attention, "fp32", "bf16" (sums and everything else stay fp32) or "auto"
    (bf16 where the machine multiplies it natively). target: a machine of `sashiko.platforms`, by value or name; the host by default.
    strict: raise Unsupported instead of leaving an operation to PyTorch. rules: rewrite rules of your own, tried before ours. kernels:
    code for the `call`s that such rules make.

    Raises InputError for arguments that do not fit and for a model in training mode; Unsupported for a model that torch.export cannot
    trace, such as one whose control flow depends on data.
    """
    if precision not in PRECISIONS:
        raise InputError(f"precision is {precision!r}", hint=f"one of {', '.join(PRECISIONS)}")
    args, kwargs = _arguments(example_inputs)
    if isinstance(model, QuantizedModule):  # a graph module takes keyword arguments by position: put them in the order of the signature
        kwargs = {name: kwargs[name] for name in (*model.gate.names, *kwargs) if name in kwargs}
    program = export(model, args, kwargs, dynamic_shapes)
    captured = from_exported(program, decomposed=True)
    built = build(captured, Options(resolve(target), precision, strict, rules, kernels, type(model).__name__))
    return CompiledModel(signature_of(captured), built.executable, [s.tensor for s in captured.state], built)


def _arguments(example_inputs: Sequence[Any] | Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise InputError(
        f"example_inputs is a {type(example_inputs).__name__}", hint="pass a tuple of positional or a dict of keyword arguments"
    )


def quantize_and_compile(
    model: torch.nn.Module,
    batches: Iterable[Any],
    *,
    preset: str | Scheme = "int8",
    dynamic_shapes: Any = None,
    precision: str = "auto",
    target: Target | str | None = None,
    strict: bool = False,
) -> CompiledModel:
    """Calibrate a model on `batches`, quantize it and compile the result: `quantize` and `compile` in one verb.

    The first batch serves as the example inputs.
    """
    check_iterable(batches)
    kept = _First(batches)
    small = quantize(model, kept, preset=preset)
    first = kept.first
    example: tuple[Any, ...] | dict[str, Any] = (
        dict(first) if isinstance(first, Mapping) else tuple(first) if isinstance(first, (tuple, list)) else (first,)
    )
    return compile(small, example, dynamic_shapes=dynamic_shapes, precision=precision, target=target, strict=strict)


class _First:
    """An iterable that remembers its first item."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items
        self.first: Any = None

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # a TypeError where the items have no length, as it should be

    def __iter__(self) -> Any:
        for number, item in enumerate(self._items):
            if number == 0:
                self.first = item
            yield item
