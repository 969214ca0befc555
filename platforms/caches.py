"""Cache sizes of this machine, from /sys where there is one, else from sysconf, else typical ones."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SYS_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Caches:
    """Sizes in bytes. l1d, l2: of one core. l3: shared, 0 when there is none or it is unknown."""

    l1d: int
    l2: int
    l3: int
    line: int


# Small enough for every machine of the last ten years: blocking for these never thrashes.
TYPICAL = Caches(32 << 10, 256 << 10, 0, 64)


def parse_size(text: str) -> int:
    """Returns the bytes of a size as /sys writes it, such as "48K"; 0 when it is not one."""
    text = text.strip()
    unit = _UNITS.get(text[-1:], 1)
    digits = text[:-1] if text[-1:] in _UNITS else text
    return int(digits) * unit if digits.isdecimal() else 0


def read_caches(folder: Path = SYS_CACHE) -> Caches:
    """Returns the caches that `folder` (index0, index1, ...) describes, filled up from sysconf and from `TYPICAL`."""
    sizes = {1: 0, 2: 0, 3: 0}
    line = 0
    for index in sorted(folder.glob("index*")):
        kind = _text(index / "type")
        level = _text(index / "level")
        if kind in ("Data", "Unified") and level in ("1", "2", "3"):
            sizes[int(level)] = parse_size(_text(index / "size"))
            line = parse_size(_text(index / "coherency_line_size")) or line
    return Caches(
        l1d=sizes[1] or _sysconf("SC_LEVEL1_DCACHE_SIZE") or TYPICAL.l1d,
        l2=sizes[2] or _sysconf("SC_LEVEL2_CACHE_SIZE") or TYPICAL.l2,
        l3=sizes[3] or _sysconf("SC_LEVEL3_CACHE_SIZE") or TYPICAL.l3,
        line=line or _sysconf("SC_LEVEL1_DCACHE_LINESIZE") or TYPICAL.line,
    )


def _text(path: Path) -> str:
    """Returns the stripped content of a small file; empty when it cannot be read, as in a container without /sys."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _sysconf(name: str) -> int:
    """Returns a sysconf value; 0 when it is unknown here."""
    try:
        return max(0, os.sysconf(name))
    except (ValueError, OSError, AttributeError):
        return 0
