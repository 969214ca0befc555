"""What calls leave behind: no memory of weights that are no longer."""

from __future__ import annotations

import weakref

import torch

from sashiko.runtime.executable import Code, Executable
from sashiko.runtime.plan import ConstantSource


def test_packed_weights_go_when_the_weight_has_changed_whatever_the_shape_of_the_next_call(code: Code, chain: type) -> None:
    weight = torch.zeros(())
    c = chain()
    (x,) = c.inputs(1)
    w = c.constant(ConstantSource((weight,), lambda: torch.full((40, 40), float(weight)), "w"))
    c.step("add", [x, w], c.buffer("output", 0))
    executable = Executable(c.plan(1, 1), code)
    packed = []
    for rows in range(1, 20):
        weight.fill_(rows)
        for again in (rows, rows + 20, 3):
            (got,) = executable(torch.zeros(again, 40))
            assert isinstance(got, torch.Tensor) and torch.equal(got, torch.full((again, 40), float(rows)))
        packed.append(weakref.ref(executable._constants.current.tensors[0]))
    assert [each() is not None for each in packed] == [False] * 18 + [True]
