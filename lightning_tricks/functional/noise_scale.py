"""The gradient noise scale: the batch size from which on larger batches stop paying.

With ``|g_b|^2`` the squared norm of the mean gradient of b samples, its expectation is ``|G|^2 + S / b``, where G is
the true gradient and S the trace of the covariance of one sample's. Two batch sizes, of which one is a part of the
other, give both:

    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b)        S = (|g_b|^2 - |g_B|^2) / (1/b - 1/B)

Each is noisy but unbiased, so they are averaged over the steps before their ratio ``S / |G|^2`` is taken.

**Reference**: McCandlish et al. (2018), "An Empirical Model of Large-Batch Training", arXiv:1812.06162, appendix A.1.

**Cost**: the norm of one micro-batch's gradient a window. Nothing is read from the device until `scale` is.

**Sharding**: squared norms of each rank's own micro-batch, averaged over the ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["FirstOfWindow", "NoiseScale", "batch_sizes", "filled"]


@dataclass
class FirstOfWindow:
    """The first micro-batch of a window, on one rank, to be summed over the ranks.

    Args:
        square: scalar, the squared norm of its mean gradient.
        samples: how many it has.

    Example:
        >>> first = FirstOfWindow(torch.tensor(4.0), 2.0)
        >>> first.numbers()
        tensor([4.0000, 0.5000, 2.0000, 1.0000], dtype=torch.float64)
    """

    square: Tensor
    samples: float

    def numbers(self) -> Tensor:
        """Return what is summed: squared norm, 1 / samples, samples, and 1."""
        return torch.stack([self.square.double(), *filled(self.square, 1 / self.samples, self.samples, 1.0)])


def batch_sizes(sums: Tensor, *, common: bool, weighed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean squared norm of the first micro-batches, and the samples behind it and behind the window.

    Args:
        sums: over the ranks: `FirstOfWindow.numbers`; then of the window its samples, the sum of 1 / samples of its
            micro-batches, and their number.
        common: whether each rank's first gradient is that of all ranks.
        weighed: whether micro-batches count by their samples. Where batches of any size count the same, the noise is
            that of fewer samples, evenly spread.

    Example:
        >>> batch_sizes(torch.tensor([4.0, 0.5, 2.0, 1.0, 6.0, 0.75, 2.0]), common=False, weighed=True)
        (tensor(4.), tensor(2.), tensor(6.))
    """
    square, inverse, samples_of_first, ranks, samples, inverses, batches = sums
    small = samples_of_first if common else ranks / inverse
    return square / ranks, small, samples if weighed else batches.square() / inverses


def filled(like: Tensor, *values: float) -> list[Tensor]:
    """Return scalars that are made on a device: copied there they would be waited for.

    Args:
        like: on the device.
        values: of the scalars.

    Example:
        >>> filled(torch.zeros(2), 1.0, 2.0)
        [tensor(1., dtype=torch.float64), tensor(2., dtype=torch.float64)]
    """
    return [torch.full((), value, dtype=torch.float64, device=like.device) for value in values]


@dataclass
class NoiseScale:
    """Running means of S and of |G|^2.

    Args:
        decay: of the exponential averages, in (0, 1).

    Example:
        >>> noise = NoiseScale(decay=0.9)
        >>> one, two, three = torch.tensor([1.0, 2.0, 3.0])
        >>> noise.step(three, two, small=one, big=two, applied=True)
        >>> float(noise.scale())
        2.0
    """

    decay: float = 0.95
    trace: Tensor | None = None
    signal: Tensor | None = None

    def step(
        self, small_square: Tensor, big_square: Tensor, *, small: Tensor, big: Tensor, applied: bool | Tensor
    ) -> None:
        """Take in one window. Does not synchronise.

        Args:
            small_square: scalar, the squared norm of the mean gradient over `small` samples.
            big_square: scalar, that over `big`, which hold the others.
            small: scalar, samples in the smaller batch.
            big: scalar, samples in the larger one.
            applied: whether the step was taken; a bool, or a scalar holding 0 or 1. What was not, or is not finite,
                teaches nothing, nor do two batches of one size.
        """
        signal = (big * big_square - small * small_square) / (big - small)
        trace = (small_square - big_square) / (1 / small - 1 / big)  # not finite where both are of one size
        if self.trace is None or self.signal is None:  # both begin with zero, which their ratio does not see
            self.trace, self.signal = torch.zeros_like(trace), torch.zeros_like(signal)
        enters = torch.isfinite(signal) & torch.isfinite(trace)
        if isinstance(applied, Tensor):
            enters &= applied.to(enters.device) > 0
        elif not applied:
            return
        share = torch.where(enters, 1 - self.decay, 0.0).to(trace.dtype)
        self.trace = self.trace.lerp(torch.where(enters, trace, 0.0), share)
        self.signal = self.signal.lerp(torch.where(enters, signal, 0.0), share)

    def scale(self) -> Tensor | None:
        """Return S / |G|^2 in samples, a scalar; nan as long as the mean of either is not positive; None at first."""
        if self.trace is None or self.signal is None:
            return None
        known = (self.trace > 0) & (self.signal > 0)
        return torch.where(known, self.trace / self.signal, torch.nan)

    def state_dict(self) -> dict[str, Any]:
        """Return the means, on the CPU. Synchronises with the device."""
        values = {"trace": self.trace, "signal": self.signal}
        return {key: None if value is None else value.cpu() for key, value in values.items()}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take the means over from a checkpoint.

        Args:
            state: what `state_dict` returned.
            device: where they are to be.
        """
        self.trace, self.signal = (None if state[key] is None else state[key].to(device) for key in ("trace", "signal"))
