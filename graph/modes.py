"""Whether models train or are evaluated."""

from __future__ import annotations

import inspect
from itertools import chain
from types import CodeType, FunctionType

import torch
from torch.nn.utils.parametrize import ParametrizationList

# torch's own containers, in which nothing reads the flag. Those that are put into an evaluated model, as parametrizations bring them, have
# that of every new module. A class of somebody else's may read its own.
_CONTAINERS = (
    torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict, ParametrizationList,
)
_EVAL = "call model.eval() first"


def has_one_mode(model: torch.nn.Module) -> bool:
    """True for the graphs that torch.export and PT2E make. Their operations say themselves whether they train; the flag that every new
    module carries means nothing, and `eval`, which could clear it, is replaced by one that raises."""
    return isinstance(model, torch.fx.GraphModule) and "eval" in vars(model)


def in_training(model: torch.nn.Module) -> str:
    """The names of the first modules in training mode, or an empty string. Containers are what their parts are, and layers that hold no
    tensors and do not read their mode have none: some are made anew by copying and loading, in training mode."""
    parts = {} if has_one_mode(model) else dict(model.named_modules())
    training = [name for name, part in parts.items() if part.training and not has_one_mode(part) and type(part) not in _CONTAINERS]
    names = [name or type(model).__name__ for name in training if not _ignores_mode(parts[name])]
    return f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"


def to_evaluate(model: torch.nn.Module) -> str:
    """What to do about a model of which parts are in training mode."""
    return _EVAL if model.training else f"{_EVAL}: copying or loading some layers puts them back into training mode"


def _ignores_mode(layer: torch.nn.Module) -> bool:
    """Whether a layer without tensors, parts and hooks does not read its mode: nothing that its class defines names it."""
    hooks = (*layer._forward_hooks.values(), *layer._forward_pre_hooks.values())
    if next(chain(layer.children(), layer.parameters(), layer.buffers(), hooks), None) is not None:
        return False
    own = (value for kind in type(layer).__mro__ if not issubclass(torch.nn.Module, kind) for value in vars(kind).values())
    functions = (value.fget if isinstance(value, property) else inspect.unwrap(value) if callable(value) else None for value in own)
    return not any(isinstance(function, FunctionType) and _may_name_mode(function.__code__) for function in functions)


def _may_name_mode(code: CodeType) -> bool:
    """Whether a method names `training`, or wraps a function that may."""
    return bool({*code.co_freevars} - {"__class__"}) or _names_mode(code)


def _names_mode(code: CodeType) -> bool:
    return "training" in code.co_names or any(_names_mode(inner) for inner in code.co_consts if isinstance(inner, CodeType))
