"""Whole calls on a GPU as CUDA graphs: what takes a launch and some Python for each step is one launch.

A graph has its memory, so that arguments are copied into it and results out of it: calls with large ones are not recorded. Nor is
anything whose work depends on data or on random numbers. CUDA Programming Guide, section 3.2.8.7.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..diagnostics.warn import warn
from ..graph.randomness import draws
from .constants import ConstantSet
from .plan import AtenStep, NativeSegment, Plan

Call = Callable[..., tuple[Any, ...]]

_EARLIER = 2  # calls of a shape before it is recorded: libraries choose their kernels in the first
_MOST_BYTES = 16 << 20  # of arguments and results, which take 10 us to copy at 3 TB/s
_FEWEST_STEPS = 4
_MOST = 16  # graphs of a model
_SHAPES = 1024  # whose calls are counted
_UNSTEADY = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_WAITING = ("linalg_", "cholesky", "svd", "qr", "lu_", "lstsq", "index_put", "histc", "bincount")
"""How the names begin of what looks at numbers of the GPU before it goes on: no graph can, and no tag says so."""


def can_replay(plan: Plan) -> bool:
    """Whether the work of a call follows from its shapes, and is worth recording."""
    outside = [segment for segment in plan.segments if isinstance(segment, AtenStep)]
    native = sum(len(segment.steps) for segment in plan.segments if isinstance(segment, NativeSegment))
    return len(outside) + native >= _FEWEST_STEPS and all(map(_is_steady, outside))


def _is_steady(step: AtenStep) -> bool:
    op = step.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten" or draws(op, step.args, dict(step.kwargs)):
        return False
    return not any(tag in op.tags for tag in _UNSTEADY) and not op._opname.lstrip("_").startswith(_WAITING)


class _Recorded:
    """One shape: the graph, the tensors that it reads and writes, and the weights that it was recorded with."""

    def __init__(self, call: Call, inputs: Sequence[Any], constants: ConstantSet, device: torch.device) -> None:
        self.constants = constants
        self.graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Later calls write into these tensors, in whatever mode they are.
        with torch.inference_mode(False), torch.no_grad():
            self.inputs = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                self.graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self.results = call(*self.inputs)
                finally:
                    self.graph.capture_end()
            torch.cuda.current_stream(device).wait_stream(side)
        self.places = [value for value in self.inputs if isinstance(value, torch.Tensor)]

    def run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """A call with these arguments; its results are tensors of its own."""
        given = [value for value in inputs if isinstance(value, torch.Tensor)]
        with torch.no_grad():
            if given:
                torch._foreach_copy_(self.places, given)
            self.graph.replay()
            return tuple([made.clone() if isinstance(made, torch.Tensor) else made for made in self.results])


class Replays:
    """The graphs of one model, by what makes the shapes of a call different. Calls of one model follow one another, on any stream.
    possible: whether there are any."""

    def __init__(self, possible: bool, device: torch.device) -> None:
        self._device, self._possible = device, possible
        self._lock = threading.Lock()
        self._calls: dict[Any, int] = {}
        self._known: dict[Any, _Recorded | None] = {}
        self._last: tuple[int, torch.cuda.Event] | None = None

    def find(self, key: Any, inputs: Sequence[Any], constants: ConstantSet, call: Call) -> _Recorded | None:
        """The graph for a call, recorded now where it is time to. None: the call runs step by step."""
        if not self._possible or torch.cuda.is_current_stream_capturing():
            return None
        with self._lock:
            if key in self._known:
                found = self._known[key]
                if found is None or found.constants.pointers == constants.pointers:
                    return found
                del self._known[key]
                self._calls.pop(key, None)  # weights that change may do so again
            if len(self._calls) > _SHAPES:
                self._calls.clear()
                self._known = {known: found for known, found in self._known.items() if found is not None}
            calls = self._calls[key] = self._calls.get(key, 0) + 1
            if calls <= _EARLIER or sum(found is not None for found in self._known.values()) >= _MOST:
                return None
            self._known[key] = self._recorded(inputs, constants, call)
            return self._known[key]

    def _recorded(self, inputs: Sequence[Any], constants: ConstantSet, call: Call) -> _Recorded | None:
        if _bytes(inputs) > _MOST_BYTES:
            return None
        try:
            made = _Recorded(call, inputs, constants, self._device)
        except (RuntimeError, TypeError) as error:
            warn(f"sashiko launches kernel by kernel, for a call could not be recorded as a CUDA graph: {error}")
            return None
        return made if _bytes(made.results) <= _MOST_BYTES else None

    def run(self, recorded: _Recorded, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """A call by its graph. One on another stream waits for the one before."""
        with self._lock:
            stream = torch.cuda.current_stream(self._device)
            if self._last is not None and self._last[0] != stream.cuda_stream:
                stream.wait_event(self._last[1])
            event = self._last[1] if self._last is not None else torch.cuda.Event()  # type: ignore[no-untyped-call]
            results = recorded.run(inputs)
            event.record(stream)
            self._last = stream.cuda_stream, event
            return results


def _bytes(values: Sequence[Any]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
