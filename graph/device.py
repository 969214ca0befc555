"""The device that a graph is for, and what a GPU is given to PyTorch for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..diagnostics.errors import Unsupported
from ..diagnostics.surroundings import CPU
from .ir import Value
from .ops import OPS
from .types import TensorType, f64

__all__ = ["CPU", "device_of", "refuse_products"]

_ELSEWHERE = ("contraction", "recurrence", "order", "quant")
# Those that are functions of the C library, for large numbers, and in f64.
PERIODIC = ("sin", "cos", "tan")
WIDE_ELSEWHERE = ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "erf", "pow", "atan2", "sigmoid")


def device_of(tensors: Iterable[Any]) -> torch.device:
    """The GPU that any of the tensors is on, else the CPU. Lowering refuses those on others."""
    return next((t.device for t in tensors if isinstance(t, torch.Tensor) and t.device.type == "cuda"), CPU)


def refuse_products(made: Any, arguments: Any) -> None:
    """Raises Unsupported where what a call became has products or the like between its arguments and its results: on GPUs PyTorch's
    libraries compute them. So does it where elements depend on the order in which others were made."""
    given = {v for v in pytree.tree_leaves(arguments) if isinstance(v, Value)}
    pending, seen = [v for v in pytree.tree_leaves(made) if isinstance(v, Value)], set[Value]()
    while pending:
        value = pending.pop()
        if value in seen or value in given:
            continue
        seen.add(value)
        wide = isinstance(value.type, TensorType) and value.dtype == f64
        if OPS[value.op].group in _ELSEWHERE or value.op in ("scan", "put", *PERIODIC) or (wide and value.op in WIDE_ELSEWHERE):
            raise Unsupported("PyTorch's own kernels compute it on GPUs")
        pending += value.inputs
