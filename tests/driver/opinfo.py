"""PyTorch's own database of operators and sample inputs, run through `torch.compile(backend="sashiko")` against eager."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

import sashiko
from sashiko.driver.backend import _Inference
from tests.driver.functions import left

# What these compute is not a function of their inputs: fresh or uninitialized memory, random numbers.
NOT_COMPARABLE = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "rand_like",
    "randn",
    "randn_like",
    "randint",
    "randint_like",
    "normal",
    "bernoulli",
    "multinomial",
    "uniform",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "nn.functional.dropout",
    "nn.functional.dropout2d",
    "nn.functional.dropout3d",
    "nn.functional.alpha_dropout",
    "nn.functional.feature_alpha_dropout",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d",
    "nn.functional.rrelu",
    "nn.functional.scaled_dot_product_attention_dropout",
    "pca_lowrank",
    "svd_lowrank",
    "torch.ops.aten._safe_softmax.default_dropout",
    "torch.ops.aten._flash_attention_forward",
    "torch.ops.aten._efficient_attention_forward",
}


@dataclass(frozen=True)
class Outcome:
    """status: right, wrong, error, or skipped (eager itself does not run it, or its result is not determined).

    left: what PyTorch ran: names of ATen operations, "a whole graph" for one that the compiler refuses, "no graph" where Dynamo gives
    the backend nothing.
    """

    op: str
    sample: int
    status: str
    detail: str = ""
    left: tuple[str, ...] = ()


def operators() -> list[OpInfo]:
    """Every operator that takes float32 on the CPU."""
    return [op for op in op_db if torch.float32 in op.supported_dtypes("cpu")]


def full_name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


@contextmanager
def compiled_graphs() -> Iterator[list[sashiko.CompiledModel | None]]:
    """What the backend makes of the graphs it is given; None for one that it leaves to PyTorch as a whole."""
    made: list[sashiko.CompiledModel | None] = []
    real = _Inference._compiled

    def noted(self: _Inference, frozen: dict[int, torch.Tensor]) -> sashiko.CompiledModel | None:
        made.append(real(self, frozen))
        return made[-1]

    with patch.object(_Inference, "_compiled", noted):
        yield made


def left_to_pytorch(made: list[sashiko.CompiledModel | None]) -> tuple[str, ...]:
    """See Outcome."""
    names = [] if made else ["no graph"]
    for model in made:
        if model is None:
            names.append("a whole graph")
        else:
            names += left(model)
    return tuple(dict.fromkeys(names))


def check(op: OpInfo, samples: int = 2) -> Iterator[Outcome]:
    """The first `samples` float32 samples of an operator."""
    name = full_name(op)
    if op.name in NOT_COMPARABLE:
        yield Outcome(name, 0, "skipped", "its result is random or uninitialized")
        return
    iterator = op.sample_inputs("cpu", torch.float32, requires_grad=False)
    for number in range(samples):
        try:
            sample = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            yield Outcome(name, number, "skipped", f"no sample: {error}")
            return
        yield _check(op, sample, name, number)


def _check(op: OpInfo, sample: SampleInput, name: str, number: int) -> Outcome:
    def call(args: Any, kwargs: Any) -> Any:
        return op.op(*args, **kwargs)

    def arguments() -> tuple[Any, Any]:
        return pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, ((sample.input, *sample.args), sample.kwargs))

    try:
        torch.manual_seed(0)
        expected = call(*arguments())
    except Exception as error:
        return Outcome(name, number, "skipped", f"eager: {error}")
    torch._dynamo.reset()
    with compiled_graphs() as made:
        try:
            torch.manual_seed(0)
            got = torch.compile(call, backend="sashiko", dynamic=False)(*arguments())
        except Exception as error:
            return Outcome(name, number, "error", f"{type(error).__name__}: {error}"[:600])
    return replace(_compared(got, expected, name, number), left=left_to_pytorch(made))


def _compared(got: Any, expected: Any, name: str, number: int) -> Outcome:
    try:
        torch.testing.assert_close(got, expected, equal_nan=True, rtol=2e-4, atol=2e-5)
    except AssertionError as error:
        return Outcome(name, number, "wrong", str(error)[:600])
    except Exception as error:
        return Outcome(name, number, "right" if type(got) is type(expected) else "wrong", str(error)[:200])
    return Outcome(name, number, "right")
