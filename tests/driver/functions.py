"""Functions as models, and what compiled ones leave to PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

import sashiko
from sashiko.runtime.plan import AtenStep


class Apply(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def left(compiled: sashiko.CompiledModel) -> list[str]:
    """The operations left to PyTorch."""
    return [str(s.target) for s in compiled.executable.plan.segments if isinstance(s, AtenStep)]
