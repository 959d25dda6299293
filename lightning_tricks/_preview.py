"""Draw a curve: in the terminal with block characters, or as a picture with matplotlib."""

from collections.abc import Sequence
from pathlib import Path

__all__ = ["draw_as_png", "draw_in_terminal"]

_BLOCKS = " ▁▂▃▄▅▆▇█"


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
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'expected matplotlib, which draws PNG files: pip install "lightning_tricks[plot]", or leave `path` out to '
            "draw in the terminal"
        ) from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, values)
    axes.set(title=title, xlabel=xlabel, ylabel="learning rate", xlim=(0, steps[-1]))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")
