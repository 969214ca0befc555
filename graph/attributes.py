"""What a module has in its attributes, and keeping it while torch traces: a model that stores what it computes, as caches are made on
demand, stores tensors without data then, and would go on with them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.lazy import LazyModuleMixin

from .captured import same_value

T = TypeVar("T")
Numbers = Mapping[tuple[torch.nn.Module, str], float]
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)  # classes that are filled again as they were; subclasses may do more


@contextmanager
def kept(model: torch.nn.Module) -> Iterator[None]:
    """Afterwards attributes of the model and its modules, and lists, dicts and sets among these, hold the same objects as before."""
    before = [(container, container.copy(), _content(container)) for container in _containers(model)]
    try:
        yield
    finally:
        for container, copy, content in before:
            if _content(container) != content:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(copy)


def numbers(model: torch.nn.Module) -> dict[tuple[torch.nn.Module, str], float]:
    """The ints and floats among the attributes of modules."""
    held = ((module, vars(module)) for module in model.modules())
    return {(module, name): value for module, own in held for name, value in own.items() if type(value) in (int, float)}


def counted(model: torch.nn.Module, trace: Callable[[], T]) -> tuple[T, list[str]]:
    """What tracing the model gives, and the names of the numbers that every call changes: that are others after forward, and others again
    after a second trace that begins with these. What is stored and stays, such as the sizes of an image, is none."""
    before = numbers(model)
    made, after = _with_numbers(model, trace)
    changed = {place: after[place] for place in before.keys() & after.keys() if not same_value(after[place], before[place])}
    if not changed:
        return made, []
    later: Numbers = {}
    with kept(model), suppress(Exception):  # such as one of a model that raises at a certain number
        for (module, name), value in changed.items():
            vars(module)[name] = value
        _, later = _with_numbers(model, trace)
    prefixes = {module: prefix for prefix, module in model.named_modules()}
    moved = [place for place, value in changed.items() if place not in later or not same_value(later[place], value)]
    return made, sorted([f"{prefixes[module]}.{name}".removeprefix(".") for module, name in moved])


def _with_numbers(model: torch.nn.Module, trace: Callable[[], T]) -> tuple[T, Numbers]:
    """What a trace gives, and the numbers as forward leaves them: torch.export itself puts them back."""
    found: dict[tuple[torch.nn.Module, str], float] = {}
    hook = model.register_forward_hook(lambda *_: found.update(numbers(model)))
    try:
        with kept(model):
            return trace(), found
    finally:
        hook.remove()


def without_data(model: torch.nn.Module) -> str:
    """The name of a tensor without data that an earlier trace has left in the model, or an empty string."""
    for prefix, module in model.named_modules():
        for held in (vars(module), module._parameters, module._buffers):
            for name, value in held.items():
                if isinstance(value, FakeTensor):
                    return f"{prefix}.{name}".removeprefix(".")
    return ""


def _containers(model: torch.nn.Module) -> list[Any]:
    """The attributes of modules, and whatever is a container in what these hold, each once. A lazy module stays what its first call makes
    of it."""
    found: dict[int, Any] = {}
    ahead: list[Any] = [model]
    while ahead:
        each = ahead.pop()
        if isinstance(each, LazyModuleMixin):
            continue
        each = vars(each) if isinstance(each, torch.nn.Module) else each
        if id(each) in found:
            continue
        if type(each) in _CONTAINERS:
            found[id(each)] = each
        values = each.values() if isinstance(each, dict) else each
        ahead += [value for value in values if isinstance(value, (torch.nn.Module, tuple)) or type(value) in _CONTAINERS]
    return list(found.values())


def _content(container: Any) -> list[tuple[object, int]]:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    return [(key, id(value)) for key, value in items]
