"""Capturing leaves a model as it was, whatever its forward stores in its attributes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import sashiko
from sashiko.diagnostics.errors import InputError

X = torch.arange(12.0).view(4, 3) / 10
VERBS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": lambda model: sashiko.compile(model, (X,)),
    "dynamic": lambda model: sashiko.compile(model, (X,), dynamic_shapes=({0: torch.export.Dim.AUTO},)),
    "quantize": lambda model: sashiko.quantize(model, [(X,)], preset="int8-weight"),
    "both": lambda model: sashiko.quantize_and_compile(model, [(X,)], preset="int8-weight"),
}
verbs = pytest.mark.parametrize("verb", VERBS)
pytestmark = pytest.mark.filterwarnings("ignore:The tensor attribute")  # torch's, that they should be buffers


class Cached(nn.Module):
    """A table that is made when it is first needed, or too short."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "table", None) is None or len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1]) + 1.0
        return self.linear(x) * self.table[: x.shape[1]]


class Stored(Cached):
    """Attributes of every kind: replaced, filled, of a submodule, buffers, modules."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor = torch.zeros(1)
        self.seen: dict[str, Any] = {"all": [torch.zeros(1)], "pair": ([], {1})}
        self.register_buffer("sum", torch.zeros(3))
        self.act: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.seen["last"] = self.linear.last = x  # type: ignore[assignment]
        self.seen["all"].append(x)
        self.seen["pair"][0].append(x)
        self.seen["pair"][1].add(2)
        self.sum = self.sum + x.sum(0)
        if self.act is None:
            self.act = nn.Tanh()
        return super().forward(self.act(x)) + self.sum


@verbs
@torch.no_grad()
def test_what_is_cached_on_first_use_is_none_of_the_trace(verb: str) -> None:
    model = Cached().eval()
    for _ in range(2):
        assert_close(VERBS[verb](model)(X), Cached.forward(model, X), rtol=2e-2, atol=2e-2)
        assert type(model.table) is Tensor
        del model.table
    before = set(vars(model))
    VERBS[verb](model)
    assert set(vars(model)) == before
    table = model.table = torch.full((3,), 2.0)
    VERBS[verb](model)
    assert model.table is table
    assert_close(model(X), 2 * model.linear(X))


@verbs
@torch.no_grad()
def test_attributes_of_every_kind(verb: str) -> None:
    model = Stored().eval()
    last, total, seen = model.last, model.sum, model.seen
    names = [set(vars(module)) for module in model.modules()]
    VERBS[verb](model)
    assert [set(vars(module)) for module in model.modules()] == names
    assert model.last is last and model.sum is total and torch.equal(total, torch.zeros(3)) and model.seen is seen
    assert set(seen) == {"all", "pair"} and [*map(len, seen["all"])] == [1] and seen["pair"] == ([], {1})
    assert model.act is None and set(model._buffers) == {"sum"} and set(model._modules) == {"linear"}
    assert type(model(X)) is Tensor


def test_a_model_that_cannot_be_captured_is_left_as_it_was() -> None:
    class Branches(Cached):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            return found if found.sum() > 0 else -found

    model = Branches().eval()
    with pytest.raises(sashiko.Unsupported):
        sashiko.compile(model, (X,))
    assert "table" not in vars(model)


@verbs
def test_tensors_that_another_trace_has_left_are_refused(verb: str) -> None:
    model = nn.Sequential(Cached()).eval()
    torch.export.export(model, (X,), strict=False)
    with pytest.raises(InputError, match=r"0\.table is a FakeTensor(.|\n)*delete the attribute"):
        VERBS[verb](model)
    del model[0].table
    VERBS[verb](model)


def test_a_lazy_layer_without_numbers_stays_what_its_first_call_makes_of_it() -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d(affine=False, track_running_stats=False)).eval()
    assert sashiko.quantize(model, [(X,)])(X).shape == model(X).shape
    assert type(model[0]) is nn.BatchNorm1d


class Counts(nn.Module):
    """How often it was called, in one of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.linear.calls = 0  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        self.linear.calls += 1  # type: ignore[operator]
        return self.linear(x) * self.linear.calls


class Sizes(nn.Module):
    """What every call stores alike, or makes once."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.longest, self.scale, self.ready, self.last = 0, 1, 0.5, False, None

    def forward(self, x: Tensor) -> Tensor:
        self.width, self.longest, self.scale = x.shape[1], max(self.longest, x.shape[0]), x.shape[1] ** -0.5
        self.ready, self.last, self.made = True, x.shape[0], 1  # type: ignore[assignment]
        return x * self.scale


@verbs
@torch.no_grad()
def test_numbers_that_calls_change_are_spoken_of(verb: str) -> None:
    model = Counts().eval()
    with pytest.warns(UserWarning, match="takes linear.calls for constant"):
        made = VERBS[verb](model)
    assert model.linear.calls == 0 and not model._forward_hooks
    assert_close(made(X), model.linear(X), rtol=2e-2, atol=2e-2)
    assert torch.equal(model(X), model.linear(X)) and torch.equal(model(X), model.linear(X) * 2)


@torch.no_grad()
def test_numbers_that_calls_store_are_not(recwarn: pytest.WarningsRecorder) -> None:
    model = Sizes().eval()
    assert_close(sashiko.compile(model, (X,))(X), X * 3**-0.5)
    assert not [str(w.message) for w in recwarn if "sashiko" in str(w.message)] and model.width == 0 and not hasattr(model, "made")


class State(nn.Module):
    """With attributes of many kinds, for forward to change."""

    linear: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.flag, self.word = False, "a"
        self.last: int | None = None
        self.table: Tensor
        self.sum: Tensor
        self.stats: dict[Any, Any] = {"calls": 0, "inner": [1]}
        self.seen: list[Any] = []
        self.own = SimpleNamespace(calls=0, seen=[0])
        self.settings = Settings()
        self.register_buffer("sum", torch.zeros(3))


class Settings:
    """An object of a class of its own."""

    last: Any

    def __init__(self) -> None:
        self.calls = 0


class Toggles(State):
    def forward(self, x: Tensor) -> Tensor:
        self.flag = not self.flag
        return self.linear(x) * (2 if self.flag else 1)


class TakesTurns(State):
    """The two calls compute alike, and return another of two results."""

    def forward(self, x: Tensor) -> Tensor:
        self.flag = not self.flag
        both = self.linear(x), self.linear(-x)
        return both[self.flag]


class Spells(State):
    def forward(self, x: Tensor) -> Tensor:
        self.word += "a"
        return self.linear(x) * len(self.word)


class InDict(State):
    def forward(self, x: Tensor) -> Tensor:
        self.stats["calls"] += 1
        return self.linear(x) * self.stats["calls"]


class InList(State):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.shape[0])
        return self.linear(x) * len(self.seen)


class Inside(State):
    def forward(self, x: Tensor) -> Tensor:
        self.stats["inner"].append(1)
        return self.linear(x) * len(self.stats["inner"])


class InNamespace(State):
    def forward(self, x: Tensor) -> Tensor:
        self.own.seen.append(1)
        return self.linear(x) * len(self.own.seen)


class InObject(State):
    def forward(self, x: Tensor) -> Tensor:
        self.settings.calls += 1
        return self.linear(x) * self.settings.calls


class Tensors(State):
    """A mean over the last results, which are in a list."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [*self.seen, self.linear(x)][-3:]
        return torch.stack(self.seen).mean(0)


class IntoBuffer(State):
    """What differs is what is written into a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        self.flag = not self.flag
        self.sum.add_(x.sum(0) if self.flag else x.mean(0))
        return self.linear(x)


CHANGE = {
    Toggles: "flag", TakesTurns: "flag", Spells: "word", InDict: "stats", InList: "seen", Inside: "stats", InNamespace: "own",
    InObject: "settings", Tensors: "seen", IntoBuffer: "flag",
}


def told(record: pytest.WarningsRecorder) -> list[str]:
    return [str(w.message) for w in record if "sashiko" in str(w.message)]


def plain(model: State) -> object:
    held = model.flag, model.last, model.word, model.stats, model.seen, vars(model.own), vars(model.settings), model.sum.tolist()
    return copy.deepcopy(held)


@pytest.mark.parametrize("kind", CHANGE)
@torch.no_grad()
def test_state_that_each_call_changes_is_spoken_of(kind: type[State], recwarn: pytest.WarningsRecorder) -> None:
    model = kind().eval()
    before, own = plain(model), vars(model.own)
    compiled = sashiko.compile(model, (X,))
    assert [text.partition(" for ")[0] for text in told(recwarn)] == [f"sashiko takes {CHANGE[kind]}"] and "each call" in told(recwarn)[0]
    assert plain(model) == before and vars(model.own) is own and not model._forward_hooks
    assert_close(compiled(X), copy.deepcopy(model)(X))


class Starts(State):
    def forward(self, x: Tensor) -> Tensor:
        found = self.linear(x) * (2 if self.flag else 1)
        self.flag = True
        return found


@torch.no_grad()
def test_state_that_the_first_call_changes_is_spoken_of(recwarn: pytest.WarningsRecorder) -> None:
    model = Starts().eval()
    with pytest.warns(UserWarning, match=r"takes flag for constant as the first call finds it(.|\n)*call the model once before"):
        sashiko.compile(model, (X,))
    assert not model.flag
    model(X)
    recwarn.clear()
    assert_close(sashiko.compile(model, (X,))(X), model(X))
    assert not told(recwarn)


class Collects(State):
    """What no result depends on, beside a buffer that each call changes."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.shape[0])
        self.stats["calls"] += 1
        self.flag, self.last, self.word = not self.flag, x.shape[0], "b"
        self.settings.last = x.shape
        self.sum = self.sum + x.sum(0)
        return self.linear(x) + self.sum


class Fills(State):
    """Tables that the first call makes: in a dictionary by size, behind a flag, and in a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1]
        if size not in self.stats:
            self.stats[size] = torch.arange(size) + 1.0
        if not self.flag:
            self.table = torch.zeros(size)
            self.table[1:] = 2
            self.sum.copy_(torch.arange(3.0))
            self.flag, self.word = True, "made"
        return self.linear(x) * self.stats[size] + self.table + self.sum


@pytest.mark.parametrize("kind", (Collects, Fills))
@torch.no_grad()
def test_what_is_collected_or_made_once_is_not(kind: type[State], recwarn: pytest.WarningsRecorder) -> None:
    model = kind().eval()
    twin, before = copy.deepcopy(model), plain(model)
    compiled = sashiko.compile(model, (X,))
    assert not told(recwarn) and plain(model) == before
    for call in range(3):
        assert_close(compiled(X + call), twin(X + call))
