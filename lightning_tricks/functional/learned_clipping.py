"""Thresholds for clipping by norm that are learned from the norms of the run itself.

A fixed threshold is right for a while at most: norms fall by orders of magnitude in a run. Both estimators here watch
the norms of applied steps. `NormStatistics` keeps a running mean and variance and calls a norm an outlier by its
z-score; `NormHistory` keeps the last norms and cuts at a percentile of them. Before either has seen enough it does not
clip.

Formula:
    z-score (ZClip): z = (|g| - mean) / (std + 1e-6); where z > z_threshold, clip |g| to mean + z_threshold^2 / z * std;
        mean <- d * mean + (1 - d) * n,  var <- d * var + (1 - d) * (n - mean)^2  with n the norm after clipping
    percentile (AutoClip): clip |g| to the p-th percentile of the last norms (before clipping)

Reference:
    Kumar, Owen, Chowdhury, Guera (2025), "ZClip", arXiv:2504.02507, algorithm 1; Seetharaman, Wichern, Pardo, Le Roux
    (2020), "AutoClip", arXiv:2007.14469, algorithm 1.

Differs:
    Steps that were not applied, and norms that are zero or not finite, enter neither. AutoClip's history is bounded,
    and holds the norms before this one, where the paper adds this one first and keeps all. The variance of the warmup
    is that of its norms, as in the authors' code; it is computed as they come in (Welford) instead of at its end.

Cost:
    A dozen scalar operations a step on the device; the percentile sorts `history_steps` numbers. No synchronisation.

Sharding:
    None of its own: the norm is global, and each rank computes the same.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["NormHistory", "NormStatistics"]

_EPSILON = 1e-6


@dataclass
class NormStatistics:
    """Running mean and variance of the norms of applied steps.

    Args:
        decay: weight of the past in the running mean, in (0, 1).
        warmup_steps: applied steps whose plain mean and variance the running ones begin with, 1 or more.
        z_threshold: the z-score above which a norm is an outlier, above 0.

    Example:
        >>> statistics = NormStatistics(decay=0.9, warmup_steps=2, z_threshold=2.0)
        >>> for norm in (1.0, 3.0):
        ...     statistics.step(torch.tensor(norm))
        >>> statistics.threshold(torch.tensor(3.5)), statistics.threshold(torch.tensor(6.0))
        (tensor(inf), tensor(3.0000))
    """

    decay: float
    warmup_steps: int
    z_threshold: float
    mean: Tensor | None = None
    var: Tensor | None = None
    count: Tensor | None = None

    def zscore(self, norm: Tensor) -> Tensor:
        """Return how many standard deviations a norm lies above the mean; 0 during the warmup.

        Args:
            norm: a scalar.
        """
        if self.mean is None or self.var is None or self.count is None:
            return torch.zeros_like(norm)
        z = (norm - self.mean) / (self.var.sqrt() + _EPSILON)
        return torch.where(self.count >= self.warmup_steps, z, torch.zeros_like(z))

    def spike_threshold(self, norm: Tensor) -> Tensor:
        """Return the norm above which a norm is an outlier; inf during the warmup.

        Args:
            norm: a scalar, for its device and dtype.
        """
        if self.mean is None or self.var is None or self.count is None:
            return torch.full_like(norm, math.inf)
        threshold = self.mean + self.z_threshold * (self.var.sqrt() + _EPSILON)
        return torch.where(self.count >= self.warmup_steps, threshold, torch.full_like(threshold, math.inf))

    def threshold(self, norm: Tensor) -> Tensor:
        """Return the norm to clip to: inf, unless this one is an outlier. The larger an outlier, the less is left.

        Args:
            norm: the norm before clipping, a scalar.
        """
        if self.mean is None or self.var is None:
            return torch.full_like(norm, math.inf)
        z = self.zscore(norm)
        clipped = self.mean + self.z_threshold**2 / z * self.var.sqrt()
        return torch.where(z > self.z_threshold, clipped, torch.full_like(clipped, math.inf))

    def step(self, clipped_norm: Tensor, applied: bool | Tensor = True) -> None:
        """Take in the norm of one step.

        Args:
            clipped_norm: the norm after clipping, a scalar. One that is zero or not finite changes nothing.
            applied: whether the step was; a bool, or a scalar holding 0 or 1.
        """
        if applied is False:
            return
        if self.mean is None or self.var is None or self.count is None:
            self.mean, self.var, self.count = (torch.zeros_like(clipped_norm) for _ in range(3))
        enters = _enters(clipped_norm, applied)
        warming_up = self.count < self.warmup_steps
        share = torch.where(warming_up, 1.0 / (self.count + 1.0), 1.0 - self.decay)
        deviation = clipped_norm - self.mean
        mean = self.mean + share * deviation
        # Of the norms so far in the warmup; the running one after it.
        spread = torch.where(warming_up, deviation * (clipped_norm - mean), (clipped_norm - mean).square())
        var = self.var + share * (spread - self.var)
        self.mean = torch.where(enters, mean, self.mean)
        self.var = torch.where(enters, var, self.var)
        self.count = self.count + enters.to(self.count.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics, on the CPU. Synchronises with the device."""
        return {name: None if one is None else one.cpu() for name, one in self._tensors().items()}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take statistics over from a checkpoint.

        Args:
            state: what `state_dict` returned.
            device: where the norms are.
        """
        for name in self._tensors():
            setattr(self, name, None if state[name] is None else state[name].to(device))

    def _tensors(self) -> dict[str, Tensor | None]:
        return {"mean": self.mean, "var": self.var, "count": self.count}


@dataclass
class NormHistory:
    """The norms of the last applied steps, and a percentile of them.

    Args:
        percentile: in [0, 100].
        history_steps: how many norms are kept, 1 or more.
        warmup_steps: applied steps before which nothing is clipped, 1 or more.

    Example:
        >>> history = NormHistory(percentile=50.0, history_steps=3, warmup_steps=2)
        >>> for norm in (9.0, 1.0, 2.0, 3.0):
        ...     history.step(torch.tensor(norm))
        >>> history.threshold(torch.tensor(7.0))
        tensor(2.)
    """

    percentile: float
    history_steps: int
    warmup_steps: int
    norms: Tensor | None = None
    """The last norms, the newest at the end; nan where there is none yet."""

    def threshold(self, norm: Tensor) -> Tensor:
        """Return the norm to clip to; inf during the warmup.

        Args:
            norm: the norm before clipping, for its device and dtype.
        """
        if self.norms is None:
            return torch.full_like(norm, math.inf)
        percentile = torch.nanquantile(self.norms, self.percentile / 100.0)
        enough = (~self.norms.isnan()).sum() >= min(self.warmup_steps, self.history_steps)
        return torch.where(enough, percentile, torch.full_like(percentile, math.inf))

    def step(self, norm: Tensor, applied: bool | Tensor = True) -> None:
        """Take in the norm of one step.

        Args:
            norm: the norm before clipping, a scalar. One that is zero or not finite changes nothing.
            applied: whether the step was; a bool, or a scalar holding 0 or 1.
        """
        if applied is False:
            return
        if self.norms is None:
            self.norms = torch.full((self.history_steps,), math.nan, dtype=norm.dtype, device=norm.device)
        enters = _enters(norm, applied)
        self.norms = torch.where(enters, torch.cat([self.norms[1:], norm.reshape(1)]), self.norms)

    def state_dict(self) -> dict[str, Any]:
        """Return the norms, on the CPU. Synchronises with the device."""
        return {"norms": None if self.norms is None else self.norms.cpu()}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take norms over from a checkpoint, the last ones of them if it kept more.

        Args:
            state: what `state_dict` returned.
            device: where the norms are.
        """
        saved = state["norms"]
        if saved is None:
            self.norms = None
            return
        self.norms = torch.full((self.history_steps,), math.nan, dtype=saved.dtype, device=device)
        kept = saved[-self.history_steps :]
        self.norms[-len(kept) :] = kept.to(device)


def _enters(norm: Tensor, applied: bool | Tensor) -> Tensor:
    """Whether a norm is taken in. One of zero is not: a threshold of zero would never let go."""
    enters = torch.isfinite(norm) & (norm > 0)
    return enters & (applied > 0) if isinstance(applied, Tensor) else enters
