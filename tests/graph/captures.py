"""Modules made of a function, captured and run by the reference interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sashiko.graph import interpret, passes
from sashiko.graph.capture import Captured, export, from_exported
from sashiko.graph.simplify import canonical, cse
from sashiko.graph.verify import verify

Forward = Callable[..., Any]
SIMPLIFYING = (passes.Pass("canonical", canonical), passes.Pass("cse", cse))


def run(captured: Captured, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
    """One call of a captured model, before and after simplification, with its writes carried out once."""
    flat = captured.flatten(args, kwargs or {})
    tensors, env = captured.bind(flat)
    declared = captured.declared
    verify(captured.graph, declared)
    outputs = interpret.run(captured.graph, tensors, env)
    again = interpret.run(passes.run(captured.graph, SIMPLIFYING, declared=declared), tensors, env)
    for a, b in zip(outputs, again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    for write in captured.mutations:
        tensors[write.input].copy_(outputs[write.output])
    return captured.results(flat, outputs, env)


def module(forward: Forward, **parts: Any) -> nn.Module:
    """A module in evaluation mode with the given forward(self, ...), submodules and buffers."""

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                if isinstance(part, torch.Tensor):
                    self.register_buffer(name, part)
                else:
                    setattr(self, name, part)

    Made.forward = forward
    return Made().eval()


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, shapes: Any = None) -> Captured:
    return from_exported(export(model, args, kwargs, shapes), decomposed=True)


class Causal(nn.Module):
    """Attention weights under a mask that is computed for each pair of positions by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        earlier = torch.vmap(torch.vmap(torch.ge, (None, 0)), (0, None))(places, places)
        return (x @ self.keys(x).mT).masked_fill(~earlier, -1e9).softmax(-1)
