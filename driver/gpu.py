"""What of a compilation is other for GPUs: loops become kernels that are launched, and all else is PyTorch's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from ..cpu_codegen import cache
from ..diagnostics.dump import dump_stage, say
from ..diagnostics.errors import Unsupported
from ..gpu_codegen.loops import LaunchCode, emit_launch
from ..graph.ir import Value
from ..kernels.attention_spec import AttentionCode, AttentionSpec
from ..kernels.sorting import SortSpec
from ..kernels.spec import GemmCode, GemmSpec
from ..platforms import gpu
from ..platforms.target import Target
from ..stitch.loops import LoopKernel
from .kernels import CODE, AttentionChoice, GemmChoice, Kernels, with_params
from .recall import Spec


def target_of(device: torch.device) -> Target:
    """The target for a GPU. Raises Unsupported for one that is too old."""
    return gpu.nvidia(*torch.cuda.get_device_capability(device))


@dataclass
class GpuKernels(Kernels):
    """The kernels of one compilation for a GPU. Raises Unsupported for all that is no loop: capture leaves that to PyTorch."""

    _launches: dict[LoopKernel, LaunchCode] = field(default_factory=dict)

    def expect(self, specs: Iterable[Spec]) -> None:
        pass

    def ptx(self, name: str) -> str:
        """The text of all kernels. name: of the compilation, for dumps."""
        text = self.module.text()
        found = cache.assembled(text, self.target)
        for number, stage, shown in ((90, "llvm", lambda: text), (91, "ptx", lambda: found)):
            dump_stage(name, number, stage, shown)
            say(CODE, shown)
        return found

    def loop(self, kernel: LoopKernel) -> LaunchCode:
        key = replace(kernel, name="", params=())
        if key not in self._launches:
            named = replace(kernel, name=f"loop{len(self._launches)}_{kernel.name}")
            say(CODE, lambda: str(named))
            self._launches[key] = emit_launch(self.module, self.target, named)
        code = with_params(self._launches[key], kernel.params)
        assert isinstance(code, LaunchCode)
        return code

    def gemm(self, spec: GemmSpec) -> tuple[GemmCode, GemmChoice]:
        raise Unsupported("a matrix product has no kernel for GPUs")

    def attention(self, spec: AttentionSpec) -> tuple[AttentionCode, AttentionChoice]:
        raise Unsupported("attention has no kernel for GPUs")

    def call(self, value: Value) -> LaunchCode:
        raise Unsupported("a kernel of the user's is for CPUs", value.origin)

    def sort(self, spec: SortSpec) -> LaunchCode:
        raise Unsupported("sorting has no kernel for GPUs")
