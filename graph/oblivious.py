"""Tracing that takes nothing for granted of free sizes but what the model asks of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType
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
    """Lets torch look at no computed size for being 0 or 1 that is neither, and makes no guard of how tensors lie in memory: one that is
    not known to have no gaps is taken to have some. Sizes of arguments are 2 or more, as always: those of 0 and 1 are fixed, and torch
    finds out as much about the others. Nor does torch note the memory format of each result, for which it would try to prove something
    about each axis, without any effect here."""
    places: Sequence[tuple[Any, str]] = (
        (proxy_tensor, "_extract_tensor_metadata"), (torch._C, "_conv_determine_backend_memory_format"), (sym_node.SymNode, "has_hint"),
        (symbolic_shapes, "_guard_or"), (symbolic_shapes.ShapeEnv, "_produce_dyn_sizes_from_int_tuple"),
        (fake_impls, "_compute_slice_index"),
    )
    with alone():
        symbolic_shapes.uninteresting_files().add(__file__)  # guards are known by what asks, which is not this file
        before = [getattr(place, name) for place, name in places]
        noting, order, hinted, answer, sizes, index = before

        def of_arguments(*args: Any, **kwargs: Any) -> Any:
            with _CONFIG.patch(backed_size_oblivious=False):
                return sizes(*args, **kwargs)

        def ordered(image: Any, *others: Any) -> Any:  # the memory format that a convolution gives its result
            env = image.fake_mode.shape_env
            with nullcontext() if env is None else env.suppress_guards():
                return order(image, *others)

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
            ordered,
            lambda node: hinted(node) and _is_asked_by_python(sys._getframe(1)),
            lambda asked, default: bool(asked) if _is_that_number(asked, default) else answer(asked, default),
            of_arguments, cut,
        )
        for (place, name), new in zip(places, instead, strict=True):
            setattr(place, name, new)
        try:
            with _CONFIG.patch(backed_size_oblivious=True):
                yield
        finally:
            for (place, name), old in zip(places, before, strict=True):
                setattr(place, name, old)


def _is_asked_by_python(frame: FrameType) -> bool:
    """Whether this function, which is what called `has_hint` as far as Python knows, did so. Where it called C++ that did, ATen wants to
    know by it whether it may make guards to learn if a tensor has gaps, as `contiguous` and `reshape` do for copies to save. In a program
    as a whole, copies cost nothing where they are not needed."""
    return "has_hint" in frame.f_code.co_names


def _is_that_number(asked: Any, default: bool) -> bool:
    """Whether torch would take a computed size for another number than the 0 or 1 that it is: what is squeezed has another shape then."""
    if not isinstance(asked, torch.SymBool) or not asked.node.has_hint() or bool(asked.node.hint) == default:
        return False
    kind = sympy.Ne if default else sympy.Eq
    return all(isinstance(each, kind) and any(side.is_number for side in each.args) for each in asked.node.expr.atoms(sympy.Rel))
