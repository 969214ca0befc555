"""Turns: as many at once as there are, in order of coming, none lost."""

from __future__ import annotations

import threading
import time

from sashiko.runtime.turns import Turns


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
