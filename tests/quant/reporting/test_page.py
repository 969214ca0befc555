"""The report page: complete, self-contained, safe, and shown by a browser without errors or horizontal scrolling."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from sashiko.quant import (
    FP32,
    ActivationScheme,
    OpScheme,
    Override,
    QuantRecord,
    Scheme,
    WeightScheme,
    calibrate,
    measured,
    quantize,
    report,
)
from sashiko.quant.histograms import summary
from sashiko.quant.observers import HistogramObserver, MinMaxObserver
from sashiko.quant.presets import resolve
from sashiko.quant.record import Metric
from sashiko.quant.reporting.markup import Markup, element
from sashiko.quant.reporting.page import page
from sashiko.quant.reporting.words import in_words
from sashiko.quant.sensitivity import site_sqnr
from tests.quant.models import Attention, mlp

HOSTILE = "<script>document.title='ran'</script>\"'&"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")


@pytest.fixture(scope="module")
def record() -> QuantRecord:
    """Every part of a page: several precisions, histograms, times, sensitivities, a metric, notes, hostile text."""
    rows, groups = OpScheme(ActivationScheme(granularity="row")), OpScheme(None, WeightScheme(4, "group", 8))
    scheme = Scheme(OpScheme(ActivationScheme("percentile", 99.0)), (Override("value", rows), Override("out", groups)))
    found = quantize(Attention().eval(), [torch.randn(4, 6, 16) for _ in range(3)], preset=scheme).record
    sites = tuple(replace(s, error_db=10.0 + 5 * n, seconds={"fp32": 2e-4, "int8": 5e-5}) for n, s in enumerate(found.sites))
    left = tuple(replace(item, name=HOSTILE, reason=HOSTILE) for item in found.left_out)
    return replace(found, sites=sites, left_out=left, notes=(HOSTILE,), metric=Metric(HOSTILE, 0.9, 0.89))


class Reader(HTMLParser):
    """Counts elements, checks that they are closed in order, and keeps the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self._count(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._count(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def _count(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] += 1
        self.attributes += attrs


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


def test_everything_is_on_the_page(record: QuantRecord) -> None:
    found = read(page(record))
    assert len(record.sites) == 4 and len(record.left_out) == 2
    # Operations, times and what was left out, each with a row of headings.
    assert found.counts["table"] == 3 and found.counts["tr"] == 3 + 4 + 4 + 2
    # query and key share the activation that they quantize; value has a scale per row, out none.
    assert found.counts["figure"] == 1
    for word in ("query", "10.0 dB", "200 µs", "int8 per row", "int4 weight", "group of 8", "99 % of the values", "0.89", HOSTILE):
        assert word in found.text


def test_a_record_without_measurements(record: QuantRecord) -> None:
    bare = replace(record, sites=(), left_out=(), notes=(), metric=None)
    assert read(page(bare)).counts["table"] == 0
    small = quantize(mlp(), [torch.randn(5, 8)], preset="int8-minmax")
    found = read(page(small.record))
    assert found.counts["table"] == 1 and found.counts["figure"] == 0 and "Sensitivity" not in found.text


def test_nothing_runs_and_nothing_is_fetched(record: QuantRecord) -> None:
    text = page(record)
    found = read(text)
    assert found.counts.keys() & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a"} == set()
    names = {name for name, _ in found.attributes}
    assert not any(name.startswith("on") or name in ("src", "href", "style") for name in names)
    assert all(word not in text for word in ("://", "url(", "@import"))
    assert any((value or "").startswith("default-src 'none'") for _, value in found.attributes)


def test_markup_is_escaped_once() -> None:
    inner = element("b", "<&>")
    assert inner == "<b>&lt;&amp;&gt;</b>"
    assert element("p", inner, "<", class_='"', data_x=None) == "<p class=\"&quot;\"><b>&lt;&amp;&gt;</b>&lt;</p>"
    assert isinstance(inner, Markup) and element("rect", x=1) == '<rect x="1"/>'


def test_sensitivity_of_results_where_that_of_the_model_is_unknown(record: QuantRecord) -> None:
    own = replace(record, sites=tuple(replace(item, error_db=None, result_db=7.0) for item in record.sites))
    found = read(page(own))
    assert "7.0 dB" in found.text and "given exact inputs" in found.text and "10.0 dB" not in found.text


def test_measured_modules_know_their_noise() -> None:
    calibration = calibrate(mlp(), [torch.randn(50, 8)], resolve("int8"))
    sites = measured(calibration).record.sites
    assert [item.result_db for item in sites] == [site_sqnr(calibration)[item.site.name] for item in sites]
    assert all(20 < (item.result_db or 0.0) < 60 for item in sites)
    assert [item.site.name for item in measured(calibration, {"0": FP32}).record.sites] == ["2"]


def test_report_writes_a_page_and_returns_text(tmp_path: Path) -> None:
    small = quantize(mlp(), [torch.randn(5, 8)])
    text = small.report(tmp_path / "r.html")
    assert text == small.report() and text.startswith("2 in int8")
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == page(small.record)


@pytest.mark.parametrize("values", [torch.randn(5000) * 3, torch.rand(100) + 5, torch.tensor([1e-3, 1e3]), torch.zeros(7)])
def test_summaries_of_histograms(values: torch.Tensor) -> None:
    observer = HistogramObserver(ActivationScheme("mse"))
    observer.observe(values)
    found = summary(observer)
    assert found is not None and len(found.counts) <= 64
    assert sum(found.counts) == values.numel() and found.counts[0] > 0 and found.counts[-1] > 0
    assert found.low <= values.min() and values.max() <= found.high
    width = (found.high - found.low) / len(found.counts)
    inside = torch.floor((values.double() - found.low) / width).long().bincount(minlength=len(found.counts))
    assert tuple(inside.tolist()) == found.counts
    assert summary(MinMaxObserver()) is None and summary(HistogramObserver(ActivationScheme("mse"))) is None


def test_the_record_keeps_histograms() -> None:
    small = quantize(mlp(), [torch.randn(50, 8) for _ in range(2)], preset="int8-symmetric")
    (limits,) = small.record.sites[0].ranges
    assert limits.histogram is not None and sum(limits.histogram.counts) == 800


@pytest.mark.parametrize(
    ("floating", "quantized", "change"), [(0.9, 0.65, "\u22120.25"), (math.inf, math.inf, "+0"), (math.inf, 20.0, "\u2212inf")]
)
def test_the_change_of_a_metric(record: QuantRecord, floating: float, quantized: float, change: str) -> None:
    assert f"<b>{change}</b><small>change of db</small>" in page(replace(record, metric=Metric("db", floating, quantized)))


def test_text_is_no_markup(record: QuantRecord) -> None:
    odd = replace(record, notes=("[/bold] [red]:smile:",))
    assert "note: [/bold] [red]:smile:" in report(odd) and "error dB" in report(odd)


def test_schemes_in_words() -> None:
    assert in_words(OpScheme(None, None)) == "computed in fp32"
    words = "activations uint8, range of least squared error; weights int8 per channel"
    assert in_words(OpScheme(ActivationScheme("mse", signed=False))) == words


PROBE = "<script>document.body.dataset.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth</script></body>"


@pytest.mark.skipif(not BROWSER, reason="no chromium is installed")
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_it(record: QuantRecord, width: int, tmp_path: Path) -> None:
    text = page(record)
    plain, probed = tmp_path / "plain.html", tmp_path / "probed.html"
    plain.write_text(text, encoding="utf-8")
    probed.write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text).replace("</body>", PROBE), encoding="utf-8")
    _, messages = browse(plain, width, tmp_path)
    assert "CONSOLE" not in messages
    shown, _ = browse(probed, width, tmp_path)
    assert 'data-wide="0"' in shown
    assert shown.count("<tr>") == 3 + 4 + 4 + 2 and "<title>Quantization report</title>" in shown


def browse(file: Path, width: int, tmp_path: Path) -> tuple[str, str]:
    """The document as the browser has it, and what it logged."""
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={width},900", "--dump-dom")
    command = [BROWSER, *options, f"--user-data-dir={tmp_path / 'profile'}", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout, done.stderr
