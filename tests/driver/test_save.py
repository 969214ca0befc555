"""Saved models, read by a new process that knows nothing of the model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.testing import assert_close

import sashiko

# Reads models and a list of calls of each, and writes the results.
READER = """
import sys
import torch, sashiko
folder = sys.argv[1]
results = {}
for name, calls in torch.load(f"{folder}/calls").items():
    model = sashiko.load(f"{folder}/{name}")
    results[name] = [model(*args, **kwargs) for args, kwargs in calls]
    assert "left to PyTorch" in model.explain(), "the explanation is saved too"
torch.save(results, f"{folder}/results")
"""

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


def in_new_process(models: Mapping[str, tuple[sashiko.CompiledModel, Calls]], folder: Path) -> dict[str, list[Any]]:
    """Saves models by name, and returns what a new process gets for the calls of each."""
    for name, (compiled, _) in models.items():
        compiled.save(folder / name)
    torch.save({name: calls for name, (_, calls) in models.items()}, folder / "calls")
    done = subprocess.run([sys.executable, "-P", "-c", READER, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results: dict[str, list[Any]] = torch.load(folder / "results")
    return results


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.down(self.norm(nn.functional.gelu(self.up(x))))
        return {"y": y, "best": y.argmax(-1)}


class WithAten(Network):
    """Some operations have no native form."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = super().forward(x)["y"]
        ordered, places = torch.sort(y, dim=-1)
        return {"ordered": ordered * 2, "places": places, "inverse": torch.linalg.inv(y.t() @ y + 2 * torch.eye(32))}


def fp32(x: torch.Tensor) -> sashiko.CompiledModel:
    return sashiko.compile(Network().eval(), (x,))


def int8(x: torch.Tensor) -> sashiko.CompiledModel:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).eval()
    return sashiko.quantize_and_compile(model, [torch.randn(8, 32) for _ in range(3)] + [x], dynamic_shapes=({0: Dim("rows", min=1)},))


def with_aten(x: torch.Tensor) -> sashiko.CompiledModel:
    return sashiko.compile(WithAten().eval(), (x,))


def with_names(x: torch.Tensor) -> sashiko.CompiledModel:
    free = {"x": {0: Dim("rows", min=1, max=9)}}
    return sashiko.compile(Network().eval(), {"x": x}, dynamic_shapes=free)


def test_a_new_process_gets_the_same_results(tmp_path: Path) -> None:
    x, y = torch.randn(2, 6, 32).unbind()
    models: dict[str, tuple[sashiko.CompiledModel, Calls]] = {
        make.__name__: (make(x), [((x,), {}), ((y,), {})]) for make in (fp32, int8, with_aten)
    }
    models["with_names"] = with_names(x), [((), {"x": torch.randn(rows, 32)}) for rows in (1, 4, 9)]
    results = in_new_process(models, tmp_path)
    for name, (compiled, calls) in models.items():
        assert_close(results[name], [compiled(*args, **kwargs) for args, kwargs in calls], rtol=0, atol=0)


def test_names_and_bounds_are_saved(tmp_path: Path) -> None:
    with_names(torch.randn(4, 32)).save(tmp_path / "model.sashiko")
    loaded = sashiko.load(tmp_path / "model.sashiko")
    with pytest.raises(sashiko.InputError, match=r"x.*dimension 0.*10(.|\n)*9"):
        loaded(x=torch.randn(10, 32))
    with pytest.raises(sashiko.InputError, match="keyword arguments"):
        loaded(y=torch.randn(4, 32))


def test_a_saved_model_is_that_of_the_moment(tmp_path: Path) -> None:
    model, x = nn.Linear(8, 4).eval(), torch.randn(3, 8)
    compiled = sashiko.compile(model, (x,))
    with torch.no_grad():
        model.weight.mul_(2)
        expected = model(x)
        compiled.save(tmp_path / "model.sashiko")  # changed after compilation, before saving
        model.weight.zero_()
    assert_close(sashiko.load(tmp_path / "model.sashiko")(x), expected)


def test_what_cannot_be_saved_says_so(tmp_path: Path) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(x)
            return x + self.seen

    compiled = sashiko.compile(Counts().eval(), (torch.randn(4),))
    with pytest.raises(sashiko.Unsupported, match="writes its own buffers"):
        compiled.save(tmp_path / "model.sashiko")
    assert list(tmp_path.iterdir()) == []
