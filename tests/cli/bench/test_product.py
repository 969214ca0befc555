"""The product of a layer is found among the steps, in every precision, and timed without the others."""

from __future__ import annotations

import pytest

from sashiko.cli.bench.product import OPERATIONS, product


@pytest.mark.parametrize("kind", OPERATIONS)
def test_the_product_of_a_layer(kind: str) -> None:
    step = product(kind, (3, 20, 16))
    assert step.kernel.startswith("gemm_i32" if kind == "int8" else "gemm_f32")
    assert 0 < step.seconds(2) < 1
