"""PyTorch's database of operators through `torch.compile(backend="sashiko")`: a spread by default, all of it when slow tests run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch

import sashiko
from tests.driver.opinfo import Outcome, check, operators

# Every kind of lowering: elementwise, broadcast, reduction, view, gather, product, and what is left to PyTorch.
SPREAD = (
    *("add", "where", "exp", "pow", "floor_divide", "nn.functional.gelu", "clamp", "isnan"),
    *("sum", "argmax", "std", "softmax", "nn.functional.layer_norm"),
    *("cat", "permute", "gather", "nn.functional.embedding", "nn.functional.pad"),
    *("matmul", "nn.functional.linear", "bmm", "nn.functional.conv2d", "nn.functional.avg_pool2d"),
    *("sort", "linalg.inv"),
)
LEFT = {"linalg.inv"}


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    return [f"{o.op} sample {o.sample}: {o.status}: {o.detail}" for o in outcomes if o.status in ("wrong", "error")]


@pytest.mark.parametrize("name", SPREAD)
def test_operator(name: str) -> None:
    found = [op for op in operators() if op.name == name]
    assert found, f"PyTorch's database has no {name}"
    outcomes = list(check(found[0], 1))
    assert [o.status for o in outcomes] == ["right"], failures(outcomes)
    assert bool(outcomes[0].left) == (name in LEFT), outcomes[0].left


def test_the_check_itself_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    (op,) = (op for op in operators() if op.name == "exp")
    real = sashiko.CompiledModel.call_flat
    monkeypatch.setattr(sashiko.CompiledModel, "call_flat", lambda self, flat: [r + 1 for r in real(self, flat)])
    assert [o.status for o in check(op, 1)] == ["wrong"]


def summary(outcomes: Sequence[Outcome]) -> str:
    """The table that `make opinfo` prints."""
    status = Counter(o.status for o in outcomes)
    native: dict[str, bool] = {}
    for o in outcomes:
        if o.status != "skipped":
            native[o.op] = native.get(o.op, True) and not o.left
    samples = [o for o in outcomes if o.status != "skipped"]
    reasons = Counter(name for o in samples for name in o.left)
    lines = [
        f"samples    {len(outcomes):5}: " + ", ".join(f"{status[s]} {s}" for s in ("right", "wrong", "error", "skipped")),
        f"samples    {sum(not o.left for o in samples):5} native as a whole, {sum(bool(o.left) for o in samples)} with something left",
        f"operators  {sum(native.values()):5} native as a whole, {len(native) - sum(native.values())} with something left",
        "left most often:",
        *(f"  {count:5} x {name}" for name, count in reasons.most_common(25)),
    ]
    return "\n".join([*lines, *failures(outcomes)])


@pytest.mark.slow
def test_every_operator() -> None:
    torch.set_num_threads(1)
    outcomes = [outcome for op in operators() for outcome in check(op)]
    print(f"\n{summary(outcomes)}")
    assert failures(outcomes) == []
    assert len(outcomes) > 1000
