"""Graphs that PyTorch runs as Dynamo made them, since what AOTAutograd makes of them is wrong, or has arguments that no code takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph
from torch.overrides import TorchFunctionMode

from ..diagnostics.errors import Unsupported


def refuse_nested(given: Sequence[Any]) -> None:
    """Unsupported for nested tensors: what a call passes for the number of elements in their rows has no value."""
    if any(isinstance(tensor, torch.Tensor) and tensor.is_nested for tensor in given):
        raise Unsupported("the graph takes a nested tensor")


class Windows(TorchFunctionMode):
    """Looks at the windows (`Tensor.unfold`) of a trace, and whether their memory is overwritten later: torch's functionalization makes
    zeros of what lies between windows then, and sums of what several of them hold."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[torch.Tensor, int | None]] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "").partition(".")[0] == "unfold" and isinstance(result, torch.Tensor):
            self._seen.append((result, _version(result)))
        return result

    def refuse_writes(self, graph: Graph) -> None:
        """Unsupported for the functional graph of the trace if it writes through windows."""
        changed = any(before is None or _version(tensor) != before for tensor, before in self._seen)
        if changed and any(node.target is torch.ops.aten.unfold_backward.default for node in graph.nodes):
            raise Unsupported("the graph writes to what it sees through windows (Tensor.unfold)")


def _version(tensor: torch.Tensor) -> int | None:
    try:
        return tensor._version
    except RuntimeError:  # made under inference mode
        return None
