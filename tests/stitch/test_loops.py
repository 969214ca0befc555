"""Loop bodies: which buffers may be the same memory."""

from __future__ import annotations

from sashiko.graph.types import bf16, f32
from sashiko.stitch.loops import COLUMN, ROW, BodyBuilder, Node, in_place

AT = ROW * 64 + COLUMN


def test_what_is_read_where_it_is_stored_may_be_overwritten() -> None:
    b = BodyBuilder()
    x, y, scale, out = (b.buffer(f32) for _ in range(4))
    b.store(out, AT, b.op("mul", f32, b.op("add", f32, b.load(x, AT), b.load(y, AT)), b.load(scale, COLUMN)))
    assert in_place(b.finish()) == ((out, x), (out, y))


def test_elements_read_elsewhere_later_or_in_another_size_may_not() -> None:
    b = BodyBuilder()
    twice, narrow, later, guarded, out, second = (b.buffer(d) for d in (f32, bf16, f32, f32, f32, f32))
    total = b.op("add", f32, b.op("add", f32, b.load(twice, AT), b.load(twice, AT + 1)), b.cast(b.load(narrow, AT), f32))
    condition = b.op("gt", b.nodes[-1].dtype, total, b.const(0.0, f32))
    total = b.op("add", f32, total, b.load(guarded, AT, condition, b.const(0.0, f32)))
    b.store(out, AT, total)
    b.store(second, COLUMN, b.op("add", f32, total, b.load(later, AT)))
    assert in_place(b.finish()) == ((out, guarded),)


def test_a_reduction_may_read_again_what_is_stored() -> None:
    b = BodyBuilder()
    x, out = b.buffer(f32), b.buffer(f32)
    load = b.load(x, AT)
    b.store(out, AT, b.op("div", f32, load, b.add(Node("reduce", f32, (load,), kind="sum", axis="c"))))
    assert in_place(b.finish()) == ()
