"""A warning names the line that called into the package."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sashiko
from sashiko.diagnostics.warn import warn


def test_warnings_name_the_callers_line() -> None:
    """Through what else is called on the way, which may call the package again."""
    inside = {"__name__": "sashiko.driver.somewhere", "warn": warn}
    between = {"__name__": "torch.export"}
    exec(compile("def inner(): warn('of a cache')\ndef outer(): between(inner)", "somewhere.py", "exec"), inside)
    exec(compile("def call(f): f()", "torch.py", "exec"), between)
    inside["between"] = between["call"]  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="of a cache") as found:
        inside["outer"]()  # type: ignore[operator]
    [shown] = found
    assert shown.filename == __file__ and shown.lineno == test_warnings_name_the_callers_line.__code__.co_firstlineno + 8


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.linear = 0, nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        result: torch.Tensor = self.linear(x) * self.count
        return result


@torch.no_grad()
def test_a_model_that_counts_its_calls() -> None:
    with pytest.warns(UserWarning, match="takes count for constant") as found:
        sashiko.compile(Counting().eval(), (torch.randn(2, 3),))
    assert [shown.filename for shown in found if "takes count" in str(shown.message)] == [__file__]
