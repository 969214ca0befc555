"""What is known while code is written is not computed by it."""

from __future__ import annotations

from sashiko.cpu_codegen.builder import I64, VOID, Function, Module, Val, i64


def test_numbers_that_are_known_make_no_code() -> None:
    fn = Function(Module(), "f", VOID, [I64])
    before = fn.args[0]
    found = [fn.add(i64(40), i64(2)), fn.sub(i64(2), i64(9)), fn.mul(i64(6), i64(7)), fn.udiv(i64(40), i64(9)), fn.smin(i64(3), i64(8)),
             fn.smax(i64(3), i64(8)), fn.add(before, i64(0)), fn.mul(before, i64(1))]
    assert [value.ref for value in found] == ["42", "-7", "42", "4", "3", "8", before.ref, before.ref]


def test_what_is_not_known_is_computed() -> None:
    fn = Function(Module(), "f", VOID, [I64])
    for value in (fn.udiv(i64(1), i64(0)), fn.add(i64(-1), i64(2)), fn.smin(fn.args[0], i64(8))):
        assert isinstance(value, Val) and value.ref.startswith("%")
