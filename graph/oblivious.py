"""Tracing that takes nothing for granted of free sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor

from .alone import alone


@contextmanager
def oblivious() -> Iterator[None]:
    """Lets torch look at no free size for being 0 or 1. Nor does it note the memory format of each result, for which it would try to
    prove something about each axis, without any effect here."""
    tracer: Any = proxy_tensor
    with alone():
        noting = tracer._extract_tensor_metadata
        tracer._extract_tensor_metadata = partial(noting, include_contiguity=False)
        try:
            with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
                yield
        finally:
            tracer._extract_tensor_metadata = noting
