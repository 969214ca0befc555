"""The axes that `dynamic_shapes` names, looked at before torch.export takes them for places in lists."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import AdditionalInputs, ShapesCollection

from ..diagnostics.errors import InputError

_PLACE = "dynamic_shapes"
_HINT = "a dict has axes counted from 0 for its keys: {0: Dim('batch')}"


def check_axes(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any) -> None:
    """InputError for what names no axis of the arguments. What else does not fit them torch.export says itself."""
    if dynamic_shapes is None or isinstance(dynamic_shapes, (ShapesCollection, AdditionalInputs)):
        return
    if not isinstance(dynamic_shapes, (Mapping, Sequence)):
        what = f"dynamic_shapes={dynamic_shapes!r:.60} is no tuple and no dict"
        raise InputError(what, _PLACE, "pass a tuple with an entry for each argument, or a dict by their names")
    try:
        given = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:  # the example is wrong, which tracing tells
        return
    named = {**given.arguments, **given.kwargs} if isinstance(dynamic_shapes, Mapping) else list(given.arguments.values())
    _check(dynamic_shapes, named, "")


def _check(shapes: Any, value: Any, name: str) -> None:
    """The same for an argument, or all of them."""
    if isinstance(value, torch.Tensor):
        for axis in shapes if isinstance(shapes, Mapping) else ():
            if not isinstance(axis, int) or isinstance(axis, bool):
                raise InputError(f"dynamic_shapes{name} has {axis!r} for an axis", _PLACE, _HINT)
            if not 0 <= axis < value.dim():
                raise InputError(f"dynamic_shapes{name} has axis {axis}, of a tensor with {value.dim()} dimensions", _PLACE, _HINT)
    elif isinstance(shapes, Mapping) and isinstance(value, Mapping):
        for key in shapes.keys() & value.keys():
            _check(shapes[key], value[key], f"{name}[{key!r}]")
    elif isinstance(shapes, (tuple, list)) and isinstance(value, (tuple, list)):
        for number, pair in enumerate(zip(shapes, value)):
            _check(*pair, f"{name}[{number}]")
