"""Whether models train or are evaluated."""

from __future__ import annotations

import dis
import inspect
from itertools import chain, pairwise
from types import FunctionType

import torch
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils import _pytree as pytree

# torch's own containers, in which nothing reads the flag. Those that are put into an evaluated model, as parametrizations bring them, have
# that of every new module. A class of somebody else's may read its own.
_CONTAINERS = (
    torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict, ParametrizationList,
)
_OF_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"}  # Python's instructions
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
    """Whether a layer without tensors and parts certainly does not read its mode: its methods, from `forward` on, read other attributes
    alone, and hand the layer itself to nobody, who could."""
    kind = type(layer)
    plain = all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in ("__call__", "__getattr__", "__getattribute__"))
    if not plain or next(chain(layer.children(), layer.parameters(), layer.buffers(), _hooks(layer)), None) is not None:
        return False
    names = ["forward"]
    for name in names:  # which grow
        found = inspect.getattr_static(kind, name, None)
        method = found.fget if isinstance(found, property) else found
        if name not in vars(layer) and isinstance(method, FunctionType):
            read = _attributes_read(method)
            if read is None or "training" in read:
                return False
            names += sorted(read.difference(names))
        elif hasattr(found, "__get__") or any(map(callable, pytree.tree_leaves([found, vars(layer).get(name)]))):
            return False
    return True


def _hooks(layer: torch.nn.Module) -> chain[object]:
    """What is called with the layer itself."""
    return chain(layer._forward_hooks.values(), layer._forward_pre_hooks.values())


def _attributes_read(method: FunctionType) -> set[str] | None:
    """The attributes of its first argument that a method reads or sets. None where it does something else with that as well, or wraps
    another function, which is given it."""
    code = method.__code__
    if method.__closure__ or not code.co_argcount:
        return None
    names = set[str]()
    for step, following in pairwise(dis.get_instructions(code)):
        loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)  # some instructions load two
        if step.opname.startswith("LOAD_") and code.co_varnames[0] in loaded:
            if loaded.index(code.co_varnames[0]) != len(loaded) - 1 or following.opname not in _OF_ATTRIBUTES:
                return None
            names.add(following.argval)
    return names
