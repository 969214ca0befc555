"""Pickling of quantized modules, in the form of their files.

torch's own GraphModule pickles its source text and traces that again, which fails for exported programs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from .encode import decode, encode
from .module import QuantizedModule


def state(module: QuantizedModule) -> tuple[str, dict[str, torch.Tensor]]:
    """Everything that `restore` needs, picklable."""
    data, tensors = encode(module)
    return json.dumps(data, allow_nan=False), tensors


def restore(text: str, tensors: Mapping[str, Any]) -> QuantizedModule:
    """The module of which `state` was taken."""
    return decode(json.loads(text), tensors)
