"""Matrix products for tests: random operands, the kernel run as its callers run it, and exact references."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from sashiko.cpu_codegen.builder import Module
from sashiko.cpu_codegen.contract import BufferSlot, KernelCode, ParamSlot
from sashiko.graph import sums16
from sashiko.graph.dims import Dim, evaluate, symbol
from sashiko.graph.types import DType, f32, i32, u8
from sashiko.kernels import gemm, x86_words
from sashiko.kernels.micro import MicroKernel
from sashiko.kernels.packing import pack_rhs
from sashiko.kernels.spec import Choice, GemmCode, GemmSpec, Strides
from sashiko.kernels.x86_vector import MaddubsMicro
from sashiko.platforms.target import Target
from sashiko.stitch.loops import COLUMN, ROW, Body, BodyBuilder, Node
from tests.emulation import Array, Buffer, Call, Runner

M: Dim = symbol("M", 1)
Micros = Sequence[MicroKernel]


@dataclass(frozen=True)
class Case:
    """m rows, n columns, k products; pitch: elements between the rows of the lhs that belong to nobody.

    caches: bytes of L1 and L2 as if they were so small, so that small products are cut into blocks. across: the lhs is stored transposed;
    pitch: between the columns, then.
    """

    m: int
    n: int
    k: int
    pitch: int = 0
    caches: tuple[int, int] | None = None
    across: bool = False

    def on(self, target: Target) -> Target:
        """The machine with these caches."""
        return target if self.caches is None else replace(target, l1d=self.caches[0], l2=self.caches[1])

    def lhs(self, dtype: DType) -> tuple[torch.Tensor, torch.Tensor]:
        """What is stored, and the rows of it."""
        outer, inner = (self.k, self.m) if self.across else (self.m, self.k)
        stored = random((outer, inner + self.pitch), dtype, 1)
        return stored, stored[:, :inner].mT if self.across else stored[:, :inner]


def plain_store(n: Dim, acc: DType) -> Body:
    """out[r, c] = acc."""
    builder = BodyBuilder()
    out = builder.buffer(acc)
    builder.store(out, ROW * n + COLUMN, builder.add(Node("acc", acc)))
    return builder.finish()


def acc_of(lhs: DType) -> DType:
    return f32 if lhs.is_float else i32


def spec_of(case: Case, lhs: DType, rhs: DType, epilogue: Body | None = None, m: Dim = M) -> GemmSpec:
    body = plain_store(case.n, acc_of(lhs)) if epilogue is None else epilogue
    strides = Strides(0, 1, m + case.pitch) if case.across else Strides(0, case.k + case.pitch)
    return GemmSpec(lhs, rhs, m, case.n, case.k, strides, body)


def random(shape: tuple[int, ...], dtype: DType, seed: int) -> torch.Tensor:
    """Integers of the whole range, or normal floats."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_float:
        return torch.randn(shape, generator=generator).to(dtype.torch)
    low, high = (0, 256) if dtype == u8 else (-128, 128)
    return torch.randint(low, high, shape, generator=generator).to(dtype.torch)


def weight(shape: tuple[int, ...], micros: Micros, seed: int) -> torch.Tensor:
    """A random rhs of a family; where its products are to be added in 16 bits, of integers as large as that allows."""
    found = random(shape, micros[0].rhs, seed)
    if not isinstance(micros[0], MaddubsMicro):
        return found
    rows = found.double().clamp(-127, 127).flatten(0, -2)
    return sums16.limited(rows, rows, micros[0].sums).to(torch.int8).view(shape)


def array(tensor: torch.Tensor) -> Array:
    """A numpy array with the same bytes; bf16 as uint16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    return tensor.contiguous().numpy()


def exact(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """lhs [m, k] times rhs [n, k] transposed, in f64; exact for 8-bit operands."""
    return lhs.double() @ rhs.double().mT


def bound(lhs: torch.Tensor, rhs: torch.Tensor, terms: int) -> torch.Tensor:
    """What an f32 sum of k products may differ from the exact one: k + 2 roundings of the sum of magnitudes (Higham, section 3.1)."""
    return (terms + 2) * 2.0**-24 * (lhs.double().abs() @ rhs.double().abs().mT)


def words_bound(lhs: torch.Tensor, rhs: torch.Tensor, step: int) -> torch.Tensor:
    """What rounding both operands to integers adds to that: half of what 1 stands for, of either times the other's magnitudes."""
    x, w = lhs.double().abs(), rhs.double().abs()
    half = 0.5001 / x86_words.most_of(step)
    of_x, of_w = (half * each.amax(1) for each in (x, w))
    return of_x[:, None] * w.sum(1) + x.sum(1)[:, None] * of_w + x.shape[1] * of_x[:, None] * of_w


def packed_of(weight: torch.Tensor, micro: MicroKernel) -> torch.Tensor:
    """A weight as a family reads it."""
    if isinstance(micro, x86_words.WordMicro):
        return x86_words.pack(weight, micro.packing)
    return pack_rhs(weight, micro.packing)


class Together:
    """Products in one module that run in one process, which costs less than a module and a process for each."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.module = runner, Module()
        self.calls: list[Call] = []
        self._arrays: list[Array] = []
        self._checks: list[tuple[int, Callable[[Array], None]]] = []

    def name(self) -> str:
        """A name for the next product's kernels."""
        return f"product_{len(self._checks)}"

    def place(self, array: Array) -> int:
        """The number of one more array."""
        self._arrays.append(array)
        return len(self._arrays) - 1

    def add(
        self, kernels: Sequence[KernelCode], lhs: int, rhs: int, out: Array, sizes: Mapping[str, int], check: Callable[[Array], None],
        *others: int,
    ) -> None:
        """Kernels of one product on the arrays `lhs` and `rhs`, each in two calls as two threads would, each to an `out` of its own, which
        `check` looks at afterwards. others: arrays behind `out`."""
        for kernel in kernels:
            at = self.place(out)
            self.calls += halves(kernel, (lhs, rhs, at, *others), sizes)
            self._checks.append((at, check))

    def run(self) -> None:
        results = self.runner.run_calls(self.module.text(), self._arrays, self.calls)
        for at, check in self._checks:
            check(results[at])


def halves(kernel: KernelCode, places: Sequence[int], sizes: Mapping[str, int]) -> list[Call]:
    """Two calls that share the domain."""
    end = evaluate(kernel.domain, sizes)
    middle = end // 2 // kernel.grain * kernel.grain
    return [call(kernel, places, first, last, sizes) for first, last in ((0, middle), (middle, end)) if first < last]


def call(kernel: KernelCode, places: Sequence[int], begin: int, end: int, sizes: Mapping[str, int]) -> Call:
    """places: the number of the array for each operand."""
    slots: list[Buffer | int] = []
    for slot in kernel.slots:
        assert not isinstance(slot, ParamSlot)
        slots.append(Buffer(places[slot.index]) if isinstance(slot, BufferSlot) else evaluate(slot.dim, sizes))
    return Call(kernel.symbol, tuple(slots), begin, end)


def run(runner: Runner, micros: Micros, cases: Sequence[Case], known_rows: bool = False, pieces: int = 0) -> None:
    """Runs products through both of their kernels and compares them with the exact ones. Cases that differ in rows share the code."""
    products, lhs, rhs = Together(runner), micros[0].lhs, micros[0].rhs
    codes: dict[tuple[GemmSpec, Target], GemmCode] = {}
    for case in cases:
        spec = replace(spec_of(case, lhs, rhs, m=case.m if known_rows else M), choice=Choice(pieces=pieces))
        known = _, target = spec, case.on(runner.target)
        if known not in codes:
            codes[known] = gemm.emit(products.module, target, spec, micros, products.name())
        code = codes[known]
        (stored, x), w = case.lhs(lhs), weight((case.n, case.k), micros, 2)
        packed, sizes = packed_of(w, micros[0]), {"M": case.m}
        assert packed.numel() == evaluate(code.packed_bytes, sizes)
        out = np.full((case.m, case.n), 77, np.float32 if lhs.is_float else np.int32)
        check = partial(compare, x=x, w=w, case=case, micro=micros[0])
        products.add(kernels_of(code), products.place(array(stored)), products.place(packed.numpy()), out, sizes, check)
    products.run()


def kernels_of(code: GemmCode) -> list[KernelCode]:
    return [code.rows] if code.columns is None else [code.rows, code.columns]


def compare(result: Array, x: torch.Tensor, w: torch.Tensor, case: Case, micro: MicroKernel | None = None) -> None:
    """Integers must be equal, floats within the bound of their number of terms, and of the integers that a family makes of them."""
    reference = exact(x, w)
    difference = (torch.from_numpy(result).double() - reference).abs()
    allowed = bound(x, w, case.k) if x.dtype.is_floating_point else torch.zeros_like(reference)
    if isinstance(micro, x86_words.WordMicro):
        allowed = allowed + words_bound(x, w, micro.step_k)
    worst = (difference - allowed).max().item()
    assert worst <= 0, f"{case}: off by {difference.max().item()}, {int((difference > allowed).sum())} of {difference.numel()} elements"
