"""The examples run from the command line, and do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, folder: Path, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found.group(1))


def test_language_model(tmp_path) -> None:
    """A few steps of a small model; the whole run is the README's first command, and stands in `.ci/run`."""
    output = run(
        "train_language_model.py", tmp_path, "--steps", "60", "--width", "32", "--eval-batches", "4", "--compare"
    )
    entropy = number(r"order-0 entropy *│ ([\d.]+)", output)
    bits = number(r"with lightning_tricks *│ ([\d.]+)", output)
    assert entropy == pytest.approx(4.6, abs=0.3)
    assert bits < entropy
    assert number(r"plain Trainer, as many steps *│ ([\d.]+)", output) < 8
    assert "│ 60, 0" in output
    assert number(r"peak activation bytes saved *│ (\d+) MiB", output) > 0
    assert "3 blocks: blocks.0" in output
    assert (tmp_path / "language_model.png").stat().st_size > 10_000


def test_digits(tmp_path) -> None:
    output = run("train_digits.py", tmp_path, "--epochs", "5", "--compare")
    assert number(r"with lightning_tricks *│ ([\d.]+)%", output) > 90
    assert number(r"plain Trainer, as many epochs *│ ([\d.]+)%", output) < 20  # its weights are nan
    assert "│ 103, 2" in output
    assert (tmp_path / "digits.png").stat().st_size > 10_000


def test_the_models_know_nothing_of_the_package() -> None:
    for name in ("train_language_model.py", "train_digits.py"):
        text = (EXAMPLES / name).read_text()
        for body in re.findall(r"^class \w+\((?:pl\.LightningModule|nn\.Module)\):.*?(?=^\S)", text, re.M | re.S):
            assert "lt." not in body
