"""What `sashiko doctor` finds out, as data: the machine, the libraries inside torch, the tools around, the cache."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from ..diagnostics import env
from ..platforms.host import HostReport, cpu_model, host_report

_PACKAGES = (
    *("sashiko", "torch", "numpy", "llvmlite", "safetensors", "py-cpuinfo", "rich"),
    *("transformers", "onnx", "onnxscript", "onnxruntime", "openvino", "nncf", "matplotlib"),
)
_SYMBOLS: tuple[tuple[str, str], ...] = (
    ("GOMP_parallel", "the thread pool shared with torch"),
    ("sgemm_", "float32 matrix products (MKL), a row of the kernel table"),
    ("aoti_torch_get_data_ptr", "tells where a watched weight lies"),
    ("cblas_sgemm_compute", "float32 matrix products with packed weights (MKL)"),
    ("cblas_gemm_bf16bf16f32", "bfloat16 matrix products (MKL)"),
    ("aoti_torch_cpu_bmm_out", "batched matrix products"),
    ("aoti_torch_cpu_convolution", "convolution"),
    ("aoti_torch_cpu_mkldnn__convolution_pointwise", "convolution with a fused activation (oneDNN)"),
    ("aoti_torch_cpu__qlinear_pointwise_tensor", "int8 matrix products (oneDNN)"),
    ("aoti_torch_cpu__qconv_pointwise_tensor", "int8 convolution (oneDNN)"),
    ("aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu", "attention"),
    ("aoti_torch_cpu__embedding_bag", "sums of embedding rows"),
)
_TOOLS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("qemu-aarch64-static", "qemu-aarch64"), "runs AArch64 code in tests"),
    (("aarch64-linux-gnu-gcc",), "links the AArch64 test driver"),
    (("llvm-mca-22", "llvm-mca"), "estimates the speed of inner loops"),
)


@dataclass(frozen=True)
class FeatureRow:
    """One instruction-set feature. note: why it is not used although the CPU reports it."""

    name: str
    present: bool
    enables: str
    note: str


@dataclass(frozen=True)
class Found:
    """A symbol, a tool or a package. where: library, path or version; empty when it is absent."""

    name: str
    where: str
    use: str


@dataclass(frozen=True)
class Machine:
    """Everything `sashiko doctor` shows. Sizes in bytes. amx: "granted", "not reported by the CPU", or the reason of the refusal."""

    model_name: str
    system: str
    triple: str
    llvm_cpu: str
    vector_bits: int
    registers: int
    torch_threads: int
    l1d: int
    l2: int
    l3: int
    cache_line: int
    amx: str
    features: tuple[FeatureRow, ...]
    packages: tuple[Found, ...]
    symbols: tuple[Found, ...]
    tools: tuple[Found, ...]
    cache_dir: str
    cache_files: int
    cache_bytes: int
    settings: tuple[Found, ...]


def examine() -> Machine:
    """Looks at this machine. Takes about two seconds, nearly all of it the import of torch."""
    import torch

    report = host_report()
    target = report.target
    files, size = folder_size(env.cache_dir())
    return Machine(
        model_name=cpu_model(),
        system=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        triple=target.triple,
        llvm_cpu=target.cpu,
        vector_bits=target.vector_bits,
        registers=target.registers,
        torch_threads=torch.get_num_threads(),
        l1d=target.l1d,
        l2=target.l2,
        l3=target.l3,
        cache_line=target.cache_line,
        amx=amx_state(report),
        features=feature_rows(report),
        packages=tuple(Found(name, _version(name), "") for name in _PACKAGES),
        symbols=_symbols(Path(torch.__file__).parent / "lib"),
        tools=tuple(Found(names[0], next(filter(None, map(shutil.which, names)), ""), use) for names, use in _TOOLS),
        cache_dir=str(env.cache_dir()),
        cache_files=files,
        cache_bytes=size,
        settings=tuple(Found(v.name, value, v.help) for v, value in env.current()),
    )


def amx_state(report: HostReport) -> str:
    """Returns what became of the request for AMX tiles, in words."""
    if report.target.tiles:
        return "granted"
    return dict(report.removed).get("amx_tile", "not reported by the CPU")


def feature_rows(report: HostReport) -> tuple[FeatureRow, ...]:
    """Returns one row for each feature of the machine's architecture."""
    notes = dict(report.removed)
    return tuple(
        FeatureRow(row.name, report.target.has(row.name), row.enables, notes.get(row.name, "")) for row in report.target.known_features
    )


def folder_size(folder: Path) -> tuple[int, int]:
    """Returns the number of files below a folder and their bytes. Files that vanish meanwhile (another process cleans up) do not count."""
    files = size = 0
    for path in folder.rglob("*") if os.path.isdir(folder) else ():
        try:
            if path.is_file():
                size += path.stat().st_size
                files += 1
        except OSError:
            continue
    return files, size


def _symbols(folder: Path) -> tuple[Found, ...]:
    """Looks the symbols up in torch's CPU library; the lookup covers the libraries it depends on."""
    libraries = [path for pattern in ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll") for path in folder.glob(pattern)]
    library = ctypes.CDLL(str(libraries[0])) if libraries else None
    place = libraries[0].name if libraries else ""
    return tuple(Found(name, place if hasattr(library, name) else "", use) for name, use in _SYMBOLS)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
