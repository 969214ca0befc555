"""Whether a model trains."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from sashiko.graph.modes import in_training


class Named(nn.ModuleDict):
    """A container of somebody else's, which may look at its flag."""


def test_torchs_own_containers_are_what_their_parts_are() -> None:
    normed = weight_norm(nn.Linear(2, 2).eval())
    assert normed.parametrizations.training and in_training(normed) == ""
    normed.parametrizations.weight[0].train()
    assert in_training(normed) == "parametrizations.weight.0"
    assert in_training(nn.Sequential(nn.Linear(2, 2).eval())) == ""
    assert in_training(nn.Sequential(nn.Linear(2, 2))) == "0"
    assert in_training(Named({"a": nn.Linear(2, 2).eval()})) == "Named"
