"""Copies of runs of the lhs into scratch memory, in the form that a micro-kernel reads."""

from __future__ import annotations

from collections.abc import Callable

from ..cpu_codegen.builder import F16, F32, I8, I16, Function, Ty, Val, const, i64
from ..cpu_codegen.intrinsics import prefetch
from ..cpu_codegen.sweep import tail_mask
from ..graph.types import DType
from ..platforms.target import Target
from .micro import MicroKernel

Convert = Callable[[Function, Val], Val]


def memory_type(dtype: DType) -> Ty:
    """The type to move elements with: bf16 as 16-bit integers."""
    return {"f32": F32, "bf16": I16, "f16": F16, "i8": I8, "u8": I8}[dtype.name]


def padded(fn: Function, count: Val, step: int) -> Val:
    """count rounded up to whole steps."""
    return fn.mul(fn.udiv(fn.add(count, i64(step - 1)), i64(step)), i64(step))


def widths(target: Target, bits: int) -> tuple[int, ...]:
    """How many contiguous elements to copy at a time, most first, 0 for one by one; with masked memory one width does it all."""
    full = target.lanes(bits)
    return (full,) if target.masked_memory else (full, full // 4, 0)


def copy_elements(
    fn: Function, micro: MicroKernel, source: Val, target: Val, count: Val, lanes: tuple[int, ...], col_bytes: Val | None
) -> None:
    """Copies and converts `count` elements in pieces of `lanes`, then fills up with zeros to whole steps. col_bytes None: contiguous."""
    copy_run(fn, memory_type(micro.lhs), micro.convert, source, target, count, micro.layout.element, lanes, col_bytes)
    fill_steps(fn, micro, target, count)


def copy_run(
    fn: Function, element: Ty, convert: Convert, source: Val, target: Val, count: Val, to_type: Ty, lanes: tuple[int, ...],
    col_bytes: Val | None, ahead: Val | None = None,
) -> None:
    """Copies `count` elements; lanes: of `widths`; ahead: bytes from what is copied to what is fetched meanwhile."""
    done: Val = i64(0)
    for width in lanes if col_bytes is None else (0,):
        size = max(1, width)
        stop = fn.mul(fn.udiv(count, i64(size)), i64(size))

        def piece(index: Val, _: list[Val], width: int = width) -> list[Val]:
            at = fn.gep(source, index, element) if col_bytes is None else fn.gep(source, fn.mul(index, col_bytes))
            if ahead is not None and width:
                prefetch(fn, fn.gep(at, ahead))
            fn.store(convert(fn, fn.load(element.vec(width), at)), fn.gep(target, index, to_type))
            return []

        fn.loop(done, stop, size, [], piece)
        done = stop
    if col_bytes is None and lanes[-1]:
        _copy_last(fn, element.vec(lanes[-1]), convert, fn.gep(source, done, element), fn.gep(target, done, to_type), fn.sub(count, done))


def copy_known(
    fn: Function, element: Ty, convert: Convert, source: Val, target: Val, count: int, to_type: Ty, lanes: tuple[int, ...]
) -> None:
    """Copies `count` contiguous elements without a loop; lanes: of `widths`."""
    done = 0
    for width in lanes:
        while count - done >= max(1, width):
            value = fn.load(element.vec(width), fn.gep(source, i64(done), element))
            fn.store(convert(fn, value), fn.gep(target, i64(done), to_type))
            done += max(1, width)
    if done < count:
        start, to = fn.gep(source, i64(done), element), fn.gep(target, i64(done), to_type)
        _copy_last(fn, element.vec(lanes[-1]), convert, start, to, i64(count - done))


def _copy_last(fn: Function, ty: Ty, convert: Convert, source: Val, target: Val, left: Val) -> None:
    """Copies fewer elements than a vector has, under a mask."""

    def copy() -> list[Val]:
        mask = tail_mask(fn, left, ty.lanes)
        fn.masked_store(convert(fn, fn.masked_load(ty, source, mask, const(ty, 0))), target, mask)
        return []

    fn.branch(fn.icmp("sgt", left, i64(0)), copy)


def fill_steps(fn: Function, micro: MicroKernel, target: Val, count: Val) -> None:
    """Fills up a row of `count` elements with zeros to whole steps."""

    def zero(index: Val, _: list[Val]) -> list[Val]:
        fn.store(const(micro.layout.element, 0), fn.gep(target, index, micro.layout.element))
        return []

    fn.loop(count, padded(fn, count, micro.step_k), 1, [], zero)
