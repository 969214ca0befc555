"""The product of a layer is found among the sections, in every precision, and timed without the others."""

from __future__ import annotations

import pytest

from sashiko.cli.bench.sections import OPERATIONS, product


@pytest.mark.parametrize("kind", OPERATIONS)
def test_the_product_of_a_layer(kind: str) -> None:
    section = product(kind, (3, 20, 16))
    assert section.kernel.startswith("gemm_i32" if kind == "int8" else "gemm_f32")
    assert 0 < section.seconds(2) < 1
