"""A monitor of the gradient noise scale, by which to choose the batch size."""

import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks._lightning import MisconfigurationException, accumulates, callbacks_of, loss_scaler
from lightning_tricks._validation import check_number
from lightning_tricks.composition import OptimizerStep, Summary, Touches, Trick, current_step, current_window
from lightning_tricks.distributed.open_gradients import local_open_gradients
from lightning_tricks.functional.clipping import gradient_norm
from lightning_tricks.functional.micro_batching import num_samples
from lightning_tricks.functional.noise_scale import FirstOfWindow, NoiseScale, batch_sizes, filled

__all__ = ["GradientNoiseScaleMonitor"]


class GradientNoiseScaleMonitor(Trick):
    """Estimate the critical batch size from the gradient of a window's first micro-batch against that of the window.

    Batches much smaller than the noise scale train almost twice as far with twice the samples; batches much larger gain
    almost nothing. It needs windows of two micro-batches or more: `GradientAccumulation`, or
    ``Trainer(accumulate_grad_batches=...)``.

    Logs ``noise/scale``, in samples, or in what a function given to ``GradientAccumulation(weigh_by=...)`` counts; nan
    as long as the estimate is not positive, as it may be in the first steps.

    Args:
        decay: of the averages over the steps, in (0, 1).

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; a batch's samples cannot be counted.
        MisconfigurationException: at the start of fit, in manual optimization.

    Cost:
        The norm of one micro-batch's gradient a window, and with several ranks three numbers summed over them.

    Reference:
        McCandlish et al. (2018), "An Empirical Model of Large-Batch Training", arXiv:1812.06162, appendix A.1.

    Example:
        >>> from lightning_tricks import GradientAccumulation, GradientNoiseScaleMonitor
        >>> tricks = [GradientAccumulation(4), GradientNoiseScaleMonitor()]
    """

    touches = Touches.GRADIENTS_READ
    job = "estimate the gradient noise scale"
    buys = "the batch size beyond which larger ones do not pay"
    costs = "the norm of one micro-batch's gradient a window"

    def __init__(self, *, decay: float = 0.95) -> None:
        self.decay = check_number("decay", decay, maximum=1.0, above=True)
        if decay == 1.0:
            raise ValueError(f"expected `decay` to be below 1.0, got {decay}")
        self.reset()

    @override
    def reset(self) -> None:
        self._noise = NoiseScale(self.decay)
        self._first: FirstOfWindow | None = None
        self._samples = 0.0  # of the window so far
        self._inverses = 0.0  # sum of 1 / samples of its micro-batches
        self._of_batch = 0.0
        self._is_exact = False  # whether the window's gradient is that of its union
        self._is_common = False  # whether the first gradient is that of all ranks
        self._measured: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._saved: dict[str, Any] | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise MisconfigurationException(
                f"{type(self).__name__} compares a micro-batch with its window, but {type(pl_module).__name__} "
                "optimizes manually, where neither is known: set automatic_optimization = True, or drop it"
            )

    @override
    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        tricks = [one for one in callbacks_of(trainer) if isinstance(one, Trick)]
        self._is_exact = any(one.count_steps(1, 1) is not None for one in tricks)
        if trainer.accumulate_grad_batches == 1 and not self._is_exact:
            rank_zero_warn(
                f"{type(self).__name__} finds nothing to compare: each window is one batch. List GradientAccumulation"
            )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        window = current_window(trainer)
        saved, self._saved = self._saved, None
        if saved is not None:
            device = trainer.strategy.root_device
            self._noise.load_state_dict(saved["noise"], device)
            first = saved["first"]
            self._first = None if first is None else FirstOfWindow(first[0].to(device), first[1])
            self._samples, self._inverses = saved["samples"], saved["inverses"]
        if window.num_losses == 0:
            self._first, self._samples, self._inverses = None, 0.0, 0.0
        self._of_batch = float(num_samples(batch)) if window.weight is None else window.weight

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        window = current_window(trainer)
        self._samples += self._of_batch
        self._inverses += 1 / self._of_batch if self._of_batch else 0.0
        if window.num_losses != 1 or not self._of_batch or not accumulates(trainer):
            return
        gradients, self._is_common = local_open_gradients(pl_module)
        # They were divided by the number of micro-batches, weighed, and multiplied by the loss scaler.
        norm = gradient_norm(gradients) * (trainer.accumulate_grad_batches / window.gradient_share)
        scaler = loss_scaler(trainer)
        square = (norm if scaler is None else norm / scaler.scale(torch.ones_like(norm))).square()
        self._first = FirstOfWindow(square, self._of_batch)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._measured = None
        window, step = current_window(trainer), current_step(trainer, optimizer)
        if window.num_losses < 2 or not step.parameters():
            return
        norm = step.measured(gradient_norm)
        if not self._is_exact:  # Lightning divides a short window by the number of a full one
            norm = norm * (trainer.accumulate_grad_batches / window.num_losses)
        first = torch.stack(filled(norm, 0.0, 0.0, 0.0, 0.0)) if self._first is None else self._first.numbers()
        sums = torch.cat([first, torch.stack(filled(norm, self._samples, self._inverses, window.num_losses))])
        if trainer.world_size > 1:
            sums = trainer.strategy.reduce(sums, reduce_op="sum")
        square, small, big = batch_sizes(sums, common=self._is_common, weighed=window.weight is not None)
        self._measured = square, norm.double().square(), small, big

    @override
    def after_step(self, trainer: pl.Trainer, module: pl.LightningModule, step: OptimizerStep) -> None:
        if self._measured is not None:
            small_square, big_square, small, big = self._measured
            self._noise.step(small_square, big_square, small=small, big=big, applied=step.applied)
        self._first, self._measured, self._samples, self._inverses = None, None, 0.0, 0.0

    @override
    def metrics(self, trainer: pl.Trainer, stepped: Any) -> Mapping[str, float | Tensor]:
        scale = self._noise.scale()
        return {} if scale is None else {"noise/scale": scale}

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        return Summary("the first micro-batch of each window against the window")

    @override
    def state_dict(self) -> dict[str, Any]:
        first = None if self._first is None else (self._first.square.cpu(), self._first.samples)
        return self._saved or {
            "noise": self._noise.state_dict(),
            "first": first,
            "samples": self._samples,
            "inverses": self._inverses,
        }

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.world_size > 1 and self._saved is None:
            # Only rank 0's state is saved, which is not that of the others: an open window teaches nothing then.
            checkpoint["callbacks"][self.state_key] |= {"first": None, "samples": math.nan}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict
