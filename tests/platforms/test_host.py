"""Host detection from made-up machines, and once from the real one."""

from __future__ import annotations

import builtins
import errno
import os
import sys
from pathlib import Path

import pytest

from sashiko.diagnostics.errors import InputError
from sashiko.platforms import amx, host
from sashiko.platforms.amx import AmxPermission
from sashiko.platforms.caches import TYPICAL, Caches, parse_size, read_caches
from sashiko.platforms.catalogue import CATALOGUE, NEOVERSE_N1, NEOVERSE_N2, X86_64_AMX, X86_64_V3, X86_64_V4, X86_64_VNNI
from sashiko.platforms.target import Target

CACHES = Caches(48 << 10, 2 << 20, 0, 64)
YES = AmxPermission(True, "")
NO = AmxPermission(False, "the kernel refused")
V2 = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
V3 = f"{V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
VNNI = f"{V4} avx512_vnni adx aes clflushopt pclmulqdq rdseed 3dnowprefetch"
SPR = (
    f"{VNNI} avx512vbmi avx512_vbmi2 avx512_bitalg avx512_vpopcntdq avx512ifma avx512_bf16 avx512_fp16 avx_vnni "
    "gfni vaes vpclmulqdq sha_ni movdiri movdir64b amx_tile amx_int8 amx_bf16"
)


def never() -> AmxPermission:
    raise AssertionError("asked for AMX without reason")


def x86(flags: str, answer: AmxPermission | None = None) -> host.HostReport:
    return host.x86_report(frozenset(flags.split()), CACHES, never if answer is None else lambda: answer)


@pytest.mark.parametrize(
    ("flags", "like"),
    [(V3, X86_64_V3), (V4, X86_64_V4), (VNNI, X86_64_VNNI), (SPR, X86_64_AMX)],
    ids=["v3", "v4", "vnni", "amx"],
)
def test_machines_of_the_catalogue_are_recognized(flags: str, like: Target) -> None:
    report = x86(flags, YES if "amx" in flags else None)
    found = report.target
    assert (found.features, found.cpu, found.vector_bits, found.registers) == (like.features, like.cpu, like.vector_bits, like.registers)
    assert (found.l1d, found.l2, found.l3) == (48 << 10, 2 << 20, 0)
    assert report.removed == ()


def test_an_old_machine_still_gets_a_target() -> None:
    found = x86(V2).target
    assert (found.cpu, found.vector_bits, found.features) == ("x86-64-v2", 128, frozenset())


def test_a_refusal_removes_amx_with_the_reason_and_the_cpu_that_implies_it() -> None:
    report = x86(SPR, NO)
    assert report.removed == (("amx_bf16", NO.reason), ("amx_int8", NO.reason), ("amx_tile", NO.reason))
    assert report.target.features == X86_64_AMX.features - {"amx_tile", "amx_int8", "amx_bf16"}
    assert report.target.cpu == "cascadelake"


def test_hidden_base_features_remove_what_needs_them() -> None:
    report = x86(VNNI.replace("avx512bw", ""))
    assert dict(report.removed).keys() == {"avx512_vnni"}
    assert (report.target.vector_bits, report.target.cpu) == (256, "x86-64-v3")


def test_cpu_names_never_imply_hidden_flags() -> None:
    assert x86(SPR.replace("gfni", ""), YES).target.cpu == "cascadelake"
    assert x86(VNNI.replace("adx", "")).target.cpu == "x86-64-v4"
    assert x86(V3.replace("movbe", "")).target.cpu == "x86-64-v2"


def test_flags_without_underscores_mean_the_same() -> None:
    assert x86(VNNI.replace("_", "")).target == x86(VNNI).target


@pytest.mark.parametrize("like", [NEOVERSE_N1, NEOVERSE_N2], ids=lambda t: t.name)
def test_arm_machines_of_the_catalogue_are_recognized(like: Target) -> None:
    word1 = 1 << 1 | 1 << 10 | 1 << 20 | (1 << 22 if like.has("sve") else 0)
    word2 = (1 << 1 | 1 << 13 | 1 << 14) if like.has("sve2") else 0
    found = host.arm_report(word1, word2, CACHES).target
    assert (found.features, found.cpu, found.vector_bits) == (like.features, like.cpu, 128)


def test_arm_without_any_reported_bit_has_neon() -> None:
    found = host.arm_report(0, 0, CACHES).target
    assert (found.features, found.cpu) == (frozenset({"neon"}), "generic")


def test_this_machine() -> None:
    found = host.host()
    assert found is host.host()
    assert found.name == "host" and found.l1d >= 8 << 10 and found.l2 >= found.l1d
    assert found.cache_line in (32, 64, 128, 256)


def test_missing_proc_falls_back_to_py_cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        @staticmethod
        def get_cpu_info() -> dict[str, list[str]]:
            return {"flags": ["avx2", "fma"]}

    monkeypatch.setitem(sys.modules, "cpuinfo", Fake)
    assert host._x86_flags(tmp_path / "absent") == {"avx2", "fma"}


def test_proc_is_read_without_py_cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def guarded(name: str, *rest: object) -> object:
        assert name != "cpuinfo"
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", guarded)
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: avx2 fma\n\nprocessor\t: 1\nflags\t\t: sse2\n")
    assert host._x86_flags(file) == {"avx2", "fma"}


def test_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.resolve(None) is host.host() is host.resolve("host")
    assert host.resolve("neoverse_n2") is NEOVERSE_N2 is host.resolve(NEOVERSE_N2)
    assert host.default_target() is host.host()
    monkeypatch.setenv("SASHIKO_TARGET", "x86_64_v3")
    assert host.default_target() is X86_64_V3 is host.resolve(None)
    assert host.resolve("host") is host.host()
    monkeypatch.setenv("SASHIKO_TARGET", "z80")
    with pytest.raises(InputError, match=r"z80(.|\n)*SASHIKO_TARGET"):
        host.resolve(None)


def test_amx_answer_has_a_reason_exactly_when_refused() -> None:
    answer = amx.request()
    assert answer.granted == (answer.reason == "")
    assert answer is amx.request()


def test_amx_is_not_asked_for_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    answer = amx.request.__wrapped__()
    assert not answer.granted and "aarch64" in answer.reason


def test_a_refusal_says_what_stands_in_the_way() -> None:
    assert "sigaltstack" in amx.refusal(errno.ENOSPC) and "5.16" in amx.refusal(errno.EINVAL)
    assert amx.refusal(errno.EPERM).endswith(os.strerror(errno.EPERM))


@pytest.mark.isa("amx_tile")
def test_where_amx_counts_the_kernel_has_granted_it() -> None:
    assert amx.request().granted


def test_catalogue_caches_grow_outwards() -> None:
    assert all(t.l1d < t.l2 < t.l3 for t in CATALOGUE)


@pytest.mark.parametrize(("text", "size"), [("48K", 48 << 10), ("2M", 2 << 20), ("64", 64), ("", 0), ("none", 0), ("1G\n", 1 << 30)])
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_read_caches(tmp_path: Path) -> None:
    rows = [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2048K"), ("3", "Unified", "105M")]
    for number, (level, kind, size) in enumerate(rows):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size), ("coherency_line_size", "128")):
            (folder / name).write_text(text + "\n")
    assert read_caches(tmp_path) == Caches(48 << 10, 2 << 20, 105 << 20, 128)


def test_read_caches_without_sys_is_usable(tmp_path: Path) -> None:
    found = read_caches(tmp_path)
    assert found.l1d > 0 and found.l2 > 0 and found.line > 0 and found.l3 >= TYPICAL.l3


def test_cpu_model(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("model name\t: Some CPU: fast\nmodel name\t: Other\n")
    assert host.cpu_model(file) == "Some CPU: fast"
    assert host.cpu_model(tmp_path / "absent") != ""


def test_cpus_without_a_name_have_numbers(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    core = "processor\t: {}\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: {}\nCPU revision\t: 1\n\n"
    file.write_text(core.format(0, "0xd0c") + core.format(1, "0xd49"))
    assert host.cpu_model(file) == "implementer 0x41, part 0xd0c, variant 0x3, revision 1"
