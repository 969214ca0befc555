"""Kernels that users bring: a rule makes a `call`, and the kernel of that name writes its code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..cpu_codegen.builder import Module
from ..cpu_codegen.contract import KernelCode
from ..graph.types import TensorType
from ..platforms.target import Target

Options = tuple[tuple[str, float | int | str], ...]
Emit = Callable[[Module, Target, str, tuple[TensorType, ...], TensorType, Options], KernelCode]


@dataclass(frozen=True)
class CustomKernel:
    """The code behind `call` values of one name, under the kernel contract (`cpu_codegen/contract.py`).

    emit(module, target, symbol, inputs, output, options) adds a function named `symbol` to the module and says what its slots are. Its
    operands are the inputs in order, then the output; all are dense and row-major.
    """

    name: str
    emit: Emit
