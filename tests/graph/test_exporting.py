"""What torch says while it traces, and what it records."""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import sashiko
from sashiko.diagnostics.errors import BY_PARTS, InputError, Unsupported
from sashiko.graph.capture import export
from sashiko.graph.exporting import quiet, without_writes
from tests.driver.functions import Apply, at_most_ten
from tests.graph.captures import Causal, capture, run


class Heard(logging.Handler):
    """Keeps the messages of some loggers of torch, which may let none through to the root, and which others may have silenced."""

    def __init__(self, *names: str) -> None:
        super().__init__(logging.WARNING)
        self.loggers, self.messages = [logging.getLogger(name) for name in names], list[str]()
        self.before = [(logger.level, logger.disabled) for logger in self.loggers]
        self.silenced = logging.root.manager.disable

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.disable(logging.NOTSET)
        for logger in self.loggers:
            logger.addHandler(self)
            logger.setLevel(logging.WARNING)
            logger.disabled = False
        return self.messages

    def __exit__(self, *_: object) -> None:
        logging.disable(self.silenced)
        for logger, (level, disabled) in zip(self.loggers, self.before, strict=True):
            logger.removeHandler(self)
            logger.setLevel(level)
            logger.disabled = disabled


def test_what_torch_logs_and_deals_with_is_hidden() -> None:
    shapes = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    with Heard(shapes.name) as messages:
        with quiet():
            shapes.warning("Failed to reduce inequalities")  # as it does where a size is rounded up to a multiple
            shapes.warning("news")
        shapes.warning("Failed to reduce inequalities")
    assert messages == ["news", "Failed to reduce inequalities"]
    with Heard("torch._subclasses.fake_tensor", "torch") as messages, pytest.raises(InputError, match="mat1 and mat2 shapes"):
        export(nn.Linear(3, 3).eval(), (torch.randn(4),))
    assert messages == []


def test_transforms_of_functions_are_carried_out() -> None:
    model = Causal().eval()
    captured = capture(model, (torch.randn(2, 5, 4),), None, ({0: Dim.AUTO},))
    x = torch.randn(3, 5, 4)
    assert not captured.leftovers
    torch.testing.assert_close(run(captured, (x,)), model(x))


class Force(nn.Module):
    """The derivative of an energy, which torch.export does not follow and torch.compile leaves to PyTorch."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.energy = nn.Linear(4, 1) if learned else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.func.grad(lambda each: self.energy(each).tanh().sum())(x)
        return found


@pytest.mark.filterwarnings("ignore:A model attribute")
@pytest.mark.parametrize("learned", [True, False])
def test_what_torch_alone_gives_up_has_a_way_out(learned: bool) -> None:
    model, x = Force(learned).eval(), torch.randn(2, 4)
    with pytest.raises(Unsupported, match=r"cannot capture") as caught:
        export(model, (x,))
    assert BY_PARTS in caught.value.hint
    torch.testing.assert_close(torch.compile(model, backend="sashiko")(x), model(x))


class Canvas(nn.Module):
    """Writes to a slice of a tensor of its own, and to a buffer, which are read before and afterwards."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        canvas = torch.zeros_like(x)
        before = self.fc(canvas)
        canvas[:, 1:].copy_(nn.functional.gelu(x[:, 1:]))
        self.seen += canvas.sum(0)
        result: Tensor = self.fc(canvas) + before * self.seen
        return result


def test_without_writes_operations_stay_as_they_are() -> None:
    model, x = Canvas().eval(), torch.randn(3, 4)
    with torch.no_grad():
        program = torch.export.export(copy.deepcopy(model), (x,))
        functional = without_writes(program)
        assert without_writes(functional) is functional
        targets = [str(node.target) for node in functional.graph.nodes if node.op == "call_function"]
        assert targets.count("aten.linear.default") == 2 and "aten.gelu.default" in targets and "aten.slice_scatter.default" in targets
        made = functional.module()
        for _ in range(2):
            assert torch.equal(made(x), model(x))
        assert torch.equal(made.seen, model.seen) and bool(model.seen.any())


def test_assertions_of_data_with_a_message_are_made_in_each_call() -> None:
    x, n = torch.randn(3, 4), torch.tensor([1, 2])
    model = Apply(at_most_ten).eval()
    for fast in (sashiko.compile(model, (x, n)), sashiko.compile(sashiko.quantize(model, [(x, n)], progress=False), (x, n))):
        torch.testing.assert_close(fast(x, n + 1), model(x, n + 1))
        for wrong in ([1, 11], [-1, 2], [10, 10]):
            with pytest.raises(AssertionError):
                model(x, torch.tensor(wrong))
            with pytest.raises(RuntimeError, match="Runtime assertion failed"):
                fast(x, torch.tensor(wrong))


class Densities(nn.Module):
    def __init__(self, asked: bool | None) -> None:
        super().__init__()
        self.asked = asked

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normal = torch.distributions.Normal(x, x.exp(), validate_args=self.asked)
        density: Tensor = normal.log_prob(x + 1)
        return density, torch.distributions.Categorical(logits=x).entropy()


@pytest.mark.parametrize("asked", [None, True])
def test_distributions_look_at_numbers_where_they_are_asked_to(asked: bool | None) -> None:
    kind: Any = torch.distributions.Distribution
    before, model, x = kind._validate_args, Densities(asked).eval(), torch.randn(3, 4)
    kind.set_default_validate_args(True)  # Dynamo switches it off
    try:
        with pytest.raises(Unsupported, match="branches on its data") if asked else nullcontext():
            captured = capture(model, (x,))
            assert not captured.leftovers
            torch.testing.assert_close(run(captured, (x,)), model(x))
        assert kind._validate_args is True
    finally:
        kind.set_default_validate_args(before)
