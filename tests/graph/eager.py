"""Calls of ATen operations, what eager gives for them, and how far that may be off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Recorded:
    """One call of an ATen operation with real arguments."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def copied(item: Any) -> Any:
    if isinstance(item, range):
        return torch.arange(item.start, item.stop, item.step)
    return item.detach().clone() if isinstance(item, torch.Tensor) else item


def reference(call: Recorded) -> Any:
    """Eager's result.

    Transposed convolutions of narrow types, which some processors sum in these, are computed in f32 and rounded, remainders in f64: eager
    makes NaN of some that are in a vector, where the quotient is infinite in f32.
    """
    args, first = tree_map(copied, call.args), call.args[0]
    if call.target in (aten.fmod.Tensor, aten.remainder.Tensor) and (dtype := torch.result_type(*args)).is_floating_point:
        return call.target(*(a.double() for a in args)).to(dtype)
    if call.target is aten.convolution.default and args[6] and first.is_floating_point():
        wide = torch.promote_types(first.dtype, torch.float32)
        return call.target(*(a.to(wide) if isinstance(a, torch.Tensor) else a for a in args)).to(first.dtype)
    return call.target(*args, **tree_map(copied, call.kwargs))


def order_of_sums(call: Recorded) -> float:
    """What two orders of the sums of a convolution, of products that are added, or of a product of complex matrices, may differ by: k
    roundings each of the largest sum of magnitudes (Higham, 3.1). 0 for other calls."""
    if call.target is aten.addbmm.default and call.args[1].is_floating_point():
        added, left, right = (each.abs() for each in call.args)
        factors = {name: abs(value) for name, value in call.kwargs.items()}
        return float(2 * left.shape[0] * left.shape[2] * torch.finfo(left.dtype).eps / 2 * call.target(added, left, right, **factors).max())
    products = call.target in (aten.mm.default, aten.bmm.default) and call.args[0].is_complex()
    if not products and call.target is not aten.convolution.default:
        return 0.0
    left, right, *rest = call.args
    terms = left.shape[-1]
    if call.target is aten.convolution.default:
        terms, rest = right[0].numel(), [None if rest[0] is None else rest[0].abs(), *rest[1:]]
    magnitudes = call.target(left.abs(), right.abs(), *rest)
    # Narrow types are summed in f32, or eager's sum would be the less exact one by far. A complex product is a sum of two.
    eps = torch.finfo(torch.promote_types(left.dtype, torch.float32)).eps if left.is_floating_point() or left.is_complex() else 0.0
    return float((2 if left.is_complex() else 1) * 2 * terms * eps / 2 * magnitudes.max()) if magnitudes.numel() else 0.0


def rounded_fractions(call: Recorded) -> float:
    """Eager rounds the weights of neighbours to the type of the image, two products along each axis; here they are f32 at least."""
    image = call.args[0]
    return float((image.dim() - 2) * torch.finfo(image.dtype).eps * image.abs().max())


def cubic_weights(call: Recorded) -> float:
    """The weights of bicubic points are polynomials whose terms reach 6 and cancel: six roundings, in each of two computations that
    associate otherwise. A point has two such weights for each neighbour, and the weights of the others add up to less than 2."""
    image, cubic = call.args[0], "bicubic" in str(call.target) or call.args[2] == 2
    return float(6 * 6 * torch.finfo(image.dtype).eps * image.abs().max()) if cubic and image.numel() else 0.0


def own_error(call: Recorded) -> float:
    """How far eager itself is from the results in f64, eight times: two computations of a whole layer in f32 have errors of one size."""
    wide = tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in call.args)
    results = zip(*(tree_flatten(call.target(*args))[0] for args in (call.args, wide)), strict=True)
    return max(8 * float((a - b).abs().nan_to_num().max()) for a, b in results if a is not None)
