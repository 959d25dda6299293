"""The import boundaries between the layers, and proof that the test of them can fail."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_tricks"

LAYER_2_AND_3 = ("callbacks", "strategies", "precision", "planner")

# What a layer must not import, by the prefix of the module's name.
FORBIDDEN = {
    "functional": ("lightning.", "pytorch_lightning", "torchmetrics", "rich", "lightning_tricks."),
    "distributed": ("lightning.", "pytorch_lightning", "torchmetrics", "rich", "lightning_tricks."),
    "composition": tuple(f"lightning_tricks.{one}" for one in LAYER_2_AND_3),
    **{layer: tuple(f"lightning_tricks.{one}" for one in LAYER_2_AND_3) for layer in LAYER_2_AND_3[:3]},
}
ALLOWED = {
    "functional": ("lightning_tricks.functional",),
    "distributed": ("lightning_tricks.functional", "lightning_tricks.distributed"),
}
# Composition knows no technique; of layer 0 it needs what undoes an edit.
TECHNIQUE_FREE = ("lightning_tricks.functional.patching",)

PRIVATE = re.compile(r"\b(trainer|strategy|fit_loop|epoch_loop|logger_connector|module|pl_module|loop)\._[a-z]\w*")


def imports(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names] + [node.module or ""]
    return found


def faults(layer: str, source: str) -> list[str]:
    """Imports that the layer must not have."""
    bad = []
    for name in imports(source):
        dotted = name + "."
        if dotted.startswith(ALLOWED.get(layer, ())):
            continue
        if dotted.startswith(FORBIDDEN.get(layer, ())) or (
            layer == "composition"
            and name.startswith("lightning_tricks.functional.")
            and not name.startswith(TECHNIQUE_FREE)
        ):
            bad.append(name)
    return bad


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize(
    "path", [p for p in files() if p.name != "__init__.py"], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_layer_keeps_to_its_imports(path: Path) -> None:
    assert faults(path.relative_to(PACKAGE).parts[0], path.read_text()) == []


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_private_lightning_names_stand_in_two_files(path: Path) -> None:
    if path.name not in ("_lightning.py", "_lightning_data.py"):
        assert PRIVATE.findall(path.read_text()) == []


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("functional", "import lightning.pytorch as pl"),
        ("functional", "from lightning.pytorch import Trainer"),
        ("functional", "import torchmetrics"),
        ("functional", "def f():\n    from lightning_tricks.callbacks import clipping"),
        ("functional", "from lightning_tricks._lightning import loss_scaler"),
        ("composition", "from lightning_tricks.functional.clipping import gradient_norm"),
        ("composition", "from lightning_tricks.callbacks.clipping import GradientNormClipping"),
        ("callbacks", "from lightning_tricks.callbacks.clipping import GradientNormClipping"),
    ],
)
def test_the_boundary_test_can_fail(layer: str, source: str) -> None:
    assert faults(layer, source)


def test_the_test_of_private_names_can_fail() -> None:
    assert PRIVATE.search("trainer._logger_connector.should_update_logs")
    assert not PRIVATE.search("trainer.strategy.root_device")


def test_every_technique_has_one_stem() -> None:
    """A callback's file has a layer-0 file and tests of the same name."""
    tests = PACKAGE.parent / "tests"
    for path in (PACKAGE / "callbacks").glob("[a-z]*.py"):
        assert (PACKAGE / "functional" / path.name).exists(), path.name
        assert (tests / "callbacks" / f"test_{path.name}").exists(), path.name


def test_sizes_stay_readable() -> None:
    for path in files():
        assert len(path.read_text().splitlines()) <= 450, path
