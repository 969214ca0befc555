"""Constants that several compiled models have in common: graphs of one model, or one model compiled for several sizes.

Each derives them for itself, since nothing tells whether a weight was written through `.data` in between, and then keeps what another
one has already if it is the same, byte for byte.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch

from ..diagnostics.forks import Lock

_LEAST_BYTES = 64 << 10  # smaller constants are not worth the search
_PIECE = 256 << 10  # bytes compared at once, which stay in a cache

_Key = tuple[object, ...]
_known: dict[_Key, list[weakref.ref[torch.Tensor]]] = {}
_lock = Lock()  # a reference may die, and be forgotten, while its thread is in here


def in_common(tensor: torch.Tensor, watched: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor in use that was derived from the same memory and is equal to `tensor` in every byte; else `tensor`, which others may get
    from now on and nobody may write to. What lies in the memory of the watched tensors themselves stays there."""
    sources = tuple(each.untyped_storage().data_ptr() for each in watched)
    if not sources or tensor.nbytes < _LEAST_BYTES or tensor.untyped_storage().data_ptr() in sources:
        return tensor
    key = (sources, tensor.dtype, tensor.shape)
    with _lock:
        others = [reference() for reference in _known.get(key, ())]
    for other in others:
        if other is not None and _equal(other, tensor):
            return other
    with _lock:
        _known.setdefault(key, []).append(weakref.ref(tensor, lambda reference: _forget(key, reference)))
    return tensor


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bytes are. `torch.equal` would wait for its threads in a forked child, where they are not."""
    a, b = (tensor.reshape(-1).view(torch.uint8).numpy() for tensor in (one, other))
    return all(np.array_equal(a[start : start + _PIECE], b[start : start + _PIECE]) for start in range(0, len(a), _PIECE))


def _forget(key: _Key, reference: weakref.ref[torch.Tensor]) -> None:
    with _lock:
        _known[key].remove(reference)
        if not _known[key]:
            del _known[key]
