"""Sizes that depend on numbers which a model keeps in buffers, as audio codecs keep the strides of their convolutions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.testing import assert_close

import sashiko
from sashiko.graph import numbers
from tests.driver.functions import Apply, left


class Padded(nn.Module):
    """A convolution of all samples: the last window is filled up."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 5, 2)
        self.register_buffer("size", torch.tensor(5), persistent=False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("step", torch.tensor(2))
        self.register_buffer("unused", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = torch.ceil((x.shape[-1] - self.size) / self.step + 1).to(torch.int64) - 1
        extra = frames * self.step + self.size - x.shape[-1]
        return self.conv(F.pad(x, (0, extra))) * self.scale  # type: ignore[arg-type]


class Decided(Padded):
    """A number decides what is done."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if self.step > 1 else x.flip(-1))  # type: ignore[operator]


class Shifted(Padded):
    """The number changes in each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step.add_(1)  # type: ignore[operator]
        return super().forward(x)


X = torch.randn(2, 3, 20)


def test_they_are_numbers_of_the_code_and_watched(tmp_path: Path) -> None:
    model = nn.Sequential(Padded(), nn.ReLU()).eval()
    before = list(model.state_dict()), type(model[0])
    compiled = sashiko.compile(model, X, strict=True)
    assert (list(model.state_dict()), type(model[0])) == before and model[0].step is model.get_buffer("0.step")
    assert_close(compiled(X), model(X))
    compiled.save(tmp_path / "padded")
    model.get_buffer("0.scale").fill_(2.0)  # no number of a size: as any weight
    model.get_buffer("0.unused").fill_(3)
    assert_close(compiled(X), model(X))
    model.get_buffer("0.step").fill_(3)
    with pytest.raises(sashiko.InputError, match=r"0\.step changed after the model was compiled"):
        compiled(X)
    model.get_buffer("0.step").fill_(2)
    model.get_buffer("0.scale").fill_(0.5)
    assert_close(sashiko.load(tmp_path / "padded")(X), model(X))


def test_many_of_them_are_counted() -> None:
    model = nn.Sequential(*(Padded() for _ in range(3)))
    with numbers.known(model) as found:
        for part in model:
            assert (part.size, part.step) == (5, 2)
    assert found.names() == "0.size, 0.step, 1.size and 3 more"


def test_quantized() -> None:
    model = nn.Sequential(Decided(), nn.Flatten(), nn.Linear(72, 4)).eval()
    small = sashiko.quantize(model, [X], progress=False)
    assert any("sizes depend on buffers" in note and "0.step" in note for note in small.record.notes)
    assert_close(small(X), model(X), atol=0.05, rtol=0.05)
    compiled = sashiko.compile(small, X)
    assert left(compiled) == []
    assert_close(compiled(X), small(X), atol=1e-2, rtol=1e-2)


def test_a_number_that_the_model_changes_is_refused() -> None:
    model = Shifted().eval()
    with pytest.raises(sashiko.Unsupported, match="depend") as refused:
        sashiko.compile(model, X)
    assert 'torch.compile(model, backend="sashiko")' in refused.value.hint
    assert type(model) is Shifted and list(model.state_dict())[:3] == ["scale", "step", "unused"]


@pytest.mark.parametrize(("shape", "axes"), [((200_000, 16), (0,)), ((4, 200_000), (1,)), ((40, 3, 5000), (0, 2)), ((100_003, 5), (0,))])
@pytest.mark.parametrize("free", [False, True])
def test_errors_of_long_sums_do_not_grow_with_their_length(shape: tuple[int, ...], axes: tuple[int, ...], free: bool) -> None:
    """Numbers of one sign, whose roundings add up where each is added to all before it: by some 200 units in the last place here."""
    x = torch.rand(shape, generator=torch.Generator().manual_seed(3))
    sizes = ((dict.fromkeys(range(x.dim()), Dim.AUTO),),) if free else None
    for function in (torch.sum, torch.var):
        exact = function(x.double(), axes)
        fast = sashiko.compile(Apply(lambda x, f=function: f(x, axes)).eval(), (x,), dynamic_shapes=sizes)
        assert_close(fast(x).double(), exact, rtol=20 * torch.finfo(torch.float32).eps, atol=0)
