"""`dynamic_shapes` in a form that torch.export takes: the axes that they name are looked at before it takes them for places in lists, and
arguments have names of their own where it would be of two minds about them. What it notes of them in the arguments is gone afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.export import AdditionalInputs, ShapesCollection
from torch.utils import _pytree as pytree

from ..diagnostics.errors import InputError

_PLACE = "dynamic_shapes"
_MARK = "_dynamo_"  # in the names of all attributes of tensors that say which sizes are dynamic
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


@contextmanager
def marks_kept(arguments: Any) -> Iterator[None]:
    """Afterwards tensors have the marks of dynamic sizes that they had before. torch.export makes its own, which it takes off only where it
    succeeds, and the caller's with them; the next trace would go by what is left."""
    held = [vars(leaf) for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    before = [{name: mark for name, mark in attributes.items() if _MARK in name} for attributes in held]
    try:
        yield
    finally:
        for attributes, marks in zip(held, before):
            for name in [name for name in attributes if _MARK in name]:
                del attributes[name]
            attributes.update(marks)


@contextmanager
def spelled_out(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any) -> Iterator[Any]:
    """For a trace with `dynamic_shapes`: `forward` has parameters of their own for what it takes as **named, and these are the shapes by
    such names. torch wants one dict for all of them in its first look at the shapes, and one entry for each in its last."""
    forward, signature = model.forward, inspect.signature(model.forward)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    whole = next(iter(signature.parameters.keys() - {parameter.name for parameter in own}), "")
    names = signature.bind(*args, **kwargs).arguments.get(whole, {}) if dynamic_shapes is not None else {}
    if not names:
        yield dynamic_shapes
        return

    def spelled(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    own += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    spelled.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    attributes = vars(model)
    before = attributes.get("forward")  # of this model alone
    attributes["forward"] = spelled
    try:
        yield _one_by_one(dynamic_shapes, whole, names)
    finally:
        del attributes["forward"]
        if before is not None:
            attributes["forward"] = before


def _one_by_one(shapes: Any, whole: str, names: Mapping[str, Any]) -> Any:
    """The shapes with entries of their own for `names`, where torch.export's form has one for all of them."""
    if not isinstance(shapes, Mapping) or whole not in shapes or names.keys() & shapes.keys():
        return shapes
    held = dict.fromkeys(names) if shapes[whole] is None else shapes[whole]
    return {**{name: shape for name, shape in shapes.items() if name != whole}, **held} if isinstance(held, Mapping) else shapes
