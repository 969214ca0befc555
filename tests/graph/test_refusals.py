"""What is said of dynamic_shapes, and of tensors of other kinds, that torch.export refuses: what torch found, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import sashiko
from sashiko.diagnostics.errors import SPARSE, CalibrationError, InputError, SashikoError, Unsupported
from sashiko.graph.capture import export
from sashiko.graph.refusals import UNPACKED, translated
from tests.driver.functions import Apply

B, C = Dim("b", max=16), Dim("c", max=16)
AUTO = "torch.export.Dim.AUTO takes such conditions for granted, and the sizes of each call are checked"
FROM_SIX = "b = Dim('b', min=6, max=16)\n  "
AT_LEAST_TWO = "torch.export takes a size of 0 or 1 for a constant; give an example with at least 2 for "


@pytest.mark.parametrize(("function", "sizes", "shapes", "what", "hint"), [
    (lambda x: x + 1, [(1, 8)], ({0: B},), "specialized it to be a constant (1).", AT_LEAST_TWO + "b"),
    (lambda x: x + 1, [(0, 8)], ({0: B},), "specialized it to be a constant (0).", AT_LEAST_TWO + "b"),
    (lambda x: x + 1, [(1, 8)], ({0: Dim.DYNAMIC},), "inferred a static shape of 1", AT_LEAST_TWO + "inputs['args'][0].shape[0]"),
    (lambda x, y: x[:1] + y[:1], [(1, 8), (2, 8)], ({0: B}, {0: 2 * B}), "to be a constant (1). You marked 2*b", AT_LEAST_TWO + "b"),
    (lambda x: x + torch.ones(4, 1), [(1, 4, 3)], ({0: B, 1: C},), "You marked c as dynamic", AT_LEAST_TWO + "b\n  c = 4"),
    (lambda x: x + torch.ones(6, 1), [(6, 3)], ({0: B},), "specialized it to be a constant (6).", "b = 6"),
    (lambda x, y: x + y, [(3, 8), (3, 8)], ({0: B}, {0: C}), "must always be equal.", "c = b"),
    (lambda x: x * 2 if x.shape[0] > 5 else x, [(6, 8)], ({0: B},), "satisfy the generated guard 6 <= ", FROM_SIX + AUTO),
    (lambda x: x * 2 if x.shape[0] % 5 else x, [(6, 8)], ({0: B},), "% 5) != 0.", AUTO),
    (lambda x: x + 1, [(20, 8)], ({0: B},), "20 not in range", "see the documentation of torch.export's dynamic_shapes"),
], ids=["one", "nothing", "any size", "derived", "one and four", "constant", "equal", "branch", "unproven", "beyond"])  # fmt: skip
def test_the_reason_and_what_to_do(
    function: Callable[..., torch.Tensor], sizes: list[tuple[int, ...]], shapes: Any, what: str, hint: str
) -> None:
    args = tuple(torch.randn(size) for size in sizes)
    with pytest.raises(InputError, match="dynamic_shapes do not fit the model: ") as caught:
        export(Apply(function).eval(), args, dynamic_shapes={"args": shapes})
    assert what in caught.value.what and caught.value.hint == hint
    assert not any(advice in str(caught.value) for advice in ("draft_export", "TORCH_LOGS", "mark_dynamic"))


def test_what_is_taken_for_granted_instead() -> None:
    model = Apply(lambda x: x * 2 if x.shape[0] % 5 else x).eval()
    compiled = sashiko.compile(model, torch.randn(6, 8), dynamic_shapes={"args": ({0: Dim.AUTO},)})
    x = torch.randn(7, 8)
    torch.testing.assert_close(compiled(x), x * 2)
    with pytest.raises(InputError, match="has size 5, expected 1 to 4 more than a multiple of 5, from 1 on"):
        compiled(x[:5])


@pytest.mark.parametrize("function", [lambda x: x * 2 if x.shape[0] == 3 else x, lambda x: x * torch.tensor(range(x.shape[0]))[:, None]])
def test_where_the_model_makes_a_size_a_constant(function: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(InputError, match=r"specialized it to be a constant \(3\)") as caught:
        export(Apply(function).eval(), (torch.randn(3, 8),), dynamic_shapes={"args": ({0: B},)})
    assert caught.value.where == f"{__file__}:{function.__code__.co_firstlineno}"


def test_where_an_operation_does_it_beneath_what_traces() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[y.shape[0] - 1, 1] = 0.0
        return y

    with pytest.raises(InputError, match=r"specialized it to be a constant \(3\)") as caught:
        export(Apply(write).eval(), (torch.randn(3, 8),), dynamic_shapes={"args": ({0: B},)})
    assert not caught.value.where or caught.value.where.startswith(__file__)


class Recurrent(nn.Module):
    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.layer = cell(4, 6, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, *state: torch.Tensor) -> Any:
        return self.layer(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True), *state)


@pytest.mark.parametrize(("cell", "state"), [(nn.LSTM, ()), (nn.GRU, (torch.zeros(1, 3, 6),))])
def test_packed_sequences(cell: Any, state: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(Unsupported, match="a recurrent layer is given a PackedSequence") as caught:
        export(Recurrent(cell).eval(), (torch.randn(3, 7, 4), torch.tensor([7, 5, 2]), *state))
    assert caught.value.hint == UNPACKED and caught.value.where.startswith(__file__)


class Edges(nn.Module):
    """Of a graph, as a matrix that is a buffer, an argument or made in each call."""

    def __init__(self, of: torch.layout) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("edges", torch.eye(5).to_sparse(layout=of))

    def forward(self, x: torch.Tensor, edges: torch.Tensor | None = None, values: torch.Tensor | None = None) -> torch.Tensor:
        if values is not None and edges is not None:
            edges = torch.sparse_coo_tensor(edges, values, (5, 5))
        found: torch.Tensor = torch.sparse.mm(self.edges if edges is None else edges, self.layer(x))
        return found


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(("of", "given"), [
    (torch.sparse_coo, ()), (torch.sparse_csr, ()), (torch.sparse_coo, (torch.eye(5).to_sparse(),)),
    (torch.sparse_coo, (torch.arange(5).expand(2, 5), torch.ones(5))),
], ids=["coo", "csr", "argument", "made"])  # fmt: skip
def test_sparse_tensors(of: torch.layout, given: tuple[torch.Tensor, ...]) -> None:
    model, args = Edges(of).eval(), (torch.randn(5, 4), *given)
    for make in (lambda: sashiko.compile(model, args), lambda: sashiko.quantize_and_compile(model, [args])):
        with pytest.raises(SashikoError, match="sparse") as caught:
            make()
        assert caught.value.hint == ("to_dense() converts it" if isinstance(caught.value, CalibrationError) else SPARSE)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("of", [torch.sparse_coo, torch.sparse_csr])
def test_products_of_sparse_tensors_are_traced_where_every_size_is_fixed(of: torch.layout) -> None:
    model, x = Edges(of).eval(), torch.randn(5, 4)
    small = sashiko.quantize(model, [x], progress=False)
    torch.testing.assert_close(small(x), model(x), rtol=0.05, atol=0.05)
    assert "every size is fixed" in small.report()


@pytest.mark.parametrize(("text", "what"), [
    ("\nThe inequality cannot be solved\nusing solve_univariate_inequality.\n\nmore", "be solved using solve_univariate_inequality."),
    ("no rule for this\nTraceback (most recent call last):\n  File", "no rule for this"),
    ("no rule for this:\nthat and that", "no rule for this:"),
    ("", "NotImplementedError"),
])  # fmt: skip
def test_a_sentence_that_goes_on_is_told_whole(text: str, what: str) -> None:
    assert translated(NotImplementedError(text)).what.endswith(what)
