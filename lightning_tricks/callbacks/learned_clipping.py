"""Clipping by norms whose threshold is learned from the run, as callbacks."""

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from lightning_tricks._clipper import NormClipper
from lightning_tricks._validation import check_int, check_number
from lightning_tricks.composition import OptimizerStep, Summary
from lightning_tricks.composition.per_optimizer import PerOptimizer
from lightning_tricks.composition.trick import key_of
from lightning_tricks.functional.learned_clipping import NormHistory, NormStatistics

__all__ = ["PercentileGradientClipping", "ZScoreGradientClipping"]


class _LearnedClipping(NormClipper):
    """What both share: an estimator for each optimizer, which learns from applied steps and is saved."""

    def __init__(self, nonfinite: Literal["skip", "raise", "ignore"]) -> None:
        super().__init__(2.0, nonfinite)

    @abstractmethod
    def _estimator(self) -> Any:
        """Return a new estimator."""

    @override
    def reset(self) -> None:
        super().reset()
        self._estimators: PerOptimizer[Any] = PerOptimizer(self._estimator)
        self._thresholds: dict[int, Tensor] = {}
        self._learned_from: dict[int, Tensor] = {}

    @override
    def _forget(self, index: int) -> None:
        super()._forget(index)
        self._learned_from.pop(index, None)

    @override
    def after_step(self, trainer: pl.Trainer, module: pl.LightningModule, step: OptimizerStep) -> None:
        super().after_step(trainer, module, step)
        norm = self._learned_from.pop(step.index, None)
        if norm is not None:
            self._estimators.get(step.index, norm.device).step(norm, step.applied)

    @override
    def metrics(self, trainer: pl.Trainer, stepped: Collection[int]) -> Mapping[str, float | Tensor]:
        thresholds = {
            key_of("grad/threshold", index): self._thresholds[index] for index in stepped if index in self._thresholds
        }
        return {**super().metrics(trainer, stepped), **thresholds}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "estimators": self._estimators.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._learned_from.clear()
        self._estimators.load_state_dict(state_dict["estimators"])


class ZScoreGradientClipping(_LearnedClipping):
    """Clip norms that lie far above their running mean (ZClip), and leave out steps whose norm is not finite.

    The mean and the variance are those of applied steps, after clipping. An outlier is clipped below the threshold, the
    more so the larger it is.

    Logs ``grad/norm`` (before clipping), ``grad/threshold`` (the norm above which it is an outlier), ``grad/zscore``,
    ``grad/clip_rate`` (share of the run's applied steps that were clipped) and ``grad/clip_coefficient``; for
    optimizer i > 0 with ``/i`` behind.

    Args:
        z_threshold: standard deviations above the mean from which a norm is an outlier, above 0.
        decay: weight of the past in the running mean and variance, in (0, 1).
        warmup_steps: applied steps from which the first mean and variance are taken, unclipped; 1 or more.
        max_norm: a largest norm besides, also during the warmup; above 0, None for none.
        nonfinite: as for `GradientNormClipping`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.
        RuntimeError: with ``nonfinite="raise"``, in training: a norm is not finite.

    Cost:
        That of `GradientNormClipping`, and two dozen scalar operations a step on the device.

    Reference:
        Kumar, Owen, Chowdhury, Guera (2025), "ZClip", arXiv:2504.02507, algorithm 1.

    Example:
        >>> from lightning_tricks import ZScoreGradientClipping
        >>> clipping = ZScoreGradientClipping(3.0, max_norm=1.0)
    """

    buys = "a threshold that follows the run: only norms that are outliers are clipped"
    costs = "as GradientNormClipping"

    def __init__(
        self,
        z_threshold: float = 2.5,
        *,
        decay: float = 0.97,
        warmup_steps: int = 25,
        max_norm: float | None = None,
        nonfinite: Literal["skip", "raise", "ignore"] = "skip",
    ) -> None:
        super().__init__(nonfinite)
        self.z_threshold = check_number("z_threshold", z_threshold, above=True)
        self.decay = check_number("decay", decay, above=True, maximum=1.0)
        if decay == 1.0:
            raise ValueError("expected `decay` to be below 1.0, got 1.0: the statistics would never change")
        self.warmup_steps = check_int("warmup_steps", warmup_steps, minimum=1)
        self.max_norm = None if max_norm is None else check_number("max_norm", max_norm, above=True)

    @override
    def reset(self) -> None:
        super().reset()
        self._zscores: dict[int, Tensor] = {}

    @override
    def _estimator(self) -> NormStatistics:
        return NormStatistics(self.decay, self.warmup_steps, self.z_threshold)

    @override
    def _threshold(self, index: int, norm: Tensor) -> Tensor:
        statistics: NormStatistics = self._estimators.get(index, norm.device)
        limit, spike = statistics.threshold(norm), statistics.spike_threshold(norm)
        self._zscores[index] = statistics.zscore(norm)
        # The statistics are of the norm that the paper's rule leaves, the cap of `max_norm` besides it.
        self._learned_from[index] = torch.minimum(norm, limit)
        if self.max_norm is not None:
            limit, spike = limit.clamp(max=self.max_norm), spike.clamp(max=self.max_norm)
        self._thresholds[index] = spike
        return limit

    @override
    def metrics(self, trainer: pl.Trainer, stepped: Collection[int]) -> Mapping[str, float | Tensor]:
        zscores = {key_of("grad/zscore", index): self._zscores[index] for index in stepped if index in self._zscores}
        return {**super().metrics(trainer, stepped), **zscores}

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        cap = "" if self.max_norm is None else f", and norms at {self.max_norm:g}"
        found = f"norms {self.z_threshold:g} deviations above their mean, after {self.warmup_steps} applied steps{cap}"
        return Summary(found, self._nonfinite_words())


class PercentileGradientClipping(_LearnedClipping):
    """Clip norms to a percentile of the last ones (AutoClip), and leave out steps whose norm is not finite.

    The history holds the norms of applied steps before clipping. At 10, the paper's choice, nine steps of ten are
    clipped, so that the norm hardly varies and the learning rate alone sets the size of steps.

    Logs ``grad/norm`` (before clipping), ``grad/threshold``, ``grad/clip_rate`` (share of the run's applied steps that
    were clipped) and ``grad/clip_coefficient``; for optimizer i > 0 with ``/i`` behind.

    Args:
        percentile: in [0, 100].
        history_steps: how many norms are kept, 1 or more.
        warmup_steps: applied steps before which nothing is clipped, 1 or more.
        nonfinite: as for `GradientNormClipping`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.
        RuntimeError: with ``nonfinite="raise"``, in training: a norm is not finite.

    Cost:
        That of `GradientNormClipping`, and sorting `history_steps` numbers a step on the device.

    Reference:
        Seetharaman, Wichern, Pardo, Le Roux (2020), "AutoClip", arXiv:2007.14469, algorithm 1.

    Example:
        >>> from lightning_tricks import PercentileGradientClipping
        >>> clipping = PercentileGradientClipping(90, history_steps=500)
    """

    buys = "a threshold that follows the run: norms are cut at a percentile of the last ones"
    costs = "as GradientNormClipping, and a sort of the history"

    def __init__(
        self,
        percentile: float = 10,
        *,
        history_steps: int = 1000,
        warmup_steps: int = 25,
        nonfinite: Literal["skip", "raise", "ignore"] = "skip",
    ) -> None:
        super().__init__(nonfinite)
        self.percentile = check_number("percentile", percentile, maximum=100.0)
        self.history_steps = check_int("history_steps", history_steps, minimum=1)
        self.warmup_steps = check_int("warmup_steps", warmup_steps, minimum=1)
        if warmup_steps > history_steps:
            raise ValueError(
                f"expected `warmup_steps` to be at most `history_steps`={history_steps}, got {warmup_steps}: "
                "the history would never be long enough"
            )

    @override
    def _estimator(self) -> NormHistory:
        return NormHistory(self.percentile, self.history_steps, self.warmup_steps)

    @override
    def _threshold(self, index: int, norm: Tensor) -> Tensor:
        self._thresholds[index] = self._estimators.get(index, norm.device).threshold(norm)
        self._learned_from[index] = norm
        return self._thresholds[index]

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        found = (
            f"norms at percentile {self.percentile:g} of the last {self.history_steps}, after {self.warmup_steps} "
            "applied steps"
        )
        return Summary(found, self._nonfinite_words())
