"""A run as a picture: for each model a group of bars, how many times faster than eager fp32."""

from __future__ import annotations

from pathlib import Path

from ...diagnostics.errors import InputError
from .frameworks import OURS, YARDSTICK
from .record import Run, title, yardstick

_PLACE = "bench --plot"
# Ours in indigo, as the cloth; the peers in quiet colours. The darker, the fewer bits.
_SHADES = {
    OURS: ("#9fb0d9", "#5a72b5", "#24397d", "#101c47"),
    YARDSTICK: ("#d9d9d9", "#bdbdbd"),
    "inductor": ("#f3cfa8", "#e0a060"),
    "openvino": ("#c9e0c4", "#93bf8a", "#5d945a"),
    "onnxruntime": ("#e9c6cf", "#c98a9a"),
}


def check(path: Path) -> None:
    """InputError without matplotlib, or for a file whose ending says no format that it writes: before anything is measured."""
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("matplotlib is not installed", _PLACE, 'pip install "sashiko[bench]"') from error
    matplotlib.use("Agg")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise InputError(f"{path.name!r} says no format of pictures", _PLACE, f"end its name in one of {', '.join(sorted(formats))}")


def draw(run: Run, path: Path) -> None:
    """Writes the picture; its format is that of the file's ending. Raises what `check` raises, and InputError without anything to draw."""
    check(path)
    from matplotlib import pyplot

    groups = speeds(run)
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    if not names:
        raise InputError("nothing was measured that could be drawn", _PLACE)
    colours = _colours(names)
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.2 + 0.32 * len(names) * len(groups)), 4.2), dpi=150)
    width = 0.85 / len(names)
    for position, name in enumerate(names):
        places = [(at, group[name]) for at, group in enumerate(groups.values()) if name in group]
        offsets = [at + (position - (len(names) - 1) / 2) * width for at, _ in places]
        heights = [speed for _, speed in places]
        bars = axes.bar(offsets, heights, width * 0.92, label=name, color=colours[name], zorder=2)
        axes.bar_label(bars, [f"{speed:.2g}" for speed in heights], fontsize=7, padding=1)
    axes.axhline(1, color="#808080", linewidth=0.8, zorder=1)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel("times as fast as PyTorch eager fp32")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, ncols=3, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0))
    at, below = (1.0, 0.0), (0.0, -34.0)
    axes.annotate(
        run.machine.cpu, at, below, "axes fraction", "offset points", fontsize=7, color="#808080", ha="right", va="top"
    )
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)


def speeds(run: Run) -> dict[str, dict[str, float]]:
    """For each group (threads and run are told where there are several) the speed of every row with a time, relative to eager fp32."""
    found: dict[str, dict[str, float]] = {}
    for group, rows in run.groups().items():
        base = yardstick(rows)
        if base is not None:
            timed = {row.name: row.timing for row in rows if row.timing is not None and not row.yardstick}
            found[title(*group).replace(" ", "\n", 1)] = {name: timing.ratio_to(base) for name, timing in timed.items()}
    return found


def _colours(names: list[str]) -> dict[str, str]:
    """A shade for each name, in the order in which the names of a framework come."""
    used: dict[str, int] = {}
    colours = {}
    for name in names:
        framework = name.split(" ")[0]
        shades = _SHADES.get(framework, ("#909090",))
        colours[name] = shades[min(used.get(framework, 0), len(shades) - 1)]
        used[framework] = used.get(framework, 0) + 1
    return colours
