"""Turns: as many at once as there are, in order of coming, none lost."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
import torch

import sashiko
from sashiko.runtime.turns import CALLERS, TURNS, Turn, Turns


def give(turns: Turns, turn: Turn) -> None:
    turns.free.put(turn)
    turns.pass_on()


def test_no_more_at_once_than_turns_and_none_lost() -> None:
    turns, running, most, done = Turns(3), 0, 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, most, done
        for _ in range(300):
            turn = turns.take()
            with lock:
                running += 1
                most = max(most, running)
            if done % 7 == 0:
                time.sleep(0)
            with lock:
                running -= 1
                done += 1
            give(turns, turn)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert done == 16 * 300 and running == 0 and 1 <= most <= 3
    assert turns.free.qsize() == 3


def test_who_waits_first_comes_first() -> None:
    turns, order = Turns(1), list[int]()
    first = turns.take()

    def work(number: int) -> None:
        turn = turns.take()
        order.append(number)
        give(turns, turn)

    threads = []
    for number in range(8):
        threads.append(threading.Thread(target=work, args=(number,)))
        threads[-1].start()
        while len(turns.waiting) <= number:
            time.sleep(0.001)
    give(turns, first)
    for thread in threads:
        thread.join(10)
    assert order == list(range(8))


@pytest.mark.parametrize("served", [False, True])
def test_who_is_interrupted_while_waiting_takes_no_turn(served: bool) -> None:
    """served: whether the turn comes at the moment of the interruption."""
    turns = Turns(1)
    held = turns.take()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if served:
            give(turns, held)
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
        give(turns, held)
    assert turns.free.qsize() == 1


def test_a_turn_that_is_dropped_comes_back_to_who_waits() -> None:
    turns, got = Turns(1), list[Turn]()
    held = turns.take()
    waiting = threading.Thread(target=lambda: got.append(turns.take()), daemon=True)
    waiting.start()
    while not turns.waiting:
        time.sleep(0.001)
    del held
    waiting.join(10)
    assert len(got) == 1 and turns.free.empty()
    got.clear()
    assert turns.free.qsize() == 1


@pytest.mark.parametrize("popped", [False, True])
def test_who_hands_over_may_be_cut_off(popped: bool) -> None:
    """popped: behind the call that takes the first who waits out of the queue; he is not woken either way."""

    class Cut(deque[Any]):
        def popleft(self) -> Any:
            if popped:
                super().popleft()
            raise KeyboardInterrupt

    turns, got = Turns(1), list[Turn]()
    turns.waiting = Cut()
    held = turns.take()
    waiting = threading.Thread(target=lambda: got.append(turns.take()), daemon=True)
    waiting.start()
    while not turns.waiting:
        time.sleep(0.001)
    turns.free.put(held)
    with pytest.raises(KeyboardInterrupt):
        turns.pass_on()
    waiting.join(10)
    assert len(got) == 1 and not turns.waiting and turns.free.empty()


def test_signals_in_calls_lose_no_turn() -> None:
    """Wherever in a call the handler raises."""
    fast, x = sashiko.compile(torch.nn.Linear(8, 8).eval(), torch.randn(1, 8)), torch.randn(1, 8)
    came = list[int]()

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    fast(x)
    count, before = TURNS.free.qsize(), signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(1500):
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + 7e-7 * (number % 700))
                while len(came) == number:  # what the handler raises in a destructor ends no call
                    fast(x)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert TURNS.free.qsize() == count
