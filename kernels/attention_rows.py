"""Rows of attention's operands between memory, in their own element type and stride, and f32 scratch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..cpu_codegen import convert
from ..cpu_codegen.builder import BF16, F32, I16, I32, I64, PTR, VOID, Function, Module, Ty, Val, const, i64
from ..cpu_codegen.slots import Slots
from ..graph.types import DType, bf16, f32
from ..platforms.target import Target
from .attention_spec import HeadStrides

# Longer rows are copied by a loop, which keeps the code small.
_UNROLLED = 8


def head_start(fn: Function, slots: Slots, operand: int, strides: HeadStrides, element: Ty, b: Val, h: Val) -> Val:
    """Where the rows of head h of item b of an operand begin."""
    at = fn.add(fn.add(slots.dim(strides.offset), fn.mul(b, slots.dim(strides.batch))), fn.mul(h, slots.dim(strides.head)))
    return fn.gep(slots.buffer(operand), at, element)


def pieces(count: int, lanes: int) -> Iterator[tuple[int, int]]:
    """(position, width) of vectors that cover `count` elements: whole ones, then halves, quarters, ... and single elements (width 0)."""
    at, width = 0, lanes
    while at < count:
        while width > count - at:
            width //= 2
        yield at, width if width > 1 else 0
        at += width


def each_piece(fn: Function, count: int, lanes: int, copy: Callable[[Val, int], None]) -> None:
    """Calls `copy(position, width)` so that all elements are covered."""
    whole = count // lanes if count // lanes > _UNROLLED else 0

    def vector(index: Val, _: list[Val]) -> list[Val]:
        copy(index, lanes)
        return []

    if whole:
        fn.loop(i64(0), i64(whole * lanes), lanes, [], vector)
    for at, width in pieces(count - whole * lanes, lanes):
        copy(i64(whole * lanes + at), width)


def each_element(fn: Function, count: int, copy: Callable[[Val, int], None]) -> None:
    """Calls `copy(position, 0)` for every element."""

    def element(index: Val, _: list[Val]) -> list[Val]:
        copy(index, 0)
        return []

    fn.loop(i64(0), i64(count), 1, [], element)


def read_row(fn: Function, dtype: DType, source: Val, col: Val, count: int, target: Val, lanes: int) -> None:
    """Copies `count` elements, `col` elements apart, into f32 scratch."""
    element = convert.memory_type(dtype)

    def copy(index: Val, width: int) -> None:
        value = fn.load(element.vec(width), fn.gep(source, fn.mul(index, col), element))
        fn.store(value if dtype == f32 else convert.widen(fn, value, dtype), fn.gep(target, index, F32))

    if col.ref == "1":
        each_piece(fn, count, lanes, copy)
    else:
        each_element(fn, count, copy)


def copy_row(fn: Function, dtype: DType, source: Val, col: Val, count: int, target: Val, padded: int, lanes: int) -> None:
    """Copies `count` elements, `col` elements apart, as they are, and fills up with zeros to `padded` of them."""
    element = convert.memory_type(dtype)

    def copy(index: Val, width: int) -> None:
        fn.store(fn.load(element.vec(width), fn.gep(source, fn.mul(index, col), element)), fn.gep(target, index, element))

    if col.ref == "1":
        each_piece(fn, count, lanes, copy)
    else:
        each_element(fn, count, copy)
    zero_row(fn, dtype, fn.gep(target, i64(count), element), padded - count, lanes)


def pair_rows(fn: Function, even: Val, odd: Val | None, col: Val, count: int, target: Val, lanes: int) -> None:
    """Mixes two rows of 16-bit elements, `col` elements apart: those of the first one before those of the second, or before zeros."""

    def copy(index: Val, width: int) -> None:
        ty, at = I16.vec(width), fn.mul(index, col)
        low = fn.load(ty, fn.gep(even, at, I16))
        high = fn.load(ty, fn.gep(odd, at, I16)) if odd is not None else const(ty, 0)
        to = fn.gep(target, index, I32)
        if width:
            fn.store(fn.shuffle(low, high, [n // 2 + width * (n % 2) for n in range(2 * width)]), to)
        else:
            fn.store(low, to)
            fn.store(high, fn.gep(to, i64(2)))

    if col.ref == "1":
        each_piece(fn, count, lanes, copy)
    else:
        each_element(fn, count, copy)


def zero_row(fn: Function, dtype: DType, target: Val, count: int, lanes: int) -> None:
    """Writes `count` zeros."""
    element = convert.memory_type(dtype)
    each_piece(fn, count, lanes, lambda index, width: fn.store(const(element.vec(width), 0), fn.gep(target, index, element)))


def write_row(fn: Function, dtype: DType, source: Val, count: int, out: Val, col: Val, lanes: int) -> None:
    """Copies `count` elements that lie side by side to where they belong, `col` elements apart."""
    element = convert.memory_type(dtype)

    def copy(index: Val, width: int) -> None:
        fn.store(fn.load(element.vec(width), fn.gep(source, index, element)), fn.gep(out, fn.mul(index, col), element))

    if col.ref == "1":
        each_piece(fn, count, lanes, copy)
    else:
        each_element(fn, count, copy)


def together(fn: Function, target: Target, dtype: DType, even: Val, odd: Val) -> Val:
    """Vectors of f32 as one of 32-bit units: 16 bits of each, rounded to `dtype`, the even one in the low half."""
    lanes = even.ty.lanes
    if dtype == bf16 and target.has("avx512_bf16") and lanes == 16:
        both = fn.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", BF16.vec(2 * lanes), [odd, even])
        words = fn.convert("bitcast", both, I16.vec(2 * lanes))
        mixed = fn.shuffle(words, words, [n // 2 + lanes * (n % 2) for n in range(2 * lanes)])
        return fn.convert("bitcast", mixed, I32.vec(lanes))
    first, second = (convert.narrow(fn, target, value, dtype) for value in (even, odd))
    if lanes == 4:  # two vectors of half the length fill one of 128 bits in one instruction
        mixed = fn.shuffle(first, second, [n // 2 + lanes * (n % 2) for n in range(2 * lanes)])
        return fn.convert("bitcast", mixed, I32.vec(lanes))
    low, high = (fn.convert("zext", value, I32.vec(lanes)) for value in (first, second))
    return fn.or_(low, fn.shl(high, const(high.ty, 16)))


def emit_transpose(module: Module, lanes: int) -> str:
    """Adds `void name(ptr source, i64 source pitch, ptr target, i64 target pitch, i64 squares)` and returns its name.

    target[column][row] = source[row][column] for `lanes` rows and lanes * squares columns of 32 bits; pitches are bytes. Each
    vector is loaded in quarters from rows that are four apart, so that shuffles stay inside quarters, which is cheap everywhere.
    """
    name = f"attention.transpose{lanes}"
    if name in module.functions:
        return name
    fn = Function(module, name, VOID, [PTR, I64, PTR, I64, I64], internal=True)
    source, source_pitch, target, target_pitch, squares = fn.args

    def four(index: Val, _: list[Val]) -> list[Val]:
        at = fn.mul(index, i64(4))
        begin = fn.gep(source, at, F32)
        corners = [fn.load(F32.vec(4), fn.gep(begin, fn.mul(source_pitch, i64(n)))) for n in range(lanes)]
        store_columns(fn, corners, fn.gep(target, fn.mul(at, target_pitch)), target_pitch)
        return []

    fn.loop(i64(0), fn.mul(squares, i64(lanes // 4)), 1, [], four)
    fn.ret()
    fn.finish()
    return name


def store_columns(fn: Function, corners: Sequence[Val], target: Val, pitch: Val) -> None:
    """Four columns, `pitch` bytes apart, whose elements in row n are the vector `corners[n]`."""
    # Vector n holds rows n, n + 4, ...; transposing each four by four leaves the columns.
    columns = _four_by_four(fn, [_joined(fn, list(corners[n::4])) for n in range(4)])
    for n, column in enumerate(columns):
        fn.store(column, fn.gep(target, fn.mul(pitch, i64(n))))


def _joined(fn: Function, parts: list[Val]) -> Val:
    """One vector of all the parts, whose number is a power of two."""
    while len(parts) > 1:
        size = range(2 * parts[0].ty.lanes)
        parts = [fn.shuffle(a, b, size) for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]


def _four_by_four(fn: Function, rows: list[Val]) -> list[Val]:
    """Transposes every four neighbours of four vectors."""
    lanes = rows[0].ty.lanes

    def chosen(a: Val, b: Val, four: tuple[int, int, int, int]) -> Val:
        """four: positions among 4 neighbours of a, then 4 of b."""
        return fn.shuffle(a, b, [base + (n if n < 4 else lanes + n - 4) for base in range(0, lanes, 4) for n in four])

    low = [chosen(rows[n], rows[n + 1], (0, 4, 1, 5)) for n in (0, 2)]
    high = [chosen(rows[n], rows[n + 1], (2, 6, 3, 7)) for n in (0, 2)]
    pairs = [(pair, four) for pair in (low, high) for four in ((0, 1, 4, 5), (2, 3, 6, 7))]
    return [chosen(pair[0], pair[1], four) for pair, four in pairs]
