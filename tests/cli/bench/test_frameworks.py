"""What the candidates make of a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from sashiko.cli.bench.frameworks import attends
from tests.driver.functions import Apply

X, W = torch.randn(2, 8, 16), torch.randn(16, 16)
IMAGE = torch.randn(1, 3, 8, 8)


@pytest.mark.parametrize(("function", "example", "expected"), [
    (lambda x: nn.functional.scaled_dot_product_attention(x, x, x), X, True),
    (lambda x: (x @ x.transpose(-1, -2)).softmax(-1) @ x, X, True),
    (lambda x: ((x @ W).relu() @ W).softmax(-1) @ W, X, False),
    (lambda x: ((x.bfloat16() @ W.bfloat16()).softmax(-1) @ W.bfloat16()).float(), X, False),
    (lambda x: x @ x.transpose(-1, -2), X, False),
    (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4), nn.Softmax(-1)).eval(), IMAGE, False),
])  # fmt: skip
def test_which_models_openvino_quantizes_as_transformers(
    function: Callable[[torch.Tensor], torch.Tensor], example: torch.Tensor, expected: bool
) -> None:
    openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed")
    assert attends(openvino.convert_model(Apply(function).eval(), example_input=(example,))) == expected
