"""Gradient clipping as callbacks: right in automatic and manual optimization, under fp16, accumulation and sharding."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from lightning_tricks._clipper import GradientClipper, NormClipper
from lightning_tricks._lightning import is_logging_step
from lightning_tricks._validation import check_indices, check_number, refuse_missing_optimizers
from lightning_tricks.composition import OptimizerStep, Summary
from lightning_tricks.composition.trick import key_of
from lightning_tricks.functional.clipping import clip_by_value_, count_exceeding

__all__ = ["GradientNormClipping", "GradientValueClipping"]


class GradientNormClipping(NormClipper):
    """Clip the global norm of each optimizer's gradients, and leave out steps whose norm is not finite.

    The norm is taken over all of an optimizer's gradients together, after unscaling and accumulation, over all shards.
    In manual optimization it happens in `optimizer.step()`; do not call `self.clip_gradients` besides.

    Logs ``grad/norm`` (before clipping), ``grad/clip_coefficient`` and ``grad/clip_rate`` (share of the applied steps
    of the whole run that were clipped); for optimizer i > 0 with ``/i`` behind.

    Args:
        max_norm: the largest norm, above 0; `math.inf` only measures. A mapping from optimizer index to value gives
            each optimizer its own, and leaves optimizers that it does not name alone.
        norm_type: p of the norm, above 0; `math.inf` for the largest absolute value.
        nonfinite: what to do when a norm is inf or nan. ``"skip"`` leaves the step out: weights, moments and schedules
            stay; it warns once and names the parameters, but for a fused optimizer's, whose step only the device saw.
            ``"raise"`` names them too. ``"ignore"`` steps on what is there. Under a loss scaler the first
            two leave the step to the scaler, which counts it as an overflow.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: a threshold is negative, zero or nan; an optimizer index does not exist (at the start of fit).
        RuntimeError: with ``nonfinite="raise"``, in training: a norm is not finite.

    Cost:
        What `functional.clipping` says, and one scalar read a step for ``"skip"`` on optimizers that are not fused and
        for ``"raise"``; none for ``"ignore"`` and for ``"skip"`` on fused optimizers.

    Reference:
        Pascanu, Mikolov, Bengio (2013), arXiv:1211.5063.

    Example:
        >>> from lightning_tricks import GradientNormClipping
        >>> generator_only = GradientNormClipping({0: 0.5})
    """

    buys = "no step larger than the threshold allows; no step at all on inf or nan"
    costs = "one read of the gradients, one scalar read a step (none with a fused optimizer)"

    def __init__(
        self,
        max_norm: float | dict[int, float] = 1.0,
        *,
        norm_type: float = 2.0,
        nonfinite: Literal["skip", "raise", "ignore"] = "skip",
    ) -> None:
        check_number("norm_type", norm_type, above=True)
        super().__init__(norm_type, nonfinite)
        thresholds = max_norm if isinstance(max_norm, Mapping) else {0: max_norm}
        for threshold in thresholds.values():
            check_number("max_norm", threshold, above=True)
        self._scope = check_indices("max_norm", max_norm) if isinstance(max_norm, Mapping) else None
        self.max_norm = max_norm

    @property
    @override
    def scope(self) -> frozenset[int] | None:
        return self._scope

    @property
    @override
    def state_key(self) -> str:
        return self._scoped_state_key(optimizers=sorted(self._scope or ()))

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        refuse_missing_optimizers("max_norm", self._scope, len(trainer.optimizers))

    @override
    def _threshold(self, index: int, norm: Tensor) -> float:
        return self.max_norm[index] if isinstance(self.max_norm, Mapping) else self.max_norm

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        if isinstance(self.max_norm, Mapping):
            found = ", ".join(f"optimizer {index}: norm at most {value}" for index, value in self.max_norm.items())
        elif math.isinf(self.max_norm):
            found = "measures only"
        else:
            found = f"norm at most {self.max_norm}"
        return Summary(found, self._nonfinite_words())


class GradientValueClipping(GradientClipper):
    """Clamp every element of the gradients, and leave out steps whose norm is not finite.

    Clamping alone would keep a nan and turn an inf into an ordinary number, so the norm is looked at first. Prefer
    `GradientNormClipping`, which keeps the gradient's direction, unless single elements are what explodes.

    Logs ``grad/norm`` (before clipping) and ``grad/clipped_elements`` (how many elements of this step's gradients were
    above the threshold, over all ranks); for optimizer i > 0 with ``/i`` behind.

    Args:
        max_value: the largest absolute value, above 0.
        nonfinite: as for `GradientNormClipping`.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: the threshold is negative, zero or nan.
        RuntimeError: with ``nonfinite="raise"``, in training: a norm is not finite.

    Cost:
        As `GradientNormClipping`; counting, on logged steps only, reads the gradients once more.

    Example:
        >>> from lightning_tricks import GradientValueClipping
        >>> clipping = GradientValueClipping(0.5)
    """

    buys = "no element larger than the threshold; no step at all on inf or nan"
    costs = "as GradientNormClipping; bends the gradient's direction"

    def __init__(self, max_value: float, *, nonfinite: Literal["skip", "raise", "ignore"] = "skip") -> None:
        super().__init__(2.0, nonfinite)
        self.max_value = check_number("max_value", max_value, above=True)

    @override
    def reset(self) -> None:
        super().reset()
        self._exceeding: dict[int, Tensor] = {}

    @override
    def _forget(self, index: int) -> None:
        self._exceeding.pop(index, None)

    @override
    def _clip(self, step: OptimizerStep, gradients: Sequence[Tensor], norm: Tensor, trainer: pl.Trainer) -> None:
        if is_logging_step(trainer) or not trainer.lightning_module.automatic_optimization:
            self._exceeding[step.index] = count_exceeding(gradients, self.max_value)
        clip_by_value_(gradients, self.max_value)

    @override
    def metrics(self, trainer: pl.Trainer, stepped: Collection[int]) -> Mapping[str, float | Tensor]:
        counts = {key_of("grad/clipped_elements", index): self._exceeding.get(index) for index in stepped}
        known = {key: count.float() for key, count in counts.items() if count is not None}
        return {**super().metrics(trainer, stepped), **known}

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        return Summary(f"elements within +-{self.max_value}", self._nonfinite_words())
