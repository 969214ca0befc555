"""Which of PyTorch's operations draw random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_DROPOUT = "dropout_p"


def draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operation draws random numbers. Attention says that it does, and does not where nothing is dropped."""
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == _DROPOUT:
            given = args[position] if position < len(args) else kwargs.get(_DROPOUT, argument.default_value)
            return not isinstance(given, (int, float)) or given != 0
    return True
