"""Stitched programs against the reference interpreter, without any code generator, and how many kernels they take."""

from __future__ import annotations

import pytest
import torch

from sashiko.graph import build as b
from sashiko.graph import interpret
from sashiko.graph.dims import Dim, symbol
from sashiko.graph.ir import Graph, Value
from sashiko.graph.types import QParams, bf16, boolean, f32, f64, i8, i64, u8
from sashiko.rewrite.rules.tables import tabulate
from sashiko.stitch.constants import constant_values
from sashiko.stitch.expand import expand_contractions, expand_unsupported
from sashiko.stitch.layout import choose_layouts
from sashiko.stitch.program import ContractionItem, LoopItem, Program
from sashiko.stitch.stitcher import stitch
from tests.stitch.reference import run_program

B, S = symbol("B", 1, 16), symbol("S", 1, 256)


def check(
    outputs: list[Value], inputs: list[Value], tensors: list[torch.Tensor], env: dict[str, int] | None = None, atol: float = 1e-5
) -> Program:
    env = env or {}
    graph = choose_layouts(expand_contractions(Graph(tuple(inputs), tuple(outputs))))
    folded = constant_values(graph.outputs)
    program = stitch(graph.outputs, graph.inputs, folded)
    given = dict(zip(inputs, tensors))
    for value in program.constants:
        given[value] = interpret.run(Graph((), (value,)), [])[0]
    got, failed = run_program(program, given, env)
    assert not failed
    for mine, reference in zip(got, interpret.run(graph, tensors, env), strict=True):
        torch.testing.assert_close(mine, reference, atol=atol, rtol=1e-5)
    return program


def kinds(program: Program) -> list[str]:
    return ["loop" if isinstance(i, LoopItem) else i.anchor.op for i in program.items]


def layer_norm(x: Value, size: int) -> Value:
    mean = b.mul(b.reduce(x, "sum", -1, True), 1.0 / size)
    centered = b.sub(x, mean)
    variance = b.mul(b.reduce(b.mul(centered, centered), "sum", -1, True), 1.0 / size)
    return b.mul(centered, b.rsqrt(b.add(variance, 1e-5)))


def softmax(x: Value) -> Value:
    e = b.exp(b.sub(x, b.reduce(x, "max", -1, True)))
    return b.div(e, b.reduce(e, "sum", -1, True))


def gelu(x: Value) -> Value:
    return b.mul(b.mul(x, 0.5), b.add(b.erf(b.mul(x, 0.70710678)), 1.0))


def test_elementwise_chain_is_one_flat_kernel() -> None:
    x, y = b.input_(0, f32, (B, S, 32)), b.input_(1, f32, (B, S, 32))
    p = check([gelu(b.add(x, y))], [x, y], [torch.randn(2, 5, 32), torch.randn(2, 5, 32)], {"B": 2, "S": 5})
    assert len(p.items) == 1 and isinstance(p.items[0], LoopItem) and p.items[0].kernel.rows is None


def test_a_chain_deeper_than_the_stack_of_python_is_several_kernels() -> None:
    x = b.input_(0, f32, (4, 8))
    chain = product = b.linear(x, b.constant(torch.randn(8, 8)))
    for _ in range(600):
        chain = b.add(b.mul(chain, 0.9), product)
    assert 1 < len(kinds(check([chain], [x], [torch.randn(4, 8)]))) < 20


def test_layer_norm_and_quantize_share_one_kernel() -> None:
    x, y = b.input_(0, f32, (B, S, 48)), b.input_(1, f32, (B, S, 48))
    normed = layer_norm(b.add(x, y), 48)
    q = b.quantize(normed, i8, QParams((0.03,)))
    p = check([normed, q], [x, y], [torch.randn(3, 5, 48), torch.randn(3, 5, 48)], {"B": 3, "S": 5})
    assert kinds(p) == ["loop"]


def test_softmax_last_and_middle_axis() -> None:
    x = b.input_(0, f32, (B, 6, S))
    assert kinds(check([softmax(x)], [x], [torch.randn(2, 6, 7)], {"B": 2, "S": 7})) == ["loop"]
    down = b.exp(b.sub(x, b.reduce(x, "max", 1, True)))
    check([b.div(down, b.reduce(down, "sum", 1, True))], [x], [torch.randn(2, 6, 7)], {"B": 2, "S": 7})


def test_a_scan_shares_its_kernel_with_what_is_at_the_same_place() -> None:
    mask, table = b.input_(0, i64, (B, S)), b.input_(1, f32, (40, 8))
    positions = b.add(b.mul(b.scan(mask, "sum", 1), mask), 1)
    tensors, env = [torch.randint(0, 2, (3, 9)), torch.randn(40, 8)], {"B": 3, "S": 9}
    assert kinds(check([positions], [mask], tensors[:1], env)) == ["loop"]
    assert kinds(check([positions, b.take(table, positions, 0)], [mask, table], tensors, env)) == ["loop", "loop"]
    x = b.input_(0, f32, (B, S))
    t = torch.randn(3, 9)
    assert kinds(check([b.scan(softmax(x), "sum", 1)], [x], [t], env)) == ["loop"]
    assert kinds(check([softmax(b.scan(x, "sum", 1))], [x], [t], env)) == ["loop"]


def test_scans_along_any_axis_and_read_elsewhere() -> None:
    x = b.input_(0, f32, (B, S, 4))
    t, env = torch.rand(3, 9, 4) + 0.5, {"B": 3, "S": 9}
    turned = b.permute(x, (0, 2, 1))
    for axis in range(3):
        for kind in ("sum", "prod"):
            check([b.add(b.scan(b.exp(x), kind, axis), x)], [x], [t], env, atol=1e-2)
    total = b.scan(x, "sum", 2)
    check([b.sub(b.unsqueeze(total, 3), b.unsqueeze(total, 2))], [x], [t], env)  # every row is read 4 times
    check([b.slice_(total, 2, 1, 2), b.reduce(total, "sum", (1, 2)), b.concat([total, x], 2)], [x], [t], env, atol=1e-4)
    check([b.matmul(total, b.permute(total, (0, 2, 1))), b.scan(b.matmul(total, turned), "sum", 2)], [x], [t], env, atol=1e-3)


def test_reductions_over_everything_and_several_axes() -> None:
    x = b.input_(0, f32, (3, S, 4))
    t = torch.randn(3, 5, 4)
    for axes in ((0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)):
        for keep in (True, False):
            check([b.reduce(x, "sum", axes, keep)], [x], [t], {"S": 5}, atol=1e-4)
    check([b.sub(x, b.reduce(x, "max", (0, 2), True))], [x], [t], {"S": 5})
    check([b.reduce(x, "argmax", 1)], [x], [t], {"S": 5})


@pytest.mark.parametrize("keep", [True, False])
def test_reductions_over_axes_of_one_length_that_are_not_one_axis(keep: bool) -> None:
    """The mean over a sequence of what is normalized over features, as many of these as there are places."""
    x = b.input_(0, f32, (2, 8, 8))
    pooled = b.reduce(layer_norm(x, 8), "sum", 1, keep)
    check([pooled], [x], [torch.randn(2, 8, 8)])
    check([b.reduce(softmax(x), "max", 1, keep)], [x], [torch.randn(2, 8, 8)])
    down = b.exp(b.sub(x, b.reduce(x, "max", 1, True)))
    check([b.reduce(b.div(down, b.reduce(down, "sum", 1, True)), "sum", 2, keep)], [x], [torch.randn(2, 8, 8)])


def test_views_cost_nothing() -> None:
    x = b.input_(0, f32, (B, S, 24))
    heads = b.permute(b.reshape(x, (B, S, 3, 8)), (0, 2, 1, 3))
    back = b.reshape(b.permute(b.mul(heads, 2.0), (0, 2, 1, 3)), (B * S, 24))
    p = check([heads, back, b.slice_(x, 2, 3, 5, 2)], [x], [torch.randn(2, 5, 24)], {"B": 2, "S": 5})
    assert all(k == "loop" for k in kinds(p))


def test_linear_takes_bias_gelu_residual_and_quantize_into_its_epilogue() -> None:
    x, r = b.input_(0, f32, (B, S, 16)), b.input_(1, f32, (B, S, 24))
    w, bias = b.constant(torch.randn(24, 16)), b.constant(torch.randn(24))
    out = b.add(gelu(b.linear(x, w, bias)), r)
    p = check([b.quantize(out, i8, QParams((0.05,)))], [x, r], [torch.randn(2, 5, 16), torch.randn(2, 5, 24)], {"B": 2, "S": 5}, atol=1)
    assert kinds(p) == ["linear"]


def test_linear_takes_a_table_into_its_epilogue() -> None:
    x, w, bias = b.input_(0, f32, (B, S, 16)), b.constant(torch.randn(24, 16)), b.constant(torch.randn(24))
    for dtype, qparams in ((u8, QParams((0.03,), 6, None, 0, 255)), (i8, QParams((0.05,)))):  # one that ends by itself, one that saturates
        [out] = tabulate(expand_contractions(Graph((x,), (b.quantize(gelu(b.linear(x, w, bias)), dtype, qparams),))), 32).outputs
        data = torch.randn(2, 5, 16)
        data[0, 0] = torch.nan
        p = check([out], [x], [data], {"B": 2, "S": 5}, atol=1)
        assert out.op == "piecewise" and kinds(p) == ["linear"]
        lookups = [n for n in p.items[0].epilogue.nodes if n.op == "lookup"]  # type: ignore[union-attr]
        assert [n.count for n in lookups] == [32] * 3 and not any(n.numbers for n in lookups), "layers share code"


def test_residual_then_layer_norm_splits_after_the_addition() -> None:
    x, r = b.input_(0, f32, (B, S, 16)), b.input_(1, f32, (B, S, 24))
    w = b.constant(torch.randn(24, 16))
    h = layer_norm(b.add(b.linear(x, w), r), 24)
    second = b.linear(h, b.constant(torch.randn(8, 24)))
    p = check([b.add(second, b.slice_(h, 2, 0, 8))], [x, r], [torch.randn(2, 5, 16), torch.randn(2, 5, 24)], {"B": 2, "S": 5}, atol=1e-4)
    assert kinds(p) == ["linear", "loop", "linear"]
    first = p.items[0]
    assert isinstance(first, ContractionItem) and first.writes[0].op == "add"


def test_softmax_of_a_linear_reads_its_stored_result() -> None:
    x = b.input_(0, f32, (4, 16))
    p = check([softmax(b.linear(x, b.constant(torch.randn(24, 16))))], [x], [torch.randn(4, 16)])
    assert kinds(p) == ["linear", "loop"]


def test_two_linears_added() -> None:
    x = b.input_(0, f32, (4, 16))
    u, v = b.linear(x, b.constant(torch.randn(24, 16))), b.linear(x, b.constant(torch.randn(24, 16)))
    p = check([b.mul(u, b.sigmoid(v))], [x], [torch.randn(4, 16)], atol=1e-4)
    assert kinds(p) == ["linear", "linear"]


def test_attention_with_padding_mask_computed_in_place() -> None:
    x = b.input_(0, f32, (B, S, 48))
    keep = b.input_(1, i64, (B, S))
    parts = [b.permute(b.reshape(b.linear(x, b.constant(torch.randn(48, 48) / 7)), (B, S, 3, 16)), (0, 2, 1, 3)) for _ in range(3)]
    mask = b.expand(b.reshape(b.ne(keep, 0), (B, 1, 1, S)), (B, 1, S, S))
    a = b.attention(*parts, mask, scale=0.25)
    out = b.linear(b.reshape(b.permute(a, (0, 2, 1, 3)), (B, S, 48)), b.constant(torch.randn(10, 48)))
    flags = torch.ones(2, 5, dtype=torch.int64)
    flags[1, 3:] = 0
    p = check([out], [x, keep], [torch.randn(2, 5, 48), flags], {"B": 2, "S": 5}, atol=1e-4)
    assert kinds(p) == ["linear"] * 3 + ["attention", "linear"]


def test_qlinear_is_exact_integer_work() -> None:
    x = b.input_(0, f32, (5, 16))
    w = b.constant(
        torch.randint(-127, 128, (24, 16), dtype=torch.int8), qparams=QParams(tuple((0.01 + 0.001 * i) for i in range(24)), axis=0)
    )
    for zero_point, qmin, qmax in ((0, -127, 127), (3, -128, 127)):
        xq = b.quantize(x, i8, QParams((0.02,), zero_point, qmin=qmin, qmax=qmax))
        p = check([b.qlinear(xq, w, b.constant(torch.randn(24)))], [x], [torch.randn(5, 16)], atol=1e-4)
        assert kinds(p) == ["loop", "int_linear"]


def test_what_a_product_reads_of_each_row_is_stored_after_the_arithmetic() -> None:
    """Normalization, the scale of each row and the integers are one loop; the product reads the scale, not what it is computed from."""
    x, w = b.input_(0, f32, (B, S, 16)), b.constant(torch.randint(-127, 128, (24, 16), dtype=torch.int8), qparams=QParams((0.01,)))
    normed = layer_norm(x, 16)
    scale = b.div(b.maximum(b.reduce(b.abs_(normed), "max", -1, True), 1e-5), 127.0)
    integers = b.quantize(b.mul(normed, b.reciprocal(scale)), i8, QParams((1.0,)))
    p = check([b.mul(b.qlinear(integers, w), scale)], [x], [torch.randn(2, 5, 16)], {"B": 2, "S": 5}, atol=0.05)
    assert kinds(p) == ["loop", "int_linear"]
    assert {v.op for v in p.items[0].writes} == {"quantize", "div"} and isinstance(p.items[1], ContractionItem)
    assert not {"div", "maximum", "reduce"} & {v.op for v in p.items[1].fused}


def test_integers_of_heads_are_stored_side_by_side() -> None:
    """A batched integer product, scaled and quantized again, whose heads a linear reads as one row: no copy in between."""
    x, y = (b.input_(n, f32, shape) for n, shape in enumerate(((B, 3, S, 8), (B, 3, 8, 16))))
    product = b.int_matmul(b.quantize(x, i8, QParams((0.02,))), b.quantize(y, i8, QParams((0.02,))))
    heads = b.quantize(b.mul(b.cast(product, f32), 0.0004), i8, QParams((0.05,)))
    w = b.constant(torch.randint(-127, 128, (10, 48), dtype=torch.int8), qparams=QParams((0.01,)))
    out = b.qlinear(b.reshape(b.permute(heads, (0, 2, 1, 3)), (B, S, 48)), w)
    p = check([out], [x, y], [torch.randn(2, 3, 5, 8), torch.randn(2, 3, 8, 16)], {"B": 2, "S": 5}, atol=0.07)
    assert kinds(p) == ["loop", "loop", "int_matmul", "int_linear"]


def test_embedding_sum_and_out_of_range() -> None:
    ids = b.input_(0, i64, (B, S))
    table = b.constant(torch.randn(30, 8))
    position = b.slice_(b.constant(torch.randn(64, 8)), 0, 0, S)
    x = layer_norm(b.add(b.take(table, ids), position), 8)
    p = check([x], [ids], [torch.randint(0, 30, (2, 5))], {"B": 2, "S": 5})
    assert kinds(p) == ["loop"]
    given = {ids: torch.tensor([[0, 30]])} | {v: interpret.run(Graph((), (v,)), [])[0] for v in p.constants}
    assert run_program(p, given, {"B": 1, "S": 2})[1]


def test_pad_concat_iota() -> None:
    x, y = b.input_(0, f32, (3, S)), b.input_(1, f32, (3, 4))
    joined = b.concat([b.mul(x, 2.0), y, b.pad(y, ((0, 0), (1, -2)), 7.0)], 1)
    check([joined, b.reduce(joined, "sum", 1)], [x, y], [torch.randn(3, 5), torch.randn(3, 4)], {"S": 5})
    check([b.add(b.iota(S, i64), 3)], [x], [torch.randn(3, 5)], {"S": 5})


def test_what_gets_a_buffer_late_is_read_from_it_by_all() -> None:
    x, i = b.input_(0, f32, (6, 4)), b.input_(1, i64, (3,))
    total = b.reduce(x, "sum", 0)  # the first kernel could compute it in place, the second one cannot
    p = check([b.gather(total, i, 0), b.concat([total, b.exp(total)], 0)], [x, i], [torch.randn(6, 4), torch.tensor([3, 0, 3])])
    assert sum(total in item.fused for item in p.items) == 1


def test_expensive_work_is_not_repeated_cheap_work_is() -> None:
    x, w = b.input_(0, f32, (6, 16)), b.constant(torch.randn(16, 16))
    e = b.exp(x)
    p = check([b.linear(e, w), b.reduce(e, "sum", 0)], [x], [torch.randn(6, 16)], atol=1e-4)
    assert sum("exp" in [v.op for v in i.fused] for i in p.items) == 1
    cheap = b.mul(x, 2.0)
    p = check([b.reduce(cheap, "sum", 0), b.reduce(cheap, "sum", 1)], [x], [torch.randn(6, 16)])
    assert len(p.items) == 2 and cheap not in p.stored


def test_narrow_types() -> None:
    x = b.input_(0, bf16, (4, 8))
    y = b.cast(b.add(b.cast(x, f32), 1.0), bf16)
    check([y, b.cast(y, boolean), b.reduce(b.cast(y, f32), "sum", 1)], [x], [torch.randn(4, 8).bfloat16()])


def test_scalar_and_empty_graph_outputs() -> None:
    x = b.input_(0, f32, ())
    check([b.add(x, 1.0), b.full(3.0, f32, (2, 3))], [x], [torch.tensor(2.0)])


@pytest.mark.parametrize(("before", "after"), [(None, None), (None, 0), (0, S - 3)], ids=str)
def test_contractions_spelled_out(before: Dim | None, after: Dim | None) -> None:
    q, k = b.input_(0, f64, (2, 4, 3, 8)), b.input_(1, f64, (2, 2, S, 8))
    mask = b.input_(2, boolean, (3, S))
    keep = torch.ones(3, 5, dtype=torch.bool)
    keep[1] = False
    a = b.attention(q, k, k, mask, scale=0.3, before=before, after=after)
    w = b.constant(torch.randn(7, 8, dtype=torch.float64))
    graph = expand_unsupported(Graph((q, k, mask), (b.linear(a, w), b.matmul(a, b.permute(a, (0, 1, 3, 2))))), lambda v: False)
    tensors = [torch.randn(2, 4, 3, 8, dtype=torch.float64), torch.randn(2, 2, 5, 8, dtype=torch.float64), keep]
    p = check(list(graph.outputs), [q, k, mask], tensors, {"S": 5})
    assert set(kinds(p)) == {"loop"}


def patches(image: Value, size: int, step: int) -> Value:
    """[B, H, W, C] as [B, rows, columns, size * size * C]."""
    windows = b.permute(b.window(b.window(image, 1, size, step), 3, size, step), (0, 1, 3, 2, 4, 5))
    return b.reshape(windows, (*windows.shape[:3], size * size * image.shape[3]))


def test_windows_are_read_in_place() -> None:
    """The padded image is stored; its windows, nine times as large, are not."""
    image = b.input_(0, f32, (2, 6, 7, 4))
    rows = patches(b.pad(image, ((0, 0), (1, 1), (1, 1), (0, 0))), 3, 2)
    p = check([b.relu(b.linear(rows, b.constant(torch.randn(5, 36)), b.constant(torch.randn(5))))], [image], [torch.randn(2, 6, 7, 4)])
    assert kinds(p) == ["loop", "linear"] and p.items[0].writes[0].op == "pad"


def test_an_image_whose_channels_lie_apart_is_stored_with_them_together() -> None:
    image = b.input_(0, f32, (2, 4, 6, 7))
    rows = patches(b.permute(image, (0, 2, 3, 1)), 3, 1)
    p = check([b.linear(rows, b.constant(torch.randn(5, 36)))], [image], [torch.randn(2, 4, 6, 7)])
    assert kinds(p) == ["loop", "linear"] and p.items[0].writes[0].op == "permute"


def test_windows_that_do_not_overlap_are_copied_once() -> None:
    image = b.input_(0, f32, (2, 4, 6, 8))
    rows = patches(b.permute(image, (0, 2, 3, 1)), 2, 2)
    p = check([b.linear(rows, b.constant(torch.randn(5, 16)))], [image], [torch.randn(2, 4, 6, 8)])
    assert kinds(p) == ["loop", "linear"] and p.items[0].writes[0].op == "reshape"


def test_what_overlapping_windows_are_over_is_computed_once() -> None:
    """A function that costs more than a load has a kernel of its own; others, and windows side by side, have not."""
    x, data = b.input_(0, f32, (2, 9, 4)), torch.randn(2, 9, 4)

    def pooled(value: Value, step: int) -> Value:
        return b.reduce(b.window(b.pad(value, ((0, 0), (1, 0), (0, 0))), 1, 3, step), "max", 2)

    assert kinds(check([pooled(b.exp(x), 1)], [x], [data])) == ["loop", "loop"]
    assert kinds(check([pooled(b.exp(x), 3)], [x], [data])) == ["loop"]
    assert kinds(check([pooled(b.relu(x), 1)], [x], [data])) == ["loop"]


def test_a_sum_seen_as_one_axis_of_several_is_computed_along_these() -> None:
    """What it reads at each place is the same for all features of a head, and computed once for these."""
    x, at = b.input_(0, f32, (5, 4, 3, 8)), b.input_(1, f32, (5, 4, 3))
    weight = b.reshape(b.exp(b.mul(at, 0.5)), (5, 4, 3, 1))
    total = b.reshape(b.reduce(b.mul(x, weight), "sum", 2), (5, 32))
    p = check([total], [x, at], [torch.randn(5, 4, 3, 8), torch.randn(5, 4, 3)])
    last = p.items[-1]
    assert kinds(p) == ["loop", "loop"] and isinstance(last, LoopItem) and (last.kernel.cols, last.kernel.depth) == (8, 3)
