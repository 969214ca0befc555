"""The product of a layer is found among the steps, in every precision, and timed without the others."""

from __future__ import annotations

import pytest

from sashiko.cli.bench.product import NARROW, OPERATIONS, product
from sashiko.platforms.catalogue import X86_64_V3
from sashiko.platforms.host import host


@pytest.mark.parametrize("kind", [*OPERATIONS, *(kind + NARROW for kind in OPERATIONS)])
def test_the_product_of_a_layer(kind: str) -> None:
    step = product(kind, (3, 20, 16))
    assert step.kernel.startswith("gemm_i32" if kind.startswith("int8") else "gemm_f32")
    assert 0 < step.seconds(2) < 1


@pytest.mark.skipif(bool(X86_64_V3.why_not_on(host())), reason="this machine lacks AVX2")
def test_the_product_is_made_for_the_target() -> None:
    """Its weights are as small as is fast there."""
    assert product("int8", (3, 32, 64), X86_64_V3).kernel.endswith("avx2maddubs4")
