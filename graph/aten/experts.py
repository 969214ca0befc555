"""Products of groups of rows, each with a matrix of its own, as mixtures of experts compute them.

`aten._grouped_mm` takes few types, and transformers has an operator of its own for the others, of which nothing is known but its name until
that package is imported. Quantized modules hold `sashiko::experts`, which has a meaning in PyTorch for f32 alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...diagnostics.errors import Unsupported
from .. import build as b
from ..dims import product
from ..ir import Value
from ..products import transposed
from ..types import i64
from .call import Call, Row
from .linear_algebra import need_float

_NAME = "sashiko::experts"


def reference(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """x[S, K] by w[E, N, K]: rows [ends[e - 1], ends[e]) by matrix e, zeros behind the last one's."""
    result = x.new_zeros(len(x), w.shape[1])
    start = 0
    for matrix, end in zip(w, ends.tolist(), strict=True):
        result[start:end] = F.linear(x[start:end], matrix)
        start = end
    return result


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, w, ends = ctx.saved_tensors
    with torch.enable_grad():
        given = x.detach().requires_grad_(), w.detach().requires_grad_()
        result = reference(*given, ends)
    return *torch.autograd.grad(result, given, gradient), None


torch.library.define(_NAME, "(Tensor x, Tensor w, Tensor ends) -> Tensor")
torch.library.impl(_NAME, "CPU", reference)
torch.library.register_fake(_NAME, lambda x, w, ends: x.new_empty((x.shape[0], w.shape[1])))
torch.library.register_autograd(_NAME, _gradients, setup_context=_keep)
EXPERTS: torch._ops.OpOverload = torch.ops.sashiko.experts.default


def experts(c: Call, x: Value, w: Value, ends: Value) -> Value:
    """As `reference`."""
    need_float(x, w)
    ends = b.cast(ends, i64)
    out = b.routed_linear(x, b.reshape(w, (product(w.shape[:2]), w.shape[2])), ends)
    taken = b.lt(b.iota(x.shape[0], i64), b.slice_(ends, 0, ends.shape[0] - 1, 1))
    return b.cast(b.where(b.unsqueeze(taken, 1), out, 0.0), c.dtype)


def grouped_mm(
    c: Call, x: Value, w: Value, ends: Value | None = None, bias: Value | None = None, dtype: torch.dtype | None = None
) -> Value:
    """The same with w[E, K, N]."""
    if ends is None or bias is not None or (x.tensor.rank, w.tensor.rank) != (2, 3):
        raise Unsupported("matrices take turns along something else than the rows")
    whole = transposed(w)
    return experts(c, x, b.permute(w, (0, 2, 1)) if whole is None else whole, ends)


GROUPED: Any = getattr(torch.ops.aten, "_grouped_mm", None)
"""torch's operator, which is private: None where a version lacks it."""
ROWS: dict[Any, Row] = {EXPERTS: experts, **({} if GROUPED is None else {GROUPED.default: grouped_mm})}
NAMED: dict[str, Row] = {"transformers.grouped_mm_fallback.default": grouped_mm}
