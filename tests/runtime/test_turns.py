"""Turns: as many at once as there are, in order of coming, none lost."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

import pytest

from sashiko.runtime.turns import CALLERS, Turns


def test_no_more_at_once_than_turns_and_none_lost() -> None:
    turns, running, most, done = Turns(3), 0, 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, most, done
        for _ in range(300):
            turns.take()
            with lock:
                running += 1
                most = max(most, running)
            if done % 7 == 0:
                time.sleep(0)
            with lock:
                running -= 1
                done += 1
            turns.give()

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert done == 16 * 300 and running == 0 and 1 <= most <= 3
    for _ in range(3):
        turns.take()  # all are back


def test_who_waits_first_comes_first() -> None:
    turns, order = Turns(1), list[int]()
    turns.take()

    def work(number: int) -> None:
        turns.take()
        order.append(number)
        turns.give()

    threads = []
    for number in range(8):
        threads.append(threading.Thread(target=work, args=(number,)))
        threads[-1].start()
        while len(turns._waiting) <= number:
            time.sleep(0.001)
    turns.give()
    for thread in threads:
        thread.join(10)
    assert order == list(range(8))


@pytest.mark.parametrize("served", [False, True])
def test_who_is_interrupted_while_waiting_takes_no_turn(served: bool) -> None:
    """served: whether the turn comes at the moment of the interruption."""
    turns = Turns(1)
    turns.take()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if served:
            turns.give()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            turns.take()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert CALLERS[1] == 0
    if not served:
        turns.give()
    following = threading.Thread(target=turns.take, daemon=True)
    following.start()
    following.join(10)
    assert not following.is_alive()
