"""Sums over windows written out for several rows: depthwise convolutions against torch, what is read how often, and what stays a loop."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn import functional as F

from sashiko.cpu_codegen.builder import Module
from sashiko.cpu_codegen.jit import assembly
from sashiko.cpu_codegen.loops import emit_loop_kernel
from sashiko.cpu_codegen.schedule import needed
from sashiko.cpu_codegen.written import Written, written_out
from sashiko.graph import build as b
from sashiko.graph.aten.windows import surrounded, windows
from sashiko.graph.dims import symbol
from sashiko.graph.ir import Value
from sashiko.graph.types import f32, i8, u8
from sashiko.platforms.catalogue import CATALOGUE, X86_64_V4
from sashiko.stitch.loops import Body, LoopKernel
from sashiko.stitch.program import LoopItem
from sashiko.stitch.stitcher import stitch
from tests.cpu_codegen.kernels import empty, few, normal, run
from tests.emulation import Runner, runners
from tests.sweeps import left_to_sweep

TARGET = CATALOGUE[0]


@dataclass(frozen=True)
class Windows:
    """A depthwise convolution of x[n, side, side, channels] with a bias and a relu before it."""

    n: int
    side: int
    channels: int
    size: int
    step: int = 1
    edge: int = 0
    kind: str = "sum"

    @property
    def count(self) -> int:
        return (self.side + 2 * self.edge - self.size) // self.step + 1

    def kernel(self) -> LoopKernel:
        x = b.input_(0, f32, (self.n, self.side, self.side, self.channels))
        w = b.input_(1, f32, (self.size, self.size, self.channels))
        (item,) = stitch((self.value(x, w),), (x, w), ()).items
        assert isinstance(item, LoopItem)
        return item.kernel

    def value(self, x: Value, w: Value) -> Value:
        image = surrounded(b.relu(x), (self.edge,) * 2, (self.edge,) * 2)
        return b.add(b.reduce(b.mul(windows(image, (self.size,) * 2, (self.step,) * 2, (1, 1)), w), self.kind, (3, 4)), 1.0)

    def expected(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        image, taps = x.relu().permute(0, 3, 1, 2).double(), w.permute(2, 0, 1).unsqueeze(1).double()
        return F.conv2d(image, taps, stride=self.step, padding=self.edge, groups=self.channels).permute(0, 2, 3, 1) + 1


def written(case: Windows) -> Written:
    found = written_out(TARGET, case.kernel())
    assert found is not None
    return found


@pytest.mark.parametrize("runner", [left_to_sweep(each) if each.id == "x86_64_v3" else each for each in few()])
def test_depthwise_windows(runner: Runner) -> None:
    """Rows that all conditions hold in, rows at the edges, whole vectors and a tail; in two calls as two threads would."""
    cases = (Windows(2, 8, 37, 3, 1, 1), Windows(1, 14, 16, 5, 2, 2), Windows(1, 7, 33, 7, 1, 3), Windows(1, 10, 8, 3))
    odd = (Windows(2, 13, 16, 3, 1, 1), Windows(1, 19, 5, 5, 1, 2), Windows(1, 29, 8, 3, 1, 1))  # a line at a time, and a pixel
    edges = (Windows(1, 28, 19, 7, 1, 3), Windows(1, 20, 5, 7, 1, 2))
    large = (*edges, Windows(2, 16, 20, 9), Windows(1, 25, 8, 11, 2), Windows(1, 31, 3, 13), Windows(1, 33, 8, 31))  # in a loop over lines
    for case in (*cases, *odd, *large):
        x, w = normal(case.n, case.side, case.side, case.channels), normal(case.size, case.size, case.channels, seed=1)
        rows = case.n * case.count**2 // (case.kernel().rows // written(case).kernel.rows)  # type: ignore[operator]
        out = empty(case.n, case.count, case.count, case.channels)
        for part in ((0, rows // 2), (rows // 2, rows)):
            out = run(runner, case.kernel(), [x, w, out], part=part)[-1]
        magnitudes = case.expected(x.abs(), w.abs())
        assert ((out.double() - case.expected(x, w)).abs() <= (case.size**2 + 2) * 2.0**-24 * magnitudes).all()


def test_rows_read_what_they_share_once() -> None:
    found = written(Windows(1, 16, 32, 3, 1, 1))
    assert found.kernel.rows == 64 and found.kernel.depth is None and len(found.sums) == 4

    def loads(kernel: LoopKernel) -> list[tuple[int, bool]]:
        return [(n.buffer, bool(n.args)) for n in (kernel.body.nodes[m] for m in needed(kernel.body)) if n.op == "load"]

    assert sum(buffer == 0 for buffer, _ in loads(found.kernel)) == 3 * 6
    assert sum(buffer == 1 for buffer, _ in loads(found.kernel)) == 9
    # Above, below, left and right of the image; nothing is asked about the columns between.
    assert 0 < len(found.conditions) <= 8 and any(asks for _, asks in loads(found.kernel))
    assert not any(asks for _, asks in loads(found.inner))


@pytest.mark.parametrize("runner", runners(needs=("avx512_vnni",)) + runners(needs=("i8mm",)))
def test_dots_of_bytes_join_the_sums(runner: Runner) -> None:
    """Windows 3 x 3 over bytes: of each row three dot products, and what is packed for one is there for its neighbours."""
    x, w = b.input_(0, u8, (2, 16, 16, 37)), b.input_(1, i8, (3, 3, 37))
    patches = windows(surrounded(x, (1, 1), (1, 1)), (3, 3), (1, 1), (1, 1))
    image, weight = (b.pack_bytes([b.slice_(v, axis, n, 1) for n in range(3)]) for v, axis in ((patches, 3), (w, 0)))
    value = b.reduce(b.dot_bytes(image, weight), "sum", (3, 4))
    (item,) = stitch((value,), (x, w), ()).items
    assert isinstance(item, LoopItem)
    found = written_out(runner.target, item.kernel)
    assert found is not None and len(found.sums) == 4
    used = [found.inner.body.nodes[n].op for n in needed(found.inner.body)]
    assert (used.count("dot_bytes"), used.count("add"), used.count("pack_bytes")) == (4 * 3, 0, 6 + 3)
    generator = torch.Generator().manual_seed(0)
    xs = torch.randint(0, 256, (2, 16, 16, 37), generator=generator).to(torch.uint8)
    ws = torch.randint(-128, 128, (3, 3, 37), generator=generator).to(torch.int8)
    tensors = {x: xs, w: ws, value: empty(2, 16, 16, 37, dtype=torch.int32)}
    got = run(runner, item.kernel, [tensors[v] for v in item.operands])[item.operands.index(value)]
    taps = ws.permute(2, 0, 1).unsqueeze(1).double()
    assert torch.equal(got.double(), F.conv2d(xs.permute(0, 3, 1, 2).double(), taps, padding=1, groups=37).permute(0, 2, 3, 1))


@pytest.mark.parametrize("runner", few())
def test_a_sum_that_all_rows_share(runner: Runner) -> None:
    """Of x[k, c], beside one of y[r, c] that is the same for all k."""
    x, y = b.input_(0, f32, (2, 5)), b.input_(1, f32, (4, 5))
    every = b.expand(b.unsqueeze(x, 0), (4, 2, 5))
    value = b.reduce(b.mul(b.div(every, b.reduce(every, "sum", 1, True)), b.unsqueeze(y, 1)), "sum", 1)
    (item,) = stitch((value,), (x, y), ()).items
    assert isinstance(item, LoopItem) and written_out(TARGET, item.kernel) is not None
    xs, ys = normal(2, 5).abs() + 1, normal(4, 5, seed=1)
    tensors = {x: xs, y: ys, value: empty(4, 5)}
    got = run(runner, item.kernel, [tensors[v] for v in item.operands])[item.operands.index(value)]
    torch.testing.assert_close(got, (xs / xs.sum(0) * ys[:, None]).sum(1))


def test_without_an_edge_nothing_is_asked() -> None:
    assert written(Windows(1, 18, 32, 3)).conditions == ()


def test_whether_a_line_is_within_the_image_is_asked_once() -> None:
    """Of a window of 7 x 7: of all terms together, and of those beside the image for all lines together."""
    found = written(Windows(1, 28, 16, 7, 1, 3))
    body = found.kernel.body
    assert [body.deps[n] for n in found.of_lines] == [{"r", "k"}] and all(body.deps[n] == {"r"} for n in found.conditions)
    lines = found.lines(found.inner.body)
    assert lines is not None

    def asks(body: Body) -> list[bool]:
        return [bool(n.args) for n in (body.nodes[m] for m in needed(body)) if n.op == "load" and n.buffer == 0]

    assert asks(found.inner.body) == [True] * 20 and asks(lines.inside) == [False] * 20 and asks(lines.outside) == []


def test_terms_join_the_sums_of_all_lines_one_by_one() -> None:
    """A sum of the line that is added later would need registers that there are not."""
    module = Module()
    emit_loop_kernel(module, X86_64_V4, Windows(1, 20, 16, 7).kernel())
    text = assembly(module.text(), X86_64_V4)
    assert text.count("vfmadd") == 7 * 14 and "(%rsp)" not in text


def test_large_windows_are_written_out_a_line_at_a_time() -> None:
    found = written(Windows(1, 22, 32, 9))
    assert (found.kernel.rows, found.kernel.depth, found.sums, found.conditions) == (14, 9, (), ())
    loads = [node.buffer for node in (found.kernel.body.nodes[n] for n in needed(found.kernel.body)) if node.op == "load"]
    assert loads.count(0) == 9 + 13 and loads.count(1) == 9
    small = written(Windows(1, 19, 32, 7, 1, 3))  # 19 rows of 49 terms would be too much
    assert small.kernel.depth == 7 and small.kernel.rows == 19


def test_the_next_line_is_fetched_where_windows_have_a_few() -> None:
    for size, fetches in ((3, 0), (9, 9 + 13), (31, 0)):
        module = Module()
        emit_loop_kernel(module, TARGET, Windows(1, 13 + size, 32, size).kernel())
        assert module.text().count("call void @llvm.prefetch") == fetches, size


def test_the_places_of_results_are_fetched_where_these_leave_the_second_level_cache() -> None:
    small = Windows(1, 22, 32, 9)
    for image, places in ((small, 0), (replace(small, n=2 + TARGET.l2 // (4 * 14 * 14 * 32)), 14)):
        module = Module()
        emit_loop_kernel(module, TARGET, image.kernel())
        assert len(re.findall(r"call void @llvm\.prefetch\S*\(ptr \S+, i32 1,", module.text())) == places


def test_any_number_of_images() -> None:
    n, taps = symbol("n"), b.input_(1, f32, (3, 3, 32))
    x = b.input_(0, f32, (n, 16, 16, 32))
    (item,) = stitch((Windows(1, 16, 32, 3, 1, 1).value(x, taps),), (x, taps), ()).items
    assert isinstance(item, LoopItem)
    found = written_out(TARGET, item.kernel)
    assert found is not None and found.kernel.rows in (64 * n, 128 * n)


def test_images_of_any_size() -> None:
    """They are written out one by one. Where they lie is found by divisions, which LLVM's passes over loops would repeat at each load."""
    height, width, taps = symbol("h", 8, 256), symbol("w", 8, 256), b.input_(1, f32, (3, 3, 96))
    x = b.input_(0, f32, (2, height, width, 96))
    value = b.reduce(b.mul(windows(surrounded(x, (1, 1), (1, 1)), (3, 3), (1, 1), (1, 1)), taps), "sum", (3, 4))
    (item,) = stitch((value,), (x, taps), ()).items
    assert isinstance(item, LoopItem)
    found = written_out(TARGET, item.kernel)
    assert found is not None and found.kernel.rows == item.kernel.rows and found.kernel.depth is None
    module = Module()
    emit_loop_kernel(module, TARGET, item.kernel)
    assert len(re.findall(r"\n\s+div[lq]\s", assembly(module.text(), TARGET))) <= len(re.findall(r" = u(?:div|rem) ", module.text()))


def test_what_stays_a_loop() -> None:
    x, long = b.input_(0, f32, (4, 16, 8, 32)), b.input_(0, f32, (4, 177, 32))
    taps = b.input_(1, f32, (89, 1))  # a prime number of terms
    many = b.reduce(b.mul(b.window(long, 1, 89, 1), taps), "sum", 2)
    nothing_shared = b.reduce(x, "sum", 2)
    kernels = [stitch((value,), inputs, ()).items for value, inputs in ((nothing_shared, (x,)), (many, (long, taps)))]
    for (item,) in kernels:
        assert isinstance(item, LoopItem) and written_out(TARGET, item.kernel) is None
    assert written_out(TARGET, Windows(1, 16, 8, 3, kind="max").kernel()) is None
