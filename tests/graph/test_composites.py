"""Composite operations that have rows: they are not decomposed, and give what their decomposition gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sashiko.graph.capture import from_exported
from sashiko.graph.exporting import quiet
from tests.graph.captures import Forward, capture, module, run

COMPOSITE: dict[str, tuple[Forward, tuple[torch.Tensor, ...]]] = {
    "layer_norm": (lambda m, x, w: F.layer_norm(x, (6,), w, None, 1e-3), (torch.randn(2, 4, 6), torch.randn(6))),
    "layer_norm of bf16": (lambda m, x: F.layer_norm(x, (4, 6)), (torch.randn(2, 4, 6).bfloat16(),)),
    "group_norm": (lambda m, x, w: F.group_norm(x, 3, w, None, 1e-3), (torch.randn(2, 6, 4, 5), torch.randn(6))),
    "group_norm of bf16": (lambda m, x: F.group_norm(x, 2), (torch.randn(2, 4).bfloat16(),)),
    "instance_norm": (lambda m, x, w: F.instance_norm(x, None, None, w, w + 1), (torch.randn(2, 6, 4, 5), torch.randn(6))),
    "instance_norm of bf16": (lambda m, x: F.instance_norm(x), (torch.randn(2, 3, 20).bfloat16(),)),
    "instance_norm by statistics": (
        lambda m, x, w: F.instance_norm(x, w, w.abs(), w, w, False), (torch.randn(2, 6, 4, 5), torch.randn(6)),
    ),
    "zeros around": (lambda m, x: F.pad(x, (1, 2, 0, 3)), (torch.randint(-9, 9, (2, 3, 4)),)),
    "numbers around, and a cut": (lambda m, x: F.pad(x, (-1, 2), "constant", 1.5), (torch.randn(2, 3, 4),)),
    "concat": (lambda m, x, y: torch.concat((x, y)) + torch.concatenate([y, x]), (torch.randn(2, 3), torch.randint(9, (4, 3)).flip(0)[:2])),
    "concat of complex numbers": (lambda m, x, y: torch.concat((x * 1j, y), -1).abs(), (torch.randn(2, 3), torch.randn(2, 1))),
    "shapes": (lambda m, x, y: x.unflatten(1, (-1, 2)) + y.view_as(x).reshape_as(y), (torch.randn(3, 4), torch.randn(3, 2, 2))),
    "shapes of complex numbers": (lambda m, x: (x * 1j).unflatten(1, (2, -1)).flatten(1).imag * 2, (torch.randn(3, 4),)),
    "dropout": (lambda m, x: F.dropout(x, 0.5, False) + 1, (torch.randn(3, 5),)),
    "patches": (lambda m, x, w: F.conv2d(x, w, None, 2), (torch.randn(1, 3, 4, 6), torch.randn(5, 3, 2, 2))),
    "patches of a line": (lambda m, x, w: F.conv1d(x, w, None, (2,)), (torch.randn(1, 3, 6), torch.randn(5, 3, 2))),
    "convolution without a batch": (lambda m, x, w: F.conv2d(x, w, None, 2), (torch.randn(3, 4, 6), torch.randn(5, 3, 2, 2))),
    "difference": (lambda m, x: torch.diff(x, 2, -2), (torch.randint(-9, 9, (3, 5, 4)),)),
    "difference with ends": (lambda m, x, y: torch.diff(x, prepend=y, append=y), (torch.randn(3, 5), torch.randn(3, 1))),
    "difference of bools": (lambda m, x: torch.diff(x), (torch.rand(3, 5) > 0.5,)),
    "conversions": (lambda m, x: x.to(torch.float64) + x.to("cpu").type_as(x).double(), (torch.randn(3, 5),)),
    "logic": (lambda m, x, y: (x & y) | (x.expand_as(y) & True), (torch.rand(3) > 0.5, torch.rand(2, 3) > 0.5)),
    "integer logic": (lambda m, x, y: x & y, (torch.randint(0, 99, (3,)), torch.randint(0, 99, (2, 3), dtype=torch.int32))),
}


@pytest.mark.parametrize("name", COMPOSITE)
def test_composites_are_not_traced_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What their rows give is, to the bit, what the decomposed program gives."""
    forward, args = COMPOSITE[name]
    model = module(forward)
    with torch.no_grad(), quiet():
        program = torch.export.export(model, args)
    decomposed = run(from_exported(program.run_decompositions(), decomposed=True), args)
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", None)
    captured = capture(model, args)
    torch.testing.assert_close(run(captured, args), decomposed, rtol=0, atol=0)
    torch.testing.assert_close(run(captured, args), model(*args))
