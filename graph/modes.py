"""Whether models train or are evaluated."""

from __future__ import annotations

import torch
from torch.nn.utils.parametrize import ParametrizationList

# torch's own containers, in which nothing reads the flag. Those that are put into an evaluated model, as parametrizations bring them, have
# that of every new module. A class of somebody else's may read its own.
_CONTAINERS = (
    torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict, ParametrizationList,
)
EVAL = "call model.eval() first"  # what to do about a model that trains


def has_one_mode(model: torch.nn.Module) -> bool:
    """True for the graphs that torch.export and PT2E make. Their operations say themselves whether they train; the flag that every new
    module carries means nothing, and `eval`, which could clear it, is replaced by one that raises."""
    return isinstance(model, torch.fx.GraphModule) and "eval" in vars(model)


def in_training(model: torch.nn.Module) -> str:
    """The names of the first modules in training mode, or an empty string. Containers are what their parts are."""
    parts = {} if has_one_mode(model) else dict(model.named_modules())
    training = [name for name, part in parts.items() if part.training and not has_one_mode(part) and type(part) not in _CONTAINERS]
    names = [name or type(model).__name__ for name in training]
    return f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
