"""Tell a spike of the loss or of the gradient norm from the noise of training.

A value is a spike if it lies far above the centre of the last ones. Centre and spread are the median and the median
absolute deviation: a mean and a standard deviation would follow the very values that they are to reveal. Spikes come in
clusters, so the newest values are left out of the comparison for a while: the first of a cluster cannot raise the
threshold for the next.

Formula:
    m = median(w), d(v) = 1.4826 * median(|v - median(v)|)
    x is a spike if x > m + z * max(d(w), s * |m|) and x > m * min(exp(z * d(log w)), 100), the latter where w > 0
    with w the values of applied steps, without the newest d to 2 d - 1 steps, d an eighth of the window,
    or half of the warmup if that is less

Reference:
    Rousseeuw, Hubert (2011), "Robust statistics for outlier detection", doi:10.1002/widm.2, section 2 (the factor
    makes the spread that of a normal distribution); Chowdhery et al. (2022), "PaLM", arXiv:2204.02311, section 5.1
    (leaving out the batches of a spike).

Differs:
    The spread is at least a share s of the centre, so that values that hardly vary do not make noise a spike. What
    varies by factors, as gradient norms and losses near zero do, must be far out on a logarithmic scale too: on a
    linear one a sound run has many spikes. A hundred times the centre always is.

Cost:
    One comparison a step, on the device; every d steps two medians of `window_steps` numbers. No synchronisation.

Sharding:
    None of its own: what comes in is global, and each rank computes the same.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["SpikeWindow", "account_of", "loss_and_norm", "shown_limits"]

_NORMAL = 1.4826
_LARGEST_FACTOR = 100.0


def loss_and_norm(loss: Tensor | None, norm: Tensor) -> Tensor:
    """Put the loss and the gradient norm of a step side by side.

    Args:
        loss: a scalar, None where there was none.
        norm: a scalar.

    Returns:
        Two float32 numbers; -inf in the place of a loss that there was not.

    Example:
        >>> loss_and_norm(None, torch.tensor(2.0))
        tensor([-inf, 2.])
    """
    norm = norm.float()
    return torch.stack([torch.full_like(norm, -math.inf) if loss is None else loss, norm])


def account_of(values: Tensor, limits: Tensor | None, flags: Sequence[bool | Tensor]) -> Tensor:
    """Put all that is to be known of a step into one row, to be read later with others in one transfer.

    Args:
        values: from `loss_and_norm`.
        limits: of the same shape; None for nan.
        flags: bools, or scalars that are true or above zero.

    Returns:
        Values, limits, and the flags as 0 or 1.

    Example:
        >>> account_of(torch.tensor([1.0, 2.0]), None, [True, torch.tensor(0.0)])
        tensor([1., 2., nan, nan, 1., 0.])
    """
    limits = torch.full_like(values, math.nan) if limits is None else limits
    known = torch.stack([torch.as_tensor(flag, device=values.device) > 0 for flag in flags])
    return torch.cat([values, limits, known.float()])


def shown_limits(limits: Tensor) -> Tensor:
    """Return limits for people to look at: inf where there is none, as in the warmup.

    Args:
        limits: from `SpikeWindow.limits`.

    Example:
        >>> shown_limits(torch.tensor([1.0, torch.finfo(torch.float32).max]))
        tensor([1., inf])
    """
    return torch.where(limits < torch.finfo(limits.dtype).max, limits, math.inf)


@dataclass
class SpikeWindow:
    """The last values of several quantities, and what would be a spike of each.

    Args:
        z_threshold: robust standard deviations above the centre, above 0.
        window_steps: how many values of applied steps are compared with, 2 or more.
        warmup_steps: how many have to be there before anything is a spike, 2 or more.
        least_spread: of each quantity the least standard deviation that is assumed, as a share of its centre; one
            number for all.

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
    least_spread: Sequence[float] = (0.01,)
    values: Tensor | None = None
    """Of shape (quantities, window), the newest last; nan where there is none yet."""
    _limits: Tensor | None = None
    _newest: list[tuple[Tensor | None, bool | Tensor]] = field(default_factory=list)
    _steps: int = 0

    @property
    def delay_steps(self) -> int:
        """How many of the newest values are left out of the comparison, at least."""
        return max(min(self.window_steps // 8, self.warmup_steps // 2), 1)

    def limits(self, values: Tensor) -> Tensor:
        """Return the value of each quantity above which it is a spike; the largest finite one during the warmup.

        Args:
            values: one of each quantity, for their number, device and dtype.
        """
        if self._limits is None:
            self._limits = torch.full_like(values, torch.finfo(values.dtype).max)
        return self._limits

    def exceeds(self, values: Tensor) -> Tensor:
        """Return whether any of the values is a spike, or inf or nan, as a boolean scalar.

        Args:
            values: one of each quantity; -inf for one that there is not.
        """
        return ~(values <= self.limits(values)).all()

    def step(self, values: Tensor | None, applied: bool | Tensor = True) -> None:
        """Take in one step. Those that were left out count as steps, so that it does not matter who knows of it.

        Args:
            values: one of each quantity, None where none was measured. Those that are not finite are left out.
            applied: whether the step was; a bool, or a scalar holding 0 or 1.
        """
        self._newest.append((values, applied))
        self._steps += 1
        self._take_in()

    def state_dict(self) -> dict[str, Any]:
        """Return the values, on the CPU. Synchronises with the device."""
        newest = [None if one[0] is None else _entering([one])[:, 0].cpu() for one in self._newest]
        values = None if self.values is None else self.values.cpu()
        return {"values": values, "newest": newest, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take values over from a checkpoint, the newest of them if it kept more.

        Args:
            state: what `state_dict` returned.
            device: where the values are to be.
        """
        saved = state["values"]
        self.values = self._limits = None
        self._steps = state["steps"]
        if saved is not None:
            self.values = saved.new_full((len(saved), self.window_steps), math.nan)
            kept = saved[:, -self.window_steps :]
            self.values[:, -kept.shape[1] :] = kept
            self.values = self.values.to(device)
            self._set_limits()
        self._newest = [(None if one is None else one.to(device), True) for one in state["newest"]]
        self._take_in()

    def _take_in(self) -> None:
        # When the warmup ends as many as may be, so that judging begins there.
        while len(self._newest) >= 2 * self.delay_steps or (
            self._steps == self.warmup_steps and len(self._newest) > self.delay_steps
        ):
            count = min(self.delay_steps, len(self._newest) - self.delay_steps)
            steps = [step for step in self._newest[:count] if step[0] is not None]
            del self._newest[:count]
            if steps:
                self._append(_entering(steps))

    def _append(self, new: Tensor) -> None:
        if self.values is None:
            self.values = new.new_full((len(new), self.window_steps), math.nan)
        joined = torch.cat([self.values, new], dim=1)
        # What is nan moves to the front, and the oldest of the rest out.
        order = (~joined.isnan()).int().argsort(dim=1, stable=True)
        self.values = joined.gather(1, order)[:, -self.window_steps :]
        self._set_limits()

    def _set_limits(self) -> None:
        assert self.values is not None
        centre = self.values.nanmedian(dim=1).values
        deviation = _deviation(self.values)
        shares = itertools.cycle(self.least_spread)
        spread = torch.maximum(deviation, torch.stack([next(shares) * one for one in centre.abs()]))
        factor = (self.z_threshold * _deviation(self.values.log())).exp().clamp(max=_LARGEST_FACTOR)
        # The logarithm of what is negative is nan, and so is then the factor.
        limits = torch.fmax(centre + self.z_threshold * spread, centre * factor)
        enough = (~self.values.isnan()).sum(dim=1) >= self.warmup_steps - self.delay_steps
        # Without a spread nothing is known: a loss that is mostly zero, as a hinge loss may be.
        self._limits = torch.where(enough & (spread > 0), limits, torch.finfo(limits.dtype).max)


def _deviation(values: Tensor) -> Tensor:
    """The robust standard deviation of each row, without its nans."""
    centre = values.nanmedian(dim=1, keepdim=True).values
    return _NORMAL * (values - centre).abs().nanmedian(dim=1).values


def _entering(steps: list[tuple[Tensor | None, bool | Tensor]]) -> Tensor:
    """The steps' values side by side, nan where they do not enter."""
    measured = [(value, applied) for value, applied in steps if value is not None]
    values = torch.stack([value for value, _ in measured], dim=1)
    known = [
        applied if isinstance(applied, Tensor) else torch.full_like(value[0], float(applied))
        for value, applied in measured
    ]
    enters = torch.isfinite(values) & (torch.stack(known) > 0)
    return torch.where(enters, values, math.nan)
