"""Capture from torch.export and from AOTAutograd: what becomes input, constant, state, output, and what is refused and why."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.export import Dim

from sashiko.diagnostics.errors import InputError, Unsupported
from sashiko.graph import interpret, passes
from sashiko.graph.attrs import ConstantAttrs
from sashiko.graph.capture import Captured, decompositions, export, from_fx
from sashiko.graph.captured import FixedInput, FixedOutput, InputOutput, SymbolicOutput
from tests.graph.captures import SIMPLIFYING, Forward, capture, module, run


def test_sizes_are_symbols_and_results_keep_their_structure() -> None:
    fc = nn.Linear(4, 3)
    model = module(lambda self, x, *, scale: {"y": self.fc(x) * scale, "n": x.shape[0] * 2, "x": x, "k": 7, "w": self.fc.weight}, fc=fc)
    captured = capture(model, (torch.randn(3, 4),), {"scale": torch.tensor(2.0)}, {"x": {0: Dim("batch", min=1, max=64)}, "scale": None})
    for n in (1, 5):
        x, scale = torch.randn(n, 4), torch.tensor(0.5)
        got = run(captured, (x,), {"scale": scale})
        torch.testing.assert_close(got["y"], model(x, scale=scale)["y"])
        assert got["n"] == 2 * n and got["x"] is x and got["k"] == 7 and got["w"] is fc.weight
    assert [type(o) for o in captured.outputs[1:]] == [SymbolicOutput, InputOutput, FixedOutput, FixedOutput]
    (symbol,) = captured.symbols
    assert (symbol.position, symbol.axis, symbol.lo, symbol.hi) == (0, 0, 1, 64)


@pytest.mark.parametrize(("args", "kwargs", "words"), [
    ((torch.randn(3, 5),), {}, "dimension 1 has size 5"),
    ((torch.randn(3),), {}, "1 dimensions"),
    ((torch.randn(65, 4),), {}, "from 1 to 64"),
    ((torch.randn(3, 4).double(),), {}, "float64"),
    ((3.0,), {}, "float, expected a tensor"),
    ((), {}, "positional arguments that do not fit"),
    ((torch.randn(3, 4),), {"other": 1}, "keyword arguments"),
])
def test_calls_that_do_not_fit_are_refused(args: Any, kwargs: Any, words: str) -> None:
    captured = capture(module(lambda self, x: x + 1), (torch.randn(3, 4),), None, ({0: Dim("b", min=1, max=64)},))
    with pytest.raises(InputError, match=words):
        run(captured, args, kwargs)


def test_python_arguments_are_fixed() -> None:
    captured = capture(module(lambda self, x, flag: x + 1 if flag else x), (torch.randn(2), True))
    assert isinstance(captured.inputs[1], FixedInput)
    with pytest.raises(InputError, match="flag is False"):
        run(captured, (torch.randn(2), False))


def test_parameters_and_buffers_are_watched_and_other_tensors_copied() -> None:
    fc = nn.Linear(2, 2)
    model = module(lambda self, x: self.fc(x) + self.shift + self.table, fc=fc, shift=torch.randn(2))
    model.table = torch.randn(2)
    constants = {v.name: v.attrs for v in capture(model, (torch.randn(1, 2),)).graph.constants}
    found = {n: (a.tensor, a.watched) for n, a in constants.items() if isinstance(a, ConstantAttrs)}
    assert found["fc.weight"] == (fc.weight, True) and found["shift"][0] is model.shift and found["shift"][1]
    assert torch.equal(found["table"][0], model.table) and found["table"][0] is not model.table and not found["table"][1]


def test_written_buffers_are_state() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        self.count.add_(1)
        return x * self.count

    model = module(forward, count=torch.zeros(2))
    captured = capture(model, (torch.randn(2),))
    eager = copy.deepcopy(model)
    for _ in range(3):
        x = torch.randn(2)
        torch.testing.assert_close(run(captured, (x,)), eager(x))
    assert captured.state[0].tensor is model.count and model.count.tolist() == [3.0, 3.0]


def test_written_arguments_are_written_back() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + 1

    captured = capture(module(forward), (torch.ones(2),))
    x = torch.ones(2)
    assert run(captured, (x,)).tolist() == [3.0, 3.0] and x.tolist() == [2.0, 2.0]


def test_floats_computed_from_sizes_are_computed() -> None:
    model = module(lambda self, x: x / x.shape[0] ** 0.5 + x * (x.shape[0] / 3))
    captured = capture(model, (torch.randn(5, 2),), None, ({0: Dim("b")},))
    assert not captured.leftovers
    for n in (1, 7):
        x = torch.randn(n, 2)
        torch.testing.assert_close(run(captured, (x,)), model(x))


def test_gradient_and_autocast_regions_are_inlined() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            y: torch.Tensor = self.fc(x)
        return y

    model = module(forward, fc=nn.Linear(2, 2))
    captured = capture(model, (torch.randn(3, 2),))
    assert not captured.leftovers and "linear" in {v.op for v in captured.graph.order}
    x = torch.randn(3, 2)
    torch.testing.assert_close(run(captured, (x,)), model(x))


def test_what_has_no_row_is_left_to_pytorch_with_reason_and_place() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        values, places = torch.mode(x + 1, dim=-1)
        return values * 2, places, torch.fft.fft(x).abs()

    model = module(forward)
    captured = capture(model, (torch.randn(3, 4),), None, ({0: Dim("b")},))
    assert {note.op for note in captured.leftovers} == {"aten.mode.default", "aten._fft_r2c.default", "aten.view_as_real.default"}
    assert all(note.reason and note.origin.startswith("test_capture.py:") for note in captured.leftovers)
    x = torch.randn(2, 4)
    torch.testing.assert_close(run(captured, (x,)), model(x))


def test_what_writes_or_draws_is_decomposed() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[0].add_(1)
        return y

    x = torch.randn(3, 4)
    torch.testing.assert_close(run(capture(module(forward), (x,)), (x,)), forward(None, x), rtol=0, atol=0)
    drawn = capture(module(lambda self, x: F.dropout(x, 0.5, True)), (x,))
    assert not any(note.op == "aten.dropout.default" for note in drawn.leftovers)
    whole = capture(module(lambda self, x, w: F.conv2d(x, w, padding=1)), (torch.randn(1, 3, 4, 6), torch.randn(5, 3, 3, 3)))
    assert not whole.leftovers


@pytest.mark.parametrize("dynamic", [None, ({0: torch.export.Dim.DYNAMIC},)])
def test_strides_of_what_is_pooled_to_one_are_no_operation(dynamic: Any) -> None:
    """Where the elements of a channel are not neighbours, PyTorch's pooling gives its result such strides too, by `as_strided`."""
    row = module(lambda self, x: F.adaptive_avg_pool1d(x.transpose(1, 2) * 2, 1).flatten(1))
    image = module(lambda self, x: F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2) + 1, 1).relu())
    for model, x in ((row, torch.randn(3, 6, 4)), (image, torch.randn(2, 5, 6, 4))):
        captured = capture(model, (x,), shapes=dynamic)
        assert not captured.leftovers
        torch.testing.assert_close(run(captured, (x,)), model(x))


def test_a_window_that_moves_is_left_to_pytorch() -> None:
    model, x = module(lambda self, x: (x * 2).as_strided((3, 2), (2, 2))), torch.randn(4, 4)
    captured = capture(model, (x,))
    assert [note.op for note in captured.leftovers] == ["aten.as_strided.default"]
    torch.testing.assert_close(run(captured, (x,)), model(x))


def test_training_mode_is_refused() -> None:
    with pytest.raises(InputError, match="eval"):
        export(nn.Linear(2, 2), (torch.randn(1, 2),))


def test_control_flow_on_data_is_unsupported_and_located() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x

    with pytest.raises(Unsupported, match="data-dependent") as caught:
        export(module(forward), (torch.randn(2),))
    assert "test_capture.py" in caught.value.where


def test_sizes_that_depend_on_data_are_unsupported() -> None:
    with pytest.raises(Unsupported, match="depends on the data"):
        capture(module(lambda self, x: x[x > 0]), (torch.randn(4),))


def test_dynamic_shapes_that_do_not_fit_are_the_callers_error() -> None:
    with pytest.raises(InputError, match="dynamic_shapes"):
        export(module(lambda self, x: x + torch.ones(4)), (torch.randn(4),), None, ({0: Dim("n")},))


def test_one_random_operation_is_kept() -> None:
    model = module(lambda self, x: x + torch.rand_like(x))
    captured = capture(model, (torch.zeros(3),))
    flat = captured.flatten((torch.zeros(3),), {})
    torch.manual_seed(0)
    got = interpret.run(captured.graph, captured.bind(flat)[0])[0]
    torch.manual_seed(0)
    torch.testing.assert_close(got, model(torch.zeros(3)))


def test_buffers_that_nothing_reads_may_be_of_any_kind() -> None:
    model = module(lambda self, x: x * 2)
    model.register_buffer("sparse", torch.ones(2, 2, dtype=torch.bool).to_sparse(), persistent=False)
    model.register_buffer("narrow", torch.zeros(3).to(torch.float8_e4m3fn))
    captured = capture(model, (torch.ones(3),))
    assert torch.equal(interpret.run(captured.graph, captured.bind(captured.flatten((torch.ones(3),), {}))[0])[0], torch.full((3,), 2.0))


def test_numbers_that_nothing_uses_are_not_drawn_unless_others_follow() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        used = x + torch.rand(3)
        torch.rand(2)
        return used

    def unlike(self: Any, x: torch.Tensor) -> torch.Tensor:
        torch.rand(2)
        return x + torch.rand(3)

    assert [v.op for v in capture(module(forward), (torch.zeros(3),)).graph.order].count("aten") == 1
    with pytest.raises(Unsupported, match="order cannot be kept"):
        capture(module(unlike), (torch.zeros(3),))


def test_random_operations_whose_order_would_change_are_refused() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        first, second = torch.rand_like(x), torch.rand_like(x)
        return second - first

    with pytest.raises(Unsupported, match="random"):
        capture(module(forward), (torch.zeros(3),))


SHAPES: dict[str, Forward] = {
    "slices": lambda self, x: (x[:, 1:], x[:, -2:], x[:, :-1], x[..., ::2], x[0], x[:, -1]),
    "broadcasts": lambda self, x: x + torch.arange(x.shape[1]).unsqueeze(-1) + torch.zeros(x.shape[0], 1, 1),
    "merges": lambda self, x: (x.flatten(0, 1), x.reshape(x.shape[0], -1), x.transpose(0, 1).reshape(-1), x.repeat(2, 1, 3)),
    "joins": lambda self, x: (torch.cat([x, x], 1), torch.stack([x, x], 1), torch.nn.functional.pad(x, (1, 2, 0, 3))),
    "parts": lambda self, x: (*x.chunk(2, -1), *x.split([2, 4], 2), *x.unbind(2)),
    "masks": lambda self, x: (x.masked_fill(x > 0, 1.5), torch.where(x > 0, x, 0), x.triu(), x.tril(-1), x.clamp(-1, 1)),
    "lookups": lambda self, x: (x[:, torch.tensor([0, -1])], x[torch.arange(x.shape[0]), 1], x.index_select(2, torch.tensor([3, 1]))),
    "statistics": lambda self, x: (x.softmax(1), x.log_softmax(-1), x.var(1), x.std((0, 2)), x.amax(2), x.norm(dim=-1), x.argmax(1)),
    "products": lambda self, x: (x @ x.transpose(1, 2), torch.einsum("bsh,bth->bst", x, x), x @ torch.ones(6)),
    "norms": lambda self, x: (nn.functional.layer_norm(x, (6,)), nn.functional.rms_norm(x, (6,)), nn.functional.normalize(x, dim=-1)),
    "dtypes": lambda self, x: (x.int() // 2, x.long() + 0.5, x.bool() & (x > 0), x.half() + x, x.to(torch.float64) / 3),
}


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_dynamic_shapes_have_native_forms(name: str) -> None:
    model = module(SHAPES[name])
    captured = capture(model, (torch.randn(2, 7, 6),), None, ({0: Dim("b"), 1: Dim("s", min=4)},))
    assert not captured.leftovers, captured.leftovers
    for sizes in ((3, 5), (1, 9)):
        x = torch.randn(*sizes, 6)
        torch.testing.assert_close(run(captured, (x,)), model(x))


def _backend(seen: list[Captured]) -> Any:
    def compiler(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        captured = from_fx(graph, example_inputs)
        seen.append(captured)

        def call(*flat: Any) -> Any:
            tensors, env = captured.bind(flat)
            return captured.results(flat, interpret.run(captured.graph, tensors, env), env)

        return call

    return aot_autograd(fw_compiler=compiler, inference_compiler=compiler, decompositions=decompositions())


def test_graphs_of_aot_autograd() -> None:
    def forward(self: Any, x: torch.Tensor, mask: torch.Tensor) -> Any:
        self.calls.add_(1)
        q = self.fc(x).unflatten(-1, (2, 4)).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None, :])
        return self.norm(y.transpose(1, 2).flatten(2) + x) * x.shape[1]

    calls = torch.zeros(1)
    model = module(forward, fc=nn.Linear(8, 8), norm=nn.LayerNorm(8), calls=calls)
    eager, seen = copy.deepcopy(model), list[Captured]()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=_backend(seen), dynamic=True)
    with torch.no_grad():
        for sizes in ((2, 5), (3, 7)):
            x, mask = torch.randn(*sizes, 8), torch.rand(sizes) < 0.7
            torch.testing.assert_close(compiled(x, mask), eager(x, mask))
    assert calls.item() == 2
    (captured,) = seen
    assert not captured.leftovers and captured.symbols
    simple = passes.run(captured.graph, SIMPLIFYING, declared=captured.declared)
    assert {"attention", "linear"} <= {v.op for v in simple.order}
    assert [v.shape[1:3] for v in simple.order if v.op == "reshape" and v.dtype.name == "bool"] == [(1, 1)]


def test_frozen_placeholders_become_constants() -> None:
    graph = torch.fx.Graph()
    weight, x = torch.randn(3, 4), torch.randn(2, 4)
    nodes = [graph.placeholder("w"), graph.placeholder("x")]
    nodes[0].meta["val"], nodes[1].meta["val"] = weight, x
    turned = graph.call_function(torch.ops.aten.t.default, (nodes[0],))
    turned.meta["val"] = weight.t()
    product = graph.call_function(torch.ops.aten.mm.default, (nodes[1], turned))
    product.meta["val"] = x @ weight.t()
    graph.output([product])
    captured = from_fx(torch.fx.GraphModule({}, graph), [weight, x], frozen={0: weight})
    assert [v.op for v in captured.graph.order] == ["input", "constant", "linear"]
    torch.testing.assert_close(interpret.run(captured.graph, captured.bind([weight, x])[0])[0], x @ weight.t())
    with pytest.raises(InputError):
        captured.bind([weight.clone(), x])
