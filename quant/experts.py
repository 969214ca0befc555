"""The matrices of experts with integer values, in the place of parameters [E, N, K], or [E, K, N], in floating point."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..diagnostics.errors import InputError
from ..graph.computed import computed
from .linear import converted, dequantized
from .scheme import WeightScheme
from .weights import QuantizedWeight

_MAKER = "transformers.integrations.moe"  # its decorator replaces forward by one that takes the parameters as they are called here
_NAMES = ("gate_up_proj", "up_proj", "down_proj")


def matrices(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a module that are matrices of experts, as [E, N, K] for N outputs and K inputs. Those of transformers, whose
    product takes them as a whole: `grouped_mm`, which is the usual one. Others have none."""
    forward = type(module).forward
    transposed = vars(module).get("is_transposed")
    if getattr(forward, "__globals__", {}).get("__name__") != _MAKER or not isinstance(transposed, bool):
        return {}
    found = {name: parameter for name in _NAMES if (parameter := module._parameters.get(name)) is not None and parameter.dim() == 3}
    return {name: p.detach().transpose(1, 2) if transposed else p.detach() for name, p in found.items()}


def of_integers(module: nn.Module) -> list[str]:
    """The names of such parameters that hold integers already."""
    made = module.get_submodule("parametrizations").named_children() if parametrize.is_parametrized(module) else ()
    return [name for name, chain in made if any(isinstance(each, IntegerMatrices) for each in chain.children())]


class IntegerMatrices(nn.Module):
    """What a parameter of experts is computed from: int8 [E N, K] and scales, float32 [E N] or [E N, groups]. A parametrization, as
    `torch.nn.utils.parametrize` has them; compiled, the integers are multiplied as they are."""

    zero_point: torch.Tensor

    def __init__(self, count: int, transposed: bool, dtype: torch.dtype, made: QuantizedWeight, scheme: WeightScheme) -> None:
        super().__init__()
        self.count, self.transposed, self.dtype, self.scheme = count, transposed, dtype, scheme
        self._made: QuantizedWeight | None = made
        # Always zero; the operators take one.
        self.register_buffer("zero_point", torch.zeros(made.scales.shape, dtype=torch.int64), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> IntegerMatrices:
        self.dtype = converted(self.dtype, fn, self.zero_point)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def right_inverse(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The integers and scales; called once, as it is put in the parameter's place."""
        made, self._made = self._made, None
        if made is None:
            what = "the matrices of experts are integers, to which nothing is assigned"
            raise InputError(what, hint="load the state_dict of a model that was quantized alike")
        return made.values, made.scales

    def forward(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The parameter that they stand for, in its shape and type; read only."""

        def whole() -> torch.Tensor:
            rows = dequantized(values, scales, self.zero_point, self.scheme)
            found = rows.to(self.dtype).view(self.count, -1, values.shape[1])
            return found.transpose(1, 2) if self.transposed else found

        return computed(whole)


def put(module: nn.Module, name: str, made: QuantizedWeight, scheme: WeightScheme) -> None:
    """Puts integers in the place of a parameter of a module."""
    parameter = module.get_parameter(name).requires_grad_(False)  # integers do not train
    integers = IntegerMatrices(len(parameter), bool(module.is_transposed), parameter.dtype, made, scheme)
    parametrize.register_parametrization(module, name, integers, unsafe=True)
