"""Parts of graphs as JSON: the same after a round trip, and an error for what a file may not name."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from enum import Enum
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from sashiko.diagnostics.errors import ArtifactError, Unsupported
from sashiko.graph import dims, encode
from sashiko.graph.attrs import Slot


def test_an_operation_that_this_torch_lacks() -> None:
    for name in ("aten::no_such_operation.default", "nowhere::add.Tensor", "aten::add.NoSuch", "rubbish"):
        with pytest.raises(ArtifactError):
            encode.target_from(name)


@pytest.mark.parametrize("dim", [0, 7, dims.symbol("s", 1, 9) * 3 + 2, dims.ceildiv(dims.symbol("s") * dims.symbol("t"), 16) * 16])
def test_expressions(dim: dims.Dim) -> None:
    again = encode.dim_from(json.loads(json.dumps(encode.dim_json(dim))))
    assert again == dim
    assert [(s.lo, s.hi) for s in sorted(dims.symbols(again), key=lambda s: s.name)] == [
        (s.lo, s.hi) for s in sorted(dims.symbols(dim), key=lambda s: s.name)
    ]


def test_arguments_of_operations() -> None:
    template = (
        None, True, 3, -2.5, "text", float("-inf"), [Slot(0), (Slot(1), [])], dims.symbol("s") + 1,
        torch.bfloat16, torch.device("cpu"), torch.strided, torch.channels_last,
    )
    assert encode.template_from(json.loads(json.dumps(encode.template_json(template), allow_nan=False))) == template


class Kind(Enum):
    A = 1


@pytest.mark.parametrize("tree", [{False: 2, True: 3}, {1.5: 1, None: 2}, 1, [1, (2, {"a": 3, "b": [4]})], (), OrderedDict(x=1), {}])
def test_trees(tree: Any) -> None:
    spec = pytree.tree_structure(tree)
    assert encode.tree_from(json.loads(json.dumps(encode.tree_json(spec)))) == spec


@pytest.mark.parametrize("tree", [{(2, 3): 1}, {("a", ("b",)): 1}, {Kind.A: 1}, {b"a": 1}, defaultdict(list, a=1), [{"a": {(1,): 1}}]])
def test_trees_that_would_not_come_back_the_same(tree: Any) -> None:
    with pytest.raises(Unsupported, match="cannot be written"):
        encode.tree_json(pytree.tree_structure(tree))


def test_trees_import_nothing() -> None:
    named = pytree.treespec_dumps(pytree.tree_structure(defaultdict(list, a=1)))
    with pytest.raises(ArtifactError, match="defaultdict"):
        encode.tree_from(named)
    enum = encode.tree_json(pytree.tree_structure({"a": 1})).replace('[\\"a\\"]', '[{\\"__enum__\\": true}]')
    assert "__enum__" in enum
    with pytest.raises(ArtifactError, match="cannot be read"):
        encode.tree_from(enum)


def test_types_of_other_packages_are_named() -> None:
    text = encode.tree_json(pytree.tree_structure([1])).replace("builtins.list", "transformers.there.Output")
    with pytest.raises(ArtifactError, match=r"import transformers\.there`"):
        encode.tree_from(text)
    with pytest.raises(Unsupported, match="cannot be written"):
        encode.tree_json(pytree.TreeSpec(set, None, []))
