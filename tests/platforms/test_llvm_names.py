"""LLVM knows every cpu and feature name. A name it does not know only makes it print a warning, so the output of a process is looked at."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sashiko.platforms import host
from sashiko.platforms.catalogue import CATALOGUE

CODE = """
import sys
import llvmlite.binding as llvm
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
for line in sys.stdin:
    triple, cpu, features, width = line.split()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features="" if features == "-" else features)
    vector = f"<{width} x float>"
    text = f"define void @f(ptr %p) {{ %v = load {vector}, ptr %p %w = fadd {vector} %v, %v store {vector} %w, ptr %p ret void }}"
    module = llvm.parse_assembly(text)
    module.triple = triple
    print(sum("add" in line for line in machine.emit_assembly(module).splitlines()))
"""


def ask_llvm(rows: list[tuple[str, str, str, int]]) -> tuple[list[int], str]:
    """Returns how many additions LLVM needs for one vector of each target, and what it prints to stderr."""
    text = "\n".join(f"{triple} {cpu} {features or '-'} {width}" for triple, cpu, features, width in rows)
    done = subprocess.run([sys.executable, "-c", CODE], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()], done.stderr


def test_targets_are_understood_and_one_vector_is_one_register() -> None:
    rows = [(t.triple, t.cpu, t.llvm_features, t.lanes(32)) for t in (*CATALOGUE, host.host())]
    counts, warnings = ask_llvm(rows)
    assert warnings == ""
    assert counts == [1] * len(rows)


@pytest.mark.parametrize(
    ("triple", "cpus"),
    [("x86_64-unknown-linux-gnu", host._X86_CPUS), ("aarch64-unknown-linux-gnu", host._ARM_CPUS)],
    ids=["x86_64", "aarch64"],
)
def test_cpu_names_of_the_host_detection_are_understood(triple: str, cpus: tuple[tuple[str, frozenset[str]], ...]) -> None:
    assert ask_llvm([(triple, cpu, "", 4) for cpu, _ in cpus])[1] == ""


def test_a_misspelt_name_would_be_noticed() -> None:
    assert "+avx99" in ask_llvm([("x86_64-unknown-linux-gnu", "x86-64", "+avx99", 4)])[1]
