"""Kernels over one function of `cpu_codegen/math`, and the measure of their error."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from sashiko.cpu_codegen.builder import F32, F64, I64, PTR, VOID, Function, Module, Ty, Val
from sashiko.cpu_codegen.math import MATH, MATH2, call
from sashiko.cpu_codegen.slots import Slots
from sashiko.platforms.target import Target
from tests.emulation import Runner

F32_ONLY = ("exp_weight", "gelu", "normal_cdf", "normal_cdf_short", "sigmoid_short")
Array = np.ndarray[Any, np.dtype[Any]]


@cache
def library(target: Target, lanes: int, scalar: Ty = F32) -> str:
    """LLVM IR with one kernel for each function, called kernel_<name>, on vectors of `lanes` elements (0: scalar code)."""
    module = Module()
    for name in (*MATH, *MATH2):
        if scalar == F32 or name not in F32_ONLY:
            add_kernel(module, target, name, 2 if name in MATH2 else 1, lanes, scalar)
    return module.text()


def add_kernel(module: Module, target: Target, name: str, arity: int, lanes: int, scalar: Ty) -> None:
    """out[i] = name(in0[i], ...) over [begin, end), in steps of `lanes` elements."""
    fn = Function(module, f"kernel_{name}", VOID, [PTR, I64, I64])
    slots = Slots(fn)
    places = [slots.buffer(n) for n in range(arity + 1)]
    ty = scalar.vec(lanes)

    def body(i: Val, _: list[Val]) -> list[Val]:
        values = [fn.load(ty, fn.gep(place, i, scalar)) for place in places[:arity]]
        fn.store(call(fn, target, name, values), fn.gep(places[arity], i, scalar))
        return []

    fn.loop(fn.args[1], fn.args[2], max(1, lanes), [], body)
    fn.ret()
    fn.finish()


def apply(runner: Runner, name: str, args: Sequence[Array], lanes: int | None = None) -> Array:
    """The function computed by `runner`'s machine with vectors of its own width, or of `lanes`. Arguments are filled up."""
    scalar = F32 if args[0].dtype == np.float32 else F64
    lanes = runner.target.lanes(scalar.bits) if lanes is None else lanes
    count = -(-len(args[0]) // max(1, lanes)) * max(1, lanes)
    filled = [np.resize(a, count) for a in args]
    *_, got = runner.run(library(runner.target, lanes, scalar), f"kernel_{name}", [*filled, np.zeros_like(filled[0])], end=count)
    return got[: len(args[0])]


def ulps(got: Array, reference: Array) -> Array:
    """Distance to a float64 reference in units in the last place of float32; infinite where only one of them is NaN or infinite.

    A finite number in place of an infinity counts its distance to 2^128, and the other way round.
    """
    with np.errstate(all="ignore"):
        exact = reference.astype(np.float32)
        unit = np.spacing(np.minimum(np.abs(exact), np.finfo(np.float32).max)).astype(np.float64)
        wide = np.clip(got.astype(np.float64), -(2.0**128), 2.0**128)
        error = np.abs(wide - np.clip(reference, -(2.0**128), 2.0**128)) / unit
    error = np.where(np.isnan(got) & np.isnan(reference), 0.0, error)
    return np.where(np.isnan(error), np.inf, error)


def every(stride: int, low: int = 0, high: int = 1 << 32) -> Array:
    """Every `stride`-th float32, by its bits in [low, high): by default both signs, all exponents, denormals, infinities and NaN."""
    return np.arange(low, high, stride, dtype=np.uint32 if high < 1 << 32 else np.uint64).astype(np.uint32).view(np.float32)


def pairs(count: int, name: str) -> tuple[Array, Array]:
    """Arguments of pow or atan2: a third of any bits, and thirds of the ranges where results are finite and errors show."""
    rng = np.random.default_rng(1)
    part = count // 3
    wild = [rng.integers(0, 1 << 32, count - 2 * part, dtype=np.uint64).astype(np.uint32).view(np.float32) for _ in range(2)]
    if name == "pow":
        tame = [(np.exp2(rng.uniform(-20, 20, part)), rng.uniform(-8, 8, part))]
        tame.append((rng.uniform(0.8, 1.25, part), rng.uniform(-400, 400, part)))
        tame[1][0][::2] *= -1
        tame[1][1][::2] = np.round(tame[1][1][::2])
    else:
        tame = [(rng.normal(size=part), rng.normal(size=part)), (rng.normal(size=part) * 1e-4, rng.normal(size=part))]
    columns = zip(*tame, strict=True)
    first, second = (np.concatenate([np.concatenate(column).astype(np.float32), wild[n]]) for n, column in enumerate(columns))
    return first, second

