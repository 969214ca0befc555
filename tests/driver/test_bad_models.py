"""Models that cannot be compiled or quantized as they are, and what cannot be done with compiled ones: what the exceptions say."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.testing import assert_close

import sashiko
from sashiko.runtime.plan import NativeSegment
from tests.driver.functions import Apply


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Rows().eval()


@pytest.fixture(scope="module")
def compiled(model: nn.Module) -> sashiko.CompiledModel:
    return sashiko.compile(model, (torch.randn(3, 16),))


@pytest.mark.parametrize("verb", ["compile", "quantize", "quantize_and_compile"])
def test_a_model_in_training_mode(verb: str) -> None:
    with pytest.raises(sashiko.SashikoError, match=r"training mode(.|\n)*eval\(\)"):
        getattr(sashiko, verb)(Rows().train(), [torch.randn(3, 16)])


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1


def test_control_flow_that_depends_on_data() -> None:
    with pytest.raises(sashiko.Unsupported, match="cannot capture this model") as caught:
        sashiko.compile(Branches().eval(), (torch.randn(3),))
    assert "test_bad_models.py" in caught.value.where and 'torch.compile(model, backend="sashiko")' in caught.value.hint
    backend = torch.compile(Branches().eval(), backend="sashiko")
    for x in (torch.ones(3), -torch.ones(3)):
        assert_close(backend(x), Branches()(x))


class Chosen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0] * 2


def test_sizes_that_depend_on_data() -> None:
    with pytest.raises(sashiko.Unsupported, match="depends on the data") as caught:
        sashiko.compile(Chosen().eval(), (torch.randn(9),))
    assert 'torch.compile(model, backend="sashiko")' in caught.value.hint
    x = torch.randn(9)
    assert_close(torch.compile(Chosen().eval(), backend="sashiko")(x), Chosen()(x))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        result: torch.Tensor = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]
        return result


def test_sequences_of_lengths_that_are_data() -> None:
    """The place is the user's, not that of the mode which the model is traced in."""
    model, args = Packed().eval(), (torch.randn(3, 6, 4), torch.tensor([6, 2, 4]))
    with pytest.raises(sashiko.Unsupported, match="cannot capture this model") as caught:
        sashiko.compile(model, args)
    assert "test_bad_models.py" in caught.value.where and 'torch.compile(model, backend="sashiko")' in caught.value.hint
    with torch.no_grad():
        assert_close(torch.compile(model, backend="sashiko")(*args), model(*args))


def test_what_is_no_model_and_what_are_no_examples(model: nn.Module) -> None:
    with pytest.raises(sashiko.InputError, match=r"expected a torch\.nn\.Module, got function"):
        sashiko.compile(lambda x: x, (torch.randn(3),))  # type: ignore[arg-type]
    with pytest.raises(sashiko.InputError, match="example_inputs is a set"):
        sashiko.compile(model, {torch.randn(3, 16)})  # type: ignore[arg-type]
    with pytest.raises(sashiko.SashikoError, match=r"forward|argument"):
        sashiko.compile(model, (torch.randn(3, 16), 2))
    with pytest.raises(sashiko.InputError, match="dynamic_shapes"):
        sashiko.compile(model, (torch.randn(3, 16),), dynamic_shapes=({1: Dim("width")},))
    with pytest.raises(sashiko.InputError, match="dynamic_shapes"):
        sashiko.compile(model, (torch.randn(3, 16),), dynamic_shapes={"y": {0: Dim("rows")}})


def test_graphs_of_other_compilers(model: nn.Module) -> None:
    """Those of torch.export are modules by `module()`, which only take the form of call that they were exported with."""
    x = torch.randn(3, 16)
    program = torch.export.export(model, (x,))
    for verb, example in ((sashiko.compile, (x,)), (sashiko.quantize, [x])):
        with pytest.raises(sashiko.InputError, match=r"got an ExportedProgram\n(.|\n)*program\.module\(\)"):
            verb(program, example)  # type: ignore[operator]
        assert_close(verb(program.module(), example)(x), model(x), rtol=0.05, atol=0.05)  # type: ignore[operator]
        with pytest.raises(sashiko.InputError, match="got TorchScript"):
            verb(torch.jit.trace(model, x), example)  # type: ignore[operator]


def test_weights_and_data_elsewhere(model: nn.Module) -> None:
    x = torch.randn(3, 16)
    for verb, example in ((sashiko.compile, (x,)), (sashiko.quantize, [x])):
        with pytest.raises(sashiko.InputError, match=r"up\.weight is on meta"):
            verb(Rows().to("meta").eval(), example)  # type: ignore[operator]
        with pytest.raises(sashiko.SashikoError, match=r"on meta(.|\n)*\.cpu\(\)"):
            verb(model, [each.to("meta") for each in example])  # type: ignore[operator]


def test_weights_made_under_inference_mode() -> None:
    with torch.inference_mode():
        model = Rows().eval()
    x = torch.randn(3, 16)
    for verb, example in ((sashiko.compile, (x,)), (sashiko.quantize, [x])):
        with pytest.raises(sashiko.Unsupported, match=r"inference tensor(.|\n)*requires_grad_\(False\)"):
            verb(model, example)  # type: ignore[operator]
    model.requires_grad_(False)
    for verb, example in ((sashiko.compile, (x,)), (sashiko.quantize, [x])):
        assert_close(verb(model, example)(x), model(x), rtol=0.05, atol=0.05)  # type: ignore[operator]


@dataclass
class Scores:
    values: torch.Tensor


class Scored(nn.Module):
    def forward(self, x: torch.Tensor) -> Scores:
        return Scores(x + 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_weights_that_torch_has_packed(model: nn.Module) -> None:
    packed = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}).eval()  # type: ignore[no-untyped-call]
    with pytest.raises(sashiko.Unsupported, match=r"PackedParams(.|\n)*quantize the model it was made from"):
        sashiko.compile(packed, (torch.randn(2, 16),))
    with pytest.raises(sashiko.Unsupported, match=r"PackedParams(.|\n)*quantize the model it was made from"):
        sashiko.quantize(packed, [torch.randn(2, 16)])


def test_a_result_of_an_unknown_class() -> None:
    x = torch.randn(3)
    with pytest.raises(sashiko.Unsupported, match=r"Scores(.|\n)*hint: (.|\n)*register_dataclass"):
        sashiko.compile(Scored().eval(), (x,))
    torch.export.register_dataclass(Scores)
    assert_close(sashiko.compile(Scored().eval(), (x,))(x).values, x + 1)


def test_a_compiled_model_inside_of_what_traces(model: nn.Module, compiled: sashiko.CompiledModel) -> None:
    x = torch.randn(2, 3, 16)
    with pytest.raises(sashiko.InputError, match=r"transform of torch\.func has no data"):
        torch.func.vmap(compiled)(x)
    with pytest.raises(sashiko.InputError, match=r"transform of torch\.func has no data"):
        torch.func.grad(lambda y: compiled(y).sum())(x[0])
    with pytest.raises(sashiko.InputError, match="FakeTensor has no data"):
        sashiko.compile(Apply(lambda y: compiled(y) + 1).eval(), (x[0],))


def test_a_compiled_model_is_not_pickled(model: nn.Module, compiled: sashiko.CompiledModel) -> None:
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"neither pickled nor copied deeply\n.*fast\.save\(path\)"):
            copied(compiled)  # type: ignore[operator]
    assert copy.copy(compiled) is compiled


def test_a_model_that_casts_its_weights_while_it_runs_is_told_of_the_way_by_parts() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner = self.inner.to(x.dtype)
            return self.inner(x)

    model, x = Casting().eval(), torch.randn(2, 3)
    with pytest.raises(sashiko.Unsupported, match=r"hint: torch.compile\(model, backend"):
        sashiko.compile(model, (x,))
    with torch.no_grad():
        assert_close(torch.compile(model, backend="sashiko")(x), model(x))


class Branching(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * 2 if x.sum() > 0 else x)  # type: ignore[no-any-return]


def test_a_branch_on_data_is_refused_quietly_and_the_parts_are_quantized(
    model: nn.Module, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, x = Branching(model).eval(), torch.rand(5, 16)
    for attempt in (lambda: sashiko.compile(whole, (x,)), lambda: sashiko.quantize(whole, [x], progress=False)):
        with pytest.raises(sashiko.Unsupported, match=r"hint: torch.compile(.|\n)*submodules without one can be quantized"):
            attempt()
    assert "def forward" not in "".join(capfd.readouterr())
    expected = whole(x)
    whole.inner = sashiko.quantize(model, [2 * x], progress=False)
    labels: list[str] = []
    made = sashiko.CompiledModel.__init__

    def noted(self: sashiko.CompiledModel, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        labels.extend(step.label for s in self.executable.plan.segments if isinstance(s, NativeSegment) for step in s.steps)

    monkeypatch.setattr(sashiko.CompiledModel, "__init__", noted)
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(whole, backend="sashiko")(x)
    assert (got - expected).abs().max() <= 0.03 * expected.abs().max()
    assert sum("int_linear" in label for label in labels) == 2


class Keeps(nn.Module):
    """Writes into a tensor that a plain object holds, and maybe the module, as a buffer, too."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.cache = SimpleNamespace(keys=torch.zeros(4, 8))
        if buffer:
            self.register_buffer("keys", self.cache.keys, persistent=False)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.cache.keys.index_copy_(0, at, x)
        return self.cache.keys.sum(0) + x


@torch.no_grad()
def test_a_tensor_that_is_written_and_held_by_a_plain_object() -> None:
    given = torch.randn(1, 8), torch.tensor([1])
    with pytest.raises(sashiko.Unsupported, match=r"neither a buffer nor an argument(.|\n)*register_buffer"):
        sashiko.compile(Keeps(False).eval(), given)
    with pytest.raises(sashiko.Unsupported, match=r"its buffer keys, which an object that is no module holds, too(.|\n)*strict=True"):
        sashiko.compile(Keeps(True).eval(), given)
    eager, model = Keeps(True).eval(), Keeps(True).eval()
    compiled = sashiko.compile(torch.export.export(model, given, strict=True).module(), given)
    for _ in range(2):
        assert_close(compiled(*given), eager(*given))


def test_draws_whose_order_cannot_be_kept() -> None:
    class Draws(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = torch.rand(4, 1), torch.randn(4, 9)
            return x * second + first

    x = torch.randn(4, 9)
    with pytest.raises(sashiko.Unsupported, match=r"order cannot be kept(.|\n)*torch\.compile\(model"):
        sashiko.compile(Draws().eval(), (x,))
    torch.manual_seed(0)
    expected = Draws()(x)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="leaves a graph to PyTorch"):
        assert_close(torch.compile(Draws(), backend="sashiko")(x), expected)


@pytest.mark.parametrize("verb", ["compile", "quantize"])
def test_a_part_in_training_mode(verb: str) -> None:
    whole = nn.Sequential(Rows(), nn.Dropout(0.5)).eval()
    whole[1].train()
    with pytest.raises(sashiko.SashikoError, match=r"in training mode.*: 1\n(.|\n)*call model\.eval\(\) first"):
        getattr(sashiko, verb)(whole, [torch.randn(3, 16)])
