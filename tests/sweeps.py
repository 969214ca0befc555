"""What `make test` leaves to `make sweep`: a check of one mechanism with types, machines and models beyond those that show it working."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def swept(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Values for `@pytest.mark.parametrize`, in their order, tuples where there are several names; those not among `kept` are for
    `make sweep`."""
    rest = pytest.mark.sweep
    return [v if v in kept else pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=rest) for v in values]


def left_to_sweep(parameters: ParameterSet) -> ParameterSet:
    """The same parameters, for `make sweep`."""
    return parameters._replace(marks=(*parameters.marks, pytest.mark.sweep))
