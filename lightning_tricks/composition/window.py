"""The accumulation window that a run is in: what the micro-batches since the last step gave, and what each counts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Window"]


@dataclass
class _Sums:
    loss: Tensor | None = None
    weight: float = 0.0
    num_losses: int = 0

    def __add__(self, other: "_Sums") -> "_Sums":
        loss = other.loss if self.loss is None else self.loss if other.loss is None else self.loss + other.loss
        return _Sums(loss, self.weight + other.weight, self.num_losses + other.num_losses)


@dataclass
class Window:
    """What a step of automatic optimization accumulates; in manual optimization, all since any optimizer's last step.

    Attributes:
        weight: what the current micro-batch counts, set by who weighs it; None where nobody does, and each counts 1.
        gradient_share: what its gradient is multiplied by, besides 1 / number of micro-batches and the loss scale.
        total_weight: the weight of the whole window on all ranks, None where nobody sums it up.
        number: how many windows of this fit came before it.
    """

    weight: float | None = None
    gradient_share: float = 1.0
    total_weight: float | None = None
    number: int = 0
    _before: _Sums = field(default_factory=_Sums)
    _batch: _Sums = field(default_factory=_Sums)
    _looked_at: bool = False

    @property
    def has_loss(self) -> bool:
        """Whether any micro-batch gave a loss."""
        return self._sums.num_losses > 0

    @property
    def num_losses(self) -> int:
        """How many losses were backpropagated."""
        return self._sums.num_losses

    @property
    def weight_sum(self) -> float:
        """The weight of this rank's micro-batches that gave a loss."""
        return self._sums.weight

    @property
    def _sums(self) -> _Sums:
        return self._before + self._batch

    def begin_batch(self) -> None:
        """Begin a micro-batch, which counts 1 unless somebody says otherwise."""
        self._before, self._batch = self._sums, _Sums()
        self.weight, self.gradient_share = None, 1.0

    def add(self, loss: Tensor | None) -> None:
        """Count a loss that is about to be backpropagated.

        Args:
            loss: scalar; None where nobody reads it. What counts nothing may be nan.
        """
        if self._looked_at:  # an optimizer that evaluates its closure again begins again
            self._looked_at, self._batch = False, _Sums()
        weight = 1.0 if self.weight is None else self.weight
        if loss is not None:
            loss = loss * weight if weight else torch.zeros_like(loss)
        self._batch += _Sums(loss, weight, 1)

    def forget_batch(self) -> None:
        """Take back what the current micro-batch gave: an exception ended it."""
        self._batch = _Sums()

    def mean_loss(self, divisor: int, world_size: int) -> Tensor | None:
        """Return this rank's part of the window's mean loss: the mean over the ranks is the one over all samples.

        Args:
            divisor: what the losses were divided by: Lightning does so by its number of micro-batches.
            world_size: number of ranks.

        Returns:
            Scalar, None where there is none. Without `total_weight` it is the mean of this rank alone.
        """
        self._looked_at = True
        sums = self._sums
        total = sums.weight if self.total_weight is None else self.total_weight / world_size
        if sums.loss is None or total == 0:
            return None
        return sums.loss if divisor == total else sums.loss * (divisor / total)

    def sum_of_losses(self) -> Tensor | None:
        """Return the sum of the losses: of manual optimization."""
        self._looked_at = True
        return self._sums.loss

    def close(self) -> None:
        """Begin a new window: the step was taken, or left out, or the run went back."""
        self.number += 1
        self._before, self._batch = _Sums(), _Sums()
        self.total_weight, self._looked_at = None, False

    def state_dict(self, mean: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return what the micro-batches of an open window gave, the mean of the ranks. Synchronises with the device.

        Args:
            mean: averages a scalar over the ranks.
        """
        sums = self._sums
        loss = None if sums.loss is None else mean(sums.loss).cpu()
        weight = float(mean(torch.tensor(sums.weight, dtype=torch.float64)))
        return {"loss": loss, "weight": weight, "losses": sums.num_losses}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on in a window that a checkpoint was written in.

        Args:
            state: what `state_dict` returned.
            device: the losses'.
        """
        loss = state["loss"]
        self.close()
        self._before = _Sums(None if loss is None else loss.to(device), state["weight"], state["losses"])
