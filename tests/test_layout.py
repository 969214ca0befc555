"""The house rules that a machine can check: packages, import order, who may know what, and sizes of files and functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Imports go only to the left.
ORDER = (
    *("diagnostics", "platforms", "graph", "rewrite", "quant", "stitch"),
    *("cpu_codegen", "gpu_codegen", "kernels", "runtime", "driver", "cli"),
)
NOT_PACKAGES = {"tests", "benchmarks", "docs", "build", "dist"}
ROOT_FILES = {"__init__.py", "__main__.py"}
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
# Architecture names are known to platforms/ and to kernel files named after an instruction set.
ISA_FILE = re.compile(r"(^|_)(neon|sdot|smmla|i8mm|bfmmla|sve|avx2|avx512|avx512bf16|vnni|amx|x86|arm|aarch64)(_|$)")


@dataclass(frozen=True)
class Import:
    """One imported module, absolute as `sashiko.folder.module`, or the plain name of a foreign one."""

    module: str
    line: int


def folders() -> list[str]:
    """Top-level folders that hold Python and are neither hidden nor outside the package."""
    found = (p for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".") and p.name not in NOT_PACKAGES)
    return sorted(p.name for p in found if any(p.rglob("*.py")))


def sources() -> list[Path]:
    """Every Python file of the package."""
    inside = [path for folder in folders() for path in (ROOT / folder).rglob("*.py")]
    return sorted(inside + [ROOT / name for name in ROOT_FILES])


def others() -> list[Path]:
    """Every Python file of the tests and benchmarks."""
    return sorted(path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of `tree`."""
    return tuple(ast.walk(tree(path)))


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[Import]:
    """Every import of a file, those inside functions and under TYPE_CHECKING too; relative ones made absolute."""
    package = ["sashiko", *path.relative_to(ROOT).parts[:-1]]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            # `from . import name` and `from .. import folder` import the name as a module, perhaps.
            yield from (Import(f"{module}.{alias.name}", node.lineno) for alias in node.names)


def declared_packages() -> list[str]:
    """The packages of pyproject.toml; read as text, since Python 3.10 has no TOML parser."""
    block = re.search(r"^packages = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert block is not None
    return re.findall(r'"([^"]+)"', block.group(1))


def test_declared_packages_are_those_of_the_tree() -> None:
    tops = (ROOT / folder for folder in folders())
    inner = (p for top in tops for p in [top, *top.rglob("*")] if p.is_dir() and p.name != "__pycache__" and any(p.glob("*.py")))
    expected = {"sashiko"} | {".".join(["sashiko", *p.relative_to(ROOT).parts]) for p in inner}
    declared = declared_packages()
    assert len(declared) == len(set(declared))
    assert set(declared) == expected


def test_every_package_has_an_init_file() -> None:
    lacking = [name for name in declared_packages() if not (ROOT.joinpath(*name.split(".")[1:]) / "__init__.py").is_file()]
    assert lacking == []


def test_folders_are_the_known_ones_and_declared_in_order() -> None:
    assert set(folders()) <= set(ORDER)
    tops = [name.split(".")[1] for name in declared_packages() if name != "sashiko"]
    assert tops == sorted(tops, key=ORDER.index)


def test_no_stray_python_at_the_root() -> None:
    assert {p.name for p in ROOT.glob("*.py")} == ROOT_FILES


def test_imports_go_only_to_the_left() -> None:
    wrong = []
    for path in sources():
        parts = path.relative_to(ROOT).parts
        if len(parts) == 1:
            continue
        mine = ORDER.index(parts[0])
        for item in imports(path):
            names = item.module.split(".")
            if names[0] != "sashiko":
                continue
            # `from .. import __version__` of the root package is allowed: it holds nothing else eagerly.
            if names[1] not in ORDER:
                if names[1:] != ["__version__"] and parts[0] != "cli":
                    wrong.append(f"{place(path)}:{item.line} imports {item.module}")
            elif ORDER.index(names[1]) > mine:
                wrong.append(f"{place(path)}:{item.line} imports {item.module} from the right")
    assert wrong == []


def test_relative_imports_inside_and_absolute_ones_outside() -> None:
    inside = [
        f"{place(path)}:{node.lineno}"
        for path in sources()
        for node in nodes(path)
        if (isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "sashiko")
        or (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "sashiko" for alias in node.names))
    ]
    assert inside == [], "the package imports itself by relative imports"
    outside = [
        f"{place(path)}:{node.lineno}"
        for path in others()
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert outside == [], "tests and benchmarks are no packages: absolute imports only"


def test_llvmlite_lives_in_cpu_codegen_only() -> None:
    wrong = [
        f"{place(path)}:{item.line}"
        for path in sources()
        for item in imports(path)
        if item.module.split(".")[0] == "llvmlite" and path.relative_to(ROOT).parts[0] != "cpu_codegen"
    ]
    assert wrong == []


def test_environment_variables_are_read_in_one_file() -> None:
    wrong = [
        f"{place(path)}:{node.lineno}"
        for path in sources()
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and place(path) != "diagnostics/env.py"
    ]
    assert wrong == []


def names_machine(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("arch", "triple")


def knows_architecture(node: ast.AST) -> bool:
    """Whether code tests `.arch`, `.triple` or the machine's name for a certain value. Comparing two machines is fine."""
    if isinstance(node, ast.Compare):
        looked_at = [names_machine(part) for part in (node.left, *node.comparators)]
        return any(looked_at) and not all(looked_at)
    if isinstance(node, ast.Match):
        return names_machine(node.subject)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr == "machine" or (node.func.attr in ("startswith", "endswith") and names_machine(node.func.value))
    return False


def test_architectures_are_known_to_platforms_and_isa_files_only() -> None:
    wrong = [
        f"{place(path)}:{getattr(node, 'lineno', 0)}"
        for path in sources()
        if path.relative_to(ROOT).parts[0] != "platforms" and not (path.parent.name == "kernels" and ISA_FILE.search(path.stem))
        for node in nodes(path)
        if knows_architecture(node)
    ]
    assert wrong == [], "ask target.has(...) instead"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("target.arch == 'x86_64'", True),
        ("target.triple.startswith('x86')", True),
        ("'x86' in target.triple", True),
        ("platform.machine()", True),
        ("target.has('avx2')", False),
        ("built_for.arch != machine.arch", False),
        ("name.startswith('x86')", False),
    ],
)
def test_the_architecture_check_itself(code: str, expected: bool) -> None:
    assert any(knows_architecture(node) for node in ast.walk(ast.parse(code))) == expected


def test_files_are_short() -> None:
    lengths = {place(path): len(path.read_text().splitlines()) for path in sources() + others()}
    assert {name: count for name, count in lengths.items() if count > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    long = {
        f"{place(path)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in sources() + others()
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None
    }
    assert {name: count for name, count in long.items() if count > MAX_FUNCTION_LINES} == {}


def test_nothing_is_left_unfinished() -> None:
    markers = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
    found = [
        f"{place(path)}:{number}"
        for path in sources() + others()
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if markers.search(line)
    ]
    assert found == []
