"""The object that a user calls: a plan, its code, its constants, and the memory of running calls.

The usual model is one native segment; its call costs a few microseconds of Python: look at the inputs, find the frame of their shapes,
allocate the results, write the pointers, one native call without the interpreter lock. Any number of threads may call at the same time.

Results are detached: no gradient flows through a compiled model, whatever its inputs require.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..cpu_codegen import jit
from ..diagnostics import env
from ..diagnostics.errors import InvalidGraph
from ..diagnostics.forks import Lock
from ..diagnostics.surroundings import CPU, undisturbed
from ..platforms.host import host
from ..platforms.target import Target
from . import runner, turns
from .constants import Constants, ConstantSet
from .contexts import MAX_FRAMES, Context
from .frames import MIN_WORK, Machine
from .inputs import LOW, PLAIN, Argument, bind, checked, in_order, lacks_memory, lies_in
from .plan import InputTensor, NativeSegment, OutputTensor, Plan
from .records import ShapeRecord, make_record
from .results import Results
from .runner import CHANGED
from .segments import Values, last_uses, run_aten, take_inputs, untrusted, written
from .timing import StepTime, Stopwatch, fastest
from .verify import verify

# Another thread may write the weights all the time; then a call uses what it derived last instead of trying for ever.
MAX_REFRESHES = 16

Result = torch.Tensor | int


@dataclass(frozen=True)
class Code:
    """Objects of all kernels of a plan, the object of the runner, and the target they were compiled for."""

    kernels: tuple[bytes, ...]
    runner: bytes
    target: Target


def with_runner(kernels: Sequence[bytes], target: Target) -> Code:
    """The code of a plan from its kernels' objects; the runner is compiled, or taken from the object cache."""
    return Code(tuple(kernels), runner.compiled(target), target)


class Executable:
    """A compiled model: `results = executable(*flat_inputs)`, both flat tuples.

    Arguments that are written into share no memory with others: the caller sees to it (`inputs.refuse_shared`).

    Errors: InputError when the arguments do not fit, or the code is for a machine that has what this one lacks; IndexError when an index
    inside the model is out of range.
    """

    device = CPU

    def __init__(self, plan: Plan, code: Code) -> None:
        self._read(plan)
        self.code = code
        foreign = code.target.why_not_on(host())
        self._runner = runner.Absent(code.target, foreign) if foreign else runner.Runner(code.runner)
        self._run, self._threads = self._runner.run, self._runner.threads
        self._libraries = [] if foreign else [jit.load_object(data) for data in code.kernels]
        minimum = env.threads_min_work()
        addresses = dict.fromkeys(plan.symbols, 0) if foreign else _addresses(plan, self._libraries)
        self._machine = Machine(addresses, MIN_WORK if minimum is None else minimum)
        self._constants = Constants(plan.constants, self._runner)
        self._contexts: deque[Context] = deque()
        self._results = Results()

    def _read(self, plan: Plan) -> None:
        """Finds out once what calls need to know of the plan."""
        verify(plan)
        self.plan = plan
        self._records: dict[tuple[Any, ...], ShapeRecord] = {}
        self._latest: ShapeRecord | None = None
        self._tick = 0
        self._lock = Lock()
        self._kinds = tuple((i.type.dtype.torch, i.type.order) if isinstance(i, InputTensor) else (None, None) for i in plan.inputs)
        self._single = _single(plan)
        self._order = _order(plan, self._single)
        self._returns = _returns(plan, self._single)
        tensors = [(position, item) for position, item in enumerate(plan.inputs) if isinstance(item, InputTensor)]
        self._values = tuple((item.value, position, item.type.order) for position, item in tensors)
        self._dead = last_uses(plan)
        self._untrusted = untrusted(plan)
        self._written = written(plan)

    def __call__(self, *inputs: Any) -> tuple[Result, ...]:
        segment = self._single
        if segment is None:
            return self._through_values(inputs, None)
        signature = self._signature(inputs, True)
        if signature is None:
            inputs = checked(self.plan.inputs, inputs, True, self.device)
            signature = self._signature(inputs, True)
            assert signature is not None, "checked arguments need no second look"
        key, pointers = signature
        record = self._records.get(key)
        if record is None or record is not self._latest:
            record = self._record(key, inputs)
        if self._order is not None:
            pointers = [pointers[position] for position in self._order]
            inputs = tuple([inputs[position] for position in self._order]) if self._written else inputs
        results = self._native(segment, 0, record, pointers, inputs)
        if self._returns is None:
            return tuple(results)
        return tuple(record.ints[n] if made is None else results[made] for n, made in enumerate(self._returns))

    def _signature(self, inputs: Sequence[Any], dense: bool) -> tuple[tuple[Any, ...], list[int]] | None:
        """Shapes and data pointers of the inputs (an int is its own shape), or None when one needs a closer look or a copy."""
        if len(inputs) != len(self._kinds):
            return None
        shapes: list[Any] = []
        pointers: list[int] = []
        for value, (dtype, order) in zip(inputs, self._kinds):
            if dtype is None:
                if type(value) is not int:
                    return None
                shapes.append(value)
                pointers.append(0)
                continue
            if type(value) not in PLAIN or value.dtype is not dtype or not value.is_cpu or value.is_neg():
                return None
            try:
                if dense and not (value.is_contiguous() if order is None else lies_in(value, order)):
                    return None
                shapes.append(value.shape)
                pointer = value.data_ptr()
            except RuntimeError:  # it has no memory, as inside of torch.func.vmap, or no sizes, as a nested one
                return None
            if pointer < LOW and lacks_memory(value):
                return None
            pointers.append(pointer)
        return tuple(shapes), pointers

    def _record(self, key: tuple[Any, ...], inputs: Sequence[Argument]) -> ShapeRecord:
        """What the shapes `key` make of the plan. InputError when they do not fit."""
        self._tick += 1
        record = self._records.get(key)
        if record is None:
            record = make_record(self.plan, bind(self.plan.inputs, inputs))
            with self._lock:
                record.used = self._tick
                self._records[key] = record
                if len(self._records) > MAX_FRAMES:
                    del self._records[min(self._records, key=lambda k: self._records[k].used)]
        record.used = self._tick
        self._latest = record
        return record

    def _native(
        self, segment: NativeSegment, at: int, record: ShapeRecord, pointers: list[int], held: Sequence[torch.Tensor],
        constants: ConstantSet | None = None, stopwatch: Stopwatch | None = None,
    ) -> list[torch.Tensor]:
        """Runs native segment `at` on the inputs `held`; `pointers` are theirs, and get those of the results.
        Without `constants` it watches the weights."""
        shape = record.segments[at]
        assert shape is not None, "the segment is native"
        order = turns.TURNS
        threads = torch.get_num_threads() if self._threads and not turns.FORKED else 1
        failed = attempts = 0
        turn = context = None
        try:
            turn = order.take()
            if shape.large_bytes or shape.updates:
                results = self._results.make(shape.outputs, record.large_bytes, held)
                pointers += [result.data_ptr() for result in results]
            else:
                results = []
                for output in shape.outputs:
                    result = output.new()
                    results.append(result)
                    pointers.append(result.data_ptr())
            context = self._context()
            while True:
                used = constants or self._constants.current
                watch = constants is None and attempts < MAX_REFRESHES
                attempts += 1
                if watch and used.in_python and self._constants.changed_in_python(used):
                    self._refresh(used)
                    continue
                frame = context.frames.get((record, at, threads, watch))
                if frame is None or frame is not context.latest or frame.constants is not used:
                    frame = context.frame(record, at, segment, self._machine, used, threads, watch)
                frame.bind(*pointers)
                failed = self._run(frame.address) if stopwatch is None else stopwatch.run(self._run, frame, segment)
                if failed != CHANGED:
                    break
                self._refresh(used)
        finally:
            try:
                if context is not None:
                    self._contexts.append(context)
            finally:
                if turn is not None:  # first the one call that no signal cuts off, see `Turns`
                    order.free.put(turn)
                    if order.waiting:
                        order.pass_on()
        if failed:
            raise IndexError(f"an index is out of range in {segment.steps[failed - 1].label}")
        return results

    def _context(self) -> Context:
        try:
            return self._contexts.pop()
        except IndexError:
            return Context()

    def _refresh(self, stale: ConstantSet) -> None:
        with self._lock:
            if self._constants.current is stale:
                self._constants.refresh()

    def _fresh_constants(self) -> ConstantSet:
        """The constants as the weights are now."""
        for _ in range(MAX_REFRESHES):
            if not self._constants.changed(known := self._constants.current):
                return known
            self._refresh(known)
        return self._constants.current

    def _through_values(self, inputs: Sequence[Any], stopwatch: Stopwatch | None = None) -> tuple[Result, ...]:
        """A call of any plan: segment after segment, values kept until their last use."""
        plan = self.plan
        signature = self._signature(inputs, False)
        if signature is None:
            inputs = checked(plan.inputs, inputs, False, self.device)
            signature = self._signature(inputs, False)
            assert signature is not None, "checked arguments need no second look"
        record = self._record(signature[0], inputs)
        constants = self._fresh_constants()
        values: Values = {value: in_order(inputs[position], order) for value, position, order in self._values}
        values.update((value, constants.tensors[number]) for value, number in plan.constant_values)
        plain = nullcontext()  # to enter a mode takes a microsecond or two
        with (
            torch.no_grad() if torch.is_grad_enabled() else plain,
            undisturbed(self.device) if torch.is_autocast_enabled(self.device.type) else plain,
        ):
            for at, segment in enumerate(plan.segments):
                if isinstance(segment, NativeSegment):
                    held = take_inputs(segment, values, self._untrusted[at], record.numbers, self.device)
                    results = self._native(segment, at, record, [t.data_ptr() for t in held], held, constants, stopwatch)
                    for output, result in zip(segment.outputs, results, strict=True):
                        values[output.value] = result
                elif stopwatch is None:
                    run_aten(segment, values, record.numbers)
                else:
                    stopwatch.start()
                    run_aten(segment, values, record.numbers)
                    stopwatch.stop(str(segment.target))
                for value in self._dead[at]:
                    del values[value]
        return tuple(
            in_order(values[o.value], o.order) if isinstance(o, OutputTensor) else record.ints[n] for n, o in enumerate(plan.outputs)
        )

    def constants(self) -> tuple[torch.Tensor, ...]:
        """The derived constants as the weights are now; not copies."""
        return self._fresh_constants().tensors

    def times(self, *inputs: Any, repeat: int = 10, again: int = 1) -> tuple[StepTime, ...]:
        """The time of every step, in order: the shortest of `repeat` runs. Each writes into copies of the inputs. again: how often a
        native step is run before the next one, with its operands where the last time left them in the caches; what is computed in place
        then is computed of its results."""
        runs = []
        for _ in range(repeat):
            stopwatch = Stopwatch(again)
            self._through_values([value.clone() if n in self._written else value for n, value in enumerate(inputs)], stopwatch)
            runs.append(stopwatch.times)
        return fastest(runs)


def _addresses(plan: Plan, libraries: Sequence[jit.Library]) -> dict[str, int]:
    """Where each kernel of the plan is. InvalidGraph when the code lacks one."""
    found = {name: library.address(name) for library in libraries for name in library.symbols}
    lacking = [name for name in plan.symbols if name not in found]
    if lacking:
        raise InvalidGraph(f"the code has no kernel {', '.join(lacking)}", f"plan {plan.name}")
    return {name: found[name] for name in plan.symbols}


def _single(plan: Plan) -> NativeSegment | None:
    """The segment of a plan that is one native segment and returns nothing but what it makes, as it makes it; else None."""
    if len(plan.segments) != 1 or not isinstance(plan.segments[0], NativeSegment):
        return None
    segment = plan.segments[0]
    inputs = {item.value: item for item in plan.inputs if isinstance(item, InputTensor)}
    made = {output.value for output in segment.outputs}
    returned = {output.value for output in plan.outputs if isinstance(output, OutputTensor)}
    as_made = all(output.order is None for output in plan.outputs if isinstance(output, OutputTensor))
    return segment if returned <= made and as_made and inputs.keys() >= set(segment.inputs) else None


def _order(plan: Plan, segment: NativeSegment | None) -> tuple[int, ...] | None:
    """Positions among the arguments of the segment's inputs; None when they are all the arguments in order."""
    if segment is None:
        return None
    positions = {item.value: position for position, item in enumerate(plan.inputs) if isinstance(item, InputTensor)}
    order = tuple(positions[value] for value in segment.inputs)
    return None if order == tuple(range(len(plan.inputs))) else order


def _returns(plan: Plan, segment: NativeSegment | None) -> tuple[int | None, ...] | None:
    """For each result of the call the number of the segment's output (None: an int); None when they are its outputs in order."""
    if segment is None:
        return None
    made = {output.value: number for number, output in enumerate(segment.outputs)}
    order = tuple(made[output.value] if isinstance(output, OutputTensor) else None for output in plan.outputs)
    return None if order == tuple(range(len(segment.outputs))) else order
