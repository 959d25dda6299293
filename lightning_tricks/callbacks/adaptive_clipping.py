"""Adaptive gradient clipping, unit by unit, as a callback."""

from collections.abc import Sequence
from typing import Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from lightning_tricks._clipper import GradientClipper
from lightning_tricks._validation import check_number
from lightning_tricks.composition import OptimizerStep, Summary
from lightning_tricks.functional.adaptive_clipping import clip_unitwise_
from lightning_tricks.functional.exclusion import excluded_parameters, validate_exclusion

__all__ = ["AdaptiveGradientClipping"]


class AdaptiveGradientClipping(GradientClipper):
    """Clip each unit's gradient to a fraction of the unit's weight norm (AGC), and leave out steps that are not finite.

    A unit is a row of a matrix, a filter of a convolution, or a whole vector. What the thresholds are follows the
    weights, so that one setting fits shallow and deep layers, and networks without normalisation.

    Logs ``grad/norm`` (before clipping); for optimizer i > 0 with ``/i`` behind.

    Args:
        clip_factor: the largest ratio of a gradient's norm to its unit's weight norm, above 0.
        eps: the least weight norm that is assumed, above 0: units that start at zero keep learning.
        exclude: what is left alone: ``"head"`` for the last `nn.Linear`, or the one named head, fc or classifier; a
            glob over names of modules and parameters; a module class, or its name; a list of these. ``()`` excludes
            nothing.
        nonfinite: as for `GradientNormClipping`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; `exclude` matches nothing, or
            everything (at the start of fit).
        RuntimeError: with ``nonfinite="raise"``, in training: a norm is not finite.

    Cost:
        What `functional.adaptive_clipping` says, and the norm and scalar read of `GradientNormClipping`.

    Reference:
        Brock, De, Smith, Simonyan (2021), arXiv:2102.06171, equation 3.

    Example:
        >>> from lightning_tricks import AdaptiveGradientClipping
        >>> clipping = AdaptiveGradientClipping(0.02, exclude=["head", "*.bias"])
    """

    buys = "no unit moves by more than a fraction of itself: training without normalisation, at large batches"
    costs = "two reads of the gradients and one of the weights, a few kernels a parameter"

    def __init__(
        self,
        clip_factor: float = 0.01,
        *,
        eps: float = 1e-3,
        exclude: str | type[torch.nn.Module] | Sequence[str | type[torch.nn.Module]] = "head",
        nonfinite: Literal["skip", "raise", "ignore"] = "skip",
    ) -> None:
        super().__init__(2.0, nonfinite)
        self.clip_factor = check_number("clip_factor", clip_factor, above=True)
        self.eps = check_number("eps", eps, above=True)
        validate_exclusion(exclude)
        self.exclude = exclude

    @override
    def reset(self) -> None:
        super().reset()
        self._left_out: set[int] = set()
        self._counts = (0, 0)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        names = excluded_parameters(pl_module, self.exclude)
        named = dict(pl_module.named_parameters(remove_duplicate=False))
        self._left_out = {id(named[name]) for name in names}
        total = len({id(one) for one in named.values()})
        self._counts = total - len(self._left_out), len(self._left_out)
        if not self._counts[0]:
            raise ValueError(
                f"expected `exclude` to leave some of the {total} parameters of {type(pl_module).__name__} to "
                f"clip, got {self.exclude!r}, which leaves none: exclude less, or drop AdaptiveGradientClipping"
            )

    @override
    def _clip(self, step: OptimizerStep, gradients: Sequence[Tensor], norm: Tensor, trainer: pl.Trainer) -> None:
        parameters = [one for one in step.parameters() if id(one) not in self._left_out]
        clip_unitwise_(parameters, [one.grad for one in parameters if one.grad is not None], self.clip_factor, self.eps)

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        clipped, left_out = self._counts
        found = f"units of {clipped} parameters at {self.clip_factor:g} of their weights; {left_out} left alone"
        return Summary(found, self._nonfinite_words())
