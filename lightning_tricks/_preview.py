"""Draw a curve or bars: in the terminal with block characters, or as a picture with matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["bars_as_png", "bars_in_terminal", "draw_as_png", "draw_in_terminal"]

_BLOCKS = " ▁▂▃▄▅▆▇█"
_BLOCKS_BESIDE = " ▏▎▍▌▋▊▉█"


def draw_in_terminal(values: Sequence[float], *, title: str, last: int, width: int = 64, height: int = 12) -> str:
    """Return a curve as lines of text, the area below it filled.

    Args:
        values: in equal steps, from step 0 on; not negative.
        title: the first line.
        last: the step of the last one.
        width: columns of the curve.
        height: lines of the curve.

    Example:
        >>> print(draw_in_terminal([0.0, 1.0, 2.0, 4.0], title="lr", last=3, width=4, height=2))
        lr
               4 |   █
                 | ▄██
                 +----
                  0  3
    """
    width = min(width, len(values))
    picked = [values[round(column * (len(values) - 1) / max(width - 1, 1))] for column in range(width)]
    top = max(values) or 1.0
    filled = [round(value / top * height * 8) for value in picked]
    lines = []
    for row in range(height - 1, -1, -1):
        label = f"{top:8.3g}" if row == height - 1 else " " * 8
        lines.append(f"{label} |" + "".join(_BLOCKS[min(max(level - 8 * row, 0), 8)] for level in filled))
    end = f"{last:>{max(width - 1, len(str(last)) + 1)}}"
    return "\n".join([title, *lines, f"{'':8} +{'-' * width}", f"{'':10}0{end}"])


def draw_as_png(steps: Sequence[int], values: Sequence[float], *, title: str, path: str | Path, xlabel: str) -> None:
    """Write a curve as a PNG file.

    Args:
        steps: where on the axis the values stand.
        values: of the curve.
        title: above it.
        path: of the file.
        xlabel: below it.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = _figure()
    axes = figure.subplots()
    axes.plot(steps, values)
    axes.set(title=title, xlabel=xlabel, ylabel="learning rate", xlim=(0, steps[-1]))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")


def bars_in_terminal(values: Mapping[str, float], *, title: str, width: int = 48) -> str:
    """Return a bar for each value as lines of text.

    Args:
        values: by name, in their order; not negative.
        title: the first line.
        width: columns of the longest bar.

    Example:
        >>> print(bars_in_terminal({"a": 4.0, "bc": 1.0}, title="MiB", width=4))
        MiB
        a  ████ 4
        bc █ 1
    """
    top = max(values.values(), default=0.0) or 1.0
    longest = max(map(len, values), default=0)
    lines = []
    for name, value in values.items():
        eighths = round(value / top * width * 8)
        bar = _BLOCKS_BESIDE[8] * (eighths // 8) + _BLOCKS_BESIDE[eighths % 8].strip()
        lines.append(f"{name:<{longest}} {bar} {value:.3g}")
    return "\n".join([title, *lines])


def bars_as_png(values: Mapping[str, float], *, title: str, path: str | Path, xlabel: str) -> None:
    """Write a bar for each value as a PNG file.

    Args:
        values: by name, in their order from the top; not negative.
        title: above them.
        path: of the file.
        xlabel: below them.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = _figure(height=max(1.5 + 0.3 * len(values), 3.0))
    axes = figure.subplots()
    axes.barh(list(values), list(values.values()))
    axes.invert_yaxis()
    axes.set(title=title, xlabel=xlabel)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120, format="png")


def _figure(height: float = 4.5) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'expected matplotlib, which draws PNG files: pip install "lightning_tricks[plot]", or leave `path` out to '
            "draw in the terminal"
        ) from error
    return Figure(figsize=(8, height), layout="constrained")
