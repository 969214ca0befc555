"""Where loads and stores go: contiguous, broadcast, strided, transposed, reshaped, gathered, guarded; 64-bit and symbolic indices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sashiko.cpu_codegen.builder import Module
from sashiko.cpu_codegen.index import LaneForm, lane_form
from sashiko.cpu_codegen.loops import emit_loop_kernel
from sashiko.graph.dims import Dim, floordiv, mod, symbol
from sashiko.graph.types import FROM_TORCH, boolean, f32, i64
from sashiko.platforms.catalogue import X86_64_V4
from sashiko.platforms.host import host
from sashiko.stitch.loops import BodyBuilder, LoopKernel, Node, axis
from tests.cpu_codegen.kernels import buffers, empty, few, normal, run
from tests.emulation import Runner

C = axis("c", 4096)
N = symbol("N")
DTYPES = (torch.float32, torch.int8, torch.bfloat16, torch.int64)


@pytest.mark.parametrize(
    ("index", "form"),
    [
        (C * 1 + 5, LaneForm(1)),
        (N + 3, LaneForm()),
        (C * 3 + N, LaneForm(3)),
        (C * N, LaneForm(N)),
        (floordiv(C, 64), LaneForm()),
        (mod(C, 64) + 64 * N, LaneForm(1)),
        (floordiv(C, 4), LaneForm(0, tuple(i // 4 for i in range(16)))),
        (mod(C, 4) * 2, LaneForm(0, tuple(2 * (i % 4) for i in range(16)))),
        (floordiv(C, 4) * 8 + mod(C, 4), LaneForm(0, tuple(i // 4 * 8 + i % 4 for i in range(16)))),
        (floordiv(C + 16 * N, 32), LaneForm()),
        (floordiv(mod(C, 64), 16), LaneForm()),
        (mod(C, 30), None),
        (floordiv(C + 1, 64), None),
        (floordiv(C + N, 64), None),
        (mod(C, 16 * N), LaneForm(1)),
        (C * C, None),
        (floordiv(C * 2, 32), LaneForm()),
        (floordiv(C * 3, 32), None),
    ],
    ids=str,
)
def test_lane_forms(index: Dim, form: LaneForm | None) -> None:
    assert lane_form(index, 16, lambda name: name == "c") == form
    if form is not None and isinstance(form.step, int):
        evaluated = [[_at(index, base + lane) for lane in range(16)] for base in (0, 16, 160)]
        for values in evaluated:
            assert values == [values[0] + form.step * lane + (form.offsets[lane] if form.offsets else 0) for lane in range(16)]


def _at(index: Dim, c: int) -> int:
    from sashiko.graph.dims import evaluate

    return evaluate(index, {"c": c, "N": 3})


def copy(
    runner: Runner, x: torch.Tensor, out: torch.Tensor, index: Callable[[Dim, Dim], Dim], dims: dict[str, int] | None = None
) -> torch.Tensor:
    """out[r, c] = x[index(r, c)], with extents R and S that are unknown to the code when `dims` is given."""
    rows, cols = (symbol("R"), symbol("S")) if dims is not None else (int(out.shape[0]), int(out.shape[1]))
    builder = BodyBuilder()
    source, target = buffers(builder, x, out)
    r, c = axis("r", rows), axis("c", cols)
    builder.store(target, r * cols + c, builder.load(source, index(r, c)))
    kernel = LoopKernel("copy", builder.finish(), rows, cols)
    return run(runner, kernel, [x, out], dims)[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("runner", few())
def test_access_patterns(runner: Runner, dtype: torch.dtype) -> None:
    x = (normal(64, 48) * 30).to(dtype)
    flat = x.flatten()
    assert torch.equal(copy(runner, x, empty(48, 64, dtype=dtype), lambda r, c: c * 48 + r), x.T)
    assert torch.equal(copy(runner, x, empty(5, 64, dtype=dtype), lambda r, c: r + 7), flat[7:12, None].expand(5, 64))
    assert torch.equal(copy(runner, x, empty(7, 48, dtype=dtype), lambda r, c: c), flat[:48].expand(7, 48))
    strided = copy(runner, x, empty(5, 100, dtype=dtype), lambda r, c: r * 600 + c * 5 + 3)
    assert torch.equal(strided, flat[:3000].reshape(5, 120, 5)[:, :100, 3])
    for run_length in (64, 4, 30, 7):
        got = copy(runner, x, empty(3, 90, dtype=dtype), lambda r, c, n=run_length: r * 90 + floordiv(c, n) * n + (n - 1) - mod(c, n))
        at = torch.arange(90)
        index = torch.arange(3)[:, None] * 90 + at // run_length * run_length + run_length - 1 - at % run_length
        assert torch.equal(got, flat[index]), run_length
    nested = copy(runner, x, empty(3, 90, dtype=dtype), lambda r, c: r * 90 + mod(floordiv(c, 3), 5) * 7 + floordiv(floordiv(c, 3), 5))
    assert torch.equal(nested, flat[torch.arange(3)[:, None] * 90 + at // 3 % 5 * 7 + at // 15])


@pytest.mark.parametrize("cols", [90, 1 << 33])
def test_numbers_divide_by_multiplication(cols: int) -> None:
    """What may not fit into 31 bits is divided in double."""
    builder = BodyBuilder()
    source, target = builder.buffer(f32), builder.buffer(f32)
    c = axis("c", cols)
    builder.store(target, c, builder.load(source, mod(floordiv(c, 3), 5)))
    module = Module()
    emit_loop_kernel(module, host(), LoopKernel("nested", builder.finish(), None, cols))
    assert ("fdiv" in module.text()) == (cols > 90)


@pytest.mark.parametrize("runner", few())
def test_unknown_extents(runner: Runner) -> None:
    x = normal(40, 77)
    size = symbol("S")
    for width in (1, 15, 16, 77):
        dims = {"R": 40, "S": width}
        view = x[:, :width].contiguous()
        assert torch.equal(copy(runner, view, empty(40, width), lambda r, c: r * size + c, dims), view)
        flipped = copy(runner, view, empty(40, width), lambda r, c: mod(r * size + c + 5, size * 40), dims)
        assert torch.equal(flipped, view.flatten().roll(-5).reshape(40, width))
        halves = copy(runner, view, empty(40, width), lambda r, c: floordiv(r * size + c, size) * size, dims)
        assert torch.equal(halves, view[:, :1].expand(40, width))


@pytest.mark.parametrize("runner", few())
def test_rows_of_a_table(runner: Runner) -> None:
    for index_type in (torch.int64, torch.int32):
        for width in (1, 7, 48, 100):
            table, ids = normal(20, width), torch.tensor([3, 0, 19, 7, 7, 1], dtype=index_type)
            assert torch.equal(embed(runner, table, ids, status=0), table[ids.long()])
            ids[2], ids[4] = 20, -1
            got = embed(runner, table, ids, status=1)
            expected = table[ids.long().clamp(0, 19)]
            expected[2] = expected[4] = 0
            assert torch.equal(got, expected)


def embed(runner: Runner, table: torch.Tensor, ids: torch.Tensor, status: int) -> torch.Tensor:
    """torch.embedding with checked indices."""
    out = empty(ids.numel(), table.shape[1])
    builder = BodyBuilder()
    places = buffers(builder, table, ids, out)
    r, c = axis("r", ids.numel()), axis("c", int(table.shape[1]))
    row = builder.load(places[1], r)
    dtype = FROM_TORCH[ids.dtype]
    low = builder.op("ge", boolean, row, builder.const(0, dtype))
    ok = builder.op("and", boolean, low, builder.op("lt", boolean, row, builder.const(len(table), dtype)))
    builder.add(Node("check", boolean, (ok,)))
    value = builder.load(places[0], builder.node_index(row) * int(table.shape[1]) + c, ok, builder.const(0.0, f32))
    builder.store(places[2], r * int(table.shape[1]) + c, value)
    return run(runner, LoopKernel("embed", builder.finish(), ids.numel(), int(table.shape[1])), [table, ids, out], status=status)[2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("runner", few())
def test_gather_along_columns(runner: Runner, dtype: torch.dtype) -> None:
    x, ids = (normal(3, 50) * 30).to(dtype), torch.randint(0, 50, (3, 37), generator=torch.Generator().manual_seed(2))
    out = empty(3, 37, dtype=dtype)
    builder = BodyBuilder()
    places = buffers(builder, x, ids, out)
    r, c = axis("r", 3), axis("c", 37)
    at = builder.load(places[1], r * 37 + c)
    ok = builder.op("lt", boolean, at, builder.const(50, i64))
    builder.add(Node("check", boolean, (ok,)))
    builder.store(places[2], r * 37 + c, builder.load(places[0], r * 50 + builder.node_index(at), ok, builder.const(0, FROM_TORCH[dtype])))
    kernel = LoopKernel("gather", builder.finish(), 3, 37)
    assert torch.equal(run(runner, kernel, [x, ids, out])[2], x.gather(1, ids))
    ids[1, 36] = 1 << 40
    expected = x.gather(1, ids.clamp(0, 49))
    expected[1, 36] = 0
    assert torch.equal(run(runner, kernel, [x, ids, out], status=1)[2], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("runner", few())
def test_guards(runner: Runner, dtype: torch.dtype) -> None:
    """Padding by 2 rows and 3 columns on every side, and a guarded store that leaves the rest alone."""
    x = (normal(5, 40) * 30).to(dtype)
    out, some = empty(9, 46, dtype=dtype), empty(9, 46, dtype=dtype)
    builder = BodyBuilder()
    places = buffers(builder, x, out, some)
    r, c = axis("r", 9), axis("c", 46)
    inside = -1
    for value, extent in ((r - 2, 5), (c - 3, 40)):
        at = builder.add(Node("index", i64, index=value))
        low = builder.op("ge", boolean, at, builder.const(0, i64))
        both = builder.op("and", boolean, low, builder.op("lt", boolean, at, builder.const(extent, i64)))
        inside = both if inside < 0 else builder.op("and", boolean, inside, both)
    value = builder.load(places[0], (r - 2) * 40 + c - 3, inside, builder.const(1, FROM_TORCH[dtype]))
    builder.store(places[1], r * 46 + c, value)
    builder.store(places[2], r * 46 + c, value, inside)
    padded, kept = run(runner, LoopKernel("pad", builder.finish(), 9, 46), [x, out, some])[1:]
    expected = torch.ones(9, 46, dtype=dtype)
    expected[2:7, 3:43] = x
    assert torch.equal(padded, expected)
    untouched = empty(9, 46, dtype=dtype)
    untouched[2:7, 3:43] = x
    assert torch.equal(kept, untouched)


@pytest.mark.parametrize("runner", few())
def test_row_guards_and_scattered_stores(runner: Runner) -> None:
    """Concatenation of two tensors by rows, and stores of a transposed result."""
    x, y, out, turned = normal(4, 37), normal(3, 37, seed=1), empty(7, 37), empty(37, 7)
    builder = BodyBuilder()
    places = buffers(builder, x, y, out, turned)
    r, c = axis("r", 7), axis("c", 37)
    row = builder.add(Node("index", i64, index=r))
    first = builder.op("lt", boolean, row, builder.const(4, i64))
    tail = builder.load(places[1], (r - 4) * 37 + c, builder.op("logical_not", boolean, first), builder.const(0.0, f32))
    value = builder.load(places[0], r * 37 + c, first, tail)
    builder.store(places[2], r * 37 + c, value)
    builder.store(places[3], c * 7 + r, value)
    results = run(runner, LoopKernel("concat", builder.finish(), 7, 37), [x, y, out, turned])
    assert torch.equal(results[2], torch.cat([x, y]))
    assert torch.equal(results[3], torch.cat([x, y]).T)


@pytest.mark.parametrize("runner", few())
def test_index_values(runner: Runner) -> None:
    """Index expressions as numbers: linear, with remainders, and of another node."""
    outs = [empty(6, 50, dtype=torch.int64), empty(6, 50, dtype=torch.int32), empty(6, 50, dtype=torch.int64)]
    builder = BodyBuilder()
    places = buffers(builder, *outs)
    r, c = axis("r", 6), axis("c", 50)
    linear = builder.add(Node("index", i64, index=r * 1000 - c * 2))
    wrapped = builder.add(Node("index", FROM_TORCH[torch.int32], index=mod(r * 50 + c, 7)))
    of_node = builder.add(Node("index", i64, index=builder.node_index(wrapped) * 3 + r))
    for place, node in zip(places, (linear, wrapped, of_node)):
        builder.store(place, r * 50 + c, node)
    got = run(runner, LoopKernel("indices", builder.finish(), 6, 50), outs)
    row, column = torch.arange(6)[:, None], torch.arange(50)
    remainders = (row * 50 + column) % 7
    assert torch.equal(got[0], row * 1000 - column * 2)
    assert torch.equal(got[1], remainders.int())
    assert torch.equal(got[2], remainders * 3 + row)


NEAR: dict[str, Callable[[Dim], Dim]] = {
    "every other": lambda c: 2 * c + 1,
    "the first of a pair": lambda c: 2 * floordiv(c, 2),
    "each twice": lambda c: floordiv(c, 2),
    "each four times": lambda c: floordiv(c, 4) + 3,
    "pairs exchanged": lambda c: c + 1 - 2 * mod(c, 2),
    "backwards": lambda c: 39 - c,
    "four over and over": lambda c: mod(c, 4),
    "the colours of a pixel": lambda c: 3 * c + 2,
    "every fourth": lambda c: 4 * c,
    "every fourth backwards": lambda c: 150 - 4 * c,
    "two groups": lambda c: mod(c, 4) + 13 * mod(floordiv(c, 4), 2),
    "two far groups": lambda c: mod(c, 8) + 48 * mod(floordiv(c, 8), 2),
    "far apart": lambda c: 20 * mod(c, 8),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("runner", few())
def test_elements_that_lie_near_one_another(runner: Runner, dtype: torch.dtype) -> None:
    """All lanes, and with a guard that holds for half of them."""
    tensors = [(normal(3, 160) * 30).to(dtype)]
    builder, r, c = BodyBuilder(), axis("r", 3), axis("c", 38)
    tensors += [empty(3, 38, dtype=dtype) for _ in range(2 * len(NEAR))]
    x, *out = buffers(builder, *tensors)
    even = builder.op("eq", boolean, builder.add(Node("index", i64, index=mod(c, 2))), builder.const(0, i64))
    other = builder.const(7, FROM_TORCH[dtype])
    for n, near in enumerate(NEAR.values()):
        builder.store(out[2 * n], r * 38 + c, builder.load(x, r * 160 + near(c)))
        builder.store(out[2 * n + 1], r * 38 + c, builder.load(x, r * 160 + near(c), even, other))
    found = run(runner, LoopKernel("near", builder.finish(), 3, 38), tensors)
    for n, near in enumerate(NEAR.values()):
        wanted = tensors[0][:, [_at(near(C), column) for column in range(38)]]
        assert torch.equal(found[2 * n + 1], wanted)
        assert torch.equal(found[2 * n + 2], wanted.where(torch.arange(38) % 2 == 0, torch.tensor(7, dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("runner", few())
def test_inactive_lanes_near_others_may_be_outside(runner: Runner, dtype: torch.dtype) -> None:
    """Column 37 would read element 75, and columns from 40 on are none."""
    x, out = (normal(74) * 30).to(dtype), empty(38, dtype=dtype)
    builder, c = BodyBuilder(), axis("c", 38)
    places = buffers(builder, x, out)
    even = builder.op("eq", boolean, builder.add(Node("index", i64, index=mod(c, 2))), builder.const(0, i64))
    builder.store(places[1], c, builder.load(places[0], 2 * c + 1, even, builder.const(0, FROM_TORCH[dtype])))
    found = run(runner, LoopKernel("outside", builder.finish(), None, 38), [x, out])[1]
    assert torch.equal(found[::2], x[1::4]) and not found[1::2].any()


@pytest.mark.parametrize(
    ("near", "gathers"), [
        ("every other", False), ("pairs exchanged", False), ("each twice", False), ("the colours of a pixel", False),
        ("every fourth backwards", False), ("far apart", True),
    ]
)
@pytest.mark.parametrize("guarded", [False, True])
def test_what_lies_within_four_vectors_is_not_gathered(near: str, gathers: bool, guarded: bool) -> None:
    builder, c = BodyBuilder(), axis("c", 32)
    x, out = builder.buffer(f32), builder.buffer(f32)
    even = builder.op("eq", boolean, builder.add(Node("index", i64, index=mod(c, 2))), builder.const(0, i64))
    restricted = (even, builder.const(0.0, f32)) if guarded else ()
    builder.store(out, c, builder.load(x, NEAR[near](c), *restricted))
    module = Module()
    emit_loop_kernel(module, X86_64_V4, LoopKernel("near", builder.finish(), None, 32))
    assert ("gather" in str(module)) == gathers
