"""Element types: one object each. The first module that needs torch says which."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
from pathlib import Path

import pytest
import torch

from sashiko.graph import types
from sashiko.graph.types import BY_NAME, DType, i4


@pytest.mark.parametrize("dtype", [*BY_NAME.values(), i4], ids=str)
def test_copies_of_an_element_type_are_itself(dtype: DType) -> None:
    """They are compared by identity."""
    assert pickle.loads(pickle.dumps(dtype)) is dtype and copy.deepcopy((dtype,))[0] is dtype


def test_an_older_torch_than_declared_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = re.search(r'"torch>=(\d+)\.(\d+),', (Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert declared is not None
    major, minor = map(int, declared.groups())
    for older in (f"{major}.{minor - 1}.1+cpu", f"{major - 1}.13.0"):
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(older))
        with pytest.raises(ImportError, match=rf"needs torch {major}\.{minor} or newer, and this is torch {re.escape(older)}"):
            importlib.reload(types)  # says so before it defines anything
