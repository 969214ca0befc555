"""What tracing took for granted of sizes, without what it asked for the strides of results alone."""

from __future__ import annotations

import traceback
from collections.abc import Mapping

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..diagnostics.errors import InputError

_FOR_STRIDES = {"_reshape_view_helper_core_alg", "matmul"}
"""Functions of PyTorch that reshape what may or may not be contiguous."""


def guards(env: ShapeEnv | None) -> tuple[sympy.Basic, ...]:
    """The guards of a trace, each once. That a reshape found sizes unequal is none: what it does then is right for equal ones, too."""
    found = env.guards if env is not None else ()
    asked = (guard.expr for guard in found if not (isinstance(guard.expr, sympy.Ne) and _for_strides(guard.sloc.framework_loc)))
    return tuple(dict.fromkeys(asked))


def another_way(assumption: object, sizes: Mapping[str, object], hint: str) -> InputError:
    """What is said of sizes that another program would be traced for."""
    here = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    return InputError(f"the model takes another way for these sizes: it was captured where {assumption}, and here {here}", hint=hint)


def _for_strides(place: traceback.FrameSummary | str | None) -> bool:
    return isinstance(place, traceback.FrameSummary) and place.name in _FOR_STRIDES and place.filename.startswith(torch.__path__[0])
