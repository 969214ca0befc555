"""Machines that the catalogue does not have, for tests of what is chosen for them."""

from __future__ import annotations

from dataclasses import replace

from sashiko.platforms.catalogue import X86_64_AMX, X86_64_VNNI

ZEN4 = replace(X86_64_VNNI, name="zen4", features=X86_64_VNNI.features | {"avx512_bf16"})
# Hypervisors hide tiles, and so do kernels before Linux 5.16.
HIDDEN = replace(X86_64_AMX, name="hidden", features=frozenset(name for name in X86_64_AMX.features if not name.startswith("amx")))
