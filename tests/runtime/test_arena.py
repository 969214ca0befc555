"""Places of buffers: no overlap while both live, close to the least memory possible, memory handed on in place."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from sashiko.runtime.arena import ALIGN, SLACK, Layout, Life, arrange, padded
from sashiko.runtime.memory import HUGE, Arena


@st.composite
def programs(draw: st.DrawFn) -> list[Life]:
    """Buffers in order of first use; some want the memory of one that ends where they begin."""
    found: list[Life] = []
    for _ in range(draw(st.integers(0, 25))):
        first = draw(st.integers(0, 12))
        candidates = [n for n, life in enumerate(found) if life.last == first]
        inherits = draw(st.sampled_from(candidates)) if candidates and draw(st.booleans()) else None
        found.append(Life(draw(st.integers(0, 5000)), first, first + draw(st.integers(0, 5)), inherits))
    return found


def chain(lives: list[Life], number: int) -> set[int]:
    """The buffer and all those whose memory it may have, however many times it was handed on."""
    found = {number}
    parent = lives[number].inherits
    while parent is not None:
        found.add(parent)
        parent = lives[parent].inherits
    return found


def overlaps(lives: list[Life], layout: Layout, a: int, b: int) -> bool:
    start_a, start_b = layout.offsets[a], layout.offsets[b]
    return start_a < start_b + padded(lives[b].nbytes) and start_b < start_a + padded(lives[a].nbytes)


@settings(max_examples=300, deadline=None)
@given(programs())
def test_live_buffers_never_overlap(lives: list[Life]) -> None:
    layout = arrange(lives)
    for a, first in enumerate(lives):
        assert layout.offsets[a] % ALIGN == 0
        assert layout.offsets[a] + first.nbytes + SLACK <= layout.nbytes
        for b in range(a):
            second = lives[b]
            if first.first > second.last or second.first > first.last or not overlaps(lives, layout, a, b):
                continue
            # Sharing while both live is right only in the one step where one ends and its heir begins.
            assert a in chain(lives, b) or b in chain(lives, a)
            assert first.first == second.last or second.first == first.last


def lower_bound(lives: list[Life]) -> int:
    """The most bytes alive at one time without sharing by inheritance; no arrangement of such buffers is smaller."""
    moments = {life.first for life in lives}
    return max((sum(padded(life.nbytes) for life in lives if life.first <= moment <= life.last) for moment in moments), default=0)


@settings(max_examples=200, deadline=None)
@given(programs())
def test_never_below_the_lower_bound_without_inheritance(lives: list[Life]) -> None:
    plain = [Life(life.nbytes, life.first, life.last) for life in lives]
    assert arrange(plain).nbytes >= lower_bound(plain)
    assert arrange(plain).nbytes <= sum(padded(life.nbytes) for life in plain)


def test_close_to_the_lower_bound() -> None:
    rng = random.Random(1)
    ratios = []
    for _ in range(50):
        firsts = [rng.randrange(100) for _ in range(120)]
        lives = [Life(rng.choice([64, 1000, 4096, 65536, 100000]), f, f + rng.choice([1, 1, 1, 2, 3, 10])) for f in firsts]
        ratios.append(arrange(lives).nbytes / lower_bound(lives))
    assert sum(ratios) / len(ratios) < 1.05
    assert max(ratios) < 1.25


def test_a_chain_of_equal_buffers_in_place_takes_one() -> None:
    lives = [Life(1000, n, n + 1, n - 1 if n else None) for n in range(20)]
    assert arrange(lives).nbytes == padded(1000)


def test_a_second_heir_gets_memory_of_its_own() -> None:
    lives = [Life(1000, 0, 1), Life(1000, 1, 2, 0), Life(1000, 1, 2, 0)]
    layout = arrange(lives)
    assert layout.offsets[0] == layout.offsets[1] != layout.offsets[2]


def test_a_larger_heir_gets_memory_of_its_own() -> None:
    layout = arrange([Life(1000, 0, 1), Life(2000, 1, 2, 0)])
    assert layout.nbytes == padded(1000) + padded(2000)


def test_an_arena_is_aligned_and_writable() -> None:
    assert Arena(0).address == 0
    small, large = Arena(100), Arena(5 * HUGE)
    assert small.address % 4096 == 0
    assert large.address % HUGE == 0
