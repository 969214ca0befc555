"""Hand-made kernels and plans: small functions with the kernel contract, and plans that chain them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from sashiko.cpu_codegen import cache
from sashiko.cpu_codegen.builder import F32, I32, I64, PTR, VOID, Function, Module, Val, const, i64
from sashiko.cpu_codegen.contract import BufferSlot, DimSlot, KernelCode, ParamSlot, Slot
from sashiko.cpu_codegen.slots import Slots
from sashiko.graph.dims import Dim, symbol
from sashiko.graph.types import TensorType, f32
from sashiko.platforms.host import host
from sashiko.runtime.executable import Code, Executable, with_runner
from sashiko.runtime.plan import (
    Buffer,
    ConstantSource,
    InputTensor,
    NativeSegment,
    Operand,
    OutputTensor,
    Plan,
    Repeat,
    SegmentOutput,
    Step,
)

ROWS: Dim = symbol("s0", 0)
COLS: Dim = symbol("s1", 1)


def elementwise(name: str, body: Callable[[Function, list[Val], Val], Val], inputs: int) -> Callable[[Module], None]:
    """Emits name(slots, begin, end): rows [begin, end) of `cols` floats; operands 0..inputs-1 are read, the last is written.

    Slots: 1 = cols, then the buffers, then one number.
    """

    def emit(module: Module) -> None:
        f = Function(module, name, VOID, [PTR, I64, I64])
        cols = f.load(I64, f.gep(f.args[0], i64(1), I64))
        buffers = [f.load(PTR, f.gep(f.args[0], i64(2 + n), I64), 8) for n in range(inputs + 1)]
        number = f.load(F32, f.load(PTR, f.gep(f.args[0], i64(3 + inputs), I64), 8))

        def point(i: Val, _: list[Val]) -> list[Val]:
            values = [f.load(F32, f.gep(b, i, F32)) for b in buffers[:-1]]
            f.store(body(f, values, number), f.gep(buffers[-1], i, F32))
            return []

        f.loop(f.mul(f.args[1], cols), f.mul(f.args[2], cols), 1, [], point)
        f.ret()
        f.finish()

    return emit


def emit_check(module: Module) -> None:
    """check(slots, begin, end): copies rows of one float; sets the status word where the value is negative."""
    f = Function(module, "check", VOID, [PTR, I64, I64])
    status = f.load(PTR, f.args[0], 8)
    source, target = (f.load(PTR, f.gep(f.args[0], i64(n), I64), 8) for n in (1, 2))

    def point(i: Val, _: list[Val]) -> list[Val]:
        value = f.load(F32, f.gep(source, i, F32))
        f.store(value, f.gep(target, i, F32))

        def bad() -> list[Val]:
            f.store(const(I32, 1), status)
            return []

        f.branch(f.fcmp("olt", value, const(F32, 0)), bad)
        return []

    f.loop(f.args[1], f.args[2], 1, [], point)
    f.ret()
    f.finish()


def emit_ranges(module: Module) -> None:
    """ranges(slots, begin, end): target[i] = begin for i in [begin, end), as i64: shows how the domain was cut."""
    f = Function(module, "ranges", VOID, [PTR, I64, I64])
    target = Slots(f).buffer(0)

    def point(i: Val, _: list[Val]) -> list[Val]:
        f.store(f.args[1], f.gep(target, i, I64))
        return []

    f.loop(f.args[1], f.args[2], 1, [], point)
    f.ret()
    f.finish()


EMITTERS = (
    elementwise("add", lambda f, v, n: f.add(v[0], v[1]), 2),
    elementwise("scale", lambda f, v, n: f.mul(v[0], n), 1),
    elementwise("shift", lambda f, v, n: f.add(v[0], n), 1),
    emit_check,
    emit_ranges,
)


@pytest.fixture(scope="session")
def code() -> Code:
    """Every hand-made kernel, compiled for this machine."""
    module = Module()
    for emit in EMITTERS:
        emit(module)
    return with_runner([cache.compiled(module.text(), host())], host())


def slots(inputs: int, number: float, cols: Dim = COLS) -> tuple[Slot, ...]:
    return (DimSlot(cols), *(BufferSlot(n) for n in range(inputs + 1)), ParamSlot((number,)))


@dataclass
class Chain:
    """Writes a plan of elementwise steps over f32[rows, cols] tensors; buffers are named by position."""

    rows: Dim = ROWS
    cols: Dim = COLS
    work: Dim = 0

    def __post_init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.steps: list[Step] = []
        self.sources: list[ConstantSource] = []

    @property
    def nbytes(self) -> Dim:
        return 4 * self.rows * self.cols

    def buffer(self, kind: str, index: int = 0) -> int:
        self.buffers.append(Buffer(kind, index, self.nbytes, f32, f"{kind}{len(self.buffers)}"))  # type: ignore[arg-type]
        return len(self.buffers) - 1

    def inputs(self, count: int) -> list[int]:
        return [self.buffer("input", n) for n in range(count)]

    def constant(self, source: ConstantSource) -> int:
        self.sources.append(source)
        return self.buffer("constant", len(self.sources) - 1)

    def step(self, kernel: str, reads: list[int], to: int, number: float = 0.0, reuse: bool = False) -> int:
        code = KernelCode(kernel, slots(len(reads), number, self.cols), self.rows, 1, self.work)
        operands = tuple(Operand(b) for b in (*reads, to))
        reuses = ((len(reads), 0),) if reuse else ()
        self.steps.append(Step(code, operands, (len(reads),), f"{kernel} {len(self.steps)}", None, reuses))
        return to

    def arena(self) -> int:
        return self.buffer("arena")

    def segment(self, inputs: list[int], outputs: list[int]) -> NativeSegment:
        kind = TensorType(f32, (self.rows, self.cols))
        made = tuple(SegmentOutput(value, kind) for value in outputs)
        return NativeSegment(tuple(inputs), made, tuple(self.buffers), tuple(self.steps))

    def plan(self, inputs: int, outputs: int) -> Plan:
        """The plan of one segment: values 0.. are the inputs, 100.. the outputs."""
        kind = TensorType(f32, (self.rows, self.cols))
        results = [100 + n for n in range(outputs)]
        segment = self.segment(list(range(inputs)), results)
        arguments = tuple(InputTensor(f"x{n}", kind, n) for n in range(inputs))
        return Plan(arguments, tuple(OutputTensor(r) for r in results), (segment,), tuple(self.sources))


def recurrence(backwards: bool = False) -> Plan:
    """x[rows, cols], s[cols] to y[rows, cols] with y[t] = 2 * (y[t - 1] + x[t]), s before the first; or y[t + 1], s after the last."""
    row, c = 4 * COLS, Chain(rows=1)
    c.inputs(2)
    middle, y = c.arena(), c.buffer("output", 0)
    c.step("add", [1, 0], middle)
    c.step("scale", [middle], y, 2.0)
    walk = Operand(0, (ROWS - 1) * row, -row) if backwards else Operand(0, 0, row)
    written = replace(walk, buffer=y)
    add, scale = c.steps
    moving = (
        replace(add, operands=(Operand(1, 0, walk.stride, written), walk, Operand(middle))),
        replace(scale, operands=(Operand(middle), written)),
    )
    matrix, vector = TensorType(f32, (ROWS, COLS)), TensorType(f32, (COLS,))
    segment = NativeSegment((0, 1), (SegmentOutput(2, matrix),), tuple(c.buffers), moving, repeats=(Repeat(0, 2, ROWS),))
    return Plan((InputTensor("x", matrix, 0), InputTensor("s", vector, 1)), (OutputTensor(2),), (segment,))


@pytest.fixture
def repeated() -> Callable[..., Plan]:
    return recurrence


@pytest.fixture
def chain() -> type[Chain]:
    return Chain


@pytest.fixture
def affine(code: Code) -> Executable:
    """(x + y) * 2 + 3 through the arena, any number of rows and columns."""
    c = Chain()
    x, y = c.inputs(2)
    total = c.step("add", [x, y], c.arena())
    doubled = c.step("scale", [total], c.arena(), 2.0, reuse=True)
    c.step("shift", [doubled], c.buffer("output", 0), 3.0)
    return Executable(c.plan(2, 1), code)


@pytest.fixture
def expected() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """What `affine` computes."""
    return lambda x, y: (x + y) * 2 + 3
