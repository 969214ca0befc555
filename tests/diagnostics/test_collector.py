"""The collector is paused inside, and afterwards as it was before."""

from __future__ import annotations

import gc
import threading
from contextlib import ExitStack

import pytest

from sashiko.diagnostics.collector import paused
from tests.forked import succeeds


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


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("mine", [0, 1, 2])
def test_a_forked_child_waits_for_no_block_of_another_thread(before: bool, mine: int) -> None:
    """mine: blocks of the thread that forks; those end in the child, too."""
    was = gc.isenabled()
    (gc.enable if before else gc.disable)()
    begun, end = threading.Event(), threading.Event()

    def compiling() -> None:
        with paused():
            begun.set()
            end.wait(60)

    thread = threading.Thread(target=compiling)
    thread.start()
    begun.wait()
    try:
        with ExitStack() as blocks:
            for _ in range(mine):
                blocks.enter_context(paused())

            def check() -> bool:
                inside = gc.isenabled()
                blocks.close()
                after = gc.isenabled()
                with paused():
                    again = gc.isenabled()
                return (inside, after, again, gc.isenabled()) == (before and not mine, before, False, before)

            assert succeeds(check)
            assert not gc.isenabled()
    finally:
        end.set()
        thread.join()
        assert gc.isenabled() == before
        (gc.enable if was else gc.disable)()
