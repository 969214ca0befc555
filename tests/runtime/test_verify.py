"""Wrong plans are refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sashiko.cpu_codegen.contract import BufferSlot, KernelCode
from sashiko.diagnostics.errors import InvalidGraph
from sashiko.graph.attrs import Slot
from sashiko.runtime.plan import AtenStep, NativeSegment, Operand, OutputTensor, Plan, Repeat
from sashiko.runtime.verify import verify


@pytest.fixture
def good(chain: type) -> Plan:
    """Two steps through the arena."""
    c = chain()
    (x,) = c.inputs(1)
    middle = c.step("scale", [x], c.arena(), 2.0)
    c.step("shift", [middle], c.buffer("output", 0), 1.0, reuse=True)
    plan: Plan = c.plan(1, 1)
    return plan


def native(plan: Plan, **changes: object) -> Plan:
    (segment,) = plan.segments
    assert isinstance(segment, NativeSegment)
    return replace(plan, segments=(replace(segment, **changes),))  # type: ignore[arg-type]


def steps(plan: Plan, first: dict[str, object], second: dict[str, object] | None = None) -> Plan:
    """The plan with fields of its two steps changed."""
    (segment,) = plan.segments
    assert isinstance(segment, NativeSegment)
    changed = (replace(step, **(change or {})) for step, change in zip(segment.steps, (first, second), strict=True))  # type: ignore[arg-type]
    return native(plan, steps=tuple(changed))


WRONG: tuple[tuple[str, Callable[[Plan], Plan], str], ...] = (
    ("unknown value", lambda p: native(p, inputs=(5,)), r"\[5\] are used before"),
    ("value made twice", lambda p: replace(p, segments=p.segments * 2), "made twice"),
    ("result nobody makes", lambda p: replace(p, outputs=(OutputTensor(9),)), r"\[9\] are returned"),
    ("constant that is not there", lambda p: replace(p, constant_values=((9, 0),)), "constant 0 of 0"),
    ("input that is not there", lambda p: native(p, inputs=()), "input 0 of 0"),
    ("output not written", lambda p: native(p, steps=p.segments[0].steps[:1]), r"outputs \[0\]"),  # type: ignore[union-attr]
    ("read before written", lambda p: native(p, steps=p.segments[0].steps[::-1]), "before it is written"),  # type: ignore[union-attr]
    ("buffer that is not there", lambda p: steps(p, {"operands": (Operand(0), Operand(7))}), "no buffer 7"),
    ("input written", lambda p: steps(p, {"writes": (0, 1)}), "must not be written"),
    ("operand that is not there", lambda p: steps(p, {"kernel": KernelCode("scale", (BufferSlot(4),), 3)}), "operand 4 of 2"),
    ("no grain", lambda p: steps(p, {"kernel": KernelCode("scale", (), 3, 0)}), "no grain"),
    ("repeats that overlap", lambda p: native(p, repeats=(Repeat(0, 2, 3), Repeat(1, 2, 3))), "overlap"),
    ("repeats beyond the end", lambda p: native(p, repeats=(Repeat(1, 3, 2),)), "do not exist"),
    ("moves without turns", lambda p: steps(p, {"operands": (Operand(0, 0, 4), Operand(1))}), "of a step that has one"),
    ("later buffer that is not there", lambda p: native(steps(p, {"operands": (Operand(0, 0, 4, Operand(9)), Operand(1))}),
                                                        repeats=(Repeat(0, 1, 2),)), "no buffer 9"),
    ("memory shared the wrong way", lambda p: steps(p, {}, {"reuses": ((0, 1),)}), "cannot share"),
)


@pytest.mark.parametrize(("change", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_plans(good: Plan, change: Callable[[Plan], Plan], message: str) -> None:
    verify(good)
    with pytest.raises(InvalidGraph, match=message):
        verify(change(good))


def test_an_operation_with_several_results_says_so(good: Plan) -> None:
    step = AtenStep(torch.ops.aten.sort.default, (Slot(0),), (), (0,), (1, 2))
    with pytest.raises(InvalidGraph, match="2 results"):
        verify(replace(good, segments=(step,)))
