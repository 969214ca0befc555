"""Tracing that takes nothing for granted of free sizes but what the model asks of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import sympy
import torch
from torch._subclasses import fake_impls
from torch.fx.experimental import proxy_tensor, sym_node, symbolic_shapes

from . import branches
from .alone import alone

_CONFIG: Any = torch.fx.experimental._config


@contextmanager
def oblivious() -> Iterator[None]:
    """Lets torch look at no computed size for being 0 or 1 that is neither, and where its C++ looks all the same, makes no guard of it.
    Sizes of arguments are 2 or more, as always: those of 0 and 1 are fixed, and torch finds out as much about the others. Nor does torch
    note the memory format of each result, for which it would try to prove something about each axis, without any effect here."""
    places: Mapping[Any, str] = {
        proxy_tensor: "_extract_tensor_metadata", sym_node.SymNode: "guard_bool",
        symbolic_shapes: "_guard_or", symbolic_shapes.ShapeEnv: "_produce_dyn_sizes_from_int_tuple", fake_impls: "_compute_slice_index",
    }
    with alone():
        symbolic_shapes.uninteresting_files().add(__file__)  # guards are known by what asks, which is not this file
        before = [getattr(place, name) for place, name in places.items()]
        noting, guarded, answer, sizes, index = before

        def of_arguments(*args: Any, **kwargs: Any) -> Any:
            with _CONFIG.patch(backed_size_oblivious=False):
                return sizes(*args, **kwargs)

        def cut(size: Any, at: Any) -> Any:
            if isinstance(at, int) and isinstance(there := size >= abs(at), torch.SymBool) and symbolic_shapes.statically_known_true(there):
                branches.note(there.node, True)  # of 1 it may not be so
            found = None if isinstance(size, int) else index(size, at)
            if found is None:  # up to the end of a table, or the length would be one that nothing is known of
                with _CONFIG.patch(backed_size_oblivious=False):
                    found = index(size, at)
            return found

        instead = (
            partial(noting, include_contiguity=False),
            lambda asked, file, line: bool(asked.hint) if _is_for_strides(asked, file) else guarded(asked, file, line),
            lambda asked, default: bool(asked) if _is_that_number(asked, default) else answer(asked, default),
            of_arguments, cut,
        )
        for (place, name), new in zip(places.items(), instead, strict=True):
            setattr(place, name, new)
        try:
            with _CONFIG.patch(backed_size_oblivious=True):
                yield
        finally:
            for (place, name), old in zip(places.items(), before, strict=True):
                setattr(place, name, old)


def _is_that_number(asked: Any, default: bool) -> bool:
    """Whether torch would take a computed size for another number than the 0 or 1 that it is: what is squeezed has another shape then."""
    if not isinstance(asked, torch.SymBool) or not asked.node.has_hint() or bool(asked.node.hint) == default:
        return False
    kind = sympy.Ne if default else sympy.Eq
    return all(isinstance(each, kind) and any(side.is_number for side in each.args) for each in asked.node.expr.atoms(sympy.Rel))


def _is_for_strides(asked: Any, file: str) -> bool:
    """Whether ATen asks if a size is 0 or 1 that is neither, or if strides are equal for one being 1: it does so to learn whether a tensor
    is contiguous, as `linear` and `contiguous` do for copies to save. No result depends on it, for operations are in the program as a
    whole and ask again in each call. What a model asks of sizes is asked from no file of C++ (`branches.py`)."""
    if not file.endswith("SymInt.h") or not isinstance(asked.expr, (sympy.Eq, sympy.Ne)) or not asked.has_hint():
        return False
    left, right = asked.expr.args
    return bool(asked.hint) == isinstance(asked.expr, sympy.Ne) and bool((left / right).is_integer or (right / left).is_integer)
