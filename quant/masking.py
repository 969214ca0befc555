"""Which positions of an activation count: those of padding must not shape its range."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from ..diagnostics.errors import CalibrationError, InputError
from ..graph.memory_format import known
from .module import FreeDim, Gate, TensorLeaf

USUAL = ("attention_mask", "decoder_attention_mask")
"""The arguments that are masks where nobody says which one is."""
DECODER = "decoder_"
"""What the names of a decoder's own arguments begin with in a model that has an encoder, too."""
ANY = ""
"""A size that may vary, and of which nothing is known that tells it from others."""


@dataclass(frozen=True)
class MaskArgument:
    """The argument of a program that is 1 at [batch, position] where a position counts and 0 where it is padding.

    certain: it was named by the user, so that other values in it are a fault; otherwise they only mean that it is no such mask.
    dims: the symbols of its two dimensions where other arguments have these, too; else ANY, or None for one size for good.
    """

    name: str
    certain: bool
    dims: tuple[str | None, str | None] = (ANY, ANY)

    def read(self, values: object, batch: str) -> torch.Tensor | None:
        """The mask as bool, from the argument of the batch of that name; None when it turns out to be no mask."""
        if isinstance(values, torch.Tensor) and values.dim() == 2 and bool(((values == 0) | (values == 1)).all()):
            return values.to(torch.bool)
        if self.certain:
            what = f"{batch}: the mask {self.name!r} holds other values than 0 and 1"
            raise CalibrationError(what, "quantize(mask=...)", "1 where a position counts, 0 where it is padding")
        return None

    def on(self, mask: torch.Tensor, x: torch.Tensor, node: Node) -> torch.Tensor | None:
        """The mask for the leading dimensions of an activation, or None when its layout does not tell which positions are whose."""
        declared = getattr(node.meta.get("val"), "shape", x.shape)
        turned = len(x.shape) == 2 and self._turned(mask, node)
        return fitted(mask, self.dims, x.shape, [_symbols(d) for d in declared], turned)

    def _turned(self, mask: torch.Tensor, node: Node) -> bool:
        """Whether positions went before the batch in what an activation's rows were joined from, the nearest that begins with either."""
        batch, position = (dim or str(size) for dim, size in zip(self.dims, mask.shape, strict=True))
        joined, seen = [node], {node}
        for each in joined:
            for operand in (n for n in each.all_input_nodes if n.op != "get_attr"):
                first = _first(operand)
                if first in (batch, position):
                    return first != batch
                if first == _first(node) and operand not in seen:
                    seen.add(operand)
                    joined.append(operand)
        return False

    def spread(self, mask: torch.Tensor, node: Node) -> bool:
        """Whether an activation has positions of this mask, as far as its sizes in the exported call tell."""
        position, declared = self.dims[1], getattr(node.meta.get("val"), "shape", ())
        return any(position in _symbols(size) if position else known(size) == mask.shape[1] for size in declared)


def _first(node: Node) -> str:
    """The leading size as it was exported; empty for what has none."""
    return str(next(iter(getattr(node.meta.get("val"), "shape", ())), ""))


def _symbols(size: int | torch.SymInt) -> frozenset[str]:
    """What a size is computed from; of one that export found to be constant, nothing."""
    return frozenset(map(str, size.node.expr.free_symbols)) if isinstance(size, torch.SymInt) else frozenset()


def mask_arguments(gate: Gate, wanted: str | bool | None) -> tuple[MaskArgument, ...]:
    """wanted: the name of an argument; None: those of `USUAL` that there are, of two dimensions; False: no mask.

    Raises InputError for a name that the program does not take, and for an argument that is not a tensor of two dimensions.
    """
    if wanted is False:
        return ()
    if wanted is not None and not isinstance(wanted, str):
        raise InputError(f"mask={wanted!r} is not the name of an argument", "quantize(mask=...)", f"choose among {', '.join(gate.names)}")
    found: list[MaskArgument] = []
    for name, leaves in gate.arguments:
        leaf = leaves[0] if [leaf.path for leaf in leaves] == [""] else None
        if name in ((wanted,) if wanted else USUAL) and isinstance(leaf, TensorLeaf) and len(leaf.dims) == 2:
            others = {dim.symbol for dim in replace(gate, arguments=tuple(a for a in gate.arguments if a[0] != name)).free}
            batch, position = (_tied(dim, others) for dim in leaf.dims)
            found.append(MaskArgument(name, wanted is not None, (batch, position)))
    if found or wanted is None:
        return tuple(sorted(found, key=lambda argument: argument.dims[1] == ANY))  # what is known goes before what only fits
    what = "is not a tensor of [batch, position]" if wanted in gate.names else "is not an argument of the batches"
    raise InputError(f"the mask {wanted!r} {what}", "quantize(mask=...)", f"choose among {', '.join(gate.names)}")


def observed_whole(gate: Gate, masks: Sequence[MaskArgument], node: Node) -> bool:
    """Whether padding counts in an activation, though there are masks: its layout does not tell where it is."""
    sizes = [known(size) for size in getattr(node.meta.get("val"), "shape", ())]
    leaves = {name: leaf for name, (leaf, *_) in gate.arguments if isinstance(leaf, TensorLeaf)}
    seen = [(m, torch.ones([d if isinstance(d, int) else d.seen for d in leaves[m.name].dims])) for m in masks]
    if None in sizes or not any(m.spread(mask, node) for m, mask in seen):
        return False
    x = torch.empty([size or 0 for size in sizes], device="meta")
    return all(m.on(mask, x, node) is None for m, mask in seen)


def _tied(dim: int | FreeDim, others: Set[str]) -> str | None:
    """One of `MaskArgument.dims`. Alone, a symbol tells nothing: the model may never bring the mask and what it belongs to together."""
    if isinstance(dim, int):
        return None
    return dim.symbol if dim.symbol in others and dim.symbol.isidentifier() else ANY


def fitted(
    mask: torch.Tensor,
    mask_dims: tuple[str | None, str | None],
    shape: Sequence[int],
    symbols: Sequence[Set[str]],
    turned: bool = False,
) -> torch.Tensor | None:
    """A mask [batch, position] over the leading dimensions of an activation, with 1 for a dimension it does not depend on; or None.

    Known layouts: [batch, position, ...], [batch * position, features], [batch, heads, position, features], [batch, heads, features,
    position], and the first two with positions before the batch, as torch's own attention has them; turned: the second is one of these.
    mask_dims: as in `MaskArgument`. symbols: what each dimension is computed from; nothing where it has one size for good. Sizes that agree
    are not enough: heads are no positions, and those of a decoder are not its encoder's.
    """

    def akin(axis: int, dim: str | None) -> bool:
        return not symbols[axis] if dim is None else dim in symbols[axis] or (dim == ANY and bool(symbols[axis]))

    def agree(axis: int, of_mask: int) -> bool:
        return shape[axis] == mask.shape[of_mask] and akin(axis, mask_dims[of_mask])

    free = [dim for dim in mask_dims if dim is not None]
    if len(shape) == 4 and agree(1, 1) and agree(2, 1):
        return None
    if len(shape) >= 3 and agree(0, 0) and agree(1, 1):
        return mask
    if len(shape) == 2 and shape[0] == mask.numel() and bool(symbols[0]) == bool(free) and all(akin(0, dim) for dim in free):
        return (mask.t() if turned else mask).reshape(-1)
    if len(shape) == 4 and agree(0, 0) and agree(2, 1):
        return mask[:, None, :]
    if len(shape) == 4 and agree(0, 0) and agree(3, 1):
        return mask[:, None, None, :]
    if len(shape) >= 3 and agree(0, 1) and agree(1, 0):
        return mask.t()
    return None
