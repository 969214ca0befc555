"""What `quantize` did, as data: nothing in here needs a graph or a model."""

from __future__ import annotations

from dataclasses import dataclass

from .scheme import Scheme


@dataclass(frozen=True)
class QuantSite:
    """One contraction to quantize.

    name: the module or parameter it belongs to, unique in the model, such as `encoder.layer.0.attention.self.query`.
    op: the ATen operator it was. node, activation: names in the exported graph, of the contraction and of its left factor.
    weight: qualified name of the parameter, or `expression of a, b` when it is computed from several.
    features: (K, N), inputs and outputs of the contraction. source: file:line in user code, empty when unknown.
    """

    name: str
    op: str
    node: str
    activation: str
    weight: str
    features: tuple[int, int]
    source: str


@dataclass(frozen=True)
class LeftOut:
    """One contraction that stays in floating point, and why."""

    name: str
    op: str
    reason: str
    source: str


@dataclass(frozen=True)
class Placement:
    """Every contraction of the program, in program order: quantized or left out with a reason."""

    sites: tuple[QuantSite, ...]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True)
class SiteResult:
    """The numbers chosen for a site. `low`..`high`: the range calibration chose; weight_sqnr: decibels."""

    site: QuantSite
    low: float
    high: float
    scale: float
    zero_point: int
    weight_sqnr: float


@dataclass(frozen=True)
class QuantRecord:
    """The whole result. `batches`: how many were seen. `notes`: what the user should know, one sentence each."""

    scheme: Scheme
    sites: tuple[SiteResult, ...]
    left_out: tuple[LeftOut, ...]
    batches: int
    notes: tuple[str, ...]
