"""The compiled model: what `sashiko.compile` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..diagnostics.errors import InputError
from ..graph.captured import Captured, FixedInput, FixedOutput, GraphOutput, InputOutput
from ..runtime.executable import Executable
from .build import Built


class CompiledModel:
    """A model as native code: called as the model is, returns what the model returns, without gradients.

    Errors when called: InputError for arguments that do not fit what was declared, IndexError for an index out of range inside the model.
    Any number of threads may call at the same time.
    """

    def __init__(self, captured: Captured, executable: Executable, built: Built | None = None) -> None:
        self.captured, self.executable, self.built = captured, executable, built
        self._state = tuple(s.tensor for s in captured.state)
        self._fixed = any(isinstance(i, FixedInput) for i in captured.inputs)
        self._direct = _direct(captured)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._direct is not None and not kwargs:
            return self._direct(self.executable(*args))
        flat = list(args) if self.captured.in_spec is None else self.captured.flatten(args, kwargs)
        return self.call_flat(flat)

    def call_flat(self, flat: Sequence[Any]) -> Any:
        """Call with the leaves of the arguments in order."""
        passed = self._checked(flat) if self._fixed else flat
        results = self.executable(*passed, *self._state)
        written = [results[m.output] for m in self.captured.mutations]
        tensors = [v for v in passed if isinstance(v, torch.Tensor)] + list(self._state)
        for mutation, result in zip(self.captured.mutations, written, strict=True):
            assert isinstance(result, torch.Tensor)
            tensors[mutation.input].copy_(result)
        return self._assembled(flat, results)

    def _checked(self, flat: Sequence[Any]) -> list[Any]:
        """The arguments that the executable takes, after comparing the others with what was captured."""
        if len(flat) != len(self.captured.inputs):
            raise InputError(f"called with {len(flat)} arguments, captured with {len(self.captured.inputs)}")
        passed = []
        for spec, value in zip(self.captured.inputs, flat, strict=True):
            if not isinstance(spec, FixedInput):
                passed.append(value)
            elif value is not spec.value and (isinstance(value, torch.Tensor) or type(value) is not type(spec.value) or value != spec.value):
                raise InputError(f"argument {spec.name} is {value!r}, but the model was compiled for {spec.value!r}", hint="compile it again for this value")
        return passed

    def _assembled(self, flat: Sequence[Any], results: Sequence[Any]) -> Any:
        symbolic = iter(results[len(self.captured.graph.outputs):])
        found: list[Any] = []
        for spec in self.captured.outputs:
            if isinstance(spec, GraphOutput):
                found.append(results[spec.index])
            elif isinstance(spec, InputOutput):
                found.append(flat[spec.position])
            else:
                found.append(spec.value if isinstance(spec, FixedOutput) else next(symbolic))
        return found if self.captured.out_spec is None else pytree.tree_unflatten(found, self.captured.out_spec)

    def save(self, path: str | Path) -> None:
        """Write the code, the weights and the plan to one file that `sashiko.load` reads, without the model."""
        from .saving import save

        save(self, path)

    def __repr__(self) -> str:
        plan = self.executable.plan
        native = sum(hasattr(s, "sections") for s in plan.segments)
        return f"CompiledModel({plan.name}: {native} native segments, {len(plan.segments) - native} operations left to PyTorch)"


def _direct(captured: Captured) -> Callable[[tuple[Any, ...]], Any] | None:
    """For models of plain positional tensors with plain results: how to return the executable's results. None: take the long way."""
    spec, out = captured.in_spec, captured.out_spec
    if captured.state or captured.mutations or any(isinstance(i, FixedInput) for i in captured.inputs):
        return None
    if any(not isinstance(o, GraphOutput) for o in captured.outputs):
        return None
    order = tuple(o.index for o in captured.outputs if isinstance(o, GraphOutput))
    if spec is None or out is None:
        return lambda results: [results[n] for n in order]
    arguments = spec.child(0)
    if spec.child(1).num_children or any(not c.is_leaf() for c in arguments.children()):
        return None
    if out.is_leaf():
        only = order[0]
        return lambda results: results[only]
    if out.type is tuple and all(c.is_leaf() for c in out.children()):
        return lambda results: tuple(results[n] for n in order)
    return None


