"""A compiled model on a GPU: the same plan, whose native segments are launches of kernels on PyTorch's current stream.

Intermediate results lie in one piece of memory that PyTorch's allocator lends for the call, so that calls on several streams are apart.
Nothing waits for the GPU: an index out of range is told by the next call.
"""

from __future__ import annotations

import array
import ctypes
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ..cpu_codegen.contract import BufferSlot, DimSlot, KernelCode, ParamSlot
from ..gpu_codegen.loops import VECTOR, LaunchCode
from ..platforms.host import host
from . import cuda, runner
from .constants import Constants, ConstantSet
from .contexts import MAX_FRAMES
from .executable import Executable, Result
from .inputs import PLAIN, checked
from .plan import NativeSegment, Operand, Plan, Step
from .records import Numbers, SegmentRecord, ShapeRecord, number
from .replay import Replays, can_replay
from .timing import StepTime, Stopwatch, fastest

_Key = tuple[ShapeRecord, int]
STATUS = None
Fixed = tuple[float, ...] | None
"""What has the same address in every call: the numbers of kernels, and the status word."""


class GpuStopwatch(Stopwatch):
    """Times steps until the GPU is done with them."""

    def start(self) -> None:
        torch.cuda.synchronize()
        super().start()

    def stop(self, label: str) -> None:
        torch.cuda.synchronize()
        super().stop(label)


class GpuExecutable(Executable):
    """A plan with PTX for one device; called like an Executable, with tensors of that device. record: whether calls may become CUDA graphs.

    Errors: InputError when the arguments do not fit; IndexError when an index inside the model was out of range in an earlier call;
    InvalidGraph when the driver refuses the code.
    """

    def __init__(self, plan: Plan, ptx: str, device: torch.device, record: bool = True) -> None:
        self._read(plan)
        self.ptx, self.device = ptx, device
        self._module = cuda.CudaModule(ptx, plan.symbols, device)
        self._launch, self._address = cuda.launcher(), cuda.launch_address()
        self._runner = runner.Runner(runner.compiled(host()))
        self._constants = Constants(plan.constants, self._runner, device)
        self._status = _status_word()
        self._failed = ctypes.c_int32.from_address(self._status.data_ptr())
        self._numbers = _numbers(plan, device)
        self._fixed: dict[Fixed, int] = {STATUS: self._status.data_ptr()}
        self._fixed |= {values: tensor.data_ptr() for values, tensor in self._numbers.items()}
        self._frames: dict[_Key, deque[_Frame]] = {}
        self._replays = Replays(record and can_replay(plan), device)

    def __call__(self, *inputs: Any) -> tuple[Result, ...]:
        self._tell()
        signature = self._signature(inputs, False)
        if signature is None:
            inputs = checked(self.plan.inputs, inputs, False, self.device)
            signature = self._signature(inputs, False)
            assert signature is not None, "checked arguments need no second look"
        index = self.device.index
        with nullcontext() if torch.cuda.current_device() == index else torch.cuda.device(index):
            recorded = self._replays.find(signature[0], inputs, self._fresh_constants(), lambda *given: self._through_values(given))
            return self._through_values(inputs) if recorded is None else self._replays.run(recorded, inputs)

    def _signature(self, inputs: Sequence[Any], dense: bool) -> tuple[tuple[Any, ...], list[int]] | None:
        if len(inputs) != len(self._kinds):
            return None
        shapes: list[Any] = []
        for value, (dtype, _) in zip(inputs, self._kinds):
            if dtype is None:
                if type(value) is not int:
                    return None
                shapes.append(value)
                continue
            if type(value) not in PLAIN or value.dtype is not dtype or value.device != self.device or value.is_neg():
                return None
            shapes.append(value.shape)
        return tuple(shapes), []

    def _native(
        self, segment: NativeSegment, at: int, record: ShapeRecord, pointers: list[int], held: Sequence[torch.Tensor],
        constants: ConstantSet | None = None, stopwatch: Stopwatch | None = None,
    ) -> list[torch.Tensor]:
        shape = record.segments[at]
        assert shape is not None, "the segment is native"
        used = constants or self._fresh_constants()
        # Vectors lie at multiples of their size: what begins elsewhere, as a view may, is copied.
        moved = {n: held[n].clone() for n, pointer in enumerate(pointers) if pointer % VECTOR}
        for n, tensor in moved.items():
            pointers[n] = tensor.data_ptr()
        arena = torch.empty(shape.arena_bytes, dtype=torch.uint8, device=self.device) if shape.arena_bytes else None
        results = [torch.empty_strided(o.shape, o.strides, dtype=o.dtype, device=self.device) for o in shape.outputs]
        pointers += [result.data_ptr() for result in results]
        stream = _stream(self.device)
        frames = self._idle(record, at)
        frame = frames.pop() if frames else _Frame(segment, shape, record.numbers, self._module.functions, self._fixed)
        frame.bind(used, [0 if arena is None else arena.data_ptr(), *pointers])
        self._module.enter()
        if stopwatch is None:
            cuda.check_launch(self._launch(frame.rows, len(segment.steps), stream, self._address))
        else:
            for n, step in enumerate(segment.steps):
                stopwatch.start()
                cuda.check_launch(self._launch(frame.rows + 8 * cuda.ROW * n, 1, stream, self._address))
                stopwatch.stop(step.label)
        frames.append(frame)
        return results

    def _tell(self) -> None:
        if self._failed.value:
            self._failed.value = 0
            raise IndexError("an index was out of range in an earlier call")

    def _idle(self, record: ShapeRecord, at: int) -> deque[_Frame]:
        """Frames that no call is writing to."""
        found = self._frames.get((record, at))
        if found is None:
            if len(self._frames) >= MAX_FRAMES * len(self.plan.segments):
                self._frames.clear()
            found = self._frames[record, at] = deque()
        return found

    def times(self, *inputs: Any, repeat: int = 10, again: int = 1) -> tuple[StepTime, ...]:
        runs = []
        for _ in range(repeat):
            stopwatch = GpuStopwatch(again)
            with torch.cuda.device(self.device):
                self._through_values(inputs, stopwatch)
            runs.append(stopwatch.times)
        return fastest(runs)


def _status_word() -> torch.Tensor:
    """An i32 in memory of this machine that the GPU sees at the same address."""
    return torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)


# The address alone takes a tenth of the time that a stream object takes.
_RAW_STREAM = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _stream(device: torch.device) -> int:
    """The address of PyTorch's current stream."""
    if _RAW_STREAM is not None:
        return int(_RAW_STREAM(device.index))
    return int(torch.cuda.current_stream(device).cuda_stream)


def _numbers(plan: Plan, device: torch.device) -> dict[tuple[float, ...], torch.Tensor]:
    """The kernels' own numbers, on the device."""
    native = (segment for segment in plan.segments if isinstance(segment, NativeSegment))
    slots = (slot for segment in native for step in segment.steps for slot in step.kernel.slots)
    values = dict.fromkeys(slot.values for slot in slots if isinstance(slot, ParamSlot))
    return {each: torch.tensor(each, dtype=torch.float32, device=device) for each in values}


class _Frame:
    """The words of a segment's launches for one shape: for each step the address of its slots and the slots, then the rows that
    `launch_all` reads. `rows`: their address. Only one call at a time may use it; a launch copies its slots."""

    def __init__(
        self, segment: NativeSegment, shape: SegmentRecord, numbers: Numbers, functions: Mapping[str, int], fixed: Mapping[Fixed, int]
    ) -> None:
        self._segment, self._shape, self._numbers, self._fixed = segment, shape, numbers, fixed
        codes = [step.kernel for step in segment.steps]
        self._words = array.array("q", [0] * sum(2 + len(code.slots) + cuda.ROW for code in codes))
        base = self._words.buffer_info()[0]
        # Where the addresses of the arena, the inputs and the outputs go, in this order, and what is added to each; those of constants.
        self._sites: list[list[tuple[int, int]]] = [[] for _ in range(1 + len(segment.inputs) + len(segment.outputs))]
        self._of_constants: list[tuple[int, int, int]] = []
        self._seen = [0] * len(self._sites)
        self._constants: ConstantSet | None = None
        at, row = 0, len(self._words) - cuda.ROW * len(codes)
        self.rows = base + 8 * row
        for step, code in zip(segment.steps, codes, strict=True):
            assert isinstance(code, LaunchCode)
            self._words[at] = base + 8 * (at + 1)
            launch = (functions[code.symbol], code.blocks(number(numbers, code.domain)), code.threads, base + 8 * at)
            self._words[row : row + cuda.ROW] = array.array("q", launch)
            at, row = self._slots(at + 1, step, code), row + cuda.ROW

    def _slots(self, at: int, step: Step, code: KernelCode) -> int:
        """Writes the slots of a kernel from word `at` on; returns the word behind them."""
        self._words[at] = self._fixed[STATUS]
        for word, slot in enumerate(code.slots, at + 1):
            if isinstance(slot, DimSlot):
                self._words[word] = number(self._numbers, slot.dim)
            elif isinstance(slot, BufferSlot):
                self._place(word, step.operands[slot.index])
            else:
                self._words[word] = self._fixed[slot.values]
        return at + 1 + len(code.slots)

    def _place(self, word: int, operand: Operand) -> None:
        buffer, offset = self._segment.buffers[operand.buffer], number(self._numbers, operand.offset)
        if buffer.kind == "constant":
            self._of_constants.append((word, buffer.index, offset))
        elif buffer.kind == "arena":
            self._sites[0].append((word, offset + self._shape.offsets[operand.buffer]))
        else:
            before = 1 if buffer.kind == "input" else 1 + len(self._segment.inputs)
            self._sites[before + buffer.index].append((word, offset))

    def bind(self, constants: ConstantSet, pointers: Sequence[int]) -> None:
        """Prepares a call. pointers: those of the arena, the inputs and the outputs."""
        if constants is not self._constants:
            self._constants = constants
            for word, index, offset in self._of_constants:
                self._words[word] = constants.pointers[index] + offset
        for n, (pointer, seen) in enumerate(zip(pointers, self._seen, strict=True)):
            if pointer != seen:
                self._seen[n] = pointer
                for word, offset in self._sites[n]:
                    self._words[word] = pointer + offset
