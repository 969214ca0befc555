"""What torch says while it traces."""

from __future__ import annotations

import logging

import pytest

from sashiko.graph.exporting import quiet


def test_what_torch_logs_of_its_own_algebra_is_hidden(caplog: pytest.LogCaptureFixture) -> None:
    shapes = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    with quiet():
        shapes.warning("Failed to reduce inequalities")  # as it does where a size is rounded up to a multiple
        shapes.warning("news")
    shapes.warning("Failed to reduce inequalities")
    assert caplog.messages == ["news", "Failed to reduce inequalities"]
