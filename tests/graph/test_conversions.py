"""int() and float() of free sizes, which stay free."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim

from sashiko.diagnostics.errors import InputError
from tests.graph.captures import capture, module, run


def _computed(self: object, x: Tensor) -> Any:
    n = x.shape[0]
    half, kind = int(n / 2), type(n if isinstance(n, int) else 3)
    assert isinstance(3, int) and isinstance(True, int) and not isinstance(1.0, int) and issubclass(bool, int)
    assert kind in (int, float) and {int: "whole"}[kind] == "whole" and int("7") == 7 and int.from_bytes(b"\x01", "big") == 1
    return x[: int(0.7 * n)] * 2, x / float(n), x.new_ones([*map(int, x.shape)]), x[: half + half].view(half, 2, -1)


def test_numbers_of_sizes_are_free() -> None:
    model = module(_computed)
    captured = capture(model, (torch.randn(8, 3),), shapes=({0: Dim("n", min=4)},))
    for n in (4, 9, 10, 100):
        x = torch.randn(n, 3)
        torch.testing.assert_close(run(captured, (x,)), model(x))
    assert "int" not in globals() and "__float__" not in vars(torch.SymInt)


def _of_a_module(text: str) -> Any:
    found: dict[str, Any] = {"torch": torch}
    exec(compile(text, "model.py", "exec"), found)
    return found["forward"]


def test_code_that_compares_types_by_identity_keeps_them() -> None:
    forward = _of_a_module("def forward(self, x): return x[:int(x.shape[0] / 4)] if kind(1) else x\ndef kind(n): return type(n) is int")
    with pytest.raises(InputError, match="== 2"):
        capture(module(forward), (torch.randn(8, 3),), shapes=({0: Dim("n", min=4)},))
    assert run(capture(module(forward), (torch.randn(8, 3),), shapes=({0: Dim.AUTO},)), (torch.randn(8, 3),)).shape == (2, 3)


def test_what_fails_with_free_numbers_alone_is_not_free() -> None:
    """torch takes Python's own types for those of tensors."""
    forward = _of_a_module("def forward(self, x): return x[:int(x.shape[0] / 4)] + torch.ones(3, dtype=int)")
    assert run(capture(module(forward), (torch.randn(8, 3),), shapes=({0: Dim.AUTO},)), (torch.randn(8, 3),)).shape == (2, 3)
    with pytest.raises(InputError, match="== 2"):
        capture(module(forward), (torch.randn(8, 3),), shapes=({0: Dim("n", min=4)},))
