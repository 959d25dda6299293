"""fp8 matrix products as a callback."""

from collections.abc import Sequence
from typing import Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_tricks._validation import check_choice
from lightning_tricks.composition import Summary, Touches, Trick
from lightning_tricks.functional.exclusion import validate_exclusion
from lightning_tricks.functional.float8 import RECIPES, LinearLayers, apply_float8, linear_layers, refuse_hardware
from lightning_tricks.functional.patching import Removable

__all__ = ["Float8Training"]


class Float8Training(Trick):
    """Let the linear layers multiply in fp8, through torchao (``pip install lightning_tricks[fp8]``).

    Weights, gradients and the optimizer stay as they are; beside it use ``precision="bf16-mixed"``. The head, layers
    whose sizes do not divide by 16, and subclasses of `nn.Linear` are left alone; the table at the start of fit says
    which.

    Args:
        recipe: ``"tensorwise"``, one scale a tensor, or ``"rowwise"``, one a row: slower, and closer.
        exclude: what is left alone besides: ``"head"`` for the last `nn.Linear`, or the one named head, fc or
            classifier; a glob over names of modules; a module class, or its name; a list of these. ``()`` excludes
            nothing.
        emulate: round to fp8 but compute in the layers' own dtype, slowly, on any device.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind; `exclude` matches nothing (at the start of fit).
        ModuleNotFoundError: torchao is not installed (at the start of fit).
        RuntimeError: the device has no fp8 matrix products and `emulate` is False; names what was found (at the start
            of fit).

    Cost:
        Casting and scaling of each operand; worth it for layers of some thousand features on an H100 or newer.

    Reference:
        Micikevicius et al. (2022), "FP8 Formats for Deep Learning", arXiv:2209.05433.

    Example:
        >>> from lightning_tricks import Float8Training
        >>> fp8 = Float8Training("rowwise", exclude=["head", "*.gate"])
    """

    touches = Touches.MODULE
    job = "run linear layers in fp8"
    buys = "linear layers up to twice as fast, on GPUs with fp8"
    costs = "three bits of mantissa in their matrix products"

    def __init__(
        self,
        recipe: Literal["tensorwise", "rowwise"] = "tensorwise",
        *,
        exclude: str | type[nn.Module] | Sequence[str | type[nn.Module]] = "head",
        emulate: bool = False,
    ) -> None:
        check_choice("recipe", recipe, RECIPES)
        validate_exclusion(exclude)
        if not isinstance(emulate, bool):
            raise TypeError(f"expected `emulate` to be True or False, got {emulate!r}")
        self.recipe = recipe
        self.exclude = exclude
        self.emulate = emulate
        self.reset()

    @override
    def reset(self) -> None:
        self._layers = LinearLayers((), {})

    @override
    def edit(self, module: pl.LightningModule) -> Removable | None:
        if not self.emulate:
            refuse_hardware(module.trainer.strategy.root_device, self.recipe)
        self._layers = linear_layers(module, self.exclude)
        if not self._layers.suitable:
            rank_zero_warn(f"Float8Training found no linear layer to convert: {self._reasons()}.")
        return apply_float8(module, self._layers.suitable, self.recipe, self.emulate)

    def _reasons(self) -> str:
        return "; ".join(f"{name}: {why}" for name, why in self._layers.left_out.items()) or "there is none"

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        names = self._layers.suitable
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        how = f"{self.recipe}, emulated" if self.emulate else self.recipe
        found = f"{len(names)} linear layers in fp8 ({how}): {shown}\nleft alone: {self._reasons()}"
        return Summary(found, "an H100 or newer" if not self.emulate else "")
