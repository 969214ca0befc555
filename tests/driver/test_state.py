"""Models whose numbers change: buffers that they write, weights that others change after compilation."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import sashiko


class Counter(nn.Module):
    """Writes two buffers: a count in place, and a running mean by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.count: torch.Tensor
        self.mean: torch.Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        self.mean.copy_(self.mean * 0.9 + x.mean(0) * 0.1)
        return (x - self.mean) * self.count


def test_buffers_that_the_model_writes() -> None:
    compiled_one = Counter().eval()
    twin = copy.deepcopy(compiled_one)
    data = torch.randn(5, 3, 4)
    compiled = sashiko.compile(compiled_one, (data[0],))
    assert int(compiled_one.count) == 0, "compiling does not run the model"
    for x in data:
        assert_close(compiled(x), twin(x))
    assert_close(dict(compiled_one.state_dict()), dict(twin.state_dict()))
    compiled_one.count.fill_(40)
    twin.count.fill_(40)
    assert_close(compiled(data[0]), twin(data[0]))


def test_buffers_that_are_results() -> None:
    class Sums(nn.Module):
        """Of what the calls gave: one added up in place, one replaced, and one as it was before the call."""

        def __init__(self) -> None:
            super().__init__()
            for name in ("added", "replaced", "before"):
                self.register_buffer(name, torch.zeros(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            old = self.before + 0
            self.before.add_(x)
            self.added.add_(x)
            self.replaced.copy_(torch.sort(self.replaced + x)[0])
            return self.added, self.replaced, old, self.added * 2

    model = Sums().eval()
    twin, x = copy.deepcopy(model), torch.randn(4)
    compiled = sashiko.compile(model, (x,))
    for _ in range(2):
        got = compiled(x)
        assert_close(got, twin(x))
        assert got[0] is model.added and got[1] is model.replaced
        assert got[2].data_ptr() != model.before.data_ptr() and got[3].data_ptr() != model.added.data_ptr()


def test_two_models_compiled_alike_have_states_of_their_own() -> None:
    models = Counter().eval(), Counter().eval()
    x = torch.randn(3, 4)
    first, second = (sashiko.compile(m, (x,)) for m in models)
    first(x)
    first(x)
    second(x)
    assert [int(m.count) for m in models] == [2, 1]


class Bounded(nn.Module):
    """Writes into parameters: rows of a table that are too long, a part of a weight and, once it is read, a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(20, 16, max_norm=1.0), nn.Linear(16, 16)

    def forward(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            self.layer.weight[:4].mul_(0.9).clamp_(-0.2, 0.2)
            result: torch.Tensor = self.layer(self.words(indices))
            self.layer.bias.mul_(1.1)
        return result, self.layer.weight


@pytest.mark.parametrize("quantized", [False, True])
def test_parameters_that_the_model_writes(quantized: bool) -> None:
    """Also where they ask for gradients. They are the model's own tensors, as buffers are."""
    torch.manual_seed(0)
    model = Bounded().eval()
    indices, expected = torch.arange(8), copy.deepcopy(model)
    if quantized:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        made: nn.Module = sashiko.quantize(model, [indices], progress=False)
        assert_close(model.state_dict(), before, rtol=0, atol=0)
        model, expected = made, copy.deepcopy(made)
    compiled = sashiko.compile(model, (indices,))
    for turn in range(3):
        assert_close(compiled(indices + turn), expected(indices + turn))
        assert_close(model.state_dict(), expected.state_dict())
    assert quantized or compiled(indices)[1] is model.layer.weight


class Rescaled(nn.Module):
    """Scales its weight down in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.is_scaled = nn.Linear(16, 16), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_scaled:
            self.layer.weight.div_(2)
            self.is_scaled = True
        result: torch.Tensor = self.layer(x)
        return result


class Remembers(nn.Module):
    """Takes its first input for the origin, and fills a table in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.is_begun = nn.Linear(16, 16), False
        self.register_buffer("origin", torch.zeros(16))
        self.register_buffer("table", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_begun:
            self.table.copy_(torch.arange(16) * x.shape[1])
            self.origin.copy_(x[0])
            self.is_begun = True
        result: torch.Tensor = self.layer(x - self.origin) + self.table
        return result


@pytest.mark.parametrize(("make", "names"), [(Rescaled, r"layer\.weight,"), (Remembers, "origin,")], ids=["parameter", "buffer"])
@pytest.mark.parametrize("verb", [
    lambda model, x: sashiko.compile(model, (x,)),
    lambda model, x: sashiko.quantize(model, [x], progress=False),
    lambda model, x: sashiko.quantize_and_compile(model, [x], progress=False),
], ids=["compile", "quantize", "both"])
@torch.no_grad()
def test_what_the_first_call_alone_writes(
    make: Callable[[], nn.Module], names: str, verb: Callable[[nn.Module, torch.Tensor], nn.Module]
) -> None:
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(4, 16)
    before = copy.deepcopy(model)
    with pytest.raises(sashiko.Unsupported, match=rf"first call alone writes into {names}(.|\n)*call the model once before"):
        verb(model, x)
    assert_close(model.state_dict(), before.state_dict(), rtol=0, atol=0)
    assert torch.equal(model(x), before(x))
    compiled, again = verb(model, x), torch.randn(4, 16)
    assert_close(compiled(again), before(again), rtol=0, atol=0.05)
    assert torch.equal(model(again), before(again))


def test_plain_tensors_among_attributes_stay_what_they_were() -> None:
    """All of what is made of them, wherever code computes it."""
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.factor = torch.arange(3.0), torch.tensor(2.0)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + self.steps, x * self.factor + self.steps * 2

    model, x = Plain().eval(), torch.randn(3)
    compiled, expected = sashiko.compile(model, (x,)), model(x)
    model.steps.add_(10)
    model.factor.add_(1)
    assert_close(compiled(x), expected)


def test_arguments_that_the_model_writes() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.add_(y)
            y[0] = 7
            return x * y

    model = Writes().eval()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    compiled = sashiko.compile(model, (x.clone(), y.clone()))
    mine, theirs = (x.clone(), y.clone()), (x.clone(), y.clone())
    assert_close(compiled(*mine), model(*theirs))
    assert_close(mine, theirs)


def step(model: nn.Module, fused: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()


def fused(model: nn.Module) -> None:
    step(model, True)


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: t * 2 + 1 for name, t in model.state_dict().items()})


def copied(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.full_like(p, 0.25))


def swapped(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = torch.full_like(p, 0.125)


CHANGES = (step, fused, loaded, copied, swapped, fused)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("outside", [False, True], ids=["native", "with PyTorch"])
def test_weights_changed_after_compilation(precision: str, outside: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 8)
            self.gain = nn.Parameter(torch.rand(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.linear(x)) * self.gain.exp()
            return torch.linalg.inv(y.t() @ y + 4 * torch.eye(8)) + self.gain if outside else y

    model, x = Model().eval(), torch.randn(12, 16)
    compiled = sashiko.compile(model, (x,), precision=precision)
    tolerance = 1e-4 if precision == "fp32" else 2**-5  # bf16: some roundings of 2^-8, through an inverse
    for change in (lambda _: None, *CHANGES):
        change(model)
        with torch.no_grad():
            expected = model(x)
        assert_close(compiled(x), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_folded_weights_are_watched_too() -> None:
    """What is computed from weights alone is computed once, and again when one of them changes."""

    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x @ (self.weight * 2).t().contiguous().tanh())

    model, x = Folded().eval(), torch.randn(5, 6)
    compiled = sashiko.compile(model, (x,))
    with torch.no_grad():
        model.norm.running_mean.add_(1)
        assert_close(compiled(x), model(x))
        model.weight.neg_()
        assert_close(compiled(x), model(x))


@pytest.mark.parametrize("backend", [False, True])
@torch.no_grad()
def test_statistics_that_training_changes_are_watched(backend: bool) -> None:
    model, x = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)).eval(), torch.randn(5, 16)
    compiled = torch.compile(model, backend="sashiko") if backend else sashiko.compile(model, (x,))
    for _ in range(3):
        assert_close(compiled(x), model(x))
        model.train()(x)
        model.eval()


def quantized() -> tuple[nn.Module, torch.Tensor, sashiko.CompiledModel]:
    """A quantized model, an input, and the compiled form of it."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).eval()
    batches = [torch.randn(8, 16) for _ in range(4)]
    small = sashiko.quantize(model, batches)
    return small, batches[0], sashiko.compile(small, (batches[0],))


def change(model: nn.Module, wanted: Callable[[torch.Tensor], bool]) -> int:
    """Changes every tensor of the model that is wanted; returns how many."""
    found = [t for t in (*model.parameters(), *model.buffers()) if wanted(t)]
    with torch.no_grad():
        for tensor in found:
            tensor.copy_(tensor.flip(0) if tensor.dtype == torch.int8 else tensor * 2)
    return len(found)


@pytest.mark.parametrize("kind", ["weights", "scales and biases"])
def test_numbers_of_a_quantized_model_changed(kind: str) -> None:
    """Never stale: the new numbers are used, or the call says that they are part of the code."""
    small, x, compiled = quantized()
    before = small(x)
    step_size = float(before.abs().max()) / 127
    assert_close(compiled(x), before, rtol=0, atol=step_size)
    wanted = (lambda t: t.dtype == torch.int8) if kind == "weights" else (lambda t: t.is_floating_point())
    assert change(small, wanted) > 0
    after = small(x)
    assert (after - before).abs().max() > 10 * step_size, "the change is seen in the results"
    try:
        got = compiled(x)
    except sashiko.InputError as error:
        assert "changed after the model was compiled" in str(error) and "compile the model again" in str(error)
        assert kind == "scales and biases"
    else:
        assert_close(got, after, rtol=0, atol=float(after.abs().max()) / 127)


def test_weights_that_get_another_shape_are_refused() -> None:
    model, x = nn.Linear(8, 4).eval(), torch.randn(2, 8)
    compiled = sashiko.compile(model, (x,))
    model.weight.data = torch.randn(5, 8)
    with pytest.raises(sashiko.InputError, match=r"weight was .*\[4, 8\] .* is now .*\[5, 8\](.|\n)*compile the model again"):
        compiled(x)
