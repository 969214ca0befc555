"""What tiles fetch ahead: whole matrices of a large result, and nothing else. What a fetch asks for is never needed for the numbers."""

from __future__ import annotations

from dataclasses import replace

from sashiko.graph.dims import floordiv, symbol
from sashiko.graph.types import bf16, f32
from sashiko.kernels.fetch import Access, accesses
from sashiko.kernels.spec import GemmSpec, Strides
from sashiko.platforms.catalogue import CATALOGUE
from sashiko.stitch.loops import COLUMN, ROW, Body, BodyBuilder, Node

TARGET = replace(CATALOGUE[0], l2=1 << 20)
N = 256


def residual() -> Body:
    """acc * scale[c] + other[r, c], stored in bf16; a number of each row and one from elsewhere are added."""
    b = BodyBuilder()
    scale, other, row, out = (b.buffer(d) for d in (f32, f32, f32, bf16))
    total = b.op("mul", f32, b.add(Node("acc", f32)), b.load(scale, COLUMN))
    total = b.op("add", f32, total, b.load(other, 8 + ROW * N + COLUMN))
    total = b.op("add", f32, total, b.load(row, ROW))
    total = b.op("add", f32, total, b.load(row, floordiv(ROW, 2) * N + COLUMN))
    b.store(out, ROW * N + COLUMN, b.cast(total, bf16))
    return b.finish()


def short() -> Body:
    """acc, stored in bf16."""
    b = BodyBuilder()
    out = b.buffer(bf16)
    b.store(out, ROW * N + COLUMN, b.cast(b.add(Node("acc", f32)), bf16))
    return b.finish()


def spec(rows: int) -> GemmSpec:
    return GemmSpec(f32, f32, rows, N, 64, Strides(0, 64), residual())


def test_matrices_are_fetched_and_rows_and_columns_are_not() -> None:
    assert accesses(TARGET, spec(4096)) == (Access(1, 8, N, 4, False), Access(3, 0, N, 2, True))


def test_a_result_that_stays_in_the_cache_is_not_fetched() -> None:
    assert accesses(TARGET, spec(64)) == ()
    # 4 bytes of each element are read, 512 KiB of them stay.
    assert accesses(TARGET, spec(512)) == () and accesses(TARGET, spec(513)) != ()
    assert accesses(TARGET, replace(spec(64), m=symbol("M", 1))) != ()


def test_a_result_of_short_elements_stays_with_more_of_them() -> None:
    assert accesses(TARGET, replace(spec(1024), epilogue=short())) == ()
    assert accesses(TARGET, replace(spec(1025), epilogue=short())) == (Access(0, 0, N, 2, True),)


def test_what_is_stored_over_what_is_read_is_fetched_once() -> None:
    b = BodyBuilder()
    other, out = b.buffer(f32), b.buffer(f32)
    place = ROW * N + COLUMN
    b.store(out, place, b.op("add", f32, b.add(Node("acc", f32)), b.load(other, place)))
    assert accesses(TARGET, replace(spec(4096), epilogue=b.finish())) == (Access(1, 0, N, 4, True),)


def test_beside_products_of_tiles_only_whole_numbers_are_fetched() -> None:
    assert accesses(TARGET, spec(4096), overlaps=True) == (Access(1, 8, N, 4, False),)
    assert accesses(TARGET, replace(spec(4096), epilogue=short()), overlaps=True) == ()
