"""A GPU for machines without one: the code of kernels runs on this processor, its threads one after the other, or as threads of Python
where they exchange values. It is the same LLVM IR; what is missing is NVIDIA's compiler and its arithmetic.

Tensors are on the CPU then. Graphs of tensors on a GPU are traced with fake ones, which need none.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from sashiko.cpu_codegen import jit
from sashiko.driver import build
from sashiko.driver.captures import captured_of
from sashiko.driver.gpu import GpuKernels
from sashiko.driver.pipeline import passes
from sashiko.graph.capture import from_fx
from sashiko.graph.captured import Captured
from sashiko.graph.exporting import decompositions
from sashiko.graph.passes import run
from sashiko.platforms.gpu import nvidia
from sashiko.platforms.host import host
from sashiko.rewrite.rules.outside import views_outside
from sashiko.rewrite.rules.parts import in_parts
from sashiko.runtime import cuda, gpu
from sashiko.runtime.gpu import GpuExecutable

_NAMES = {
    "llvm.nvvm.read.ptx.sreg.tid.x": "gpu_thread", "llvm.nvvm.read.ptx.sreg.ctaid.x": "gpu_block",
    "llvm.nvvm.shfl.sync.bfly.i32": "gpu_shuffle", "llvm.nvvm.barrier0": "gpu_barrier",
}
WARP = 32


def for_host(text: str) -> str:
    """LLVM IR of kernels for a GPU as functions that take the address of their slots."""
    head = r"define ptx_kernel void @(\S+)\(ptr byval\([^)]*\) align 8 %a0\) \"nvvm.maxntid\"=\"\d+\""
    text = re.sub(head, r"define void @\1(ptr %a0)", text)
    text = re.sub(r"internal addrspace\(3\) global", "internal global", text)
    text = re.sub(r"addrspacecast ptr addrspace\(3\) (@\S+) to ptr", r"getelementptr i8, ptr \1, i64 0", text)
    for name, other in _NAMES.items():
        text = text.replace(f"@{name}(", f"@{other}(")
    return text


@dataclass
class _Block:
    """What the threads of a block that runs now share."""

    threads: int
    words: list[int] = field(default_factory=list)
    all: threading.Barrier | None = None
    warps: list[threading.Barrier] = field(default_factory=list)


class SimulatedGpu:
    """Kernels by name. `launch` runs one as a GPU would, with the words of its slots at an address."""

    def __init__(self, text: str) -> None:
        self._now = threading.local()
        callbacks: Mapping[str, tuple[Callable[..., object], Callable[..., object]]] = {
            "gpu_thread": (lambda: self._now.thread, ctypes.CFUNCTYPE(ctypes.c_int32)),
            "gpu_block": (lambda: self._now.number, ctypes.CFUNCTYPE(ctypes.c_int32)),
            "gpu_shuffle": (self._shuffle, ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int32] * 4)),
            "gpu_barrier": (self._barrier, ctypes.CFUNCTYPE(None)),
        }
        self._callbacks = {name: kind(call) for name, (call, kind) in callbacks.items()}
        addresses = {name: ctypes.cast(call, ctypes.c_void_p).value or 0 for name, call in self._callbacks.items()}
        self._text = for_host(text)
        self._library = jit.load_object(jit.compile_object(self._text, host()), addresses)
        self.names = tuple(re.findall(r"^define void @(\S+)\(", self._text, re.M))

    def launch(self, name: str, slots: int, blocks: int, threads: int) -> None:
        """Runs every thread of every block."""
        kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._library.address(name))
        body = self._text.split(f"@{name}(ptr %a0)")[1].split("\n}\n")[0]
        together = "@gpu_shuffle" in body or "@gpu_barrier" in body
        for number in range(blocks):
            self._run_together(kernel, slots, number, threads) if together else self._run(kernel, slots, number, range(threads), None)

    def _run(self, kernel: Callable[[int], None], slots: int, number: int, threads: range, block: _Block | None) -> None:
        self._now.number, self._now.block = number, block
        for thread in threads:
            self._now.thread = thread
            kernel(slots)

    def _run_together(self, kernel: Callable[[int], None], slots: int, number: int, threads: int) -> None:
        sizes = [min(WARP, threads - first) for first in range(0, threads, WARP)]
        block = _Block(threads, [0] * threads, threading.Barrier(threads), [threading.Barrier(size) for size in sizes])
        started = [threading.Thread(target=self._run, args=(kernel, slots, number, range(n, n + 1), block)) for n in range(threads)]
        for each in started:
            each.start()
        for each in started:
            each.join()

    def _shuffle(self, mask: int, word: int, distance: int, clamp: int) -> int:
        assert (mask, clamp) == (-1, WARP - 1)
        block, thread = self._now.block, self._now.thread
        block.words[thread] = word
        block.warps[thread // WARP].wait()
        found: int = block.words[thread ^ distance]
        block.warps[thread // WARP].wait()
        return found

    def _barrier(self) -> None:
        self._now.block.all.wait()


def driver_of(gpu: SimulatedGpu) -> tuple[dict[str, int], object]:
    """Handles of the kernels, and a function like cuLaunchKernel that runs them."""
    handles = dict(zip(gpu.names, itertools.count(1)))
    names = {handle: name for name, handle in handles.items()}

    def launch(function: int, *rest: int) -> int:
        (blocks, _, _, threads, _, _, shared, _, slots, _) = rest
        assert shared == 0
        gpu.launch(names[function], ctypes.c_int64.from_address(slots).value, blocks, threads)
        return 0

    words = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    return handles, ctypes.CFUNCTYPE(ctypes.c_int, *words)(launch)


def on_gpu(model: Callable[..., Any], *args: torch.Tensor) -> Captured:
    """The graph of a function of tensors like these on a GPU; no weights are frozen."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fakes = [torch.empty(a.shape, dtype=a.dtype, device="cuda") for a in args]
        module = make_fx(model, decomposition_table=decompositions())(*fakes)
    return from_fx(module, fakes)


def executable(monkeypatch: pytest.MonkeyPatch, captured: Captured) -> GpuExecutable:
    """What the driver makes of a graph, on the simulated GPU: its tensors are on the CPU."""
    captured = replace(captured, device=torch.device("cuda", 0))
    kernels = GpuKernels(nvidia(9, 0))
    graph = views_outside(in_parts(run(captured.graph, passes("fp32", kernels.target), declared=captured.declared)))
    plan = build._Planner(graph, captured, kernels, {}, lambda g: g).plan()
    handles, launch = driver_of(SimulatedGpu(kernels.module.text()))
    monkeypatch.setattr(cuda, "CudaModule", lambda ptx, names, device: SimpleNamespace(functions=handles, enter=lambda: None))
    monkeypatch.setattr(cuda, "launch_address", lambda: ctypes.cast(launch, ctypes.c_void_p).value)  # type: ignore[arg-type]
    monkeypatch.setattr(gpu, "_status_word", lambda: torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(gpu, "_stream", lambda device: 0)
    made = GpuExecutable(plan, kernels.ptx("simulated"), torch.device("cpu"), record=False)
    made.__dict__["simulation"] = launch  # which must live as long
    return made


def compiled(monkeypatch: pytest.MonkeyPatch, model: Callable[..., Any], *args: torch.Tensor, **shapes: Any) -> GpuExecutable:
    """The same of a model that is traced as for the CPU, with its weights."""

    class Model(torch.nn.Module):
        def forward(self, *inputs: torch.Tensor) -> Any:
            return model(*inputs)

    module = model if isinstance(model, torch.nn.Module) else Model()
    return executable(monkeypatch, captured_of(module.eval(), args, {}, shapes.get("dynamic_shapes")))
