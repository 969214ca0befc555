"""explain(): the story of a compilation, in plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..diagnostics.errors import InputError
from ..quant.module import QuantizedModule
from ..runtime.plan import AtenStep
from ..runtime.segments import written
from .build import Built
from .segments import Note


class Explains(Protocol):
    """Anything with an explanation of its own: a compiled model."""

    def explain(self) -> str: ...


def explain(model: Explains) -> str:
    """What was fused, which kernel each operation runs on and why not an earlier one, what was left to PyTorch and why. Raises InputError
    for what is not compiled."""
    if hasattr(model, "explain"):
        return model.explain()
    from torch._dynamo.eval_frame import OptimizedModule  # which takes long to import, and is for errors alone

    hint = "pass what sashiko.compile returns"
    if isinstance(model, OptimizedModule):
        hint += "; SASHIKO_DEBUG=3 prints the explanation of each graph that the backend compiles"
    elif isinstance(model, QuantizedModule):
        hint += " for it; model.report() tells what was quantized"
    raise InputError(f"a {type(model).__name__} has nothing to explain", "explain(...)", hint)


def explained(built: Built) -> str:
    """The explanation of a fresh compilation."""
    natives = [n for n in built.notes if isinstance(n, tuple)]
    left = [n for n in built.notes if isinstance(n, AtenStep)]
    ops = sum(v.op not in ("input", "constant", "full") for v in built.graph.order)
    kernels = sum(len(n) for n in natives)
    times = ", ".join(f"{what} {took * 1e3:.0f} ms" for what, took in built.seconds.items())
    lines = [
        f"{built.graph.name}: {ops} operations in {kernels} kernels of {len(natives)} native segments, {len(left)} left to PyTorch",
        f"compiled: {times}",
        "",
    ]
    for number, note in enumerate(built.notes):
        lines += _segment(number, note) if isinstance(note, tuple) else _extern(number, note)
    lines += _overwritten(built)
    lines += [*built.tuning, ""] if built.tuning else []
    lines += _rules(built)
    return "\n".join(lines)


def _segment(number: int, notes: Sequence[Note]) -> list[str]:
    lines = [f"segment {number}: native, {len(notes)} kernels"]
    for note in notes:
        where = f"  ({note.origin})" if note.origin else ""
        turns = "" if note.turns == 1 else f", {note.turns} times"
        lines.append(f"  {note.label}{turns}{where}")
        lines.append(f"      {note.kernel}")
        # Rows for other operand types are most of every table and say nothing.
        close = [f"{name}: {reason}" for name, reason in note.refusals if not reason.startswith("computes ")]
        lines += [f"      not {text}" for text in close]
    return [*lines, ""]


def _extern(number: int, step: AtenStep) -> list[str]:
    return [f"segment {number}: PyTorch's {step.target}: {step.reason}", ""]


def _overwritten(built: Built) -> list[str]:
    plan = built.executable.plan
    in_place = {plan.inputs[n].label for n in written(plan)}
    found = [f"  {name}: {'in place' if name in in_place else 'with a copy of all of it'}" for name in built.overwritten]
    return ["arguments and buffers that a call writes into:", *found, ""] if found else []


def _rules(built: Built) -> list[str]:
    fired = built.trace.fired
    lines = ["rules that applied:"] if fired else []
    lines += [f"  {count:4d} x {name}" for name, count in sorted(fired.items())]
    # A pattern whose very shape is absent says nothing; a condition that failed on a real match does.
    near = [miss for miss in built.trace.near_misses() if not miss.reason.startswith("expected ")]
    if near:
        lines += ["rules that nearly applied:", *(f"  {miss}" for miss in near)]
    return lines
