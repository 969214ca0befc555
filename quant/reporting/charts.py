"""Charts as inline SVG. Colours come from the page's style sheet by class, so that light and dark pages both read well."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..record import Histogram
from .markup import Markup, element

_WIDTH, _HEIGHT = 260.0, 84.0


def histogram(data: Histogram, low: float, high: float) -> Markup:
    """Counts on a logarithmic axis; what lies outside low..high, which saturates, in another colour; lines at both ends."""
    left, right = min(data.low, low), max(data.high, high)
    span = (right - left) or 1.0
    top = math.log1p(max(data.counts))
    width = (data.high - data.low) / len(data.counts)

    def x(value: float) -> float:
        return round((value - left) / span * _WIDTH, 2)

    bars = []
    for i, count in enumerate(data.counts):
        begin = data.low + i * width
        height = round(math.log1p(count) / top * (_HEIGHT - 6), 2)
        inside = low <= begin + width / 2 <= high
        size = round(max(x(begin + width) - x(begin), 0.5), 2)
        bars.append(element("rect", x=x(begin), y=round(_HEIGHT - height, 2), width=size, height=height, class_="in" if inside else "out"))
    ends = [element("line", x1=x(end), x2=x(end), y1=0, y2=_HEIGHT, class_="end") for end in (low, high)]
    zero = element("line", x1=x(0.0), x2=x(0.0), y1=_HEIGHT - 4, y2=_HEIGHT, class_="zero")
    label = f"histogram from {data.low:.4g} to {data.high:.4g}, range {low:.4g} to {high:.4g}"
    box = f"0 0 {_WIDTH:g} {_HEIGHT:g}"
    return element("svg", bars, zero, ends, viewBox=box, class_="histogram", role="img", aria_label=label, preserveAspectRatio="none")


def bar(share: float, kind: str = "") -> Markup:
    """A bar of a share of the full width."""
    width = round(100 * min(max(share, 0.0), 1.0), 2)
    back = element("rect", x=0, y=0, width=100, height=10, class_="back")
    front = element("rect", x=0, y=0, width=width, height=10, class_=f"front {kind}".strip())
    return element("svg", back, front, viewBox="0 0 100 10", class_="bar", preserveAspectRatio="none", aria_hidden="true")


def stacked(parts: Sequence[tuple[int, str]]) -> Markup:
    """One bar of several parts: sizes and classes."""
    total = sum(size for size, _ in parts) or 1
    at = 0.0
    drawn = []
    for size, kind in parts:
        width = 100 * size / total
        drawn.append(element("rect", x=round(at, 3), y=0, width=round(width, 3), height=10, class_=f"part {kind}"))
        at += width
    return element("svg", drawn, viewBox="0 0 100 10", class_="bar stacked", preserveAspectRatio="none", aria_hidden="true")
