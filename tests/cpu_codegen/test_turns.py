"""Parts of straight-line code in turn: each in its own order, none before what it needs, the same results."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from sashiko.cpu_codegen.builder import F32, PTR, VOID, Function, Module, Val, const, i64
from sashiko.cpu_codegen.jit import assembly
from sashiko.cpu_codegen.loops import emit_loop_kernel
from sashiko.cpu_codegen.turns import in_turn
from sashiko.graph.types import f32
from sashiko.platforms.catalogue import X86_64_V3
from sashiko.platforms.host import host
from sashiko.stitch.loops import BodyBuilder, LoopKernel, axis


def test_in_turn() -> None:
    a, b = ["  %a1 = x", "  %a2 = y %a1", "  store %a2"], ["  %b1 = x", "  store %b1"]
    assert in_turn([a, b]) == [a[0], b[0], a[1], b[1], a[2]]
    assert in_turn([a]) == a and in_turn([]) == [] and in_turn([[], b]) == b


def test_what_another_part_makes_is_waited_for() -> None:
    a, b = ["  %a1 = x", "  %a2 = y %a1"], ["  %b1 = x %a2, %given", "  %b2 = x %b1"]
    assert in_turn([a, b]) == [a[0], a[1], b[0], b[1]]
    assert in_turn([b, a]) == [a[0], a[1], b[0], b[1]]


def test_names_are_whole() -> None:
    """%v1 is no part of %v10, nor of %v1.x."""
    a, b = ["  %v10 = x", "  %v1.x = x", "  %v1 = x"], ["  %b = y %v10", "  %c = y %v1"]
    assert in_turn([a, b]) == [a[0], b[0], a[1], a[2], b[1]]


def test_branches_keep_parts_apart() -> None:
    a, b = ["  %a1 = x", "  br label %there", "there:", "  %a2 = x"], ["  %b1 = x", "  %b2 = x"]
    assert in_turn([a, b]) == [*a, *b]


def test_parts_that_cannot_be_ordered() -> None:
    with pytest.raises(AssertionError, match="wait for one another"):
        in_turn([["  %a = x %b"], ["  %b = x %a"]])


def test_code_side_by_side() -> None:
    """Of four parts every load comes before the first product that waits for one; the fifth comes after them."""
    fn = Function(Module(), "several", VOID, [PTR])

    def power(n: int) -> Val:
        x = fn.load(F32.vec(4), fn.gep(fn.args[0], i64(16 * n)))
        for _ in range(n):
            x = fn.mul(x, const(x.ty, 2.0))
        return x

    results = fn.side_by_side([partial(power, n) for n in range(5)])
    lines = [re.sub(r"%\S+ = ", "", line).split()[0] for line in fn._lines]
    assert lines[:10] == ["getelementptr"] * 4 + ["load"] * 4 + ["fmul"] * 2 and lines[-6:] == ["getelementptr", "load", *["fmul"] * 4]
    assert len({value.ref for value in results}) == 5


def products_of(kernel: LoopKernel) -> list[str]:
    """The results and operands of the multiplications in the main loop of a kernel for AVX2."""
    module = Module()
    emit_loop_kernel(module, X86_64_V3, kernel)
    body = re.split(r"\n\w+\.(?:body|exit):\n", module.functions[kernel.name])[1]
    return [line for line in body.splitlines() if "fma" in line]


def chain(steps: int) -> LoopKernel:
    """out = a polynomial of x of so many steps."""
    builder = BodyBuilder()
    x, out = builder.buffer(f32), builder.buffer(f32)
    c = axis("c", 512)
    value = first = builder.load(x, c)
    for _ in range(steps):
        value = builder.op("add", f32, builder.op("exp", f32, value), first)
    builder.store(out, c, value)
    return LoopKernel("chain", builder.finish(), None, 512)


def test_long_chains_of_a_loop_are_side_by_side() -> None:
    """No multiply-add needs the one before it, but where there are too many registers to hold."""

    def waits(lines: list[str]) -> int:
        return sum(before.split(" = ")[0].strip() in re.findall(r"%[\w.]+", line.split(" = ")[1]) for before, line in pairwise(lines))

    assert waits(products_of(chain(1))) == waits(products_of(chain(2))) == 0
    assert waits(products_of(chain(6))) > 10


def tile() -> str:
    """Polynomials of eight vectors, four of which wait in registers for the others."""
    fn = Function(Module(), "tile", VOID, [PTR])
    places = [fn.gep(fn.args[0], i64(32 * n)) for n in range(8)]
    values = [fn.load(F32.vec(8), place) for place in places]

    def polynomial(n: int) -> None:
        total = x = values[n]
        for step in range(10):
            total = fn.fma(total, x, const(x.ty, step + 0.5))
        fn.store(fn.mul(total, x), places[n])

    for first in (0, 4):
        fn.side_by_side([partial(polynomial, n) for n in range(first, first + 4)])
    fn.ret()
    fn.finish()
    return fn.module.text()


def test_chains_stay_side_by_side_in_machine_code() -> None:
    products = [re.findall(r"%ymm\d+", line) for line in assembly(tile(), X86_64_V3).splitlines() if "vfmadd" in line]
    waits = sum(before[-1] in after for before, after in pairwise(products))
    assert len(products) == 8 * 10 and waits < 8


def test_targets_do_not_change_one_another() -> None:
    """How LLVM orders instructions is an option of the whole process, and another one where there are 16 registers."""
    more = replace(X86_64_V3, registers=32)
    usual, own = assembly(tile(), more), assembly(tile(), X86_64_V3)
    assert usual != own and assembly(tile(), more) == usual and assembly(tile(), X86_64_V3) == own



OTHERS = """
import sys
import llvmlite.binding as llvm

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
text = sys.stdin.read()
machine = llvm.Target.from_triple(sys.argv[1]).create_target_machine(cpu="x86-64-v3" if "x86" in sys.argv[1] else "", opt=1)


def emitted() -> str:
    return machine.emit_assembly(llvm.parse_assembly(text))


def products(assembly: str) -> list[str]:
    return [line for line in assembly.splitlines() if "fmadd" in line or "fmla" in line]


untouched = emitted()
from sashiko.cpu_codegen import jit
from sashiko.platforms.catalogue import X86_64_V3

ours = jit.assembly(text, X86_64_V3)
print(emitted() == untouched, products(ours) != products(untouched))
"""


def test_others_that_use_the_same_llvm_keep_its_order() -> None:
    """In a process of its own, where LLVM is used before anything of this package is there."""
    command = [sys.executable, "-c", OTHERS, host().triple]
    done = subprocess.run(command, input=tile(), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"], "the same as before, and not what this package wants"
