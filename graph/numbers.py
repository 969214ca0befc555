"""Buffers that hold one whole number, such as the strides that audio codecs keep there: read as that number where a size depends on it.

A size that depends on what a tensor holds is refused; one that depends on a number is a number. What is made of such numbers is part of the
code, so a model is traced this way only where it has to be, and what was read is told, to be watched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..diagnostics.errors import Unsupported


@dataclass
class Numbers:
    """What was read while a model was traced, by name."""

    read: dict[str, torch.Tensor] = field(default_factory=dict)
    _given: list[torch.Tensor] = field(default_factory=list)

    def give(self, name: str, buffer: torch.Tensor, number: int) -> torch.Tensor:
        """A constant to the trace, which computes with it."""
        constant = torch.tensor(number, dtype=buffer.dtype)
        self.read[name] = buffer
        self._given.append(constant)
        return constant

    def names(self) -> str:
        """The first few of what was read, and how many there are besides."""
        first, more = list(self.read)[:3], len(self.read) - 3
        return f"{', '.join(first)}{f' and {more} more' if more > 0 else ''}"

    def check(self) -> None:
        """Raises Unsupported where the model wrote into what it read, which would be lost."""
        if any(constant._version for constant in self._given):
            raise Unsupported(f"a size depends on one of {self.names()}, which change in each call")


def are_in(model: torch.nn.Module) -> bool:
    """Whether there are such buffers."""
    return any(_is_number(tensor) for tensor in model.buffers())


@contextmanager
def known(model: torch.nn.Module) -> Iterator[Numbers]:
    """While this lasts, attributes that are such buffers give constants. The modules are as before afterwards."""
    numbers = Numbers()
    before: list[tuple[torch.nn.Module, type, dict[str, torch.Tensor | None]]] = []
    try:
        for prefix, module in list(model.named_modules()):
            found = {name: tensor for name, tensor in module._buffers.items() if tensor is not None and _is_number(tensor)}
            if found:
                before.append((module, type(module), dict(module._buffers)))
                _as_properties(module, found, prefix, numbers)
        yield numbers
        numbers.check()
    finally:
        for module, kind, buffers in before:
            module.__class__ = kind
            module._buffers.clear()
            module._buffers.update(buffers)


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 0 and not tensor.is_floating_point() and not tensor.is_complex()


def _as_properties(module: torch.nn.Module, buffers: dict[str, torch.Tensor], prefix: str, numbers: Numbers) -> None:
    """Properties of a class of its own. They cannot be set: a module that gives an attribute another value raises."""

    def getter(name: str, buffer: torch.Tensor) -> property:
        path, number = f"{prefix}.{name}".removeprefix("."), int(buffer.item())
        return property(lambda _: numbers.give(path, buffer, number))

    kind = type(module)
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    for name in buffers:
        del module._buffers[name]
    module.__class__ = type(kind.__name__, (kind,), named | {name: getter(name, buffer) for name, buffer in buffers.items()})
