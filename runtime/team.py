"""How the threads of a run share its steps.

One OpenMP region spans the run: its first thread leads, the others follow. A step is as many shares as the run has threads, each a
range of rows in whole grains; which share is which depends on the step alone, so the same thread meets the same rows again in its
cache. The leader says which step is on, and everybody claims shares, the own one first. A thread that is not there, because the
machine runs something else on its core, takes none: the leader does its shares and waits only for shares that somebody has begun. So
a busy core costs what it would have helped, and a caller inside a parallel region, whose team is one thread, gets the right result.
Runs that are under way at once divide the threads: beside many callers each uses its own thread only.

A share is claimed by raising its word from the number of the step before to that of the step that is on, both counted from 1.
Every share of every step is claimed once, so who comes too late with an old number finds all words raised and can do no harm.

The state of a run, in 8-byte words on the leader's stack; words that different threads write are on different lines:

    0 number of the step that is on (-1: go home)    1 its address    2 frame    3 result    4 threads    5 shares so far
    8 shares done    16... the word of each share
"""

from __future__ import annotations

from ..cpu_codegen.builder import I32, I64, PTR, VOID, Function, Module, Ty, Val, const, i64
from ..cpu_codegen.intrinsics import pause

EXTERNALS = ("GOMP_parallel", "omp_get_thread_num", "sched_yield")
ON, STEP, FRAME, RESULT, THREADS, TOTAL, DONE, SHARES = 0, 1, 2, 3, 4, 5, 8, 16
MOST = 512  # threads of a run, which the state has words for
BYTES = 8 * (SHARES + MOST)
_HOME = -1
# Looks at a word before the core is offered to others, some 50 to 100 us, and how often it is offered before a follower goes home:
# after some 10 ms where nobody else wants the core, and after a few turns of the others where they do.
_PATIENCE, _OFFERS = 4096, 1 << 15
_MANY_STEPS = 8  # of a run that is likely to be long; one of few steps that is long makes no way


def word(f: Function, base: Val, number: int) -> Val:
    """Address of word `number` from `base`."""
    return f.gep(base, i64(number), I64)


def emit_begin(f: Function, state: Val, frame: Val, most: Val, callers: Val) -> Val:
    """Writes the state of a run that begins and counts it as running; returns its number of threads, a fair part of `most` and no more
    than MOST."""
    running = f.emit(I64, f"atomicrmw add ptr {callers.ref}, i64 1 monotonic, align 8")
    waiting = f.emit(I64, f"load atomic i64, ptr {word(f, callers, 1).ref} monotonic, align 8")
    others = f.add(running, waiting)
    threads = f.smax(f.smin(f.udiv(most, f.add(others, i64(1))), i64(MOST)), i64(1))
    for number in (ON, RESULT, TOTAL, DONE):
        f.store(i64(0), word(f, state, number))
    f.store(frame, word(f, state, FRAME), 8)
    f.store(threads, word(f, state, THREADS))

    def share(index: Val, _: list[Val]) -> list[Val]:
        f.store(i64(0), f.gep(word(f, state, SHARES), index, I64))
        return []

    f.loop(i64(0), threads, 1, [], share)
    return threads


def emit_make_way(f: Function, callers: Val, steps: Val) -> None:
    """Before a run of so many steps, where callers wait for a turn: lets those go first who have been woken and put on this core. Among
    them may be who gets the next turn, or Python's lock. Behind a run of milliseconds it would keep the others waiting and leave another
    core idle, since the system seldom moves a thread within such a time. The second offer is for whom the first ones wake. With 64 callers
    of a run of 1.7 ms on two cores this gave back 11 of the 15 % that were lost; of one of 7 us, with few steps, it took 15 % (Zen 5,
    Linux 6.18)."""

    def offer() -> list[Val]:
        for _ in range(2):
            f.call("sched_yield", I32, [])
        return []

    waiting = f.emit(I64, f"load atomic i64, ptr {word(f, callers, 1).ref} monotonic, align 8")
    f.branch(f.and_(f.icmp("ne", waiting, i64(0)), f.icmp("sge", steps, i64(_MANY_STEPS))), offer)


def emit_end(f: Function, callers: Val) -> None:
    """The run is over."""
    f.emit(I64, f"atomicrmw sub ptr {callers.ref}, i64 1 monotonic, align 8")


def emit_dismiss(f: Function, state: Val) -> None:
    """Sends the followers home."""
    _publish(f, state, i64(_HOME))


def emit_lead(f: Function, step: Val, state: Val, arch: str) -> None:
    """A step with the team: returns when all of it is done."""
    number = f.add(f.load(I64, word(f, state, ON)), i64(1))
    threads = f.load(I64, word(f, state, THREADS))
    f.store(step, word(f, state, STEP), 8)
    _publish(f, state, number)
    _shares(f, state, number, threads, i64(0))
    total = f.add(f.load(I64, word(f, state, TOTAL)), threads)
    f.store(total, word(f, state, TOTAL))
    looks = f.alloca(8, 8)
    f.store(i64(0), looks)

    def all_done() -> Val:
        _wait(f, looks, arch)
        return f.icmp("eq", _acquired(f, state, DONE), total)

    def wait() -> list[Val]:
        f.until(all_done)
        return []

    f.branch(f.icmp("ne", _acquired(f, state, DONE), total), wait)


def emit_follow(module: Module, arch: str) -> None:
    """Adds follow(state, thread), which takes part until the run is over, and what it is made of."""
    _emit_share(module)
    f = Function(module, "follow", VOID, [PTR, I64], internal=True)
    state, me = f.args
    threads = f.load(I64, word(f, state, THREADS))
    seen, looks = f.alloca(8, 8), f.alloca(8, 8)
    f.store(i64(0), seen)
    f.store(i64(0), looks)

    def look() -> Val:
        number = _acquired(f, state, ON)

        def work() -> list[Val]:
            f.store(number, seen)
            f.store(i64(0), looks)
            _shares(f, state, number, threads, me)
            return []

        def wait() -> list[Val]:
            _wait(f, looks, arch)
            return []

        f.branch(f.icmp("sgt", number, f.load(I64, seen)), work, wait)
        tired = f.icmp("sgt", f.load(I64, looks), i64(_PATIENCE + _OFFERS))
        return f.or_(tired, f.icmp("eq", number, i64(_HOME)))

    f.until(look)
    f.ret()
    f.finish()


def _emit_share(module: Module) -> None:
    """run_share(step, share, threads): the rows of one share, shares differing by one grain at most; nothing beyond the step's own
    number of threads."""
    f = Function(module, "run_share", VOID, [PTR, I64, I64], internal=True)
    step, share, threads = f.args
    rows, grain, wanted = (f.load(I64, word(f, step, n)) for n in (2, 3, 4))
    parts = f.smin(wanted, threads)
    grains = f.udiv(f.sub(f.add(rows, grain), i64(1)), grain)

    def run() -> list[Val]:
        begin = f.mul(f.udiv(f.mul(grains, share), parts), grain)
        end = f.mul(f.udiv(f.mul(grains, f.add(share, i64(1))), parts), grain)
        f.call("step_range", VOID, [step, begin, f.smin(end, rows)])
        return []

    f.branch(f.icmp("slt", share, parts), run)
    f.ret()
    f.finish()


def _shares(f: Function, state: Val, number: Val, threads: Val, first: Val) -> None:
    """Claims shares of step `number`, beginning with share `first`, and runs those it gets."""

    def one(index: Val, _: list[Val]) -> list[Val]:
        share = f.urem(f.add(index, first), threads)
        place = f.gep(word(f, state, SHARES), share, I64)

        def run() -> list[Val]:
            f.call("run_share", VOID, [f.load(PTR, word(f, state, STEP), 8), share, threads])
            f.emit(I64, f"atomicrmw add ptr {word(f, state, DONE).ref}, i64 1 acq_rel, align 8")
            return []

        f.branch(_raised(f, place, number), run)
        return []

    f.loop(i64(0), threads, 1, [], one)


def _raised(f: Function, place: Val, number: Val) -> Val:
    """Whether this thread raised the word from `number` - 1 to `number`."""
    before = f.sub(number, i64(1))

    def claim() -> list[Val]:
        pair = f.emit(I64, f"cmpxchg ptr {place.ref}, i64 {before.ref}, i64 {number.ref} acq_rel monotonic, align 8")
        return [f.emit(Ty("i1"), f"extractvalue {{ i64, i1 }} {pair.ref}, 1")]

    # Most words that are not ours are seen to be taken without owning their line.
    free = f.icmp("eq", f.emit(I64, f"load atomic i64, ptr {place.ref} monotonic, align 8"), before)
    return f.branch(free, claim, lambda: [const(free.ty, False)])[0]


def _publish(f: Function, state: Val, number: Val) -> None:
    f.effect(f"store atomic i64 {number.ref}, ptr {word(f, state, ON).ref} release, align 8")


def _acquired(f: Function, state: Val, number: int) -> Val:
    return f.emit(I64, f"load atomic i64, ptr {word(f, state, number).ref} acquire, align 8")


def _wait(f: Function, looks: Val, arch: str) -> None:
    """A moment's rest; offers the core to others when it has rested for long."""
    count = f.add(f.load(I64, looks), i64(1))
    f.store(count, looks)

    def offer() -> list[Val]:
        f.call("sched_yield", I32, [])
        return []

    def rest() -> list[Val]:
        pause(f, arch)
        return []

    f.branch(f.icmp("sgt", count, i64(_PATIENCE)), offer, rest)
