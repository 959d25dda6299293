"""Tell a spike of the loss or of the gradient norm from the noise of training.

A value is a spike if it lies far above the centre of the last ones. Centre and spread are the median and the median
absolute deviation: a mean and a standard deviation would follow the very values that they are to reveal. Spikes come in
clusters, so the newest values are left out of the comparison for a while: the first of a cluster cannot raise the
threshold for the next.

Formula:
    x is a spike if x > median(w) + z * max(1.4826 * median(|w - median(w)|), 0.01 * |median(w)|)
    with w the values of applied steps, without the newest eighth of a window

Reference:
    Rousseeuw, Hubert (2011), "Robust statistics for outlier detection", doi:10.1002/widm.2, section 2 (the factor
    makes the spread that of a normal distribution); Chowdhery et al. (2022), "PaLM", arXiv:2204.02311, section 5.1
    (leaving out the batches of a spike).

Differs:
    The spread is at least a hundredth of the centre, so that values that hardly vary do not make noise a spike.

Cost:
    Two medians of `window_steps` numbers a step, on the device. No synchronisation.

Sharding:
    None of its own: what comes in is global, and each rank computes the same.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["SpikeWindow"]

_NORMAL = 1.4826
_LEAST_SPREAD = 0.01


@dataclass
class SpikeWindow:
    """The last values of several quantities, and what would be a spike of each.

    Args:
        z_threshold: robust standard deviations above the centre, above 0.
        window_steps: how many values of applied steps are compared with, 2 or more.
        warmup_steps: how many have to be there before anything is a spike, 2 or more.

    Example:
        >>> window = SpikeWindow(z_threshold=6.0, window_steps=8, warmup_steps=4)
        >>> for i in range(8):
        ...     window.step(torch.tensor([2.0 + 0.1 * (i % 3), 1.0]))
        >>> window.exceeds(torch.tensor([2.2, 1.0])), window.exceeds(torch.tensor([2.2, 5.0]))
        (tensor(False), tensor(True))
    """

    z_threshold: float
    window_steps: int
    warmup_steps: int
    values: Tensor | None = None
    """Of shape (quantities, window + delay), the newest last; nan where there is none yet."""

    @property
    def delay_steps(self) -> int:
        """How many of the newest values are left out of the comparison."""
        return min(self.window_steps // 8, self.warmup_steps // 2)

    def thresholds(self, values: Tensor) -> Tensor:
        """Return the value of each quantity above which it is a spike; inf during the warmup.

        Args:
            values: one of each quantity, for their number, device and dtype.
        """
        if self.values is None:
            return torch.full_like(values, math.inf)
        window = self.values[:, : self.window_steps]
        centre = window.nanmedian(dim=1).values
        spread = _NORMAL * (window - centre[:, None]).abs().nanmedian(dim=1).values
        threshold = centre + self.z_threshold * torch.maximum(spread, _LEAST_SPREAD * centre.abs())
        enough = (~self.values.isnan()).sum(dim=1) >= self.warmup_steps
        return torch.where(enough, threshold, torch.full_like(threshold, math.inf))

    def exceeds(self, values: Tensor) -> Tensor:
        """Return whether any of the values is a spike, as a boolean scalar. One that is nan is none.

        Args:
            values: one of each quantity.
        """
        return (values > self.thresholds(values)).any()

    def step(self, values: Tensor, applied: bool | Tensor = True) -> None:
        """Take in the values of one step.

        Args:
            values: one of each quantity. Those that are not finite are left out.
            applied: whether the step was; a bool, or a scalar holding 0 or 1.
        """
        if applied is False:
            return
        if self.values is None:
            shape = (len(values), self.window_steps + self.delay_steps)
            self.values = torch.full(shape, math.nan, dtype=values.dtype, device=values.device)
        enters = torch.isfinite(values)
        if isinstance(applied, Tensor):
            enters = enters & (applied > 0)
        shifted = torch.cat([self.values[:, 1:], values[:, None]], dim=1)
        self.values = torch.where(enters[:, None], shifted, self.values)

    def state_dict(self) -> dict[str, Any]:
        """Return the values, on the CPU. Synchronises with the device."""
        return {"values": None if self.values is None else self.values.cpu()}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take values over from a checkpoint, the newest of them if it kept more.

        Args:
            state: what `state_dict` returned.
            device: where the values are to be.
        """
        saved = state["values"]
        if saved is None:
            self.values = None
            return
        shape = (len(saved), self.window_steps + self.delay_steps)
        self.values = torch.full(shape, math.nan, dtype=saved.dtype, device=device)
        kept = saved[:, -shape[1] :]
        self.values[:, -kept.shape[1] :] = kept.to(device)
