"""Weights so small that their products with bytes are added in 16 bits.

VPMADDUBSW multiplies unsigned bytes by signed ones and adds the products of two neighbours in 16 bits, where it saturates: products of
any u8 and any i8 do not fit. Of weights that are small enough two do. Where four fit, the sums that two of these instructions give are
added in 16 bits, too. Those four are two neighbours along k and the two that come four later, in each unit of eight.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch.utils.weak import WeakTensorKeyDictionary

MOST = 128
"""For the sum of the positive integers that are added in 16 bits, and for that of the negative ones: 128 * 255 < 2^15."""
COUNTS = (4, 2, 1)
"""How many products may be added in 16 bits; 1: none are."""
_UNIT = 8  # neighbours along k that make whole sums
_CHUNK = 1 << 18  # elements that are looked at together: so many stay in a cache
_SEEN: MutableMapping[torch.Tensor, tuple[int, int]] = WeakTensorKeyDictionary()
"""The version that a weight had when it was looked at, and what was found: a weight is asked about again when it is packed."""


def columns(sums: torch.Tensor, count: int) -> torch.Tensor:
    """The columns [..., count] of a weight that are added in the sums of these numbers [...]; the last ones may be beyond its end."""
    if count < 4:
        return count * sums[..., None] + torch.arange(count)
    return _UNIT * (sums[..., None] // 2) + 2 * (sums[..., None] % 2) + torch.tensor([0, 1, 4, 5])


def largest(weight: torch.Tensor, count: int) -> torch.Tensor:
    """For each row of a weight [N, K] in floating point the largest sum of the positive numbers among `count`, or of the negative ones."""
    if not weight.shape[1]:
        return weight.new_zeros(len(weight))
    parts = torch.split(weight, max(1, _CHUNK // weight.shape[1]))
    return torch.cat([torch.maximum(*(_positive(signed, count).amax(1) for signed in (part, -part))) for part in map(_padded, parts)])


def limited(values: torch.Tensor, real: torch.Tensor, count: int) -> torch.Tensor:
    """Integers [N, K], in floating point, of which sums of `count` fit: what they are too large by is taken off those that are rounded up
    the most from `real`, which gives the nearest ones that fit."""
    result, exact = _padded(values).clone(), _padded(real)
    for sign in (1, -1):
        rows, sums = (_positive(result * sign, count) > MOST).nonzero(as_tuple=True)
        if not len(rows):
            continue
        at = rows[:, None], columns(sums, count)
        some, wanted = result[at] * sign, exact[at] * sign
        while bool((excess := some.clamp_min(0).sum(-1) > MOST).any()):
            most = torch.where(some > 0, some - wanted, -torch.inf).argmax(-1, keepdim=True)
            some.scatter_add_(-1, most, -excess[:, None].to(some.dtype))
        result[at] = some * sign
    return result[:, : values.shape[1]]


def _padded(weight: torch.Tensor) -> torch.Tensor:
    """A weight with zeros that fill the last unit."""
    return torch.nn.functional.pad(weight, (0, -weight.shape[1] % _UNIT))


def _positive(padded: torch.Tensor, count: int) -> torch.Tensor:
    """The sums [N, K / count] of the positive numbers of whole units, in the order of `columns`: of neighbours, which whole vectors add."""
    sums = padded.clamp_min(0)
    if count > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    if count > 2:
        units = sums.view(len(sums), -1, 2, 2)
        sums = (units[:, :, 0] + units[:, :, 1]).flatten(1)
    return sums


def how_many(weight: torch.Tensor) -> int:
    """How many products with a weight [N, K] (i8) are added in 16 bits, of `COUNTS`, whatever unsigned bytes they are products with."""
    if weight.is_inference():
        return _counted(weight)
    if weight not in _SEEN or _SEEN[weight][0] != weight._version:
        _SEEN[weight] = weight._version, _counted(weight)
    return _SEEN[weight][1]


def _counted(weight: torch.Tensor) -> int:
    n, k = weight.shape
    found = COUNTS[0]
    rows = max(1, _CHUNK // max(k, 1))
    for begin in range(0, n if k else 0, rows):
        part = _padded(weight[begin : begin + rows]).contiguous()
        found = min(found, _how_many(part))
        if found == 1:
            break
    return found


def _how_many(weight: torch.Tensor) -> int:
    """Of a weight whose rows are whole units: four bytes that are not negative are one word, and of two of these sums lie side by side."""
    if int(weight.min()) < -127:
        return 1
    found = COUNTS[0]
    for part in (weight, -weight):
        words = part.clamp_min(0).view(torch.int32).view(-1, 2)
        pairs = (words & 0x00FF00FF) + (words >> 8 & 0x00FF00FF)
        if found == 4 and _most(pairs[:, 0] + pairs[:, 1]) <= MOST:
            continue
        found = 2
        if _most(pairs) > MOST:
            return 1
    return found


def _most(words: torch.Tensor) -> int:
    """The largest half of a word."""
    return max(int((words & 0xFFFF).max()), int((words >> 16).max()))
