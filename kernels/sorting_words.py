"""Words in order: unsigned integers whose upper half is a key, and whose lower half is the place of the key, so that no two are equal.

Of few words, the place of each is the number of those before it. More are sorted by the bytes of their keys, the lowest first (Knuth, The
Art of Computer Programming, volume 3, section 5.2.5), since equal keys stand in the order of their places at first; a byte that all keys
have in common takes no pass.
"""

from __future__ import annotations

from collections.abc import Callable

from ..cpu_codegen.builder import I32, I64, PTR, Function, Module, Ty, Val, const, i64
from ..platforms.target import Target

_RADIX = 256
COUNTERS = 4 * _RADIX  # bytes
_BLOCKS = 8  # vectors of keys that are compared with one another


def sorter(module: Module, target: Target, word: Ty) -> str:
    """Adds `ptr name(ptr words, ptr other, ptr counters, i64 count)`, which says in which of the two arrays the words are in order."""
    name = f"sort.words{word.bits}"
    if name not in module.functions:
        fn = Function(module, name, PTR, [PTR, PTR, PTR, I64], internal=True)
        lanes = target.lanes(32) if word == I64 else 1
        few = fn.icmp("sle", fn.args[3], i64(_BLOCKS * lanes))
        [found] = fn.branch(few, lambda: [_by_rank(fn, word, lanes)], lambda: [_by_bytes(fn, word)])
        fn.ret(found)
        fn.finish()
    return name


def _by_rank(fn: Function, word: Ty, lanes: int) -> Val:
    """How many words come before each of `lanes` is counted at a time: those with a smaller key, or an equal one and an earlier place."""
    words, other, ranks, count = fn.args
    key = Ty(f"i{word.bits // 2}", lanes)

    def block(first: Val, _: list[Val]) -> list[Val]:
        mine = fn.convert("trunc", fn.lshr(fn.load(word.vec(lanes), fn.gep(words, first, word)), const(word.vec(lanes), key.bits)), key)
        behind = fn.smin(fn.add(first, i64(lanes)), count)

        def counted(before: Callable[[Val, Val], Val]) -> Callable[[Val, list[Val]], list[Val]]:
            def each(at: Val, state: list[Val]) -> list[Val]:
                found = before(fn.splat(fn.load(Ty(key.scalar), key_at(fn, word, words, at)), lanes), at)
                return [fn.add(state[0], fn.convert("zext", found, I32.vec(lanes)))]

            return each

        def along(begin: Val, end: Val, total: list[Val], each: Callable[[Val, list[Val]], list[Val]]) -> list[Val]:
            """Four words at a time, two sums in turn: most of a step would be the loop."""

            def four(at: Val, sums: list[Val]) -> list[Val]:
                one, two = sums[:1], sums[1:]
                for n in (0, 2):
                    one, two = each(fn.add(at, i64(n)), one), each(fn.add(at, i64(n + 1)), two)
                return one + two

            whole = fn.sub(end, fn.urem(fn.sub(end, begin), i64(4)))
            sums = fn.loop(begin, whole, 4, [*total, const(I32.vec(lanes), 0)], four)
            return fn.loop(whole, end, 1, [fn.add(*sums)], each)

        def here(value: Val, at: Val) -> Val:
            place = fn.splat(fn.convert("trunc", fn.sub(at, first), I32), lanes)
            earlier = fn.icmp("ugt", fn.lane_ids(I32.vec(lanes)), place)
            return fn.or_(fn.icmp("ult", value, mine), fn.and_(fn.icmp("eq", value, mine), earlier))

        total = [const(I32.vec(lanes), 0)]
        total = along(i64(0), first, total, counted(lambda value, _: fn.icmp("ule", value, mine)))
        total = fn.loop(first, behind, 1, total, counted(here))
        total = along(behind, count, total, counted(lambda value, _: fn.icmp("ult", value, mine)))
        fn.store(total[0], fn.gep(ranks, first, I32))
        return []

    def move(at: Val, _: list[Val]) -> list[Val]:
        to = fn.convert("zext", fn.load(I32, fn.gep(ranks, at, I32)), I64)
        fn.store(fn.load(word, fn.gep(words, at, word)), fn.gep(other, to, word))
        return []

    fn.loop(i64(0), count, lanes, [], block)
    fn.loop(i64(0), count, 1, [], move)
    return other


def _by_bytes(fn: Function, word: Ty) -> Val:
    key, (words, other, _, count) = Ty(f"i{word.bits // 2}"), fn.args
    first = fn.load(key, key_at(fn, word, words, i64(0)))

    def differs(at: Val, state: list[Val]) -> list[Val]:
        return [fn.or_(state[0], fn.xor(first, fn.load(key, key_at(fn, word, words, at))))]

    def byte(number: Val, state: list[Val]) -> list[Val]:
        bits = fn.mul(number, i64(8))
        shift = bits if key == I64 else fn.convert("trunc", bits, key)
        needed = fn.icmp("ne", fn.and_(fn.lshr(varied, shift), const(key, _RADIX - 1)), const(key, 0))
        return fn.branch(needed, lambda: _pass(fn, word, state, shift), lambda: state)

    [varied] = fn.loop(i64(1), count, 1, [const(key, 0)], differs)
    return fn.loop(i64(0), i64(key.bits // 8), 1, [words, other], byte)[0]


def key_at(fn: Function, word: Ty, words: Val, at: Val) -> Val:
    """Where the key of a word is."""
    return fn.gep(fn.gep(words, at, word), i64(word.bits // 16))


def _pass(fn: Function, word: Ty, arrays: list[Val], shift: Val) -> list[Val]:
    """Moves the words to the other array, in the order of one byte of their keys. Gives the arrays, the one with the words first."""
    words, other = arrays
    counters, count = fn.args[2:]

    def counter(at: Val) -> Val:
        return fn.gep(counters, at, I32)

    def of(at: Val) -> Val:
        key = fn.load(shift.ty, key_at(fn, word, words, at))
        byte = fn.and_(fn.lshr(key, shift), const(key.ty, _RADIX - 1))
        return counter(byte if byte.ty == I64 else fn.convert("zext", byte, I64))

    def clear(at: Val, _: list[Val]) -> list[Val]:
        fn.store(const(I64, 0), counter(at))
        return []

    def tally(at: Val, _: list[Val]) -> list[Val]:
        where = of(at)
        fn.store(fn.add(fn.load(I32, where), const(I32, 1)), where)
        return []

    def start(at: Val, state: list[Val]) -> list[Val]:
        where = counter(at)
        found = fn.load(I32, where)
        fn.store(state[0], where)
        return [fn.add(state[0], found)]

    def move(at: Val, _: list[Val]) -> list[Val]:
        where = of(at)
        to = fn.load(I32, where)
        fn.store(fn.add(to, const(I32, 1)), where)
        fn.store(fn.load(word, fn.gep(words, at, word)), fn.gep(other, fn.convert("zext", to, I64), word))
        return []

    fn.loop(i64(0), i64(_RADIX), 2, [], clear)
    fn.loop(i64(0), count, 1, [], tally)
    fn.loop(i64(0), i64(_RADIX), 1, [const(I32, 0)], start)
    fn.loop(i64(0), count, 1, [], move)
    return [other, words]
