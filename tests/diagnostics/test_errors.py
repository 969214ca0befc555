"""The exceptions carry what, where and hint, and survive pickling."""

from __future__ import annotations

import pickle

import pytest

from sashiko.diagnostics.errors import ArtifactError, CalibrationError, InputError, InvalidGraph, Outdated, SashikoError, Unsupported

LEAVES = [Unsupported, InvalidGraph, CalibrationError, ArtifactError, InputError, Outdated]


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves(leaf: type[SashikoError]) -> None:
    error = leaf("what happened", "model.py:3", "do this")
    assert isinstance(error, SashikoError)
    assert (error.what, error.where, error.hint) == ("what happened", "model.py:3", "do this")
    assert str(error) == "what happened\n  where: model.py:3\n  hint: do this"


def test_empty_parts_are_left_out() -> None:
    assert str(Unsupported("what")) == "what"
    assert str(Unsupported("what", hint="do")) == "what\n  hint: do"


@pytest.mark.parametrize("leaf", LEAVES)
def test_pickle_keeps_everything(leaf: type[SashikoError]) -> None:
    copy = pickle.loads(pickle.dumps(leaf("a", "b", "c")))
    assert type(copy) is leaf and (copy.what, copy.where, copy.hint) == ("a", "b", "c")


@pytest.mark.parametrize("builtin", [TypeError, ValueError])
def test_input_errors_are_builtin_errors_too(builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match="3 arguments"):
        raise InputError("3 arguments were given")


def test_only_input_errors_are_builtin_errors() -> None:
    assert not issubclass(SashikoError, (TypeError, ValueError))
