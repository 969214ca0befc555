"""The one native function that runs any segment: `run_plan(frame)`.

It is the same code for every model; what differs is the frame, a block of 8-byte words that `frames.py` writes:

    header    12 words: status (i32), patches, patch count, externals, steps, first step, end step, watch, most threads,
              the callers that run and those that wait (address of two words), moves, move count
    patch     3 words: address of a slot, number of an external pointer, bytes to add
    step      6 words: kernel, its slots, rows of its domain, grain, threads, the turn that it ends or 0
    turn      5 words: turns so far, turns in all, the step that they begin with, moves, move count
    move      4 words: address of a slot, what is in it in the first turn and in the second, what is added in each after that
    watch     2 words: rows, row count
    row       6 words: tensor handle, version, data pointer, address of a sample, words of each of its 3 pieces or 0, byte of the last

First the watched weights are compared: run_plan returns -1 when one has changed. Then the patches put the call's own pointers into
slots and moves, and the moves those of the first turn into their slots. Then the steps run; the first one that sets the status word stops
the run, and its number plus 1 is returned. 0 is success. Repeated steps take turns: after the last one all slots move on and the first
one follows, unless the run began behind it.

Threads are those of torch's OpenMP runtime; `team.py` says how they share the steps of a run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

from ..cpu_codegen import cache, jit, symbols
from ..cpu_codegen.builder import I32, I64, PTR, VOID, Function, Module, Val, const, i64
from ..diagnostics.errors import InputError
from ..platforms.target import Target
from . import team
from .team import word as _word

SYMBOL = "run_plan"
HEADER, PATCH, STEP, TURN, MOVE, ROW = 12, 3, 6, 5, 4, 6
CHANGED = -1
# TensorBase::_version() of libtorch_cpu; a member function without arguments is called like a C function of `this`.
_VERSION = "_ZNK2at10TensorBase8_versionEv"
_DATA_PTR = "aoti_torch_get_data_ptr"
_WATCH = (_VERSION, _DATA_PTR)


@lru_cache(maxsize=2)
def ir(arch: str) -> str:
    """LLVM IR text of the runner, the same for every target of an architecture."""
    module = Module()
    _emit_range(module)
    team.emit_follow(module, arch)
    _emit_steps(module, arch)
    _emit_member(module)
    _emit_row_changed(module)
    _emit_run(module)
    return module.text()


def compiled(target: Target) -> bytes:
    """The object of the runner, from the object cache where it is there."""
    return cache.compiled(ir(target.arch), target)


class Absent:
    """Stands for the runner where the code is for another machine: it can be inspected and saved, and a call is an InputError."""

    threads = watch = False

    def __init__(self, target: Target, reason: str) -> None:
        self._what = f"this model is compiled for {target.name}: {reason}"

    def run(self, frame: int) -> int:
        raise InputError(self._what, hint="save() it, and load it on such a machine; or compile it without target=")


class Runner:
    """The runner loaded into this process. `run(frame address)` lets other Python threads go on meanwhile."""

    def __init__(self, data: bytes) -> None:
        externals = {name: symbols.address(name) or 0 for name in (*team.EXTERNALS, *_WATCH)}
        self.threads = all(externals[name] for name in team.EXTERNALS)
        self.watch = all(externals[name] for name in _WATCH)
        # Frames ask for threads and watching only where these are. What makes way calls the stand-in where there is no sched_yield: it only
        # looks at a number.
        stand_in = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value or 0
        self._library = jit.load_object(data, {name: address or stand_in for name, address in externals.items()})
        self.run: Callable[[int], int] = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(self._library.address(SYMBOL))


def _int(f: Function, base: Val, number: int) -> Val:
    return f.load(I64, _word(f, base, number))


def _pointer(f: Function, base: Val, number: int) -> Val:
    return f.load(PTR, _word(f, base, number), 8)


def _row(f: Function, table: Val, index: Val, words: int) -> Val:
    return f.gep(table, index, scale=8 * words)


def _emit_range(module: Module) -> None:
    """step_range(step, begin, end): the kernel of a step on rows [begin, end), if there are any."""
    f = Function(module, "step_range", VOID, [PTR, I64, I64], internal=True)
    step, begin, end = f.args

    def call() -> list[Val]:
        f.call_pointer(_pointer(f, step, 0), VOID, [_pointer(f, step, 1), begin, end])
        return []

    f.branch(f.icmp("slt", begin, end), call)
    f.ret()
    f.finish()


def _emit_member(module: Module) -> None:
    """plan_member(state): what each thread of a run does; the first one leads."""
    f = Function(module, "plan_member", VOID, [PTR], internal=True)
    (state,) = f.args

    def lead() -> list[Val]:
        f.store(f.call("run_steps", I64, [_pointer(f, state, team.FRAME), state]), _word(f, state, team.RESULT))
        team.emit_dismiss(f, state)
        return []

    def follow() -> list[Val]:
        f.call("follow", VOID, [state, me])
        return []

    me = f.convert("sext", f.call("omp_get_thread_num", I32, []), I64)
    f.branch(f.icmp("eq", me, i64(0)), lead, follow)
    f.ret()
    f.finish()


def _emit_row_changed(module: Module) -> None:
    """row_changed(row) -> i64: 0 when the tensor's storage, version and sample are those of the row. The tensor must have a version."""
    f = Function(module, "row_changed", I64, [PTR], internal=True)
    (row,) = f.args
    handle, found = _pointer(f, row, 0), f.alloca(8, 8)
    f.store(i64(0), found)
    failed = f.icmp("ne", f.call(_DATA_PTR, I32, [handle, found]), const(I32, 0))
    moved = f.icmp("ne", f.load(I64, found), _int(f, row, 2))

    def compared() -> list[Val]:
        version = f.convert("zext", f.icmp("ne", f.call(_VERSION, I64, [handle]), _int(f, row, 1)), I64)
        return [f.or_(version, _sample_changed(f, row))]

    (result,) = f.branch(f.or_(failed, moved), lambda: [i64(1)], compared)
    f.ret(result)
    f.finish()


def _sample_changed(f: Function, row: Val) -> Val:
    """Bits that differ between the pieces of a sample and the data they are from."""
    data, sample, words, last = _pointer(f, row, 2), _pointer(f, row, 3), _int(f, row, 4), _int(f, row, 5)
    starts = (i64(0), f.lshr(last, i64(1)), last)

    def compare(number: Val, before: list[Val]) -> list[Val]:
        (changed,) = before
        for piece, start in enumerate(starts):
            now = f.load(I64, f.gep(f.gep(data, start, scale=1), number, I64), 1)
            then = f.load(I64, f.gep(sample, f.add(f.mul(words, i64(piece)), number), I64))
            changed = f.or_(changed, f.xor(now, then))
        return [changed]

    return f.loop(i64(0), words, 1, [i64(0)], compare)[0]


def _emit_run(module: Module) -> None:
    f = Function(module, SYMBOL, I64, [PTR])
    (frame,) = f.args
    watch = _pointer(f, frame, 7)
    rows = _pointer(f, watch, 0)

    def check(number: Val, before: list[Val]) -> list[Val]:
        return [f.or_(before[0], f.call("row_changed", I64, [_row(f, rows, number, ROW)]))]

    (changed,) = f.loop(i64(0), _int(f, watch, 1), 1, [i64(0)], check)
    most = _int(f, frame, 8)
    state = f.alloca(team.BYTES)

    def alone() -> list[Val]:
        return [f.call("run_steps", I64, [frame, state])]

    def several() -> list[Val]:
        threads = team.emit_begin(f, state, frame, most, _pointer(f, frame, 9))

        def together() -> list[Val]:
            f.call("GOMP_parallel", VOID, [Val(PTR, "@plan_member"), state, f.convert("trunc", threads, I32), const(I32, 0)])
            return [_int(f, state, team.RESULT)]

        (result,) = f.branch(f.icmp("sgt", threads, i64(1)), together, alone)
        team.emit_end(f, _pointer(f, frame, 9))
        return [result]

    def unchanged() -> list[Val]:
        return f.branch(f.icmp("sgt", most, i64(1)), several, alone)

    (result,) = f.branch(f.icmp("ne", changed, i64(0)), lambda: [i64(CHANGED)], unchanged)
    f.ret(result)
    f.finish()


def _emit_steps(module: Module, arch: str) -> None:
    """run_steps(frame, state) -> i64: patches, then steps while the status word is 0; the failed one's number plus 1, or 0."""
    f = Function(module, "run_steps", I64, [PTR, PTR], internal=True)
    frame, state = f.args
    patches, externals, steps = _pointer(f, frame, 1), _pointer(f, frame, 3), _pointer(f, frame, 4)

    def patch(number: Val, _: list[Val]) -> list[Val]:
        row = _row(f, patches, number, PATCH)
        pointer = f.load(I64, f.gep(externals, _int(f, row, 1), I64))
        f.store(f.add(pointer, _int(f, row, 2)), _pointer(f, row, 0))
        return []

    f.loop(i64(0), _int(f, frame, 2), 1, [], patch)
    _moved(f, _pointer(f, frame, 10), _int(f, frame, 11), lambda row: _int(f, row, 1))
    f.store(const(I32, 0), frame, 4)
    at, failed = f.alloca(8, 8), f.alloca(8, 8)
    first, end = _int(f, frame, 5), _int(f, frame, 6)
    f.store(first, at)
    f.store(i64(0), failed)

    def step() -> Val:
        number = f.load(I64, at)
        row = _row(f, steps, number, STEP)
        _step(f, row, state, arch)
        bad = f.icmp("ne", f.load(I32, frame, 4), const(I32, 0))
        f.store(f.select(bad, f.add(number, i64(1)), i64(0)), failed)
        following = _following(f, number, _pointer(f, row, 5), first)
        f.store(following, at)
        return f.or_(bad, f.icmp("sge", following, end))

    def run() -> list[Val]:
        team.emit_make_way(f, _pointer(f, frame, 9), f.sub(end, first))
        f.until(step)
        return []

    f.branch(f.icmp("slt", first, end), run)
    f.ret(f.load(I64, failed))
    f.finish()


def _moved(f: Function, moves: Val, count: Val, content: Callable[[Val], Val]) -> None:
    """Fills the slots of moves."""

    def move(number: Val, _: list[Val]) -> list[Val]:
        row = _row(f, moves, number, MOVE)
        f.store(content(row), _pointer(f, row, 0))
        return []

    f.loop(i64(0), count, 1, [], move)


def _following(f: Function, number: Val, turn: Val, start: Val) -> Val:
    """The step after step `number`: the first one of a turn that is not the last. start: the first step of the run."""

    def ends() -> list[Val]:
        done, first = f.add(_int(f, turn, 0), i64(1)), _int(f, turn, 2)

        def again() -> list[Val]:
            later = f.sub(done, i64(1))
            _moved(f, _pointer(f, turn, 3), _int(f, turn, 4), lambda row: f.add(_int(f, row, 2), f.mul(later, _int(f, row, 3))))
            return [first]

        more = f.and_(f.icmp("slt", done, _int(f, turn, 1)), f.icmp("sge", first, start))
        return f.branch(more, again, lambda: [f.add(number, i64(1))])

    return f.branch(f.icmp("ne", turn, Val(PTR, "null")), ends, lambda: [f.add(number, i64(1))])[0]


def _step(f: Function, step: Val, state: Val, arch: str) -> None:
    def split() -> list[Val]:
        team.emit_lead(f, step, state, arch)
        return []

    def serial() -> list[Val]:
        f.call("step_range", VOID, [step, i64(0), _int(f, step, 2)])
        return []

    f.branch(f.icmp("sgt", _int(f, step, 4), i64(1)), split, serial)
