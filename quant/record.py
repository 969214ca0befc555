"""What `quantize` did, as data: nothing in here needs a graph or a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .scheme import Operation, OpScheme, Scheme


@dataclass(frozen=True)
class QuantSite:
    """One operation to quantize.

    name: the module or parameter it belongs to, unique in the model, such as `encoder.layer.0.attention.self.query`.
    operation: which kind it is; op: the ATen operator it was. scheme: what happens to it.
    node: its name in the exported graph. activations: names of the operands that are not constant: the left factor of a linear and the
        input of a convolution, both factors of a matmul, query, key and value; none for an embedding and a
        recurrent layer, whose hidden state is inside.
    weight: qualified name of the parameter, or `expression of a, b` when it is computed from several; empty without a weight.
    features: (K, N), inputs and outputs of a product with a weight, rows and columns of a table, (0, 0) without a weight.
    source: file:line in user code, empty when unknown.
    integers: whether it multiplies bytes, and so many that small weights (`graph.sums16`) are worth it on machines that are faster with
        them. Convolutions from one channel each are sums in f32.
    owner: the name without the number that tells it from others of the same module or parameter; empty in older files.
    """

    name: str
    operation: Operation
    op: str
    scheme: OpScheme
    node: str
    activations: tuple[str, ...]
    weight: str
    features: tuple[int, int]
    source: str
    integers: bool = True
    owner: str = ""


@dataclass(frozen=True)
class LeftOut:
    """One operation that stays as it was, and why."""

    name: str
    op: str
    reason: str
    source: str


@dataclass(frozen=True)
class Placement:
    """Every operation of the program that could be quantized, in program order: a site, or left out with a reason."""

    sites: tuple[QuantSite, ...]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True)
class Histogram:
    """How often values of an activation were seen: counts of equal bins over [low, high)."""

    low: float
    high: float
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(count < 0 for count in self.counts):
            raise ValueError("a histogram counts something less than 0 times")
        if not any(self.counts):
            raise ValueError("a histogram counts nothing")


@dataclass(frozen=True)
class ActivationRange:
    """The numbers chosen for one activation. low..high: the reals that its integers cover. histogram: None without one."""

    low: float
    high: float
    scale: float
    zero_point: int
    histogram: Histogram | None = None


@dataclass(frozen=True)
class SiteResult:
    """The numbers chosen for a site.

    ranges: one for each activation that is quantized with a fixed scale. weight_sqnr: decibels, None without an integer weight.
    result_db: signal-to-noise ratio of its own result, given exact inputs; error_db: of the model's results with this site alone
        quantized; both in decibels, None where it was not measured.
    seconds: measured time of the operation in each precision that was timed, by the label of its scheme.
    """

    site: QuantSite
    ranges: tuple[ActivationRange, ...]
    weight_sqnr: float | None
    result_db: float | None = None
    error_db: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """What the user measured the model by. floating: of the model itself; quantized: of the result."""

    name: str
    floating: float
    quantized: float


@dataclass(frozen=True)
class QuantRecord:
    """The whole result. `batches`: how many were seen. `notes`: what the user should know, one sentence each. `metric`: where measured."""

    scheme: Scheme
    sites: tuple[SiteResult, ...]
    left_out: tuple[LeftOut, ...]
    batches: int
    notes: tuple[str, ...]
    metric: Metric | None = None
