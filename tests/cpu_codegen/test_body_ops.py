"""Every elementwise operation, for every element type for which torch defines it, on every target."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from sashiko.graph.ops import BINARY, COMPARE, FLOAT_ONLY, PREDICATES, UNARY
from sashiko.graph.types import FROM_TORCH, boolean, i32
from sashiko.stitch.loops import BodyBuilder, LoopKernel, axis
from tests.cpu_codegen.kernels import buffers, empty, few, run, same
from tests.emulation import Runner, not_on_bochs, runners

Reference = Callable[..., torch.Tensor]
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NAN, INF = float("nan"), float("inf")
REFERENCES: dict[str, Reference] = {
    "floordiv": functools.partial(torch.div, rounding_mode="floor"),
    "truncdiv": functools.partial(torch.div, rounding_mode="trunc"),
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift, "relu": torch.relu,
}
# Half-width floats are computed in float32; their results differ by one rounding of theirs at most.
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
EXACT = {
    *("neg", "abs", "sign", "floor", "ceil", "trunc", "round", "relu", "add", "sub", "mul", "div", "maximum", "minimum", "reciprocal"),
    *("remainder", "fmod", "truncdiv", "floordiv", *PREDICATES, *COMPARE),
}
BITS = {"and", "or", "xor", "shl", "shr", "bitwise_not"}
BOOL_OPS = ("and", "or", "xor", "bitwise_not", "logical_not", "maximum", "minimum", "add", "mul", *COMPARE)
# Functions of the C library that the float64 forms of the mathematical functions call.
LIBM = frozenset(["exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh", "erf", "pow", "atan2"])
# And float32 arguments too large for the vector code.
ALLOWED = {torch.float64: LIBM, torch.float32: frozenset({"sinf", "cosf", "tanf"})}


def reference(op: str) -> Reference:
    found: Reference = REFERENCES[op] if op in REFERENCES else getattr(torch, op)
    return found


def operands(dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    """Ordinary and extreme values, all pairs of the extreme ones, in a number of elements that leaves a tail."""
    generator = torch.Generator().manual_seed(1)
    if dtype == torch.bool:
        special = torch.tensor([False, True])
    elif dtype.is_floating_point:
        special = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 7.0, -3.25, 1e-5, 300.0, -3e4, INF, -INF, NAN])
    else:
        info = torch.iinfo(dtype)
        special = torch.tensor([0, 1, 2, 3, 5, 7, 100, info.max, info.max - 1, info.min, info.min + 1, -1 if info.min else 9], dtype=dtype)
    pairs = torch.cartesian_prod(special, special) if count > 1 else special[:, None]
    extra = torch.randn(83, count, generator=generator) * 20
    values = pairs if dtype == torch.bool else torch.cat([pairs, extra.to(pairs.dtype)])
    return [column.to(dtype).contiguous() for column in values.T]


def evaluate(runner: Runner, ops: Sequence[str], inputs: list[torch.Tensor], arity: int, allowed: frozenset[str]) -> list[torch.Tensor]:
    """One flat kernel that computes all the operations."""
    size = inputs[0].numel()
    outputs = [empty(size, dtype=torch.bool if op in (*PREDICATES, *COMPARE) else inputs[0].dtype) for op in ops]
    builder = BodyBuilder()
    places = buffers(builder, *inputs, *outputs)
    c = axis("c", size)
    loaded = [builder.load(place, c) for place in places[:arity]]
    for op, place in zip(ops, places[arity:]):
        dtype = boolean if op in (*PREDICATES, *COMPARE) else FROM_TORCH[inputs[0].dtype]
        builder.store(place, c, builder.op(op, dtype, *loaded))
    kernel = LoopKernel("ops", builder.finish(), None, size)
    return run(runner, kernel, [*inputs, *outputs], allowed=allowed)[arity:]


def expected_of(op: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Eager torch's answer; half-width floats are computed in float32, where torch's own kernels round in between."""
    dtype = inputs[0].dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return reference(op)(*inputs)
    wide = reference(op)(*(x.float() for x in inputs))
    return wide if wide.dtype == torch.bool else wide.to(dtype)


def compare(op: str, actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point or expected.dtype == torch.bool:
        assert torch.equal(actual, expected), f"{op}: {actual[actual != expected][:5]} instead of {expected[actual != expected][:5]}"
        return
    # Mathematical functions: a few units in the last place, as their own tests check closely; half types may round the other way.
    tolerance = 0.0 if op in EXACT else 2 * UNIT[dtype] if dtype in (torch.bfloat16, torch.float16) else 16 * UNIT[dtype]
    try:
        same(actual, expected, rtol=tolerance, atol=0.0 if op in EXACT else 1e-6)
    except AssertionError as error:
        raise AssertionError(f"{op}: {error}") from error


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
@pytest.mark.parametrize("runner", few())
def test_unary(runner: Runner, dtype: torch.dtype) -> None:
    if dtype == torch.bool:
        ops = [op for op in UNARY if op in BOOL_OPS]
    else:
        ops = [op for op in UNARY if op not in (BITS if dtype.is_floating_point else FLOAT_ONLY)]
    [x] = operands(dtype, 1)
    allowed = ALLOWED.get(dtype, ALLOWED[torch.float32])
    for op, actual in zip(ops, evaluate(runner, ops, [x], 1, allowed)):
        if dtype.is_floating_point and op in ("sin", "cos", "tan"):
            x_used, actual = x[x.abs() < 1e3], actual[x.abs() < 1e3]
        else:
            x_used = x
        whole = op in ("floor", "ceil", "trunc", "round") and not dtype.is_floating_point
        compare(op, actual, x_used if whole else expected_of(op, [x_used]), dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
@pytest.mark.parametrize("runner", few())
def test_binary(runner: Runner, dtype: torch.dtype) -> None:
    if dtype == torch.float16:
        not_on_bochs(runner, "rounds ties away from zero in VCVTPS2PH")
    if dtype == torch.bool:
        ops = [op for op in (*BINARY, *COMPARE) if op in BOOL_OPS]
    else:
        ops = [op for op in (*BINARY, *COMPARE) if op not in (BITS if dtype.is_floating_point else FLOAT_ONLY) and op != "pow"]
    a, b = operands(dtype, 2)
    divisors = torch.where(b == 0, torch.ones_like(b), b) if not dtype.is_floating_point and dtype != torch.bool else b
    allowed = ALLOWED.get(dtype, ALLOWED[torch.float32])
    for inputs in ([a, b], [a, divisors]):
        for op, actual in zip(ops, evaluate(runner, ops, inputs, 2, allowed)):
            if op in ("floordiv", "truncdiv", "remainder", "fmod") and not dtype.is_floating_point:
                if inputs[1] is b:
                    continue  # division by zero gives some integer, without a trap
                wraps = (a == torch.iinfo(dtype).min) & (inputs[1] == -1) & (a != 0)
                compare(op, actual[~wraps], reference(op)(a[~wraps], inputs[1][~wraps]), dtype)
            else:
                compare(op, actual, expected_of(op, inputs), dtype)


@pytest.mark.parametrize("runner", few())
def test_pow_and_where(runner: Runner) -> None:
    a, b = operands(torch.float32, 2)
    [power] = evaluate(runner, ["pow"], [a, b], 2, frozenset())
    same(power, torch.pow(a, b), rtol=16 * UNIT[torch.float32], atol=1e-37)
    for dtype in (torch.float32, torch.int64, torch.int8, torch.bool, torch.bfloat16):
        x, y = operands(dtype, 2)
        condition = (torch.arange(x.numel()) % 3 == 0)
        out = empty(x.numel(), dtype=dtype)
        builder = BodyBuilder()
        places = buffers(builder, condition, x, y, out)
        c = axis("c", x.numel())
        loaded = [builder.load(place, c) for place in places[:3]]
        builder.store(places[3], c, builder.op("where", FROM_TORCH[dtype], *loaded))
        kernel = LoopKernel("where", builder.finish(), None, x.numel())
        same(run(runner, kernel, [condition, x, y, out])[3], torch.where(condition, x, y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("runner", few())
def test_remainders_are_exact_for_any_quotient(runner: Runner, dtype: torch.dtype) -> None:
    if dtype == torch.float64:
        not_on_bochs(runner, "gives 0 for one of these remainders, where a processor gets it right with the same instructions of AVX2")
    exponents = torch.linspace(-1000, 1000, 101) if dtype == torch.float64 else torch.linspace(-140, 120, 101)
    a = (torch.rand(101, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 1) * 2.0 ** exponents.double()
    b = (torch.rand(101, generator=torch.Generator().manual_seed(4), dtype=torch.float64) + 1) * 2.0 ** exponents.double().flip(0)
    a, b = a.to(dtype), (-b).to(dtype)
    for op, actual in zip(("fmod", "remainder"), evaluate(runner, ["fmod", "remainder"], [a, b], 2, frozenset())):
        # numpy's float64 fmod is exact; torch's vector code gives up on wide quotients.
        exact = np.fmod(a.double().numpy(), b.double().numpy())
        expected = torch.from_numpy(exact if op == "fmod" else np.where(exact != 0, exact + b.double().numpy(), exact)).to(dtype)
        same(actual, expected)


@pytest.mark.parametrize("runner", runners(host_only=True))
def test_constant_divisors(runner: Runner) -> None:
    for dtype in INTEGERS:
        [a] = operands(dtype, 1)
        for divisor in (3, -7, 16, 1, -1):
            if divisor < 0 and dtype == torch.uint8:
                continue
            keep = a != torch.iinfo(dtype).min if divisor == -1 else torch.ones_like(a, dtype=torch.bool)
            outputs = [empty(a.numel(), dtype=dtype) for _ in range(2)]
            builder = BodyBuilder()
            places = buffers(builder, a, *outputs)
            c = axis("c", a.numel())
            x, d = builder.load(places[0], c), builder.const(divisor, FROM_TORCH[dtype])
            builder.store(places[1], c, builder.op("floordiv", FROM_TORCH[dtype], x, d))
            builder.store(places[2], c, builder.op("remainder", FROM_TORCH[dtype], x, d))
            results = run(runner, LoopKernel("divide", builder.finish(), None, a.numel()), [a, *outputs])[1:]
            by = torch.tensor(divisor, dtype=dtype)
            assert torch.equal(results[0][keep], torch.div(a, by, rounding_mode="floor")[keep])
            assert torch.equal(results[1][keep], torch.remainder(a, by)[keep])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("runner", few())
def test_what_half_width_floats_hold_stays_exact(runner: Runner, dtype: torch.dtype) -> None:
    """Every number, subnormal ones included, which VCVTNEPS2BF16 takes for zeros."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    y = x[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(3))]
    for ops, inputs in ((("neg", "abs", "sign", "floor", "ceil", "trunc", "round", "relu"), [x]), (("maximum", "minimum"), [x, y])):
        for op, actual in zip(ops, evaluate(runner, ops, inputs, len(inputs), frozenset())):
            same(actual, reference(op)(*inputs))


def test_the_tables_cover_every_operation() -> None:
    assert {op for op in (*UNARY, *BINARY, *COMPARE) if op not in REFERENCES and not hasattr(torch, op)} == set()
    assert FROM_TORCH[torch.int32] == i32
