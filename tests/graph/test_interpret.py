"""The reference interpreter against NumPy in f64 and against torch where torch defines the meaning."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from sashiko.diagnostics.errors import InputError, InvalidGraph
from sashiko.graph import attrs as A
from sashiko.graph import build as b
from sashiko.graph import interpret
from sashiko.graph.dims import symbol
from sashiko.graph.interpret import ELEMENTWISE, ROWS
from sashiko.graph.ir import Graph, Value
from sashiko.graph.ops import OPS, make
from sashiko.graph.types import QParams, TensorType, bf16, boolean, f32, i8, i64, u8


def evaluate(value: Value, *tensors: torch.Tensor) -> torch.Tensor:
    """The value of a graph over input_(0), input_(1), ..., found by walking it."""
    found = sorted({v for v in Graph((), (value,)).order if v.op == "input"}, key=lambda v: v.attrs.index)  # type: ignore[attr-defined]
    result: torch.Tensor = interpret.run(Graph(tuple(found), (value,)), tensors)[0]
    return result


def test_every_operation_has_a_row() -> None:
    assert set(OPS) - set(ROWS) == {"input", "call"}
    assert {n for n, s in OPS.items() if s.group == "elementwise"} - set(ELEMENTWISE) == {"cast", "quantize", "dequantize", "piecewise"}


def test_quantize_rounds_half_to_even_saturates_and_maps_nan_to_the_lowest() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, 1e9, -1e9, math.nan, math.inf, -math.inf])
    got = evaluate(b.quantize(b.input_(0, f32, (9,)), i8, QParams((1.0,))), x)
    assert got.tolist() == [0, 2, 2, 0, 127, -127, -127, 127, -127]
    unsigned = evaluate(b.quantize(b.input_(0, f32, (9,)), u8, QParams((0.5,), 128, None, 0, 255)), x)
    assert unsigned.tolist() == [129, 131, 133, 127, 255, 0, 0, 255, 0]


def test_pieces_are_chosen_after_clamping_and_nan_becomes_the_lowest() -> None:
    """Piece 0: 10. Pieces 1 and 2: 3 u."""
    attrs = A.PiecewiseAttrs(i8, None, -math.inf, 4.0, 0.5, 0, 2, ((10.0, 0.0, 0.0, 0.0), (0.0, 3.0, 3.0, 0.0)))
    x = torch.tensor([-1e30, 0.0, 0.9, 1.1, 2.5, 4.0, 9.0, math.inf, math.nan, -math.inf])
    wanted = [10, 10, 10, 3, 8, 12, 12, 12, 0, 0]
    for bounds, expected in (({}, wanted), ({"least": -9, "greatest": 11}, [*[min(n, 11) for n in wanted[:-2]], -9, -9])):
        got = evaluate(make("piecewise", b.input_(0, f32, (10,)), attrs=replace(attrs, **bounds)), x)
        assert got.dtype == torch.int8 and got.tolist() == expected


def test_pieces_of_f32_are_not_rounded_and_may_go_on_as_lines() -> None:
    """Pieces 0 and 1: 1.5 + u / 4 and 3 x."""
    attrs = A.PiecewiseAttrs(f32, None, 0.0, 2.0, 0.5, 0, 1, ((1.5, 0.0), (0.25, 3.0)), line=True)
    x = torch.tensor([0.5, 2.0, 9.0, math.inf, -9.0, -math.inf, math.nan])
    for line, expected in ((True, [1.625, 6.0, 27.0, math.inf, -0.75, -math.inf]), (False, [1.625, 6.0, 6.0, 6.0, 1.5, 1.5])):
        got = evaluate(make("piecewise", b.input_(0, f32, (7,)), attrs=replace(attrs, line=line)), x)
        assert got.dtype == torch.float32 and got[:-1].tolist() == expected and got[-1].isnan()


def test_factors_come_before_rounding() -> None:
    """Piece 0: 10. Pieces 1 and 2: 3 u."""
    attrs = A.PiecewiseAttrs(i8, None, 0.0, 4.0, 0.5, 0, 2, ((10.0, 0.0, 0.0, 0.0), (0.0, 3.0, 3.0, 0.0)), -20, 20, zero=-1)
    value = make("piecewise", b.input_(0, f32, (2, 3)), b.input_(1, f32, (3,)), attrs=attrs)
    got = evaluate(value, torch.tensor([[0.0, 0.9, 2.5], [4.0, math.nan, 9.0]]), torch.tensor([1.25, -0.5, 10.0]))
    assert got.tolist() == [[12, -6, 20], [14, -20, 20]]
    with pytest.raises(InvalidGraph, match="spread"):
        make("piecewise", b.input_(0, f32, (3,)), b.input_(1, f32, (2, 3)), attrs=attrs)
    with pytest.raises(InvalidGraph, match="more than pieces 0 to 1"):
        make("piecewise", b.input_(0, f32, (3,)), attrs=replace(attrs, last=1))


def test_bytes_are_packed_from_the_lowest_and_their_signs_count_on_the_right() -> None:
    x, y = torch.tensor([[1, 255], [200, 0]], dtype=torch.uint8), torch.tensor([[-1, 127], [-128, 5]], dtype=torch.int8)
    first, second = b.input_(0, u8, (2, 2)), b.input_(1, i8, (2, 2))
    image, weight = (b.pack_bytes([b.slice_(v, 1, n, 1) for n in range(2)]) for v in (first, second))
    assert evaluate(image, x).tolist() == [[1 + (255 << 8)], [200]]
    assert evaluate(b.dot_bytes(image, weight), x, y).tolist() == [[-1 + 255 * 127], [200 * -128]]
    alone = b.input_(0, i8, (2,))
    assert evaluate(b.pack_bytes([alone] * 4), y[:, 1]).tolist() == [0x7F7F7F7F, 0x05050505]
    with pytest.raises(InvalidGraph, match="8 bits"):
        b.pack_bytes([b.input_(0, f32, (2,))])
    with pytest.raises(InvalidGraph, match="four bytes"):
        b.dot_bytes(first, first)


def test_bounds_are_of_magnitudes() -> None:
    value = make("bounded", b.input_(0, f32, (2,)), attrs=A.BoundedAttrs(0.5, 2.0))
    inside = torch.tensor([-0.5, 2.0])
    assert torch.equal(evaluate(value, inside), inside)
    for number in (0.25, -3.0, math.nan):
        with pytest.raises(InputError, match="no longer within"):
            evaluate(value, torch.tensor([1.0, number]))


def test_per_channel_quantization_follows_its_axis() -> None:
    x = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    q = QParams((0.5, 0.25), 0, 1)
    x0 = b.input_(0, f32, (2, 2))
    assert evaluate(b.quantize(x0, i8, q), x).tolist() == [[2, 4], [4, 8]]
    assert torch.equal(evaluate(b.dequantize(b.quantize(x0, i8, q)), x), x)


def test_qlinear_is_exact_integer_arithmetic() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.integers(0, 256, (3, 700)), rng.integers(-127, 128, (5, 700))
    bias = rng.standard_normal(5).astype(np.float32)
    xq, wq = QParams((0.1,), 7, None, 0, 255), QParams(tuple(0.01 * (i + 1) for i in range(5)), 0, 0)
    xv = Value("input", (), b.input_(0, u8, (3, 700)).attrs, TensorType(u8, (3, 700), xq))
    wv = b.constant(torch.tensor(w, dtype=torch.int8), qparams=wq)
    got = evaluate(b.qlinear(xv, wv, b.constant(torch.tensor(bias))), torch.tensor(x, dtype=torch.uint8))
    want = ((x - 7) @ w.T).astype(np.float64) * (0.1 * np.array(wq.scale)) + bias
    np.testing.assert_allclose(got.numpy(), want, rtol=4 * np.finfo(np.float32).eps, atol=1e-4)


def test_a_linear_in_groups_of_columns() -> None:
    torch.manual_seed(2)
    x, w, bias = torch.randn(2, 5, 12), torch.randn(6, 4), torch.randn(6)
    want = torch.cat([torch.nn.functional.linear(x[..., 4 * g : 4 * g + 4], w[2 * g : 2 * g + 2]) for g in range(3)], -1) + bias
    got = evaluate(b.linear(b.input_(0, f32, (2, 5, 12)), b.constant(w), b.constant(bias)), x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for columns, depth in ((6, 5), (7, 4)):  # no whole number of groups of x, and of columns
        with pytest.raises(InvalidGraph, match="do not fit"):
            b.linear(b.input_(0, f32, (2, 5, 12)), b.constant(torch.randn(columns, depth)))


@pytest.mark.parametrize(("before", "after"), [(None, None), (None, 0), (1, 2)])
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize(("cap", "sunk"), [(None, False), (0.7, False), (None, True)])
def test_attention_is_its_equation(before: int | None, after: int | None, kind: str, cap: float | None, sunk: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 3)
    keep = torch.rand(2, 1, 1, 6) < 0.7
    keep[..., 0] = True
    added = torch.randn(5, 6)
    score = (q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2)) * 0.3
    score = score if cap is None else cap * torch.tanh(score)
    score = score.masked_fill(~keep, -math.inf) if kind == "bool" else score + added.double() if kind == "float" else score
    score = score if after is None else score.masked_fill(torch.ones(5, 6).triu(1 + after).bool(), -math.inf)
    score = score if before is None else score.masked_fill(torch.ones(5, 6).tril(-1 - before).bool(), -math.inf)
    sinks = [torch.randn(1, 4, 1, 1)] if sunk else []
    score = torch.cat([score, *(sink.double().expand(2, 4, 5, 1) for sink in sinks)], -1)
    want = torch.softmax(score, -1)[..., :6] @ v.double().repeat_interleave(2, 1)
    inputs = [b.input_(0, f32, q.shape), b.input_(1, f32, k.shape), b.input_(2, f32, v.shape)]
    masks = {"none": [], "bool": [keep], "float": [added.reshape(1, 1, 5, 6)]}[kind]
    mask = [b.input_(3, boolean if kind == "bool" else f32, m.shape) for m in masks]
    sink = b.input_(3 + len(mask), f32, (1, 4, 1, 1)) if sunk else None
    got = evaluate(b.attention(*inputs, *mask or [None], sink, scale=0.3, before=before, after=after, cap=cap), q, k, v, *masks, *sinks)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_sinks_fit_attention() -> None:
    q = b.input_(0, f32, (2, 4, 5, 8))
    for shape in ((4, 1, 1), (1, 4, 1, 2), (1, 3, 1, 1)):
        with pytest.raises(InvalidGraph, match="is no sink of"):
            b.attention(q, q, q, sink=b.input_(1, f32, shape), scale=1.0)


def test_attention_is_quantized_before_it_is_rounded() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 6, 8).bfloat16()
    inputs, params = [b.input_(n, bf16, (1, 2, 6, 8)) for n in range(3)], QParams((0.01,), 128, None, 0, 255)
    value = make("attention", *inputs, attrs=A.AttentionAttrs(0.3, dtype=u8, qparams=params))
    for dtype, given in ((u8, None), (None, params), (f32, params)):
        with pytest.raises(InvalidGraph, match="quantized to 8 bits"):
            make("attention", *inputs, attrs=A.AttentionAttrs(0.3, dtype=dtype, qparams=given))
    wide = torch.softmax(q.double() @ k.double().transpose(-1, -2) * 0.3, -1) @ v.double()
    assert value.type == TensorType(u8, (1, 2, 6, 8), params)
    assert (evaluate(value, q, k, v).double() - (wide / 0.01 + 128).clamp(0, 255)).abs().max() <= 0.5 + 1e-3


def test_narrow_products_accumulate_in_f32() -> None:
    x, w = torch.randn(3, 64).bfloat16(), torch.randn(4, 64).bfloat16()
    got = evaluate(b.linear(b.input_(0, bf16, (3, 64)), b.constant(w)), x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), x.double() @ w.double().t(), rtol=1e-5, atol=1e-5)


def test_integer_products_are_exact() -> None:
    x, w = torch.full((1, 4000), -127, dtype=torch.int8), torch.full((2, 4000), 127, dtype=torch.int8)
    assert evaluate(b.linear(b.input_(0, i8, (1, 4000)), b.constant(w)), x).tolist() == [[-127.0 * 127 * 4000] * 2]


@pytest.mark.parametrize("op", [b.fmod, b.remainder], ids=["fmod", "remainder"])
def test_remainders_are_exact_where_the_quotient_is_infinite(op: Callable[[Value, Value], Value]) -> None:
    x, y = torch.tensor([1.0, 1e30, 3e38, 7.5]).repeat(8), torch.tensor([1e-40, 1e-30, 1e-38, 2.0]).repeat(8)
    got = evaluate(op(b.input_(0, f32, (32,)), b.input_(1, f32, (32,))), x, y)
    assert got.tolist() == [math.fmod(p, q) for p, q in zip(x.tolist(), y.tolist(), strict=True)]


@pytest.mark.parametrize(("kind", "want"), [("sum", 0.0), ("prod", 1.0), ("max", -math.inf), ("min", math.inf)])
def test_reductions_of_nothing_give_the_identity(kind: str, want: float) -> None:
    n = symbol("n")
    assert evaluate(b.reduce(b.input_(0, f32, (2, n)), kind, 1), torch.zeros(2, 0)).tolist() == [want, want]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scans_are_reductions_of_ever_more_elements(axis: int) -> None:
    x = torch.rand(3, 4, 5) + 0.5
    x0 = b.input_(0, f32, (3, 4, 5))
    for kind in ("sum", "prod"):
        steps = [getattr(x.narrow(axis, 0, n + 1).double(), kind)(axis) for n in range(x.shape[axis])]
        torch.testing.assert_close(evaluate(b.scan(x0, kind, axis), x).double(), torch.stack(steps, axis), rtol=1e-6, atol=1e-6)
    for kind in ("max", "min"):
        extremes = [getattr(x.narrow(axis, 0, n + 1), f"a{kind}")(axis) for n in range(x.shape[axis])]
        assert torch.equal(evaluate(b.scan(x0, kind, axis), x), torch.stack(extremes, axis))
    for refused in (b.input_(0, i8, (3, 4)), b.input_(0, boolean, (3, 4))):
        with pytest.raises(InvalidGraph, match="no tensor of numbers"):
            b.scan(refused, "sum", 1)


def test_maximum_keeps_nan() -> None:
    x = torch.tensor([math.nan, 1.0])
    x0 = b.input_(0, f32, (2,))
    assert evaluate(b.maximum(x0, 0.0), x)[0].isnan() and evaluate(b.reduce(x0, "max"), x).isnan()


@pytest.mark.parametrize("op", [b.take, b.gather])
@pytest.mark.parametrize("bad", [-1, 4])
def test_indices_out_of_range_raise(op: object, bad: int) -> None:
    index = torch.tensor([0, bad])
    table, i = b.input_(0, f32, (4,)), b.input_(1, i64, (2,))
    value = b.take(table, i) if op is b.take else b.gather(table, i, 0)
    with pytest.raises(IndexError):
        evaluate(value, torch.arange(4.0), index)


def test_symbols_are_read_from_the_inputs() -> None:
    n = symbol("n", 1, 8)
    x = b.input_(0, f32, (n, 2 * n + 1))
    graph = Graph((x,), (b.scalar(n, i64), b.reshape(x, (n * (2 * n + 1),))))
    outputs = interpret.run(graph, [torch.zeros(3, 7)])
    assert outputs[0].item() == 3 and outputs[1].shape == (21,)
    for wrong in (torch.zeros(3, 8), torch.zeros(9, 19), torch.zeros(3)):
        with pytest.raises(InputError):
            interpret.run(graph, [wrong])


def test_kernels_get_their_meaning_from_the_caller() -> None:
    x = b.input_(0, f32, (2,))
    graph = Graph((x,), (b.call("twice", [x], x.type, [("by", 2)]),))
    assert interpret.run(graph, [torch.ones(2)], kernels={"twice": lambda t, by: t * by})[0].tolist() == [2.0, 2.0]
    with pytest.raises(InvalidGraph, match="twice"):
        interpret.run(graph, [torch.ones(2)])


def test_slices_walk_backwards_and_pads_crop() -> None:
    x = torch.arange(6.0)
    x0 = b.input_(0, f32, (6,))
    assert evaluate(b.slice_(x0, 0, 5, 3, -2), x).tolist() == [5.0, 3.0, 1.0]
    assert evaluate(b.pad(x0, [(-1, 2)], 9.0), x).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 9.0, 9.0]


def test_windows_begin_every_step_and_skip_by_dilation() -> None:
    x = torch.arange(9.0)
    windows = b.window(b.input_(0, f32, (9,)), 0, 3, 2, 2)
    assert evaluate(windows, x).tolist() == [[0.0, 2.0, 4.0], [2.0, 4.0, 6.0], [4.0, 6.0, 8.0]]
    image = torch.randn(2, 7, 3)
    assert torch.equal(evaluate(b.window(b.input_(0, f32, (2, 7, 3)), 1, 4), image), image.unfold(1, 4, 1).movedim(-1, 2))


def test_argsort_is_the_order_of_numbers_with_nan_behind_them() -> None:
    x = torch.tensor([[2.0, math.nan, -math.inf, 2.0, -0.0, 0.0], [1.0, 1.0, 3.0, math.inf, math.nan, math.nan]])
    value = b.input_(0, f32, (2, 6))
    assert evaluate(b.argsort(value), x).tolist() == np.argsort(x.numpy(), kind="stable").tolist()
    assert evaluate(b.argsort(value, descending=True, count=3), x).tolist() == [[1, 0, 3], [4, 5, 3]]
    with pytest.raises(InvalidGraph, match="argsort of a scalar"):
        make("argsort", b.input_(0, f32, ()), attrs=A.ArgsortAttrs(False, 1))
