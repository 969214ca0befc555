"""Element types: one object each."""

from __future__ import annotations

import copy
import pickle

import pytest

from sashiko.graph.types import BY_NAME, DType, i4


@pytest.mark.parametrize("dtype", [*BY_NAME.values(), i4], ids=str)
def test_copies_of_an_element_type_are_itself(dtype: DType) -> None:
    """They are compared by identity."""
    assert pickle.loads(pickle.dumps(dtype)) is dtype and copy.deepcopy((dtype,))[0] is dtype
