"""`compile`: from a model to code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..diagnostics.collector import paused
from ..diagnostics.errors import InputError
from ..graph.examples import example
from ..kernels.custom import CustomKernel
from ..platforms.host import resolve
from ..platforms.target import Target
from ..quant.module import check_converted
from ..rewrite import Rule, RuleSet
from .build import Options
from .captures import captured_of
from .measure import Example
from .model import CompiledModel, build_model
from .pipeline import check_settings
from .tuning import SECONDS, tuned


def compile(
    model: torch.nn.Module,
    example_inputs: torch.Tensor | Sequence[Any] | Mapping[str, Any],
    *,
    dynamic_shapes: Any = None,
    precision: str = "fp32",
    target: Target | str | None = None,
    strict: bool = False,
    rules: RuleSet = (),
    kernels: tuple[CustomKernel, ...] = (),
    tune: bool | float = False,
) -> CompiledModel:
    """Compile a model in evaluation mode to one native function for the CPU at hand.

    example_inputs: a tuple of positional or a dict of keyword arguments, or the only argument, a tensor. dynamic_shapes: as in
    torch.export; without it the shapes are those of the example. precision: of matrix products and attention, "fp32", "bf16" (sums stay
    fp32, and everything else but residuals that the next product reads without a norm in between, as in convolution networks) or "auto"
    (bf16 where the machine multiplies it faster, or 16-bit integers in its place). target: a machine of `sashiko.platforms`, by value or
    name; the host by default. What is compiled for a machine with more than this one has can be explained and saved; a call of it is an
    InputError. strict: raise Unsupported instead of leaving an operation to PyTorch. rules: rewrite rules of your own, tried before ours.
    kernels: code for the `call`s that such rules make. tune: measure other ways to compute each matrix product on this machine, with the
    example and as many threads as torch has now, for 10 seconds or as many as are given, and keep what is faster; explain() tells, and what
    was found is kept on disk.

    Raises InputError for arguments that do not fit and for a model in training mode; Unsupported for a model that torch.export cannot
    trace, such as one whose control flow depends on data.
    """
    check_settings(precision, strict=strict)
    given = example(example_inputs)
    if not isinstance(tune, (int, float)) or not tune >= 0:
        raise InputError(f"tune is {tune!r}", hint="True, or seconds to measure for")
    _check_extensions(rules, kernels)
    options = Options(resolve(target), precision, strict, rules, kernels, type(model).__name__)
    return compiled(model, *given, dynamic_shapes, options, SECONDS if tune is True else float(tune))


def _check_extensions(rules: object, kernels: object) -> None:
    """InputError for what are no rewrite rules and no kernels."""
    for name, given, kind in (("rules", rules, Rule), ("kernels", kernels, CustomKernel)):
        if not isinstance(given, (tuple, list)) or not all(isinstance(each, kind) for each in given):
            raise InputError(f"{name} is {given!r:.60}", hint=f"a tuple of {kind.__module__.partition('.')[2]}.{kind.__name__}")


def compiled(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any, options: Options, tune: float = 0.0
) -> CompiledModel:
    """The model as code for calls like the given one, measured for `tune` seconds; errors as in `compile`."""
    check_converted(model)
    with paused():
        captured = captured_of(model, args, kwargs, dynamic_shapes)
        if tune > 0:
            return tuned(captured, options, Example(args, kwargs), tune)
        return build_model(captured, options)
