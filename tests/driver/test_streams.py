"""Results larger than the caches go around them, those that are read again do not; dynamic shapes choose at the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.testing import assert_close

import sashiko
from sashiko.platforms.host import host
from sashiko.runtime.plan import NativeSegment, Step
from sashiko.runtime.records import LARGE

ROWS = LARGE // 4096
COLUMNS = 1024
TINY_CACHES = replace(host(), l3=LARGE)


class Apply(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(x)


def steps(compiled: sashiko.CompiledModel) -> tuple[Step, ...]:
    (segment,) = compiled.executable.plan.segments
    assert isinstance(segment, NativeSegment)
    return segment.steps


def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first result is read again for the second, by another loop."""
    first = x.softmax(0)
    return first, first.softmax(1)


def narrowed(x: torch.Tensor) -> torch.Tensor:
    return torch.clamp(torch.round(x.tanh() * 100), -128, 127).to(torch.int8)


@pytest.mark.parametrize(
    ("function", "rows", "around"),
    [
        (lambda x: x.softmax(-1), ROWS, 1),
        (lambda x: x.softmax(-1), ROWS - 1, 0),
        (lambda x: x.round().sum(-1), ROWS, 0),  # of whole numbers, which is exact in any order
        (twice, ROWS, 1),
        (narrowed, 4 * ROWS, 1),
        (narrowed, 4 * ROWS - 1, 0),
    ],
    ids=["large", "small", "small results", "read again", "narrow", "small and narrow"],
)
def test_static_shapes(
    function: Callable[[torch.Tensor], object], rows: int, around: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SASHIKO_DUMP", str(tmp_path))
    x = torch.randn(rows, COLUMNS)
    compiled = sashiko.compile(Apply(function).eval(), (x,), target=TINY_CACHES)
    assert all(step.large is None for step in steps(compiled))
    (code,) = tmp_path.glob("*/*_llvm.txt")
    assert code.read_text().count("call void @llvm.x86.sse.sfence()") == (around if host().has("avx2") else 0)
    within = {"atol": 1, "rtol": 0} if function is narrowed else {}
    assert_close(compiled(x), function(x.double()), check_dtype=False, **within)


@pytest.mark.parametrize("l3", [LARGE, 8 * LARGE, 16 * LARGE])
def test_a_narrow_result_counts_as_what_it_is_computed_from(l3: int) -> None:
    x = torch.randn(8 * ROWS, COLUMNS)
    compiled = sashiko.compile(Apply(narrowed).eval(), (x,), dynamic_shapes=({0: Dim("rows", min=1)},), target=replace(host(), l3=l3))
    (step,) = steps(compiled)
    assert step.large_from == max(LARGE, l3 // 4)
    for rows in (1, 4 * ROWS, 8 * ROWS):
        assert_close(compiled(x[:rows]), narrowed(x[:rows]), atol=1, rtol=0)


def test_dynamic_shapes(tmp_path: Path) -> None:
    x = torch.randn(ROWS, COLUMNS)
    model = Apply(lambda x: x.softmax(-1)).eval()
    unbounded = sashiko.compile(model, (x,), dynamic_shapes=({0: Dim("rows", min=1)},), target=TINY_CACHES)
    (step,) = steps(unbounded)
    assert (step.large is not None) == host().has("avx2")
    unbounded.save(tmp_path / "model")
    loaded = sashiko.load(tmp_path / "model")
    for rows in (1, ROWS - 1, ROWS, ROWS + 3, 2 * ROWS):
        x = torch.randn(rows, COLUMNS)
        assert_close(unbounded(x), x.softmax(-1))
        assert torch.equal(loaded(x), unbounded(x))
    few = sashiko.compile(model, (x[: ROWS // 2],), dynamic_shapes=({0: Dim("rows", min=1, max=ROWS - 1)},), target=TINY_CACHES)
    assert steps(few)[0].large is None


def test_no_last_level_cache_is_known() -> None:
    x = torch.randn(ROWS, COLUMNS)
    compiled = sashiko.compile(nn.Softmax(-1).eval(), (x,), dynamic_shapes=({0: Dim("rows", min=1)},), target=replace(host(), l3=0))
    assert steps(compiled)[0].large is None
