"""Tracing that takes nothing for granted of free sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import sympy
import torch
from torch.fx.experimental import proxy_tensor, sym_node, symbolic_shapes

from .alone import alone


@contextmanager
def oblivious() -> Iterator[None]:
    """Lets torch look at no free size for being 0 or 1, and where its C++ looks all the same, makes no guard of it. Nor does torch note the
    memory format of each result, for which it would try to prove something about each axis, without any effect here."""
    tracer: Any = proxy_tensor
    node: Any = sym_node.SymNode
    with alone():
        symbolic_shapes.uninteresting_files().add(__file__)  # guards are known by what asks, which is not this file
        noting, guarded = tracer._extract_tensor_metadata, node.guard_bool
        tracer._extract_tensor_metadata = partial(noting, include_contiguity=False)
        node.guard_bool = lambda asked, file, line: bool(asked.hint) if _is_for_strides(asked, file) else guarded(asked, file, line)
        try:
            with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
                yield
        finally:
            tracer._extract_tensor_metadata, node.guard_bool = noting, guarded


def _is_for_strides(asked: Any, file: str) -> bool:
    """Whether ATen asks if a size is 0 or 1 that is neither, or if strides are equal for one being 1: it does so to learn whether a tensor
    is contiguous, as `linear` and `contiguous` do for copies to save. No result depends on it, for operations are in the program as a
    whole and ask again in each call. What a model asks of sizes is asked from no file of C++."""
    if not file.endswith("SymInt.h") or not isinstance(asked.expr, (sympy.Eq, sympy.Ne)) or not asked.has_hint():
        return False
    left, right = asked.expr.args
    return bool(asked.hint) == isinstance(asked.expr, sympy.Ne) and bool((left / right).is_integer or (right / left).is_integer)
