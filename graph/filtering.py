"""Which convolutions are computed by minimal filtering (`kernels/winograd.py`): with windows of 3 x 3, one for each place of an image."""

from __future__ import annotations

from dataclasses import dataclass

_LEAST_WIDTH = 16  # channels, and columns: for fewer the sums around the products take what these save
_MOST_WASTE, _MOST_WASTE_INTEGERS = 1.8, 1.2  # results that patches have, by those that there are
_LANES = 8  # channels are whole vectors of some size
_MOST_CHANNELS = 1024  # of more, so few patches fit a block that the weights, which have grown, are read too often
_FEW = 12  # patches that reading the grown weights from beyond L2 does not pay for


@dataclass(frozen=True)
class Filtering:
    """height, width: places of an image, of which there are so many `images`. channels, columns: that are read and written. apart: places
    from tap to tap. integers: bytes, which are multiplied as 16 bits, half as many in an instruction; floats are multiplied as they are."""

    height: int
    width: int
    channels: int
    columns: int
    integers: bool
    apart: int = 1
    images: int = 1

    @property
    def patches(self) -> int:
        """Of 2 x 2 results, which lie `apart`."""
        return patches(self.height, self.apart) * patches(self.width, self.apart)

    @property
    def waste(self) -> float:
        return 4 * self.patches / (self.height * self.width)

    def why_not(self, far: bool) -> str | None:
        """Why products take less time. far: whether the weight is larger than L2."""
        if self.channels > _MOST_CHANNELS:
            return f"is for at most {_MOST_CHANNELS} channels"
        if self.channels % _LANES or min(self.channels, self.columns) < _LEAST_WIDTH:
            return f"is for channels in vectors of {_LANES} and at least {_LEAST_WIDTH} channels and columns"
        if far and self.patches * self.images < _FEW:
            return f"is for at least {_FEW} patches where the weight is larger than L2"
        most = _MOST_WASTE_INTEGERS if self.integers else _MOST_WASTE
        return f"computes {self.waste:.2f} times as many results as there are" if self.waste > most else None


def patches(places: int, apart: int) -> int:
    """How many patches there are along an axis."""
    return -(-places // (2 * apart)) * apart
