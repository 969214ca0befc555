"""What a caller may have switched on around our work with tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

CPU = torch.device("cpu")


@contextmanager
def undisturbed(device: torch.device = CPU) -> Iterator[None]:
    """Inside, new tensors are on the device and products are as precise as their operands, whatever `torch.set_default_device` and
    `torch.autocast` say. The default dtype belongs to all threads, and cannot be changed for one: our tensors name theirs."""
    with device, torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def unobserved() -> Iterator[None]:
    """The same for work with plain tensors alone: no class of tensors and no mode is asked about a call, not even which device new tensors
    are on, so that reading a shape or a dtype costs nothing. torch.export and models need `undisturbed`."""
    with torch._C.DisableTorchFunction(), torch.autocast("cpu", enabled=False):
        yield
