"""Whether models train or are evaluated."""

from __future__ import annotations

import torch

EVAL = "call model.eval() first"  # what to do about a model that trains


def has_one_mode(model: torch.nn.Module) -> bool:
    """True for the graphs that torch.export and PT2E make. Their operations say themselves whether they train; the flag that every new
    module carries means nothing, and `eval`, which could clear it, is replaced by one that raises."""
    return isinstance(model, torch.fx.GraphModule) and "eval" in vars(model)


def in_training(model: torch.nn.Module) -> str:
    """The names of the first modules in training mode, or an empty string."""
    parts = {} if has_one_mode(model) else dict(model.named_modules())
    names = [name or type(model).__name__ for name, part in parts.items() if part.training and not has_one_mode(part)]
    return f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
