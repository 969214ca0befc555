"""The loops that measure bandwidth move what they say, on this machine and as code for the others."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sashiko.cpu_codegen import bandwidth, jit
from sashiko.cpu_codegen.rate import Bound, Effort, aligned, best_rate, loaded
from sashiko.platforms.catalogue import CATALOGUE
from sashiko.platforms.target import Target

SHORT = Effort(1e-4, 1)


def test_copy_and_write_reach_every_byte_and_no_other(target: Target) -> None:
    size = bandwidth.UNROLL * target.vector_bits // 8 * 3
    library = loaded(bandwidth.emit(target), target)
    source, to = aligned(size), aligned(size + 64)
    source[:] = np.arange(size) % 251
    to[:] = 255
    Bound(library, "copy", (source.ctypes.data, to.ctypes.data, size))(2)
    assert (to[:size] == source).all() and (to[size:] == 255).all()
    Bound(library, "write", (to.ctypes.data, to.ctypes.data, size))(1)
    assert (to[:size].view(np.int32) == 1).all() and (to[size:] == 255).all()


def test_read_loads_every_byte_once_in_each_pass(target: Target) -> None:
    size = bandwidth.UNROLL * target.vector_bits // 8 * 4
    lanes = target.lanes(32)
    source, to = aligned(size), aligned(target.vector_bits // 8)
    numbers = source.view(np.int32)
    numbers[:] = 0
    last = numbers[-lanes:]  # the last vector of each block goes to the last sum, which is stored last
    last[:] = 7
    Bound(loaded(bandwidth.emit(target), target), "read", (source.ctypes.data, to.ctypes.data, size))(3)
    assert (to.view(np.int32) == 21).all()


@pytest.mark.parametrize("machine", CATALOGUE, ids=lambda machine: machine.name)
def test_there_is_code_for_every_machine(machine: Target) -> None:
    assert jit.compile_object(bandwidth.emit(machine).text(), machine)


def test_levels_grow_and_a_machine_without_l3_has_none(target: Target) -> None:
    levels = bandwidth.sizes(dataclasses.replace(target, l1d=32 << 10, l2=1 << 20, l3=32 << 20))
    assert [name for name, _ in levels] == ["L1", "L2", "L3", "memory"]
    assert [size for _, size in levels] == sorted(size for _, size in levels)
    assert "L3" not in dict(bandwidth.sizes(dataclasses.replace(target, l3=0)))


def test_figures_are_positive_and_the_size_is_that_of_whole_blocks(target: Target) -> None:
    (found,) = bandwidth.measure(target, (("L1", 10_000),), SHORT)
    assert min(found.read, found.write, found.copy) > 0
    assert found.level == "L1" and 0 < found.size <= 10_000 and found.size % (2 * bandwidth.UNROLL * target.vector_bits // 8) == 0


def test_the_best_of_several_tries_counts() -> None:
    asked: list[int] = []

    def run(passes: int) -> None:
        asked.append(passes)
        sum(range(100 * passes))

    assert best_rate(run, 5.0, Effort(1e-6, 3)) > 0
    assert len(asked) >= 4 and len(set(asked[-3:])) == 1


def test_aligned_memory() -> None:
    data = aligned(100)
    assert data.size == 100 and data.ctypes.data % 64 == 0
