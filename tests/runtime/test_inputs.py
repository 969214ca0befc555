"""Whether tensors have elements in common, against the addresses of all of them."""

from __future__ import annotations

import random

import torch

from sashiko.diagnostics.errors import InputError
from sashiko.graph.types import TensorType, f32
from sashiko.runtime.inputs import refuse_shared
from sashiko.runtime.plan import InputTensor


def part(memory: torch.Tensor, steps: list[int], draw: random.Random) -> torch.Tensor:
    for axis, step in enumerate(steps):
        first = draw.randrange(memory.shape[axis])
        memory = memory[(slice(None),) * axis + (slice(first, first + draw.randint(1, 4), step),)]
    return memory


def addresses(tensor: torch.Tensor) -> set[int]:
    places = torch.zeros(tensor.shape, dtype=torch.int64)
    for axis, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        places += (torch.arange(size) * step).reshape(-1, *[1] * (tensor.dim() - axis - 1))
    return set((places * 4 + tensor.data_ptr()).flatten().tolist())


def test_slices_of_one_tensor() -> None:
    draw, found = random.Random(0), {True: 0, False: 0}
    for turn in range(2000):
        memory = torch.zeros((6, 7, 8) if turn % 2 else (3, 40))
        steps = [draw.choice((1, 1, 2, 3)) for _ in range(memory.dim())]
        one = part(memory, steps, draw)
        two = part(memory, steps if turn % 5 else steps[::-1], draw)
        inputs = [InputTensor(f"t{n}", TensorType(f32, tuple(t.shape)), n) for n, t in enumerate((one, two))]
        try:
            refuse_shared(inputs, (one, two), {0}, {0, 1})
            shared = False
        except InputError:
            shared = True
        assert shared == bool(addresses(one) & addresses(two)), (one.shape, one.stride(), two.shape, two.stride())
        found[shared] += 1
    assert min(found.values()) > 50
