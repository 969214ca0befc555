"""The ATen tables: which PyTorch operations have a native form, one row each, by theme. `docs/add_an_op.md` says how to add one."""

from __future__ import annotations

from typing import Any

from . import (
    affine,
    antialias,
    complex_numbers,
    composite,
    creation,
    experts,
    fold,
    hyperbolic,
    indexing,
    linear_algebra,
    normalization,
    order,
    padding,
    pointwise,
    quantized,
    recurrent,
    reductions,
    resize,
    sample,
    shape,
    transformer,
    transposed,
    updates,
    windows,
)
from .call import Call, Row, SymScalar
from .complex_numbers import Pair

TABLE: dict[Any, Row] = {
    **pointwise.ROWS, **reductions.ROWS, **shape.ROWS, **linear_algebra.ROWS, **normalization.ROWS, **indexing.ROWS, **creation.ROWS,
    **windows.ROWS, **transposed.ROWS, **resize.ROWS, **sample.ROWS, **fold.ROWS, **transformer.ROWS, **recurrent.ROWS, **experts.ROWS,
    **updates.ROWS, **order.ROWS, **padding.ROWS, **hyperbolic.ROWS, **antialias.ROWS,
}
# Of operators that exist only once a library that defines them has been imported. Scales that are constants may become part of types.
QUANTIZED: dict[str, Row] = {**quantized.ROWS, **affine.ROWS}
NAMED: dict[str, Row] = {**QUANTIZED, **experts.NAMED}
# Of operations that are decomposed with the rest where a program is.
COMPOSITES: dict[Any, Row] = composite.ROWS

# Of operations on complex tensors.
COMPLEX: dict[Any, complex_numbers.ComplexRow] = complex_numbers.ROWS

__all__ = ["COMPLEX", "COMPOSITES", "NAMED", "QUANTIZED", "TABLE", "Call", "Pair", "Row", "SymScalar", "composite", "recurrent"]
