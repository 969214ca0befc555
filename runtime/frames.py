"""Frames: the words that `run_plan` reads, filled in for one shape, one arena and one set of constants.

A call patches only its own input and output pointers.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from ..cpu_codegen.contract import BufferSlot, DimSlot, KernelCode
from ..graph.dims import Dim
from .constants import ConstantSet
from .plan import NativeSegment, Operand, Repeat, Step
from .records import Numbers, SegmentRecord, number
from .runner import HEADER, STEP, TURN
from .turns import CALLERS

# Scalar operations below which a step is not split, and twice the least that a thread is woken for. Measured with kernels of 3 and
# 22 operations an element on a 2.5 GHz AVX-512 machine with 2 cores: one thread does 25 to 40 operations in 1 ns, so this is 13 to
# 20 us. Two threads that are awake gain from 4 us of work on, but waking one that sleeps costs up to 8 us.
MIN_WORK = 1 << 19
_MORE_EVEN = 0.9  # of the largest share, from which on another cut is worth what its threads read twice


@dataclass(frozen=True)
class Machine:
    """What frames need of the loaded code: kernel addresses, and the work below which a step stays in the calling thread."""

    kernels: Mapping[str, int]
    min_work: int


class Frame:
    """The words of one segment. `bind(*pointers of inputs, *those of outputs)` prepares a call; `address` goes to `run_plan`.

    `inside`: 1 for words that hold a word's number, to become its address, 0 for others.
    """

    __slots__ = ("_memory", "_words", "address", "bind", "constants", "used")

    def __init__(self, words: torch.Tensor, inside: torch.Tensor, constants: ConstantSet, externals: tuple[int, int]) -> None:
        self._words = torch.empty_like(words)
        self.address = self._words.data_ptr()
        torch.add(words, inside, alpha=self.address, out=self._words)
        self._memory = (ctypes.c_int64 * len(words)).from_address(self.address)
        self.constants = constants  # keeps the memory of the constants while native code may read it
        self.used = 0
        self.bind: Callable[..., None] = partial(struct.Struct(f"={externals[1]}q").pack_into, self._memory, externals[0] * 8)

    def put(self, word: int, value: int) -> None:
        self._memory[word] = value

    def limit(self, first: int, end: int) -> None:
        """Lets the next runs execute steps [first, end) only."""
        self._memory[5], self._memory[6] = first, end


@dataclass(frozen=True)
class Site:
    """Where and for what a frame is written: the shape, the address of the arena, the constants, the most threads of a step,
    and whether the run looks for changed weights."""

    record: SegmentRecord
    numbers: Numbers
    arena: int
    constants: ConstantSet
    threads: int
    watch: bool


@dataclass(frozen=True)
class _Cut:
    """The kernel that runs a step, the rows of its domain, and how many threads share them."""

    code: KernelCode
    rows: int
    threads: int


@dataclass(frozen=True)
class _Place:
    """A step whose cut depends on the shapes: its first word, and the kernel that runs it for the first shape."""

    step: Step
    word: int
    code: KernelCode


class Pattern:
    """The frames of one segment for all shapes that have the same kernels and the same places in the arena: of a frame for another shape
    only the words that depend on the shape are written. Sequences that grow by one make a new shape in every call."""

    def __init__(self, segment: NativeSegment, machine: Machine, site: Site) -> None:
        self._segment, self._machine, self._site = segment, machine, site
        writer = _Writer(segment, machine, site)
        words = writer.words()
        inside = torch.zeros(len(words), dtype=torch.int64, device="cpu")
        inside[torch.tensor(writer.inside, dtype=torch.int64, device="cpu")] = 1
        self._words, self._inside = torch.tensor(words, dtype=torch.int64, device="cpu"), inside
        self._dims, self._places, self._externals = tuple(writer.dims), tuple(writer.places), writer.externals
        self._threads = writer.threads

    def frame(self, site: Site) -> Frame | None:
        """The frame for a shape, None when the shape needs other kernels or other places."""
        first = self._site
        same = site.arena == first.arena and site.constants is first.constants and site.record.offsets == first.record.offsets
        cuts = [_cut(place.step, self._segment, self._machine, site) for place in self._places] if same else []
        if not same or any(cut.code != place.code for cut, place in zip(cuts, self._places)):
            return None
        frame = Frame(self._words, self._inside, site.constants, self._externals)
        for word, dim, base in self._dims:
            frame.put(word, base + site.numbers[dim])
        for place, cut in zip(self._places, cuts):
            frame.put(place.word + 2, cut.rows)
            frame.put(place.word + 4, cut.threads)
        frame.put(8, max([self._threads, *(cut.threads for cut in cuts)]))
        return frame


class _Writer:
    """Collects the words of a frame, and which of them depend on the shape."""

    def __init__(self, segment: NativeSegment, machine: Machine, site: Site) -> None:
        self._segment, self._machine, self._site = segment, machine, site
        self._words: list[int] = []
        self.inside: list[int] = []
        self.dims: list[tuple[int, Dim, int]] = []  # the number of an expression, and what is added to it
        self.places: list[_Place] = []
        self.threads = 1  # the most of a step that is cut the same for all shapes
        self.externals = (0, 0)
        self._patches: list[tuple[int, int, Dim]] = []
        self._params: dict[tuple[float, ...], int] = {}
        self._moving: dict[Repeat, list[tuple[int, Operand]]] = {}  # slots of repeated steps, and what they point to

    def _put(self, *values: int) -> int:
        at = len(self._words)
        self._words.extend(values)
        return at

    def _point(self, word: int, to: int) -> None:
        """Makes `word` the address of word `to`."""
        self._words[word] = 8 * to
        self.inside.append(word)

    def _number(self, word: int, dim: Dim, base: int = 0) -> None:
        self._words[word] = base + number(self._site.numbers, dim)
        if not isinstance(dim, int):
            self.dims.append((word, dim, base))

    def words(self) -> list[int]:
        segment, words = self._segment, self._words
        self._put(*[0] * HEADER)
        count = len(segment.inputs) + len(segment.outputs)
        externals = self._put(*[0] * count)
        steps = self._put(*[0] * (STEP * len(segment.steps)))
        for at, step in enumerate(segment.steps):
            self._step(step, steps + at * STEP, segment.repeat(at))
        self._turns(steps)
        table = self._put()
        for word, external, offset in self._patches:
            row = self._put(0, external, 0)
            self._point(row, word)
            self._number(row + 2, offset)
        words[2], words[6] = len(self._patches), len(segment.steps)
        for word, target in ((1, table), (3, externals), (4, steps)):
            self._point(word, target)
        words[9] = ctypes.addressof(CALLERS)
        if self._site.watch:
            words[7] = self._site.constants.watch
        else:
            self._point(7, self._put(0, 0))
        self.externals = externals, count
        return words

    def _step(self, step: Step, at: int, repeat: Repeat | None) -> None:
        cut = _cut(step, self._segment, self._machine, self._site)
        self._words[at : at + STEP] = [self._machine.kernels[cut.code.symbol], 0, cut.rows, cut.code.grain, cut.threads, 0]
        self._point(at + 1, self._slots(step, cut.code, repeat))
        if _depends_on_shape(step):
            self.places.append(_Place(step, at, cut.code))
        else:
            self.threads = max(self.threads, cut.threads)

    def _turns(self, steps: int) -> None:
        """Writes the turns of repeated steps and how their operands move. The number of turns so far moves like a slot, too."""
        turns = [self._put(*[0] * TURN) for _ in self._segment.repeats]
        self._point(10, len(self._words))
        for repeat, turn in zip(self._segment.repeats, turns):
            self._point(steps + (repeat.end - 1) * STEP + 5, turn)
            self._number(turn + 1, repeat.times)
            self._words[turn + 2] = repeat.first
            self._point(turn + 3, len(self._words))
            moves = [self._put(0, 0, 1, 1)]
            self._point(moves[0], turn)
            for word, operand in self._moving.get(repeat, ()):
                moves.append(self._put(0, 0, 0, 0))
                self._point(moves[-1], word)
                for n, place in enumerate(operand.places, 1):
                    self._place(moves[-1] + n, place)
                self._number(moves[-1] + 3, operand.stride)
            self._words[turn + 4] = len(moves)
            self._words[11] += len(moves)

    def _slots(self, step: Step, code: KernelCode, repeat: Repeat | None) -> int:
        """Writes the slots of a kernel; returns the number of their first word, the address of the status word."""
        start = self._put(*[0] * (1 + len(code.slots)))
        self._point(start, 0)  # the status word opens the frame
        for word, slot in enumerate(code.slots, start + 1):
            if isinstance(slot, DimSlot):
                self._number(word, slot.dim)
            elif isinstance(slot, BufferSlot):
                self._operand(word, step.operands[slot.index], repeat)
            else:
                self._point(word, self._floats(slot.values))
        return start

    def _operand(self, word: int, operand: Operand, repeat: Repeat | None) -> None:
        if repeat is not None and len(operand.places) > 1:
            self._moving.setdefault(repeat, []).append((word, operand))
        else:
            self._place(word, operand)

    def _place(self, word: int, operand: Operand) -> None:
        """Makes `word` the address of part of a buffer."""
        buffer = self._segment.buffers[operand.buffer]
        if buffer.kind == "arena":
            self._number(word, operand.offset, self._site.arena + self._site.record.offsets[operand.buffer])
        elif buffer.kind == "constant":
            self._number(word, operand.offset, self._site.constants.pointers[buffer.index])
        else:
            base = 0 if buffer.kind == "input" else len(self._segment.inputs)
            self._patches.append((word, base + buffer.index, operand.offset))

    def _floats(self, values: tuple[float, ...]) -> int:
        """Number of the word where float32 numbers start; equal tuples are stored once."""
        if values not in self._params:
            data = bytes((ctypes.c_float * len(values))(*values))  # ctypes rounds; struct would refuse what is beyond float32
            data += bytes(-len(data) % 8)
            self._params[values] = self._put(*struct.unpack(f"={len(data) // 8}q", data))
        return self._params[values]


def _depends_on_shape(step: Step) -> bool:
    """Whether the cut of a step may differ from shape to shape."""
    return step.large is not None or any(not isinstance(dim, int) for code in step.variants for dim in (code.domain, code.work))


def _cut(step: Step, segment: NativeSegment, machine: Machine, site: Site) -> _Cut:
    """Which kernel runs a step for a shape, and how many threads divide its rows."""
    numbers = site.numbers
    code, other = _kernel(step, segment, numbers), step.alternative
    rows = number(numbers, code.domain)
    threads = team(number(numbers, step.kernel.work), site.threads, machine.min_work)
    if other is not None and threads > 1:
        domain = number(numbers, other.domain)
        if largest_share(domain, other.grain, threads) < _MORE_EVEN * largest_share(rows, code.grain, threads):
            code, rows = other, domain
    return _Cut(code, rows, max(1, min(threads, pieces(rows, code.grain))))


def _kernel(step: Step, segment: NativeSegment, numbers: Numbers) -> KernelCode:
    """The kernel of a step for the sizes of what it writes."""
    if step.large is None:
        return step.kernel
    written = (segment.buffers[step.operands[operand].buffer] for operand in step.writes)
    return step.large if all(number(numbers, b.nbytes) >= step.large_from for b in written) else step.kernel


def pieces(rows: int, grain: int) -> int:
    """How many pieces of whole grains a step can be cut into."""
    return -(-rows // grain)


def largest_share(rows: int, grain: int, threads: int) -> float:
    """What part of the rows one of the threads gets, as `team.py` cuts them into whole grains; the others wait for it. The last thread is
    the first to get a grain more, and has the grain that is not whole."""
    grains = pieces(rows, grain)
    if not grains:
        return 0.0
    parts = min(threads, grains)
    each, more = divmod(grains, parts)
    last = rows - (grains - each - (more > 0)) * grain
    return (last if parts == 1 else max(last, (each + (more > 1)) * grain)) / rows


def team(work: int, threads: int, min_work: int) -> int:
    """How many of `threads` are worth waking for `work`: one below `min_work`, and half of that for each above."""
    if work < min_work:
        return 1
    return min(threads, max(1, 2 * work // min_work)) if min_work else threads
