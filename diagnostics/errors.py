"""The exceptions of the project.

Every message says what happened, where in the user's code, and what to do about it. `docs/errors.md` is the manual page.
"""

from __future__ import annotations

# What to do about a place that no capture of the whole model gets past.
BY_PARTS = 'torch.compile(model, backend="sashiko") compiles the parts between such places, and submodules without one can be quantized'
# And about tensors whose rows have lengths of their own.
PADDED = "pad it, as by torch.nested.to_padded_tensor(x, 0.0)"
# And about sparse ones.
SPARSE = f"read the rows that its entries name, multiply them by these and put them together by index_add; or {BY_PARTS}"


class SashikoError(Exception):
    """Base of the exceptions that are our own.

    what: one sentence saying what happened.
    where: the place in the user's code or file, such as `model.py:12 in forward`; empty when there is none.
    hint: what the user can do; empty when there is nothing better than `what`.
    """

    def __init__(self, what: str, where: str = "", hint: str = "") -> None:
        # All three go into args, so that pickling (process pools, pytest-xdist) rebuilds the same error.
        super().__init__(what, where, hint)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


class Unsupported(SashikoError):
    """Something the compiler does not cover. Of an operation the driver makes a call of PyTorch's own, unless `strict=True`."""


class InvalidGraph(SashikoError):
    """A defect of the compiler itself: a pass, named by `where`, made a graph that the verifier rejects. Or a mistake in a user's rule."""


class CalibrationError(SashikoError):
    """The model cannot be calibrated: its data is empty, NaN or infinite, or does not fit its arguments, or it is in training mode."""


class ArtifactError(SashikoError):
    """A saved file cannot be used: damaged, made by something else, by a newer version, or for another machine."""


class InputError(SashikoError, TypeError, ValueError):
    """The arguments of a call do not fit: number, dtype, device or shape.

    It is also a TypeError and a ValueError, because code around a PyTorch module catches those.
    """


class Outdated(InputError):
    """The code was made for other numbers than the model has by now. Nothing of the call has been done."""
