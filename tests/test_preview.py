"""The preview of a schedule: in the terminal, as a picture, from Python and the command line."""

import builtins
import re

import pytest
from matplotlib.image import imread

import lightning_tricks as lt
from lightning_tricks.__main__ import main, public_schedules


def heights(printed: str) -> list[int]:
    """Of each column of the curve, in eighths of a line."""
    rows = [line.split("|", 1)[1] for line in printed.splitlines() if "|" in line]
    width = max(len(row) for row in rows)
    return [sum(" ▁▂▃▄▅▆▇█".index(row.ljust(width)[column]) for row in rows) for column in range(width)]


def test_in_the_terminal_it_has_the_shape_of_the_curve(capsys) -> None:
    lt.WarmupLinearScheduler(250, min_lr_ratio=0.0, start_factor=0.0).plot(1000, base_lr=3e-4)
    printed = capsys.readouterr().out
    found = heights(printed)
    assert "WarmupLinearScheduler: learning rate over 1000 steps, 250 of warmup" in printed
    assert "0.0003 |" in printed
    assert printed.rstrip().endswith("1000")
    assert len(found) == 64
    assert found == pytest.approx(
        [96 * min(4 * x, (1 - x) * 4 / 3) for x in (column / 63 for column in range(64))], abs=2.0
    )


def test_without_a_length_it_is_the_schedules_own_or_assumed(capsys) -> None:
    lt.WarmupCosineScheduler(10, total_steps=40).plot()
    lt.WarmupCosineScheduler(500).plot()
    lt.WarmupCosineScheduler(0.1).plot()
    lt.WarmupCosineScheduler("1e6 tokens", total_steps="1e7 tokens").plot()
    printed = capsys.readouterr().out
    assert re.findall(r"over (\d+) (\w+), (\d+)", printed) == [
        ("40", "steps", "10"),
        ("5000", "steps", "500"),
        ("1000", "steps", "100"),
        ("10000000", "tokens", "1000000"),
    ]


@pytest.mark.parametrize("name", sorted(public_schedules()))
def test_from_the_command_line(name: str, capsys, tmp_path) -> None:
    main(["plot-schedule", name, "warmup=0.2", "min_lr_ratio=0.0", "--steps", "1e2", "--lr", "0.5"])
    printed = capsys.readouterr().out
    assert f"{name}: learning rate over 100 steps, 20 of warmup" in printed
    assert "0.5 |" in printed
    assert 85 < max(heights(printed)) <= 96
    main(["plot-schedule", name, "--steps", "50", "--png", str(tmp_path / "curve.png")])
    assert imread(tmp_path / "curve.png").shape[:2] == (540, 960)


def test_strings_and_numbers_of_the_command_line(capsys) -> None:
    main(["plot-schedule", "WarmupStableDecayScheduler", "decay_shape=sqrt", "decay=50", "warmup=1"])
    assert "1000 steps, 1 of warmup" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["warmup=200", "--steps", "100"], "warmup=200 and total_steps=100"),
        (["warmup"], "NAME=VALUE, such as warmup=100, got 'warmup'"),
        (["colour=1"], "WarmupCosineScheduler, which are warmup, min_lr_ratio, min_lr, start_factor"),
        (["warmup=-1"], "`warmup` to be at least 0, got -1"),
        (["--steps", "0"], "`total_steps` to be at least 1, got 0"),
        (["--lr", "0"], "`base_lr` to be above 0.0"),
    ],
)
def test_mistakes_of_the_command_line(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as error:
        main(["plot-schedule", "WarmupCosineScheduler", *arguments])
    assert message in str(error.value)


def test_without_matplotlib_it_says_what_to_install(monkeypatch, tmp_path) -> None:
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r'pip install "lightning_tricks\[plot\]"'):
        lt.WarmupCosineScheduler(10).plot(path=tmp_path / "a.png")
