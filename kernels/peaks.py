"""What this core can do at best: products of each kind, and the bandwidth of each level of its memory.

The products are the inner loops of our own tiles on operands in L1, the fastest tile of each kind. The operands are random: AMX
was measured 25 % faster on zeros, which no model consists of. Measured once and kept in the cache of objects.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cpu_codegen import bandwidth, cache, jit
from ..cpu_codegen.bandwidth import Bandwidth
from ..cpu_codegen.builder import F32, I16, I32, I64, PTR, VOID, Function, Module, Val, i64
from ..cpu_codegen.rate import LINE, USUAL, Bound, Effort, aligned, best_rate, loaded
from ..graph.types import DType, bf16, f32, i8, u8
from ..platforms.host import cpu_model, host
from ..platforms.target import Target
from .micro import MicroKernel, Start, Tile
from .table import tiles

# The kinds of products, and the types of the operands that count as one.
KINDS: dict[str, tuple[tuple[DType, DType], ...]] = {"fp32": ((f32, f32),), "bf16": ((bf16, bf16),), "int8": ((i8, i8), (u8, i8))}
_OPERANDS = {f32: "f32", bf16: "bf16", i8: "i8", u8: "i8"}  # the bytes of u8 are those of i8
_FORMAT = 1


@dataclass(frozen=True)
class ProductPeak:
    """10^9 multiplications and additions per second of one core. kind: of `KINDS`; kernel: the tile that reached it."""

    kind: str
    kernel: str
    giga: float


@dataclass(frozen=True)
class Peaks:
    """The figures of one core of a machine. bandwidths: the smallest level first."""

    cpu: str
    products: tuple[ProductPeak, ...]
    bandwidths: tuple[Bandwidth, ...]

    def giga(self, kind: str) -> float:
        """10^9 operations per second for products of a kind."""
        return next(p.giga for p in self.products if p.kind == kind)

    def holding(self, size: int) -> Bandwidth:
        """The smallest level that was measured with at least `size` bytes, or else memory."""
        return next((b for b in self.bandwidths if b.size >= size), self.bandwidths[-1])


def peaks() -> Peaks:
    """The peaks of this machine, measured (about three seconds) when they were not before."""
    name = _name()
    found = cache.read(_path(name), name)
    return from_json(json.loads(found)) if found is not None else remeasured()


def remeasured(effort: Effort = USUAL, levels: tuple[tuple[str, int], ...] = ()) -> Peaks:
    """Measures the peaks of this machine and keeps them. levels: of memory, with the bytes to measure with; all by default."""
    target = host()
    products = tuple(measure_kind(target, kind, effort) for kind in KINDS)
    found = Peaks(cpu_model(), products, bandwidth.measure(target, levels or bandwidth.sizes(target), effort))
    name = _name()
    cache.write(_path(name), name, json.dumps(dataclasses.asdict(found)).encode())
    return found


def from_json(data: dict[str, Any]) -> Peaks:
    """The reverse of `dataclasses.asdict`."""
    products = tuple(ProductPeak(**row) for row in data["products"])
    return Peaks(data["cpu"], products, tuple(Bandwidth(**row) for row in data["bandwidths"]))


def measure_kind(target: Target, kind: str, effort: Effort = USUAL) -> ProductPeak:
    """The fastest tile of a kind of products on this machine."""
    micros = [micro for types in KINDS[kind] for micro in tiles(target, *types)]
    found = [ProductPeak(kind, micro.name, _measured(target, micro, effort)) for micro in micros]
    return max(found, key=lambda peak: peak.giga)


def steps_in_l1(target: Target, micro: MicroKernel) -> int:
    """How many steps of a tile have operands that fit into half of L1."""
    return max(1, target.l1d // 2 // (micro.step_bytes * micro.mr + _panel_bytes(micro) * micro.panels))


def emit(micro: MicroKernel, steps: int) -> Module:
    """The function void product(ptr lhs, ptr panels, ptr out, i64 passes): the inner loop of a tile, again and again."""
    module = Module()
    fn = Function(module, "product", VOID, [PTR, PTR, PTR, I64])
    lhs, rhs, out, passes = fn.args
    panel = _panel_bytes(micro) * steps
    panels = tuple(fn.gep(rhs, i64(panel * p)) for p in range(micro.panels))
    tile = Tile(lhs, i64(_pitch(micro, steps)), out, i64(steps), i64(0), panels, (), micro.nr, 0)

    def once(_: Val, accumulators: list[Val]) -> list[Val]:
        return fn.loop(i64(0), tile.steps, 1, accumulators, lambda index, values: micro.step(fn, tile, index, values))

    micro.enter(fn)
    micro.finish(fn, tile, fn.loop(i64(0), passes, 1, micro.start(fn, tile, Start.ZERO), once))
    micro.leave(fn)
    fn.ret()
    fn.finish()
    if micro.layout.step_bytes:
        _emit_rows(module, micro)
    return module


def _emit_rows(module: Module, micro: MicroKernel) -> None:
    """The function void rows(ptr elements, ptr to, i64 steps) for a tile that reads more than elements: packs a row."""
    fn = Function(module, "rows", VOID, [PTR, PTR, I64])

    def step(index: Val, _: list[Val]) -> list[Val]:
        elements = fn.gep(fn.args[0], fn.mul(index, i64(micro.step_k)), micro.layout.element)
        micro.pack_step(fn, elements, fn.gep(fn.args[1], index, scale=micro.step_bytes), elements)
        return []

    fn.loop(i64(0), fn.args[2], 1, [], step)
    fn.ret()
    fn.finish()


def _measured(target: Target, micro: MicroKernel, effort: Effort) -> float:
    """10^9 operations per second of a tile's inner loop."""
    steps = steps_in_l1(target, micro)
    library = loaded(emit(micro, steps), target)
    lhs = rows(library, micro, steps)
    rhs = _random(_OPERANDS[micro.rhs], _panel_bytes(micro) * micro.panels * steps)
    out = aligned(4 * micro.mr * micro.nr)
    work = 2 * micro.mr * micro.nr * micro.step_k * steps
    return best_rate(Bound(library, "product", (lhs.ctypes.data, rhs.ctypes.data, out.ctypes.data)), work, effort) / 1e9


def rows(library: jit.Library, micro: MicroKernel, steps: int) -> npt.NDArray[np.uint8]:
    """Random rows as a tile reads them. library: of `emit`."""
    pitch = _pitch(micro, steps)
    found = _random(_lhs_values(micro), micro.mr * pitch)
    for row in range(micro.mr if micro.layout.step_bytes else 0):
        elements = _random(_lhs_values(micro), micro.step_k * steps * micro.layout.element.bits // 8)  # packing may change them
        Bound(library, "rows", (elements.ctypes.data, found.ctypes.data + row * pitch))(steps)
    return found


def _panel_bytes(micro: MicroKernel) -> int:
    """Bytes of a panel in one step, scales included."""
    return micro.packing.unit_bytes(micro.rhs) * micro.step_k // micro.packing.unit_k


def _pitch(micro: MicroKernel, steps: int) -> int:
    """Bytes from row to row of the lhs; a line more than needed, so that the rows are not a power of two apart."""
    return micro.step_bytes * steps + LINE


def _lhs_values(micro: MicroKernel) -> str:
    """What a tile reads as its lhs, of `_random`: wider than the type where rows are packed wider."""
    wide = {F32: "f32", I32: "i32"}.get(micro.layout.element)
    return wide or ("i16" if micro.layout.element == I16 and not micro.lhs.is_float else _OPERANDS[micro.lhs])


def _random(values: str, size: int) -> npt.NDArray[np.uint8]:
    """`size` bytes of operands: floats between -1 and 1, integers of all 8-bit values. values: "f32", "bf16", "i8", "i16" or "i32"."""
    generator = np.random.default_rng(0)
    data = aligned(size)
    if values in ("f32", "bf16"):
        floats = generator.uniform(-1, 1, size // (4 if values == "f32" else 2)).astype(np.float32)
        made: npt.NDArray[Any] = floats if values == "f32" else (floats.view(np.uint32) >> 16).astype(np.uint16)
    else:
        made = generator.integers(-128, 128, size // (int(values[1:]) // 8)).astype(values.replace("i", "int"))
    data[:] = made.view(np.uint8)
    return data


def _name() -> str:
    return cache.key(f"peaks {_FORMAT} of {cpu_model()}: {host().key}", host())


def _path(name: str) -> Any:
    return cache.folder() / f"{name}.peaks"
