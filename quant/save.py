"""Saved quantized modules: one file with the program, its tensors and the record of how it was made. No pickle, no code.

    program      JSON text
    TENSOR       parameters and buffers under their names in the program, after "tensor."
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from ..graph import container
from .encode import decode, encode
from .module import QuantizedModule

FORMAT = "sashiko-quantized"
VERSION = 1
_PREFIX = "tensor."


def save(module: QuantizedModule, path: str | os.PathLike[str]) -> None:
    """Writes a quantized module to one file; an older file is replaced whole. Raises Unsupported for what has no form in a file."""
    data, tensors = encode(module)
    entries = {"program": container.text_tensor(data), **{f"{_PREFIX}{name}": tensor for name, tensor in tensors.items()}}
    container.write(path, FORMAT, VERSION, entries, {})


def load(path: str | os.PathLike[str]) -> QuantizedModule:
    """Reads a module that `QuantizedModule.save` wrote; needs neither the model nor its calibration data.

    Its tensors stay in the mapped file: do not change the file while the module is used. Raises ArtifactError when the file is damaged,
    something else or from a newer version, and what `open` raises.
    """
    return container.read(path, FORMAT, VERSION, _assemble)


def _assemble(metadata: Mapping[str, str], entries: Mapping[str, torch.Tensor]) -> QuantizedModule:
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in entries.items() if name.startswith(_PREFIX)}
    return decode(container.text_of(entries["program"]), tensors)
