"""The report as one HTML page: no scripts, no fonts, nothing from elsewhere."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import PurePath

from ..record import ActivationRange, LeftOut, QuantRecord, SiteResult
from ..scheme import OpScheme
from .charts import bar, histogram, stacked
from .markup import Markup, element, escaped
from .style import CSS
from .words import in_words, scheme_words

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_WORST = 40
_FULL_DB = 60.0
_LOW_DB = 15.0


def page(record: QuantRecord, title: str = "Quantization report") -> str:
    """A whole HTML document."""
    parts = (
        element("h1", title), _lead(record), _cards(record), _mix(record), _sensitivity(record), _operations(record.sites), _times(record),
        _activations(record.sites), _left_out(record.left_out), _notes(record.notes), _making(record),
    )
    head = (
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", title),
        element("style", Markup(CSS)),
    )
    body = element("main", *(part for part in parts if part is not None))
    return f"<!doctype html>\n{element('html', element('head', *head), element('body', body), lang='en')}\n"


def _lead(record: QuantRecord) -> Markup:
    return element("p", f"Calibrated on {record.batches} batches.", class_="soft")


def _cards(record: QuantRecord) -> Markup:
    quantized = sum(item.site.scheme.quantized for item in record.sites)
    total = len(record.sites) + len(record.left_out)
    cards = [(f"{quantized} of {total}", "operations quantized"), (str(len(record.left_out)), "left as they were")]
    metric = record.metric
    if metric is not None:
        cards.append((f"{metric.quantized:.6g}", f"{metric.name}; {metric.floating:.6g} in floating point"))
        change = 0.0 if metric.quantized == metric.floating else metric.quantized - metric.floating  # both may be infinite
        cards.append((f"{change:+.3g}".replace("-", "\u2212"), f"change of {metric.name}"))
    measured = [item for item in record.sites if item.error_db is not None]
    if measured:
        worst = min(measured, key=lambda item: item.error_db or 0.0)
        cards.append((f"{worst.error_db:.1f} dB", _breaking(f"most sensitive: {worst.site.name}")))
    drawn = (element("div", element("b", value), element("small", label), class_="card") for value, label in cards)
    return element("div", drawn, class_="cards")


def _mix(record: QuantRecord) -> Markup:
    counts = Counter(item.site.scheme.label for item in record.sites)
    kinds = {item.site.scheme.label: _kind(item.site.scheme) for item in record.sites}
    parts = [(count, label, kinds[label]) for label, count in counts.items()]
    if record.left_out:
        parts.append((len(record.left_out), "left as they were", "float"))
    legend = (element("li", element("span", class_=f"dot {kind}"), f"{label}: {count}") for count, label, kind in parts)
    drawn = stacked([(count, kind) for count, _, kind in parts])
    return _section("Precision", "Operations by what they compute in.", drawn, element("ul", legend, class_="legend"))


def _sensitivity(record: QuantRecord) -> Markup | None:
    """The error of the model's results, which is what counts, where it was measured; otherwise that of each operation's own."""
    found = [(item.site.name, item.error_db) for item in record.sites if item.error_db is not None]
    said = "Signal-to-noise ratio of the model's results with one operation alone quantized, the most sensitive first. Shorter is worse."
    if not found:
        found = [(item.site.name, item.result_db) for item in record.sites if item.result_db is not None]
        said = "Signal-to-noise ratio of each operation's own result, given exact inputs, the noisiest first. Shorter is worse."
    if not found:
        return None
    worst = sorted(found, key=lambda pair: pair[1])[:_WORST]
    rows = [_bar_row(name, f"{_decibels(value)} dB", value / _FULL_DB, "low" if value < _LOW_DB else "") for name, value in worst]
    rest = f" The {_WORST} worst of {len(found)}." if len(found) > _WORST else ""
    return _section("Sensitivity", said + rest, element("div", rows, class_="rows"))


def _bar_row(label: str, value: str, share: float, kind: str) -> Markup:
    parts = (element("div", _breaking(label), class_="label"), bar(share, kind), element("div", value, class_="value"))
    return Markup("".join(parts))


def _operations(sites: Sequence[SiteResult]) -> Markup | None:
    if not sites:
        return None
    numbers = ("K", "N", "low", "high", "scale", "zero point", "weight dB")
    said = "What was chosen for each; dB: signal to noise of the rounded weights."
    return _section("Operations", said, _table(("operation", "precision"), numbers, map(_operation, sites)))


def _operation(item: SiteResult) -> Markup:
    site = item.site
    k, n = ("", "") if site.features == (0, 0) else map(str, site.features)
    tag = element("span", element("span", class_=f"dot {_kind(site.scheme)}"), site.scheme.label, class_="tag")
    ranges = [(f"{r.low:.4g}", f"{r.high:.4g}", f"{r.scale:.4g}", str(r.zero_point)) for r in item.ranges]
    columns = [_lines(column) for column in zip(*ranges, strict=True)] if ranges else [Markup("")] * 4
    return element(
        "tr",
        element("td", _breaking(site.name), element("small", f"{site.op} {_short(site.source)}"), class_="name"),
        element("td", tag, element("small", in_words(site.scheme)), class_="reason"),
        (element("td", cell, class_="number") for cell in (k, n, *columns, _decibels(item.weight_sqnr))),
    )


def _times(record: QuantRecord) -> Markup | None:
    timed = [item for item in record.sites if item.seconds]
    if not timed:
        return None
    labels = tuple(dict.fromkeys(label for item in timed for label in item.seconds))
    rows = []
    for item in timed:
        cells = [f"{item.seconds[label] * 1e6:.3g} µs" if label in item.seconds else "" for label in labels]
        name = element("td", _breaking(item.site.name), class_="name")
        rows.append(element("tr", name, element("td", item.site.scheme.label), (element("td", cell, class_="number") for cell in cells)))
    said = "Of one call, measured on the machine that searched."
    return _section("Time by precision", said, _table(("operation", "chosen"), labels, rows))


def _activations(sites: Sequence[SiteResult]) -> Markup | None:
    """One figure for each activation, though several operations share it."""
    users: dict[tuple[str, ActivationRange], list[str]] = {}
    for item in sites:
        for name, limits in zip(item.site.activations, item.ranges):
            if limits.histogram is not None:
                users.setdefault((name, limits), []).append(item.site.name)
    if not users:
        return None
    said = "Values seen in calibration, on a logarithmic axis; what lies outside the range saturates."
    keys = ("inside the range", "int8"), ("outside", "out-dot")
    legend = [element("li", element("span", class_=f"dot {kind}"), text) for text, kind in keys]
    legend.append(element("li", element("span", class_="key"), "the chosen range"))
    figures = element("div", (_figure(limits, names) for (_, limits), names in users.items()), class_="grid")
    return _section("Activations", said, element("ul", legend, class_="legend"), Markup("<br/>"), figures)


def _figure(limits: ActivationRange, names: list[str]) -> Markup:
    data = limits.histogram
    assert data is not None
    title = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    outer = min(data.low, limits.low), max(data.high, limits.high)
    ends = element("div", (element("span", f"{end:.3g}") for end in outer), class_="ends")
    caption = element("figcaption", element("b", _breaking(title), title=", ".join(names)), f"range {limits.low:.4g} to {limits.high:.4g}")
    return element("figure", caption, histogram(data, limits.low, limits.high), ends)


def _left_out(items: Sequence[LeftOut]) -> Markup | None:
    if not items:
        return None
    rows = (
        element("tr", element("td", _breaking(i.name), class_="name"), element("td", i.op), element("td", i.reason, class_="reason"),
                element("td", _short(i.source)))
        for i in items
    )
    said = "What no scheme reaches, and what was kept as it is."
    return _section("Left as they were", said, _table(("operation", "op", "reason", "source"), (), rows))


def _notes(notes: Sequence[str]) -> Markup | None:
    return _section("Notes", "", element("ul", (element("li", note) for note in notes))) if notes else None


def _making(record: QuantRecord) -> Markup:
    pairs = [Markup(element("dt", name) + element("dd", value)) for name, value in scheme_words(record.scheme)]
    return _section("Scheme", "What was asked for.", element("dl", pairs))


def _section(title: str, said: str, *content: str) -> Markup:
    return element("section", element("h2", title), element("p", said, class_="soft") if said else Markup(""), *content)


def _table(headings: Sequence[str], numbers: Sequence[str], rows: Iterable[Markup]) -> Markup:
    head = [element("th", text, scope="col") for text in headings]
    head += [element("th", text, scope="col", class_="number") for text in numbers]
    table = element("table", element("thead", element("tr", head)), element("tbody", rows))
    return element("div", table, class_="scroll", tabindex="0")


def _lines(values: Iterable[str]) -> Markup:
    return Markup("<br/>".join(element("span", value) for value in values))


def _breaking(name: str) -> Markup:
    """A dotted name that may be broken after its dots."""
    return Markup(escaped(name).replace(".", ".<wbr/>"))


def _kind(scheme: OpScheme) -> str:
    """The class in the style sheet of a precision."""
    if scheme.weight is None:
        return scheme.floating if scheme.floating == "bf16" else "float"
    if scheme.weight.bits == 4:
        return "int4"
    if scheme.activation is None:
        return "weight"
    return "row" if scheme.activation.granularity == "row" else "int8"


def _decibels(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if math.isfinite(value) else "exact" if value > 0 else "none"


def _short(source: str) -> str:
    """The last two parts of a path with its line."""
    return "/".join(PurePath(source).parts[-2:])
