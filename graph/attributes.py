"""What a module has in its attributes, and keeping it while torch traces: a model that stores what it computes, as caches are made on
demand, stores tensors without data then, and would go on with them."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.lazy import LazyModuleMixin

Place = tuple[torch.nn.Module, str]
State = Mapping[Place, object]
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)  # classes that are filled again as they were; subclasses may do more
_GROUPS = (*_CONTAINERS, tuple, frozenset, deque)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OF_TORCH = {*vars(torch.nn.Module())} - {"training"}
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"} - {"__main__"}


@contextmanager
def kept(model: torch.nn.Module) -> Iterator[None]:
    """Afterwards attributes of the model and its modules, and lists, dicts, sets and objects in these, hold what they held before."""
    before = [(container, container.copy(), _content(container)) for container in _containers(model)]
    try:
        yield
    finally:
        for container, copy, content in before:
            if _content(container) != content:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(copy)


def state(model: torch.nn.Module) -> State:
    """What the attributes of modules hold that is neither a tensor nor a module: numbers, words, flags and the like, in containers and
    objects, too. What several modules hold is told of one of them."""
    found: dict[Place, object] = {}
    told: set[int] = set()
    for module in model.modules():
        for name, value in vars(module).items() if not isinstance(module, LazyModuleMixin) else ():
            looked_into = type(value) in (*_PLAIN, *_GROUPS) or _is_object(value)
            if looked_into and name not in _OF_TORCH and id(value) not in told:
                found[module, name] = _frozen(value, told, True)
    return found


def _frozen(value: Any, told: set[int], whole: bool) -> object:
    """Something that is equal for equal values. Of a tensor and the like it is the type alone. whole: look into an object, too."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, repr(value)
    is_object = whole and _is_object(value)
    if id(value) in told or not (is_object or kind in _GROUPS):
        return kind
    told.add(id(value))
    items = [*vars(value).items()] if is_object else [*value.items()] if isinstance(value, dict) else [*enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return kind, frozenset(_frozen(item, told, False) for item in value)
    inner = whole and not is_object
    return kind, tuple((key if type(key) in _PLAIN else type(key), _frozen(item, told, inner)) for key, item in items)


def _is_object(value: object) -> bool:
    """Whether something is an object of a class that is neither torch's nor Python's own, and has attributes."""
    if isinstance(value, (torch.nn.Module, torch.Tensor, type)):
        return False
    return isinstance(value, SimpleNamespace) or (
        type(value).__module__.partition(".")[0] not in _LIBRARIES and isinstance(getattr(value, "__dict__", None), dict)
    )


def without_data(model: torch.nn.Module) -> str:
    """The name of a tensor without data that an earlier trace has left in the model, or an empty string."""
    for prefix, module in model.named_modules():
        for held in (vars(module), module._parameters, module._buffers):
            for name, value in held.items():
                if isinstance(value, FakeTensor):
                    return f"{prefix}.{name}".removeprefix(".")
    return ""


def _containers(model: torch.nn.Module) -> list[Any]:
    """The attributes of modules, those of objects that these hold, and whatever is a container in what these hold, each once. A lazy module
    stays what its first call makes of it."""
    found: dict[int, Any] = {}
    ahead: list[tuple[Any, bool]] = [(model, True)]  # whether it is no object's
    while ahead:
        each, whole = ahead.pop()
        if isinstance(each, LazyModuleMixin):
            continue
        if isinstance(each, torch.nn.Module):
            each, whole = vars(each), True
        elif _is_object(each):
            each, whole = vars(each), False
        if id(each) in found:
            continue
        if type(each) in _CONTAINERS:
            found[id(each)] = each
        for value in each.values() if isinstance(each, dict) else each:
            if isinstance(value, (torch.nn.Module, tuple)) or type(value) in _CONTAINERS or (whole and _is_object(value)):
                ahead.append((value, whole))
    return list(found.values())


def _content(container: Any) -> list[tuple[object, int]]:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    return [(key, id(value)) for key, value in items]
