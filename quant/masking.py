"""Which positions of an activation count: those of padding must not shape its range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..diagnostics.errors import CalibrationError, InputError
from .module import Gate, TensorLeaf

USUAL = "attention_mask"
"""The argument that is the mask where nobody says which one is."""


@dataclass(frozen=True)
class MaskArgument:
    """The argument of a program that is 1 at [batch, position] where a position counts and 0 where it is padding.

    certain: it was named by the user, so that other values in it are a fault; otherwise they only mean that it is no such mask.
    fixed: which of its two dimensions have one size for good in the program.
    """

    name: str
    certain: bool
    fixed: tuple[bool, bool]

    def read(self, values: object, number: int) -> torch.Tensor | None:
        """The mask as bool, from the argument of batch `number`; None when it turns out to be no mask."""
        if isinstance(values, torch.Tensor) and values.dim() == 2 and bool(((values == 0) | (values == 1)).all()):
            return values.to(torch.bool)
        if self.certain:
            what = f"batch {number}: the mask {self.name!r} holds other values than 0 and 1"
            raise CalibrationError(what, "quantize(mask=...)", "1 where a position counts, 0 where it is padding")
        return None

    def on(self, mask: torch.Tensor, x: torch.Tensor, node: Node) -> torch.Tensor | None:
        """The mask for the leading dimensions of an activation, or None when its layout does not tell which positions are whose."""
        declared = getattr(node.meta.get("val"), "shape", x.shape)
        # A symbol that export found to be constant prints as its number.
        return fitted(mask, self.fixed, x.shape, [str(d).isdecimal() for d in declared])


def mask_argument(gate: Gate, wanted: str | bool | None) -> MaskArgument | None:
    """wanted: the name of an argument; None: `attention_mask`, where there is one of two dimensions; False: no mask.

    Raises InputError for a name that the program does not take, and for an argument that is not a tensor of two dimensions.
    """
    if wanted is False:
        return None
    if wanted is not None and not isinstance(wanted, str):
        raise InputError(f"mask={wanted!r} is not the name of an argument", "quantize(mask=...)", f"choose among {', '.join(gate.names)}")
    name = wanted or USUAL
    leaf = next((leaves[0] for argument, leaves in gate.arguments if argument == name and [leaf.path for leaf in leaves] == [""]), None)
    if isinstance(leaf, TensorLeaf) and len(leaf.dims) == 2:
        batch, position = (isinstance(d, int) for d in leaf.dims)
        return MaskArgument(name, wanted is not None, (batch, position))
    if wanted is None:
        return None
    what = "is not a tensor of [batch, position]" if name in gate.names else "is not an argument of the batches"
    raise InputError(f"the mask {name!r} {what}", "quantize(mask=...)", f"choose among {', '.join(gate.names)}")


def fitted(
    mask: torch.Tensor, mask_fixed: tuple[bool, bool], shape: Sequence[int], fixed: Sequence[bool]
) -> torch.Tensor | None:
    """A mask [batch, position] over the leading dimensions of an activation, with 1 for a dimension it does not depend on; or None.

    Known layouts: [batch, position, ...], [batch * position, ...], [batch, heads, position, features], [batch, heads, features, position].
    fixed: dimensions with one size for good; such a one is no batch or position where the mask's may vary, even if the sizes agree.
    """

    def agree(axis: int, of_mask: int) -> bool:
        return shape[axis] == mask.shape[of_mask] and fixed[axis] == mask_fixed[of_mask]

    if len(shape) == 4 and agree(1, 1) and agree(2, 1):
        return None
    if len(shape) >= 3 and agree(0, 0) and agree(1, 1):
        return mask
    if len(shape) == 2 and shape[0] == mask.numel() and fixed[0] == all(mask_fixed):
        return mask.reshape(-1)
    if len(shape) == 4 and agree(0, 0) and agree(2, 1):
        return mask[:, None, :]
    if len(shape) == 4 and agree(0, 0) and agree(3, 1):
        return mask[:, None, None, :]
    return None
