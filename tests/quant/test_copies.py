"""Shallow copies of a quantized module: modules of the same tensors, each with a gate and a record. Deep ones are in test_quantize.py."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sashiko
from sashiko.diagnostics.errors import InputError, Unsupported
from sashiko.quant import QuantizedModule, quantize
from sashiko.quant.module import gate_of
from tests.quant.models import mlp


@pytest.fixture
def small() -> QuantizedModule:
    return quantize(mlp(), [torch.randn(5, 8) for _ in range(3)])


@torch.no_grad()
def test_a_copy_is_a_quantized_module(small: QuantizedModule, tmp_path: Path) -> None:
    calls = list[object]()
    small.register_forward_hook(lambda *call: calls.append(call))
    other, x = copy.copy(small), torch.randn(3, 8)
    assert isinstance(other, QuantizedModule) and gate_of(other) == gate_of(small) and other.record == small.record
    assert torch.equal(other(x), small(x)) and len(calls) == 2
    with pytest.raises(InputError, match="has size 9 in dimension 1"):
        other(torch.randn(3, 9))
    other.save(tmp_path / "copy.sashiko")
    assert torch.equal(sashiko.load(tmp_path / "copy.sashiko")(x), small(x))
    deep = copy.deepcopy(small).train()
    assert copy.copy(deep).training and {type(each).__name__ for each in (small, other, deep)} == {"QuantizedModule"}


@torch.no_grad()
def test_tensors_are_shared_and_what_is_set_is_not(small: QuantizedModule) -> None:
    other, record, x = copy.copy(small), small.record, torch.randn(3, 8)
    other.record = replace(record, notes=("changed",))
    other.train()
    assert small.record == record and not small.training
    assert [b.data_ptr() for b in other.buffers()] == [b.data_ptr() for b in small.buffers()]
    before = small(x)
    next(iter(other.buffers())).zero_()
    assert torch.equal(other(x), small(x)) and not torch.equal(small(x), before)


@torch.no_grad()
def test_element_types_stay_those_of_the_model(small: QuantizedModule) -> None:
    """A program in f32 around other weights would fail in some calls, and in no kernel give what it says."""
    x = torch.randn(3, 8)
    before = small(x)
    for convert, hint in (("bfloat16", r'precision="bf16"'), ("half", "quantize the converted model"), ("double", "the converted")):
        with pytest.raises(Unsupported, match=rf"of torch\.float32 cannot be converted to torch\.(.|\n)*{hint}"):
            getattr(small, convert)()
        with pytest.raises(Unsupported, match="cannot be converted"):
            getattr(torch.nn.Sequential(small), convert)()
    same = small.float().cpu().to(torch.float32)
    assert same is small and torch.equal(small(x), before)
    torch.testing.assert_close(sashiko.compile(small, (x,))(x), before)
