"""Windows over images as the left operand of a product, for tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sashiko.graph.dims import Dim
from sashiko.graph.types import DType, i8
from sashiko.kernels.spec import BATCH, GemmSpec, Pieces, Strides
from sashiko.kernels.windows import strided
from sashiko.stitch.loops import Body
from tests.kernels.products import acc_of, plain_store


@dataclass(frozen=True)
class Images:
    """Windows of `taps` lines of `across` places, which are `apart` from each other, one every `step`, over images of height x width,
    channels last. groups: of the channels, each of which has a weight of its own."""

    count: int
    height: int
    width: int
    channels: int
    taps: int = 3
    across: int = 3
    step: int = 1
    apart: int = 1
    groups: int = 1

    @property
    def lines(self) -> int:
        return (self.height - self.apart * (self.taps - 1) - 1) // self.step + 1

    @property
    def places(self) -> int:
        return (self.width - self.apart * (self.across - 1) - 1) // self.step + 1

    @property
    def rows(self) -> int:
        return self.count * self.lines * self.places

    @property
    def part(self) -> int:
        return self.channels // self.groups

    @property
    def k(self) -> int:
        return self.taps * self.across * self.part

    @property
    def pieces(self) -> Pieces:
        pixel, line = self.channels, self.width * self.channels
        shape, steps = (self.count, self.lines, self.places), (self.height * line, self.step * line, self.step * pixel)
        first = self.count == 1
        row = strided(shape[first:], steps[first:])
        if self.groups == self.apart == 1:
            return Pieces(row, BATCH * line, self.across * pixel)
        return Pieces(row, strided((self.taps, self.across), (self.apart * line, self.apart * pixel)), self.part)

    def spec(self, dtype: DType, n: int, epilogue: Body | None = None, rows: Dim | None = None) -> GemmSpec:
        """The columns of a group are n."""
        body, rhs = plain_store(n, acc_of(dtype)) if epilogue is None else epilogue, dtype if dtype.is_float else i8
        m, many = self.rows if rows is None else rows, self.groups
        lhs = Strides(BATCH * self.part if many > 1 else 0, 0)
        return GemmSpec(dtype, rhs, m, n, self.k, lhs, body, many, lhs_pieces=self.pieces, weights=many)

    def windows(self, images: torch.Tensor) -> torch.Tensor:
        """[groups, rows, k]"""
        spans = self.apart * (self.taps - 1) + 1, self.apart * (self.across - 1) + 1
        found = images.unfold(1, spans[0], self.step).unfold(2, spans[1], self.step)[..., :: self.apart, :: self.apart]
        found = found.unflatten(3, (self.groups, self.part)).permute(3, 0, 1, 2, 5, 6, 4)
        return found.reshape(self.groups, self.rows, self.k)
