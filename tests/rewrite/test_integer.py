"""Products of dequantized operands: which become products of integers, how, and why others do not."""

from __future__ import annotations

import pytest
import torch

from sashiko.graph import build as b
from sashiko.graph.dims import less, symbol
from sashiko.graph.interpret import run
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import DType, QParams, bf16, f16, f32, f64, i8, i32, i64, u8
from sashiko.rewrite import apply, explain
from sashiko.rewrite.rules import INTEGER

K, N = 16, 4
UNIT, S8, U8 = QParams((1.0,), 0, None, -128, 127), QParams((0.04,)), QParams((0.03,), 128, None, 0, 255)
X = b.input_(0, f32, (2, 3, K), name="x")
SCALE = b.input_(1, f32, (2, 3, 1), name="scale")
ZERO = b.input_(2, f32, (2, 3, 1), name="zero")
WEIGHT = b.constant(torch.randint(-127, 128, (N, K), dtype=torch.int8), qparams=QParams(tuple(0.01 * (n + 1) for n in range(N)), axis=0))
BIAS = b.constant(torch.randn(N))


def dynamic(zero: bool, scale: Value = SCALE) -> Value:
    """An activation with parameters computed in the call."""
    integers = b.dequantize(b.quantize(X, i8, UNIT))
    return b.mul(b.sub(integers, ZERO) if zero else integers, scale)


def rewritten(root: Value) -> Graph:
    return apply(Graph((X, SCALE, ZERO), (root,)), INTEGER)


def ops(graph: Graph) -> list[str]:
    return [v.op for v in graph.order if v.op not in ("input", "constant", "full")]


@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
@pytest.mark.parametrize("zero", [False, True])
def test_a_rounding_of_factors_to_a_narrow_type_is_left_out(zero: bool, dtype: DType) -> None:
    graph = rewritten(b.linear(b.cast(dynamic(zero), dtype), b.cast(b.dequantize(WEIGHT), dtype), b.cast(BIAS, dtype)))
    assert ("int_linear" if zero else "qlinear") in ops(graph) and "linear" not in ops(graph)


def test_a_product_in_a_wide_type_stays_one() -> None:
    graph = rewritten(b.linear(b.cast(dynamic(True), f64), b.cast(b.dequantize(WEIGHT), f64), b.cast(BIAS, f64)))
    assert graph.outputs[0].op == "linear" and graph.outputs[0].dtype == f64


def test_a_rounded_weight_with_a_zero_point_stays_rounded() -> None:
    weight = b.dequantize(b.constant(torch.zeros(N, K, dtype=torch.int8), qparams=QParams((0.1,), 3, None, -128, 127)))
    graph = rewritten(b.linear(b.cast(dynamic(False), bf16), b.cast(weight, bf16)))
    assert next(v for v in graph.order if v.op == "linear").inputs[0].dtype == bf16


@pytest.mark.parametrize("scale", [SCALE, b.reshape(SCALE, (6, 1)), b.full(0.5, f32)], ids=["row", "flat row", "tensor"])
def test_a_scale_of_each_row_moves_behind_the_product(scale: Value) -> None:
    if scale.shape == (6, 1):
        x = b.mul(b.dequantize(b.quantize(b.reshape(X, (6, K)), i8, UNIT)), scale)
    else:
        x = dynamic(False, scale)
    graph = rewritten(b.linear(x, b.dequantize(WEIGHT), BIAS))
    assert [op for op in ops(graph) if op != "reshape"] == ["quantize", "qlinear", "mul", "add"]


def test_a_zero_point_of_each_row_is_a_share_of_the_weights_sums() -> None:
    graph = rewritten(b.linear(dynamic(True), b.dequantize(WEIGHT), BIAS))
    assert [op for op in ops(graph) if op != "cast"] == ["quantize", "int_linear", "reduce", "mul", "sub", "mul", "mul", "add"]
    x, scale, zero = torch.randn(2, 3, K) * 40, torch.rand(2, 3, 1) + 0.1, torch.randint(-128, 128, (2, 3, 1)).float()
    w = WEIGHT.attrs.tensor.double() * torch.tensor([0.01 * (n + 1) for n in range(N)], dtype=torch.float64)[:, None]  # type: ignore[attr-defined]
    integers = x.round().clamp(-128, 127).double()
    want = ((integers - zero.double()) @ w.t()) * scale.double() + BIAS.attrs.tensor.double()  # type: ignore[attr-defined]
    # The integers are exact; two products and a sum are rounded, and the scales are.
    exact = (integers - zero.double()) @ w.t() * scale.double()
    bound = 2 * torch.finfo(torch.float32).eps * (exact.abs() + want.abs())
    assert ((run(graph, [x, scale, zero])[0] - want).abs() <= bound).all()


def test_an_integer_that_zero_points_stretch_to_rows_is_no_row_of_integers() -> None:
    one = b.dequantize(b.quantize(b.input_(0, f32, ()), i8, UNIT))
    zero, scale = b.input_(1, f32, (2, 1)), b.input_(2, f32, (2, 1))
    weight = b.constant(torch.ones(N, 1, dtype=torch.int8), qparams=QParams((0.1,)))
    root = b.linear(b.mul(b.sub(one, zero), scale), b.dequantize(weight))
    graph = Graph((one.inputs[0].inputs[0], zero, scale), (root,))
    rewritten_graph = apply(graph, INTEGER)
    assert "qlinear" not in ops(rewritten_graph)
    data = [torch.tensor(5.2), torch.randn(2, 1), torch.rand(2, 1)]
    assert torch.allclose(run(rewritten_graph, data)[0], run(graph, data)[0], rtol=1e-6, atol=1e-6)


def test_operands_that_are_not_integers_of_one_scale_stay() -> None:
    changing = b.mul(b.dequantize(b.quantize(X, i8, UNIT)), b.input_(1, f32, (2, 3, K)))
    assert "changes within a row" in reason("row_scale_after_linear", b.linear(changing, b.dequantize(WEIGHT)))
    assert "expected" in reason("row_scale_after_linear", b.linear(b.mul(X, SCALE), b.dequantize(WEIGHT)))
    asymmetric = b.constant(torch.zeros(N, K, dtype=torch.int8), qparams=QParams((0.1,), 3))
    assert "not symmetric s8" in reason("row_scale_after_linear", b.linear(dynamic(False), b.dequantize(asymmetric)))
    shifted = b.sub(b.dequantize(b.quantize(X, i8, UNIT)), b.input_(1, f32, (K,)))
    assert "changes within a row" in reason("row_zero_after_linear", b.linear(shifted, b.dequantize(WEIGHT)))


def reason(rule_name: str, root: Value) -> str:
    tested = next(r for r in INTEGER if r.name == rule_name)
    inputs = tuple(sorted((v for v in Graph((), (root,)).order if v.op == "input"), key=lambda v: v.attrs.index))  # type: ignore[attr-defined]
    graph = Graph(inputs, (root,))
    assert apply(graph, (tested,)) is graph
    return explain(tested, graph)


@pytest.mark.parametrize("q", [S8, U8, QParams((0.04,), -7, None, -128, 127)], ids=["s8", "u8", "asymmetric s8"])
@pytest.mark.parametrize("r", [S8, QParams((0.05,), 5, None, -128, 127), U8, QParams((1 / 64,), 0, None, 0, 255)],
                         ids=["s8", "asymmetric s8", "u8", "u8 from zero"])
def test_products_of_two_activations_are_exact(q: QParams, r: QParams) -> None:
    """Against f64: what is left are the roundings of the sum to f32, of the scales' product and of theirs."""
    y = b.input_(1, f32, (2, K, 5))
    root = b.matmul(b.dequantize(b.quantize(X, u8 if q.qmin == 0 else i8, q)), b.dequantize(b.quantize(y, u8 if r.qmin == 0 else i8, r)))
    graph = apply(Graph((X, y), (root,)), INTEGER)
    assert "int_matmul" in ops(graph) and "dequantize" not in ops(graph)
    data = [torch.randn(2, 3, K), torch.randn(2, K, 5)]
    left, right = (
        (torch.round(t * torch.tensor(1 / p.scale[0])) + p.zero_point).clamp(p.qmin, p.qmax).double() - p.zero_point
        for t, p in zip(data, (q, r), strict=True)
    )
    want = left @ right * (q.scale[0] * r.scale[0])
    assert ((run(graph, data)[0] - want).abs() <= 3 * torch.finfo(torch.float32).eps * want.abs()).all()


def test_right_operands_that_have_no_signed_form() -> None:
    """An unsigned one is quantized to signed integers instead, unless they are made by something else."""
    y = b.input_(1, f32, (2, K, 5))
    padded = b.pad(b.quantize(y, u8, U8), ((0, 0), (0, 0), (1, 0)), 128)
    assert "not of i8 with u8" in reason("quantized_matmul", b.matmul(b.dequantize(b.quantize(X, i8, S8)), b.dequantize(padded)))
    by_channel = b.dequantize(b.quantize(y, i8, QParams((0.1,) * 5, axis=2)))
    assert "not quantized per tensor" in reason("quantized_matmul", b.matmul(b.dequantize(b.quantize(X, i8, S8)), by_channel))


def test_sums_that_may_not_fit_32_bits_stay_floats() -> None:
    """Of u8 and s8 more than 2^16 of the largest products do not, whether one side is a weight or both are computed."""
    for k, refused in ((2**16, False), (2**16 + 1, True)):
        x, y = (b.quantize(b.input_(n, f32, (1, k)), i8, S8) for n in range(2))
        weight = b.constant(torch.ones(1, k, dtype=torch.int8), qparams=S8)
        products = {
            "quantized_linear": b.linear(b.dequantize(x), b.dequantize(weight)),
            "quantized_matmul": b.matmul(b.dequantize(x), b.dequantize(b.permute(y, (1, 0)))),
        }
        assert all("may not fit 32 bits" in reason(rule, root) for rule, root in products.items() if refused)
        inputs = x.inputs[0], y.inputs[0]
        assert refused or all("dequantize" not in ops(apply(Graph(inputs, (root,)), INTEGER)) for root in products.values())


FROM_ZERO = QParams((1 / 64,), 0, None, 0, 255)


@pytest.mark.parametrize(("q", "most"), [(FROM_ZERO, 33025), (U8, 2**16), (S8, 2**16)], ids=["u8 from zero", "u8", "s8"])
def test_a_length_is_multiplied_as_integers_up_to_where_every_sum_fits(q: QParams, most: int) -> None:
    """What counts is how far integers are from their zero points. A length without a bound may be any."""
    dtype = i8 if q is S8 else u8
    for k in (most, symbol("k", 1, most), most + 1, symbol("k", 1, most + 1), symbol("k", 1)):
        x, y = (b.input_(n, f32, shape) for n, shape in enumerate(((1, k), (k, 1))))
        root = b.matmul(b.dequantize(b.quantize(x, dtype, q)), b.dequantize(b.quantize(y, dtype, q)))
        if less(k, most + 1):
            assert "int_matmul" in ops(apply(Graph((x, y), (root,)), INTEGER))
        else:
            assert f"as one of {most} does" in reason("quantized_matmul", root)


def test_rows_of_a_table_take_their_scales_along() -> None:
    """The table stays what it is: 8-bit integers."""
    scales = torch.rand(7) + 0.1
    table = b.constant(torch.randint(-128, 128, (7, K), dtype=torch.int8), qparams=QParams(tuple(scales.tolist()), 3, 0, -128, 127))
    index = b.input_(0, i64, (2, 3))
    graph = apply(Graph((index,), (b.take(b.dequantize(table), index),)), INTEGER)
    taken = [v for v in graph.order if v.op == "take"]
    assert [v.inputs[0].dtype for v in taken] == [i8, f32] and "dequantize" not in ops(graph)
    i = torch.randint(0, 7, (2, 3))
    want = (table.attrs.tensor[i].float() - 3) * scales[i][..., None]  # type: ignore[attr-defined]
    assert torch.equal(run(graph, [i])[0], want)


def test_types_of_taken_integers() -> None:
    """A channel axis moves with the axes around it, and is lost when it is taken along."""
    table = b.constant(torch.zeros(7, K, 5, dtype=torch.int8), qparams=QParams((0.1,) * K, axis=1))
    index = b.input_(0, i32, (2, 3))
    axes = [(b.take(table, index, axis).tensor.qparams or QParams((), axis=-1)).axis for axis in range(3)]
    assert axes == [2, -1, 1]
