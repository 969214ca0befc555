"""The compiled model: what `sashiko.compile` and `sashiko.load` return."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from ..diagnostics.dump import say
from ..diagnostics.errors import ArtifactError, InputError, Unsupported
from ..graph import container
from ..graph.captured import Captured
from ..quant import QuantizedModule
from ..quant import save as saved
from ..runtime import save as artifact
from ..runtime.executable import Executable
from ..runtime.inputs import refuse_shared
from ..runtime.plan import InputTensor
from ..runtime.segments import touched
from ..runtime.timing import StepTime
from .build import Built, Options, build
from .explain import explained
from .found import SearchResult
from .signature import Signature, from_json, signature_of, to_json


class CompiledModel:
    """A model as native code: called as the model is, returns what the model returns, without gradients.

    Errors when called: InputError for arguments that do not fit what was declared, IndexError for an index out of range inside the model,
    RuntimeError for an assertion of the model that does not hold.
    Any number of threads may call at the same time. Results are new tensors; the storage of one of 4 MiB and more cannot grow.

    quantized: the simulation it was compiled from, when `quantize_and_compile` made it. search: how its precisions were found.
    """

    def __init__(
        self,
        signature: Signature,
        executable: Executable,
        state: Sequence[torch.Tensor] = (),
        built: Built | None = None,
        explanation: str = "",
    ) -> None:
        self.signature, self.executable, self.built = signature, executable, built
        self.quantized: QuantizedModule | None = None
        self.search: SearchResult | None = None
        self._state = tuple(state)
        self._explanation = explanation
        self._fixed = signature.has_fixed
        self._direct = None if state or signature.plain is None else signature.direct()
        self._count, self._names = signature.plain or (-1, ())
        self._named = frozenset(self._names)
        self._bare = self._direct if not self._names and not self._fixed else None
        tensors = [n for n, item in enumerate(executable.plan.inputs) if isinstance(item, InputTensor)]
        self._written = frozenset(tensors[number] for _, number in signature.writes)
        self._touched = self._written | touched(executable.plan)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._bare is not None and not kwargs and len(args) == self._count:
            return self._bare(self.executable(*args))
        if self._direct is None or len(args) != self._count or kwargs.keys() != self._named:
            return self.call_flat(self.signature.flatten(args, kwargs))
        passed = (*args, *[kwargs[name] for name in self._names])
        return self._direct(self.executable(*(self.signature.taken(passed) if self._fixed else passed)))

    def call_flat(self, flat: Sequence[Any]) -> Any:
        """Call with the leaves of the arguments in order."""
        passed = self.signature.taken(flat) if self._fixed else flat
        inputs = (*passed, *self._state)
        if self._written:
            refuse_shared(self.executable.plan.inputs, inputs, self._written, self._touched)
        results = self.executable(*inputs)
        if self.signature.writes:
            self._write([v for v in inputs if isinstance(v, torch.Tensor)], results)
        return self.signature.assembled(flat, results)

    def _write(self, tensors: Sequence[torch.Tensor], results: Sequence[Any]) -> None:
        """Gives arguments and buffers their new content; those that were written in place have it, and are told so."""
        updated: list[torch.Tensor] = []
        for made, written in self.signature.writes:
            source, target = results[made], tensors[written]
            assert isinstance(source, torch.Tensor)
            if source.data_ptr() != target.data_ptr():
                with torch.no_grad():
                    target.copy_(source.reshape(target.shape))  # it has the shape in which the model saw the target
            elif not target.is_inference():
                updated.append(target)
        torch.autograd.graph.increment_version(updated)

    @property
    def stateful(self) -> bool:
        """Whether calls write into buffers or parameters."""
        return bool(self._state)

    def written(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """What such a call writes into: arguments, buffers and parameters."""
        inputs = (*self.signature.taken(self.signature.flatten(args, kwargs)), *self._state)
        return [inputs[number] for number in sorted(self._written)]

    def explain(self) -> str:
        """What was fused, which kernel each operation runs on and why, what was left to PyTorch and why, how precisions were chosen."""
        story = explained(self.built) if self.built is not None else self._explanation
        return story if self.search is None else f"{story}\n{self.search.text()}"

    def times(self, *args: Any, repeat: int = 10, again: int = 1, **kwargs: Any) -> tuple[StepTime, ...]:
        """The time of every step of a call, in order: the shortest of `repeat` runs, in which each step runs `again` times in a row. Raises
        InputError for less than one of either."""
        for name, count in (("repeat", repeat), ("again", again)):
            if count < 1:
                raise InputError(f"{name} is {count!r}", hint="a whole number from 1 on")
        inputs = self.signature.taken(self.signature.flatten(args, kwargs))
        return self.executable.times(*inputs, *self._state, repeat=repeat, again=again)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write code, weights and plan to one file that `sashiko.load` reads without the model.

        Raises Unsupported for a model that writes its own buffers, or whose arguments or results have no form in a file.
        """
        if self._state:
            raise Unsupported(
                "the model writes its own buffers, which a file cannot share with it", hint="save its weights and compile it again"
            )
        artifact.save(self.executable, path, {"signature": to_json(self.signature), "explanation": self.explain()})

    def __reduce__(self) -> Any:
        """Machine code and watched weights are copied and sent to other processes by way of a file."""
        raise InputError("a compiled model is neither pickled nor copied deeply", hint="fast.save(path), and sashiko.load(path) over there")

    def __copy__(self) -> CompiledModel:
        return self

    def __repr__(self) -> str:
        plan = self.executable.plan
        native = sum(hasattr(s, "steps") for s in plan.segments)
        return f"CompiledModel({plan.name}: {native} native segments, {len(plan.segments) - native} operations left to PyTorch)"


def build_model(captured: Captured, options: Options) -> CompiledModel:
    """Compile a captured program; errors as in `build`."""
    built = build(captured, options)
    say(3, lambda: explained(built))
    return CompiledModel(signature_of(captured), built.executable, [s.tensor for s in captured.state], built)


def load(path: str | os.PathLike[str]) -> CompiledModel | QuantizedModule:
    """Read what `CompiledModel.save` or `QuantizedModule.save` wrote. Needs neither the model nor a compiler.

    Raises ArtifactError when the file is damaged, something else, from a newer version, or for a machine with other features.
    """
    if container.kind_of(path) == saved.FORMAT:
        return saved.load(path)
    loaded = artifact.load(path)
    signature = loaded.notes.get("signature")
    if signature is None:
        raise ArtifactError(f"{os.fspath(path)} holds no signature of a model", hint="save the model again")
    return CompiledModel(from_json(signature), loaded.executable, explanation=str(loaded.notes.get("explanation", "")))
