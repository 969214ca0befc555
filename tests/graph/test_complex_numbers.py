"""Complex tensors: every row against eager, and models that compute with them in native code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import sashiko
from sashiko.driver.model import CompiledModel
from sashiko.graph.aten import COMPLEX
from sashiko.runtime.plan import AtenStep
from tests.driver.functions import Apply
from tests.graph.eager import Recorded
from tests.graph.test_aten_table import compared, recorded

aten = torch.ops.aten
torch.manual_seed(0)
C, D, X = torch.randn(3, 4, dtype=torch.complex64), torch.randn(3, 4, dtype=torch.complex64), torch.randn(3, 4)
OWN: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (aten.add.Tensor, (C, X)),
    (aten.add.Tensor, (X, C)),
    (aten.add.Scalar, (C, 2 - 1j, 3)),
    (aten.sub.Scalar, (C, 2, 1)),
    (aten.mul.Scalar, (C, 1 + 2j)),
    (aten.mul.Scalar, (C, 2.0)),
    (aten.div.Scalar, (C, 1 + 2j)),
    (aten.div.Tensor, (C, X)),
    (aten.div.Tensor, (X, C)),
    (aten.div.Tensor, (C, 1e30 * D)),
    (aten.abs.default, (torch.tensor([0j, 3e30 + 4e30j, 3e-30 - 4e-30j, complex("inf"), complex("-infj")]),)),
    (aten.polar.default, (X.abs(), X)),
    (aten.complex.default, (X, X.flip(0))),
    (aten.to.dtype, (X, torch.complex64)),
    (aten.to.dtype, (C, torch.complex128)),
    (aten.to.device, (C, "cpu", torch.complex128)),
    (aten.to.dtype_layout, (X,)),
    (aten.to.other, (X, C)),
    (aten.type_as.default, (X, C)),
    (aten.expand_as.default, (C, C[None])),
    (aten.t.default, (C,)),
    (aten.reshape.default, (C, [2, -1])),
    (aten._unsafe_view.default, (C, [2, 6])),
    (aten.view_copy.default, (C, [2, 6])),
    (aten.flatten.using_ints, (C, 0)),
    (aten.unflatten.int, (C, 1, [2, -1])),
    (aten.view_as.default, (C, C[None])),
    (aten.reshape_as.default, (C.t(), X)),
    (aten.squeeze.dims, (C[None], [0, 1])),
    (aten.contiguous.default, (C,)),
    (aten.chunk.default, (C, 2, 1)),
    (aten.matmul.default, (C, D.t())),
    (aten.stack.default, ([C, D], 1)),
    (aten.cat.default, ([C, X], 1)),
    (aten.slice_scatter.default, (C, D[:, :2], 1, 2, 4)),
    (aten.select_scatter.default, (C, D[1], 0, 2)),
    (aten.copy.default, (C, X)),
    (aten.full.default, ([2, 3], 1 + 2j)),
    (aten.full_like.default, (C, 3 - 1j)),
    (aten.ones.default, ([3],)),
    (aten.zeros.default, ([3],)),
    (aten.new_zeros.default, (C, [2])),
    (aten.resolve_conj.default, (C,)),
    (aten._conj.default, (C,)),
    (aten.conj_physical.default, (C,)),
    (aten.alias.default, (C,)),
    (aten.detach.default, (C,)),
    (aten.zeros_like.default, (C,)),
    (aten._conj_physical.default, (C,)),
    (aten._to_copy.default, (C.to(torch.complex128),)),
    (aten.gather.default, (C, 1, torch.tensor([[3, 0], [1, 1], [2, 3]]))),
    (aten.embedding.default, (C, torch.tensor([2, 0, 2]))),
    (aten.split.Tensor, (C, 3, 1)),
    (aten.flip.default, (C, [0, 1])),
)


TYPED = (aten.full.default, aten.zeros.default, aten.ones.default, aten.to.dtype_layout)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rows_agree_with_eager() -> None:
    """Each must be reached with a native form at least once."""
    native: set[Any] = set()
    budget: dict[Any, int] = {}
    for _, calls in recorded({torch.complex64: 2}, (torch.complex64,), COMPLEX):
        for call in filter(touches_complex, calls):
            budget[call.target] = budget.get(call.target, 0) + 1
            if budget[call.target] <= 4:
                native |= {call.target} if is_native(call) else set()
    for op, args in OWN:
        kwargs = {"dtype": torch.complex64} if op in TYPED else {}
        assert is_native(Recorded(op, args, kwargs)), op
        native.add(op)
    assert sorted({str(op) for op in COMPLEX if op not in native}) == []


def touches_complex(call: Recorded) -> bool:
    found = tree_leaves((call.args, call.target(*call.args, **call.kwargs)))
    return any(isinstance(t, Tensor) and t.is_complex() for t in found)


def is_native(call: Recorded) -> bool:
    """Whether PyTorch is left only the parts of complex arguments and results."""
    between = {"aten.view_as_real.default", "aten.resolve_conj.default", "aten.complex.default"}
    return {note.op for note in compared(call).leftovers} <= between


class Turned(nn.Module):
    """Rotary positions as complex factors: a buffer, which may change, or numbers of the model's own code."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(6.0), 100 ** (-torch.arange(8.0) / 8))
        self.factors = torch.polar(torch.ones_like(angles), angles)
        if buffer:
            del self.factors
            self.register_buffer("factors", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.factors[:, None]).flatten(-2)


def left(compiled: CompiledModel) -> list[str]:
    assert compiled.built is not None
    return [str(note.target) for note in compiled.built.notes if isinstance(note, AtenStep)]


@torch.no_grad()
@pytest.mark.parametrize("buffer", [False, True])
def test_rotary_positions_are_one_kernel(buffer: bool, tmp_path: Any) -> None:
    model, x = Turned(buffer).eval(), torch.randn(2, 6, 3, 16)
    compiled = sashiko.compile(model, (x,), strict=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-6, atol=1e-6)
    assert compiled.built is not None and [len(notes) for notes in compiled.built.notes if not isinstance(notes, AtenStep)] == [1]
    compiled.save(tmp_path / "turned.sashiko")
    torch.testing.assert_close(sashiko.load(tmp_path / "turned.sashiko")(x), model(x), rtol=1e-6, atol=1e-6)
    if buffer:
        model.factors.mul_(1j)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-6, atol=1e-6)


MODELS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], list[str]]] = {
    "arguments and results": (lambda x, y: (x * y.conj(), (x - y).abs()), (C, D), ["resolve_conj", "view_as_real"] * 2 + ["complex"]),
    "a conjugate argument": (lambda x: x.real + x.imag, (C.conj(),), ["resolve_conj", "view_as_real"]),
    "around a transform": (
        lambda x: torch.fft.irfft(torch.fft.rfft(x) * (1 + 2j)), (X,), ["_fft_r2c", "view_as_real", "complex", "_fft_c2r"]
    ),
    "in double": (lambda x: (x.to(torch.complex128) * 2j).abs(), (X,), []),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_only_what_has_no_native_form_is_left_to_pytorch(name: str) -> None:
    function, arguments, leftovers = MODELS[name]
    compiled = sashiko.compile(Apply(function).eval(), tuple(a.resolve_conj() for a in arguments))
    torch.testing.assert_close(compiled(*arguments), function(*arguments), rtol=1e-5, atol=1e-6)
    assert sorted(left(compiled)) == sorted(f"aten.{op}.default" for op in leftovers)
