"""What the clippers share: one measurement of the norm, one way to leave out a step whose norm is not finite."""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torchmetrics import SumMetric
from typing_extensions import override

from lightning_tricks._lightning import module_overrides
from lightning_tricks._validation import check_choice
from lightning_tricks.composition import OptimizerStep, Touches, Trick, current_step, step_ledger
from lightning_tricks.composition.trick import key_of
from lightning_tricks.functional.clipping import (
    StepCount,
    clip_by_norm_,
    exceeds,
    gradient_norm,
    is_nonfinite,
    named_gradients,
    nonfinite_names,
)

__all__ = ["GradientClipper", "NormClipper"]


class GradientClipper(Trick):
    """What all clippers share: measuring the norm, and a step whose norm is not finite.

    Args:
        norm_type: p of the norm.
        nonfinite: what to do when a norm is inf or nan.
    """

    touches = Touches.GRADIENTS
    job = "clip gradients"

    def __init__(self, norm_type: float, nonfinite: Literal["skip", "raise", "ignore"]) -> None:
        check_choice("nonfinite", nonfinite, ("skip", "raise", "ignore"))
        self.norm_type = norm_type
        self.nonfinite = nonfinite
        self.reset()

    @abstractmethod
    def _clip(self, step: OptimizerStep, gradients: Sequence[Tensor], norm: Tensor, trainer: pl.Trainer) -> None:
        """Change the step's gradients in place."""

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
        norm = self._norms[step.index] = step.measured(gradient_norm, self.norm_type)
        # A guard in the list owns the verdict: it came before.
        if self.nonfinite != "ignore" and not step.judged and self._leave_out(step, is_nonfinite(norm)):
            if step.scaler is None:  # under a scaler a step that overflows is no news
                self._tell(named_gradients(pl_module, parameters, gradients), norm)
            return
        self._clip(step, gradients, norm, trainer)

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

    def _tell(self, named: Sequence[tuple[str, Tensor]], norm: Tensor) -> None:
        if self._warned and self.nonfinite == "skip":
            return
        culprits = ", ".join(nonfinite_names(named)) or "none alone, only all together"
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


class NormClipper(GradientClipper):
    """What clippers of the global norm share: scaling to a threshold, and counting how often."""

    @abstractmethod
    def _threshold(self, index: int, norm: Tensor) -> float | Tensor:
        """Return the norm that optimizer `index`'s gradients may have at most, inf for any."""

    @override
    def reset(self) -> None:
        super().reset()
        self._coefficients: dict[int, Tensor] = {}
        self._clipped: dict[int, Tensor] = {}
        self._clips: dict[int, StepCount] = {}
        self._num_clipped: dict[int, SumMetric] = {}

    @override
    def _forget(self, index: int) -> None:
        self._coefficients.pop(index, None)
        self._clipped.pop(index, None)

    @override
    def _clip(self, step: OptimizerStep, gradients: Sequence[Tensor], norm: Tensor, trainer: pl.Trainer) -> None:
        threshold = self._threshold(step.index, norm)
        self._coefficients[step.index] = clip_by_norm_(gradients, threshold, norm)
        self._clipped[step.index] = exceeds(norm, threshold)

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
    def state_dict(self) -> dict[str, Any]:
        return {"num_clipped": {index: float(one.compute()) for index, one in self._counters().items()}}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._clipped.clear()
        self._clips.clear()
        self._num_clipped = {index: _counter() for index in state_dict["num_clipped"]}
        for index, count in state_dict["num_clipped"].items():
            self._num_clipped[index].update(count)


def _counter() -> SumMetric:
    # Every rank counts the same steps, so nothing is to be summed over ranks; the nan check would synchronise.
    return SumMetric(nan_strategy="disable", sync_on_compute=False)
