"""Straight-line code of several parts, an instruction of each in turn.

A processor looks ahead some hundred instructions. Of long chains one after the other, as functions are, it sees two or three at a time, and
waits for each of their steps; of chains that lie side by side it sees them all. LLVM keeps about to the order in which code is written
(`Target.schedule`).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

_NAME = re.compile(r"%[\w.]+")

CHAINS = 4
"""How many chains of operations, or partial results, that need nothing of one another go on side by side: they hide the latency of a
multiply-add, and leave registers for what they share."""


def in_turn(parts: Sequence[Sequence[str]]) -> list[str]:
    """The lines of LLVM IR of all parts, in their order and after what they take values of; parts with branches one after the other."""
    if any(line.endswith(":") for part in parts for line in part):
        return [line for part in parts for line in part]
    waiting = {name for part in parts for line in part if (name := _made(line))}
    left = [deque(part) for part in parts if part]
    result: list[str] = []
    while left:
        before = len(result)
        for part in left:
            if waiting.isdisjoint(_NAME.findall(part[0].split(" = ", 1)[-1])):
                result.append(part.popleft())
                waiting.discard(_made(result[-1]))
        assert len(result) > before, "parts that wait for one another"
        left = [part for part in left if part]
    return result


def _made(line: str) -> str:
    """The name that a line gives its value; empty without one."""
    name, equals, _ = line.partition(" = ")
    return name.strip() if equals else ""
