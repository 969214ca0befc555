"""The object cache: what is trusted, what is made again, sharing between processes, and its size."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from sashiko.cpu_codegen import cache, jit
from sashiko.platforms.catalogue import CATALOGUE, X86_64_V3, X86_64_V4
from sashiko.platforms.host import host

CODE = "define i64 @f(i64 %a) { %r = add i64 %a, 1\n ret i64 %r }"
OTHER = CODE.replace("1", "2")


pytestmark = pytest.mark.usefixtures("private_cache")


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one text with every real compilation."""
    seen: list[str] = []
    real = jit.compile_object

    def counting(text: str, *rest: object) -> bytes:
        seen.append(text)
        return real(text, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(jit, "compile_object", counting)
    return seen


def entry(text: str = CODE) -> Path:
    return cache.folder() / f"{cache.key(text, host())}.o"


def test_the_second_time_nothing_is_compiled(compilations: list[str]) -> None:
    first = cache.compiled(CODE, host())
    assert cache.compiled(CODE, host()) == first
    assert compilations == [CODE]
    assert jit.load_object(first).symbols == ("f",)


def test_keys_differ_in_everything_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {cache.key(CODE, t) for t in CATALOGUE}
    keys.add(cache.key(OTHER, X86_64_V3))
    keys.add(cache.key(CODE, dataclasses.replace(X86_64_V4, features=X86_64_V4.features - {"avx512dq"})))
    for other in (0, 2):
        monkeypatch.setattr(jit, "OPT", other)
        keys.add(cache.key(CODE, X86_64_V3))
    monkeypatch.undo()
    monkeypatch.setattr(jit, "versions", lambda: "another LLVM")
    keys.add(cache.key(CODE, X86_64_V3))
    monkeypatch.undo()
    monkeypatch.setattr(cache, "__version__", "another version")
    keys.add(cache.key(CODE, X86_64_V3))
    assert len(keys) == len(CATALOGUE) + 6
    monkeypatch.undo()
    assert cache.key(CODE, X86_64_V3) == cache.key(CODE, dataclasses.replace(X86_64_V3, name="another name"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:10],
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data[:200] + bytes([data[200] ^ 128]) + data[201:],
        lambda data: b"X" + data[1:],
        lambda data: b"something else" * 100,
        lambda data: data[57:],
    ],
    ids=["empty", "torn head", "torn", "last byte", "longer", "last bit", "one bit", "magic", "foreign", "bare object"],
)
def test_a_damaged_entry_is_made_again(compilations: list[str], damage: Callable[[bytes], bytes]) -> None:
    good = cache.compiled(CODE, host())
    entry().write_bytes(damage(entry().read_bytes()))
    assert cache.compiled(CODE, host()) == good
    assert len(compilations) == 2
    assert cache.compiled(CODE, host()) == good
    assert len(compilations) == 2


def test_an_entry_under_another_name_is_ignored(compilations: list[str]) -> None:
    cache.compiled(CODE, host())
    expected = cache.compiled(OTHER, host())
    entry(OTHER).write_bytes(entry(CODE).read_bytes())
    assert cache.compiled(OTHER, host()) == expected
    assert compilations == [CODE, OTHER, OTHER]


def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[str]) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    monkeypatch.setenv("SASHIKO_CACHE", str(file))
    with pytest.warns(UserWarning, match=f"SASHIKO_CACHE, {file}: .*(exists|directory)") as found:
        assert cache.compiled(CODE, host()) == cache.compiled(CODE, host()) != cache.compiled(OTHER, host())
    assert len(compilations) == 3 and [each.filename for each in found] == [__file__]
    monkeypatch.setenv("SASHIKO_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # nobody asked for this one
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.compiled(CODE, host())


def test_an_entry_that_cannot_be_replaced_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SASHIKO_CACHE", str(tmp_path / "cache"))
    entry().mkdir(parents=True)
    with pytest.warns(UserWarning, match=f"directory.*{entry()}"):
        cache.compiled(CODE, host())
    assert list(cache.folder().iterdir()) == [entry()]


def test_no_temporary_file_stays() -> None:
    cache.compiled(CODE, host())
    assert [path.name for path in cache.folder().iterdir()] == [entry().name]


def test_the_entries_used_longest_ago_go_first() -> None:
    cache.folder().mkdir(parents=True)
    paths = [cache.folder() / f"{n:040x}.o" for n in range(6)]
    for n, path in enumerate(paths):
        path.write_bytes(bytes(100))
        os.utime(path, (n, n))
    name = f"{0:040x}"
    cache.write(paths[0], name, bytes(23), limit=1 << 20)  # name 00...: this write looks at the folder, and finds nothing to do
    assert all(path.exists() for path in paths)
    os.utime(paths[0], (0, 0))
    assert cache.read(paths[0], name) == bytes(23)  # reading makes it the youngest
    assert cache.evict(cache.folder(), 300) == 300
    assert [path.exists() for path in paths] == [True, False, False, False, True, True]
    cache.write(paths[0], name, bytes(23), limit=150)
    assert [path.exists() for path in paths] == [True, False, False, False, False, False]


def test_eviction_leaves_alone_what_it_cannot_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("kept", "removed"):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (len(name), len(name)))
    remove = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == "kept":
            raise PermissionError
        remove(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    assert cache.evict(tmp_path, 10) == 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "kept", "link"]
    assert cache.evict(tmp_path / "nowhere", 10) == 0


def test_processes_share_the_folder() -> None:
    program = """
from sashiko.cpu_codegen import cache, jit
from sashiko.platforms.host import host
for n in range(20):
    data = cache.compiled(f"define i64 @f(i64 %a) {{ %r = add i64 %a, {n}\\n ret i64 %r }}", host())
    assert jit.load_object(data).symbols == ("f",)
"""
    running = [subprocess.Popen([sys.executable, "-P", "-c", program]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert len(list(cache.folder().iterdir())) == 20
