"""The health of dynamic loss scaling, seen from which steps it left out.

A loss scaler halves its scale and leaves a step out when gradients overflow. A few such steps at the start, and one now
and then, are how it finds its scale; a long run of them, or a scale that falls below one, means that the gradients
themselves are not finite.

Reference:
    Micikevicius et al. (2018), "Mixed Precision Training", arXiv:1710.03740, section 3.2.

Cost:
    Two integers, on the host or on the device, wherever the verdict is.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["COLLAPSED_SCALE", "OverflowStreak"]

COLLAPSED_SCALE = 1.0
"""Below this scale fp16 gradients are made smaller, not larger: scaling no longer does what it is for."""


@dataclass
class OverflowStreak:
    """How many steps in a row overflowed: now, and at the worst.

    Both are ints while the host knows each verdict, and device tensors where only the device does.

    Example:
        >>> streak = OverflowStreak()
        >>> for overflowed in (True, True, False, True):
        ...     streak.step(overflowed)
        >>> streak.current, streak.longest
        (1, 2)
    """

    current: int | Tensor = 0
    longest: int | Tensor = 0

    def step(self, overflowed: bool | Tensor) -> None:
        """Count one step. Stays on the device that `overflowed` is on, without synchronising.

        Args:
            overflowed: whether the scaler left the step out; a bool, or a scalar tensor holding 0 or 1.
        """
        self.current = (self.current + 1) * overflowed
        if isinstance(self.current, Tensor):
            # Not `as_tensor` of a number, which would be copied to the device, and waited for.
            self.longest = torch.maximum(torch.zeros_like(self.current) + self.longest, self.current)
        else:
            self.longest = max(int(self.longest), self.current)
