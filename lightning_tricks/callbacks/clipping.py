"""Gradient clipping as callbacks: right in automatic and manual optimization, under fp16, accumulation and sharding."""

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torchmetrics import SumMetric
from typing_extensions import override

from lightning_tricks._lightning import is_logging_step, module_overrides
from lightning_tricks._validation import check_choice, check_indices, check_number, refuse_missing_optimizers
from lightning_tricks.composition import OptimizerStep, Summary, Touches, Trick, current_step, step_ledger
from lightning_tricks.composition.trick import key_of
from lightning_tricks.functional.clipping import (
    StepCount,
    clip_by_norm_,
    clip_by_value_,
    count_exceeding,
    exceeds,
    gradient_norm,
    is_nonfinite,
    nonfinite_names,
)

__all__ = ["GradientNormClipping", "GradientValueClipping"]


class _GradientClipping(Trick):
    """What both clippers share: measuring the norm, and a step whose norm is not finite."""

    touches = Touches.GRADIENTS
    job = "clip gradients"

    def __init__(self, norm_type: float, nonfinite: Literal["skip", "raise", "ignore"]) -> None:
        check_choice("nonfinite", nonfinite, ("skip", "raise", "ignore"))
        self.norm_type = norm_type
        self.nonfinite = nonfinite
        self.reset()

    @abstractmethod
    def _clip(self, index: int, gradients: Sequence[Tensor], norm: Tensor, trainer: pl.Trainer) -> None:
        """Change the gradients of optimizer `index` in place."""

    @override
    def rivals(self, trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
        found = []
        if trainer.gradient_clip_val:
            found.append(f"Trainer(gradient_clip_val={trainer.gradient_clip_val})")
        if module_overrides("configure_gradient_clipping", module):
            found.append(f"{type(module).__name__}.configure_gradient_clipping")
        return found

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, LBFGS) and self.nonfinite == "skip":
                raise ValueError(
                    f'expected nonfinite="raise" or "ignore" for LBFGS, got {self.nonfinite!r}: it moves the weights '
                    "within a step, so that no step can be left out"
                )
        for name, part in pl_module.named_modules():
            if getattr(part, "sparse", False) is True:
                raise ValueError(
                    f"expected dense gradients, got {type(part).__name__}(sparse=True) at {name!r}: build it with "
                    f"sparse=False, or drop {type(self).__name__}"
                )

    @override
    def reset(self) -> None:
        self._norms: dict[int, Tensor] = {}
        self._unseen_nonfinite = StepCount()
        self._warned = False

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        step = current_step(trainer, optimizer)
        parameters = step.parameters()
        if not parameters or (self.scope is not None and step.index not in self.scope):
            return
        gradients = step.gradients()
        self._forget(step.index)
        norm = self._norms[step.index] = gradient_norm(gradients, self.norm_type)
        if self.nonfinite != "ignore" and self._leave_out(step, is_nonfinite(norm)):
            if step.scaler is None:  # under a scaler a step that overflows is no news
                self._tell(pl_module, parameters, gradients, norm)
            return
        self._clip(step.index, gradients, norm, trainer)

    def _forget(self, index: int) -> None:
        """Drop what the last step of optimizer `index` left to log."""

    def _leave_out(self, step: OptimizerStep, nonfinite: Tensor) -> bool:
        """Veto a step whose norm is not finite. True where the host knows that the step is left out."""
        if self.nonfinite == "raise" and step.scaler is None:
            return bool(nonfinite)
        if step.veto(nonfinite):
            return True
        if step.scaler is None and not self._warned:  # a fused optimizer: only the device knows, until we log
            self._unseen_nonfinite.step(nonfinite)
        return False

    def _tell(
        self, module: pl.LightningModule, parameters: Sequence[Tensor], gradients: Sequence[Tensor], norm: Tensor
    ) -> None:
        if self._warned and self.nonfinite == "skip":
            return
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        labels = [names.get(id(parameter), "a parameter outside of the module") for parameter in parameters]
        culprits = ", ".join(nonfinite_names(zip(labels, gradients, strict=True))) or "none alone, only all together"
        message = f"expected a finite gradient norm, got {float(norm)}; not finite in: {culprits}."
        if self.nonfinite == "raise":
            raise RuntimeError(
                f"{message} The weights are as before this step. Lower the learning rate, look at this batch's loss, "
                f'or let {type(self).__name__}(nonfinite="skip") leave such steps out.'
            )
        self._warned = True
        rank_zero_warn(f"{message} The step was left out. Further ones are counted in step/skipped, without a warning.")

    @override
    def metrics(self, trainer: pl.Trainer, stepped: Collection[int]) -> Mapping[str, float | Tensor]:
        unseen = self._unseen_nonfinite.take()
        if not self._warned and unseen is not None and bool(unseen):
            self._warned = True
            rank_zero_warn(
                "expected finite gradient norms, got at least one that is not: the fused optimizer left the step out. "
                "Such steps are counted in step/skipped, without a further warning."
            )
        return {key_of("grad/norm", index): self._norms[index] for index in stepped if index in self._norms}

    def _nonfinite_words(self) -> str:
        return {"skip": "leaves non-finite steps out", "raise": "raises on non-finite norms"}.get(self.nonfinite, "")


class GradientNormClipping(_GradientClipping):
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
    def reset(self) -> None:
        super().reset()
        self._coefficients: dict[int, Tensor] = {}
        self._clipped: dict[int, Tensor] = {}
        self._clips: dict[int, StepCount] = {}
        self._num_clipped: dict[int, SumMetric] = {}

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        refuse_missing_optimizers("max_norm", self._scope, len(trainer.optimizers))

    def _threshold(self, index: int) -> float:
        return self.max_norm[index] if isinstance(self.max_norm, Mapping) else self.max_norm

    @override
    def _forget(self, index: int) -> None:
        self._coefficients.pop(index, None)
        self._clipped.pop(index, None)

    @override
    def _clip(self, index: int, gradients: Sequence[Tensor], norm: Tensor, trainer: pl.Trainer) -> None:
        threshold = self._threshold(index)
        self._coefficients[index] = clip_by_norm_(gradients, threshold, norm)
        self._clipped[index] = exceeds(norm, threshold)

    @override
    def after_step(self, trainer: pl.Trainer, module: pl.LightningModule, step: OptimizerStep) -> None:
        clipped = self._clipped.pop(step.index, None)
        if clipped is not None and step.applied is not False:
            if step.index not in self._clips:
                self._clips[step.index] = StepCount()
            self._clips[step.index].step(clipped, step.applied)

    def _counters(self) -> dict[int, SumMetric]:
        """The metrics, up to date. Not updated each step: that costs more than the clipping itself."""
        for index, clips in self._clips.items():
            count = clips.take()
            if count is not None:
                if index not in self._num_clipped:
                    self._num_clipped[index] = _counter()
                self._num_clipped[index].to(count.device).update(count)
        return self._num_clipped

    @override
    def metrics(self, trainer: pl.Trainer, stepped: Collection[int]) -> Mapping[str, float | Tensor]:
        values = dict(super().metrics(trainer, stepped))
        counters = self._counters()
        for index in stepped:
            if index in self._coefficients:
                values[key_of("grad/clip_coefficient", index)] = self._coefficients[index]
            if index in counters:
                applied = max(step_ledger(trainer)[index].applied, 1)
                values[key_of("grad/clip_rate", index)] = counters[index].compute() / applied
        return values

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        if isinstance(self.max_norm, Mapping):
            found = ", ".join(f"optimizer {index}: norm at most {value}" for index, value in self.max_norm.items())
        elif math.isinf(self.max_norm):
            found = "measures only"
        else:
            found = f"norm at most {self.max_norm}"
        return Summary(found, self._nonfinite_words())

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"num_clipped": {index: float(one.compute()) for index, one in self._counters().items()}}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._clipped.clear()
        self._clips.clear()
        self._num_clipped = {index: _counter() for index in state_dict["num_clipped"]}
        for index, count in state_dict["num_clipped"].items():
            self._num_clipped[index].update(count)


class GradientValueClipping(_GradientClipping):
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
    def _clip(self, index: int, gradients: Sequence[Tensor], norm: Tensor, trainer: pl.Trainer) -> None:
        if is_logging_step(trainer) or not trainer.lightning_module.automatic_optimization:
            self._exceeding[index] = count_exceeding(gradients, self.max_value)
        clip_by_value_(gradients, self.max_value)

    @override
    def metrics(self, trainer: pl.Trainer, stepped: Collection[int]) -> Mapping[str, float | Tensor]:
        counts = {key_of("grad/clipped_elements", index): self._exceeding.get(index) for index in stepped}
        known = {key: count.float() for key, count in counts.items() if count is not None}
        return {**super().metrics(trainer, stepped), **known}

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        return Summary(f"elements within +-{self.max_value}", self._nonfinite_words())


def _counter() -> SumMetric:
    # Every rank counts the same steps, so nothing is to be summed over ranks; the nan check would synchronise.
    return SumMetric(nan_strategy="disable", sync_on_compute=False)
