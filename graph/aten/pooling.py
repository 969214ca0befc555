"""Pooling that would fix the size of an axis as it is traced: torch takes the size of a window for a constant, be it that of the axis, and
reads the length of what `max_pool1d` is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

_SAME = "input", "kernel_size", "stride", "padding"
_MAXIMUM = (*_SAME, "dilation", "ceil_mode", "return_indices")
_MEAN = (*_SAME, "ceil_mode", "count_include_pad", "divisor_override")
_OTHERWISE = "return_indices", "divisor_override"  # with which it is more than the maximum, or not the mean
_POOLS: dict[Any, tuple[int, Sequence[str], Callable[..., Any]]] = {
    **{getattr(of, f"max_pool{n}d"): (n, _MAXIMUM, torch.amax) for of in (torch, torch.nn.functional) for n in (1, 2, 3)},
    **{getattr(torch.nn.functional, f"avg_pool{n}d"): (n, _MEAN, torch.mean) for n in (1, 2, 3)},
}
_LINES = torch.max_pool1d, torch.nn.functional.max_pool1d


class FreeAxes(TorchFunctionMode):
    """Takes the maximum or mean along axes that a window is known to cover, and pools along the others so that they stay free."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = None
        if func in _POOLS:
            given = {**dict(zip(_POOLS[func][1], args, strict=False)), **(kwargs or {})}
            found = _taken_whole(func, given)
            found = _along_lines(func, given) if found is None else found
        return func(*args, **(kwargs or {})) if found is None else found


def _taken_whole(pool: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """What a pooling gives; None where no window has a free size, or not that of an axis without a border."""
    rank, _, along = _POOLS[pool]
    x, kernel, stride = given["input"], _each(given["kernel_size"], rank), _each(given.get("stride"), rank)
    if not any(isinstance(size, torch.SymInt) for size in kernel) or any(given.get(name) for name in _OTHERWISE):
        return None
    edges = zip(kernel, x.shape[-rank:], _each(given.get("padding", 0), rank), _each(given.get("dilation", 1), rank), strict=True)
    whole = [n for n, (window, size, *others) in enumerate(edges) if others == [0, 1] and statically_known_true(window == size)]
    if not whole or not x.is_floating_point():
        return None
    x = along(x, [n - rank for n in whole], keepdim=True)
    kernel, stride = ([1 if n in whole else size for n, size in enumerate(sizes)] for sizes in (kernel, stride or kernel))
    return x if len(whole) == rank else pool(**{**given, "input": x, "kernel_size": kernel, "stride": stride})


def _along_lines(pool: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """What `max_pool1d` gives along a free length, by what gives the places as well; None otherwise, and for what it alone refuses."""
    x = given["input"]
    if pool not in _LINES or given.get("return_indices") or not isinstance(x.shape[-1], torch.SymInt) or not x.is_floating_point():
        return None
    if any(2 * edge > size for edge, size in zip(_each(given.get("padding", 0), 1), _each(given["kernel_size"], 1), strict=False)):
        return None
    same = {name: value for name, value in given.items() if name != "return_indices"}
    return torch.max_pool1d_with_indices(**{**same, "stride": _each(given.get("stride"), 1)})[0]


def _each(given: Any, rank: int) -> list[Any]:
    """What is given for all axes, or for each of them."""
    sizes = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    return sizes * rank if len(sizes) == 1 else sizes
