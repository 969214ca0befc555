"""The collector is paused inside, and afterwards as it was before."""

from __future__ import annotations

import gc
from contextlib import ExitStack

import pytest

from sashiko.diagnostics.collector import paused


@pytest.mark.parametrize("before", [True, False])
def test_pauses_and_restores(before: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with pytest.raises(KeyError), paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == before
    finally:
        (gc.enable if was else gc.disable)()


def test_blocks_that_overlap_end_with_the_last() -> None:
    was = gc.isenabled()
    first, second = ExitStack(), ExitStack()
    first.enter_context(paused())
    second.enter_context(paused())
    first.close()
    assert not gc.isenabled()
    second.close()
    assert gc.isenabled() == was
