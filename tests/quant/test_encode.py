"""Files with a right checksum whose program, tensors and record do not fit each other are refused when they are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sashiko
from sashiko.diagnostics.errors import ArtifactError
from sashiko.graph import container
from sashiko.quant import quantize
from sashiko.quant.encode import encode
from sashiko.quant.save import FORMAT, VERSION


def _symbols(item: Any) -> Any:
    """Other names for all symbols."""
    if isinstance(item, dict):
        return {key: "zz" if key == "symbol" else _symbols(part) for key, part in item.items()}
    return [_symbols(part) for part in item] if isinstance(item, list) else item


WEIGHT, SCALE, ZERO = "tensor.0.weight_int8", "tensor.0.weight_scale", "tensor.0.weight_zero_point"
INCONSISTENT: dict[str, tuple[str, Callable[[Any, dict[str, torch.Tensor]], None]]] = {
    "short weight": ("0.weight_int8 is torch.int8", lambda d, t: t.update({WEIGHT: t[WEIGHT][:-1].clone()})),
    "short scale": ("0.weight_scale is torch.float32", lambda d, t: t.update({SCALE: t[SCALE][:-1].clone()})),
    "float weight": ("0.weight_int8 is torch.float32", lambda d, t: t.update({WEIGHT: t[WEIGHT].float()})),
    "scale of NaN": ("the scale of dequantize", lambda d, t: t.update({SCALE: t[SCALE] * float("nan")})),
    "infinite scale": ("the scale of dequantize", lambda d, t: t.update({SCALE: t[SCALE] / 0})),
    "activations": ("the scale of quantize", lambda d, t: _call(d, "quantize_per_tensor")["tuple"].__setitem__(1, {"float": "nan"})),
    "zero points": ("not within -127..127", lambda d, t: t.update({ZERO: t[ZERO] + 2**40})),
    "counts": ("less than 0 times", lambda d, t: d["record"]["sites"][0]["ranges"][0]["histogram"]["counts"].__setitem__(0, -17)),
    "no counts": ("counts nothing", lambda d, t: d["record"]["sites"][0]["ranges"][0]["histogram"].update(counts=[0, 0])),
    "more strides": ("the file is damaged", lambda d, t: d["graph"]["attributes"]["0.weight_int8"].update(ones=[3])),
    "symbols": ("assumes something of 'zz'", lambda d, t: d["gate"].update(assumed=_symbols(d["gate"]["assumed"]))),
}


def _call(data: Any, operator: str) -> Any:
    """The arguments of a call."""
    return next(node[3] for node in data["graph"]["nodes"] if operator in str(node[2]))


class Even(nn.Module):
    """Asks something of a size that the gate has to ask, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() if x.shape[2] % 2 else x


@cache
def _consistent() -> tuple[str, dict[str, torch.Tensor]]:
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Flatten(2), nn.Conv1d(8, 4, 3), Even()).eval()
    data, tensors = encode(quantize(model, [torch.randn(3, 4, 9)], preset="int8-symmetric"))
    assert data["gate"]["assumed"]
    return json.dumps(data), {f"tensor.{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", INCONSISTENT)
def test_parts_that_do_not_fit_each_other(name: str, tmp_path: Path) -> None:
    text, tensors = _consistent()
    data, tensors, path = json.loads(text), dict(tensors), tmp_path / "small"
    message, change = INCONSISTENT[name]
    container.write(path, FORMAT, VERSION, {"program": container.text_tensor(data), **tensors}, {})
    assert sashiko.load(path)(torch.randn(2, 4, 9)).shape == (2, 4, 5)
    change(data, tensors)
    container.write(path, FORMAT, VERSION, {"program": container.text_tensor(data), **tensors}, {})
    with pytest.raises(ArtifactError, match=message):
        sashiko.load(path)
