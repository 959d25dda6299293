"""Dynamic loss scaling: a scaler that changes its scale once an iteration, and its health.

A loss scaler halves its scale and leaves a step out when gradients overflow. A few such steps at the start, and one now
and then, are how it finds its scale; a long run of them, or a scale that falls below one, means that the gradients
themselves are not finite.

Reference:
    Micikevicius et al. (2018), "Mixed Precision Training", arXiv:1710.03740, section 3.2.

Differs:
    From `torch.amp.GradScaler` in when the scale changes: once an iteration, however many optimizers step in it and how
    often, so that all of them unscale by what their losses were scaled with.

Cost:
    Two integers, on the host or on the device, wherever the verdict is.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_tricks.functional.clipping import scale_gradients_

__all__ = ["COLLAPSED_SCALE", "DelayedRead", "IterationScaler", "OverflowStreak"]

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


class IterationScaler(GradScaler):
    """A `torch.amp.GradScaler` whose `update` waits for the end of an iteration.

    Within `iteration` any number of optimizers may step, each any number of times, all with one scale; `update` is then
    called as usual after each and takes effect once, at the end. Outside of it, it is torch's own scaler.

    Example:
        >>> scaler = IterationScaler("cpu", init_scale=4.0, growth_interval=1)
        >>> weight = nn.Parameter(torch.ones(1))
        >>> optimizers = [torch.optim.SGD([weight], lr=0.1) for _ in range(2)]
        >>> with scaler.iteration():
        ...     for optimizer in optimizers:
        ...         scaler.scale(weight.sum()).backward()
        ...         _ = scaler.step(optimizer)
        ...         scaler.update()
        ...     inside = scaler.get_scale()
        >>> inside, scaler.get_scale()
        (4.0, 8.0)
    """

    _waits = False
    _due = False

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Put updates off until the end of the block. One that ends in an exception drops them."""
        self._waits, self._due = True, False
        try:
            yield
        finally:
            self._waits = False
        if self._due:
            self._due = False
            self.update()

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Change the scale by what was found since the last time; within `iteration`, at its end.

        Args:
            new_scale: a scale to take instead, at once.
        """
        if self._waits and new_scale is None:
            self._due = True
        else:
            super().update(new_scale)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale.

        Args:
            optimizer: the optimizer; also one that has stepped in this iteration.
        """
        self._begin_again(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step, unless gradients overflowed.

        Args:
            optimizer: the optimizer; also one that has stepped in this iteration.
            args: its own.
            kwargs: its own.

        Returns:
            What the optimizer returns, None if it did not step.
        """
        self._begin_again(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def rescale_waiting_(self, optimizers: Iterable[Optimizer], before: Tensor) -> None:
        """Bring gradients that wait for a later step, scaled as they are, from one scale to the one that holds now.

        Args:
            optimizers: those that did not step.
            before: the scale that their losses were multiplied with, a scalar.
        """
        ratio = self.scale(torch.ones_like(before)) / before
        for optimizer in optimizers:
            scale_gradients_([p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None], ratio)

    def _begin_again(self, optimizer: Optimizer) -> None:
        # Private in torch 2.13: what was found is kept by optimizer, and one that has stepped is refused until
        # `update`. It stays there under another key, since `update` looks at all.
        state = self._per_optimizer_states.get(id(optimizer), {})
        if self._waits and getattr(state.get("stage"), "name", "") == "STEPPED":
            del self._per_optimizer_states[id(optimizer)]
            self._per_optimizer_states[-1 - len(self._per_optimizer_states)] = state


@dataclass
class DelayedRead:
    """Read a scalar of the device some time later, when it has come to the host by itself.

    Example:
        >>> read = DelayedRead()
        >>> read.put(torch.tensor(3.0))
        >>> read.take(), read.take()
        (3.0, None)
    """

    _host: Tensor | None = None
    _arrives: Any = None

    def put(self, value: Tensor) -> None:
        """Send a scalar on its way, unless one is still under way.

        Args:
            value: the scalar.
        """
        if self._host is not None:
            return
        if value.device.type == "cpu":
            self._host = value.clone()
        else:
            self._host = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
            self._arrives = torch.Event(value.device)
            self._arrives.record()

    def take(self) -> float | None:
        """Return the scalar if it has arrived; None if not, or if there is none."""
        if self._host is None or (self._arrives is not None and not self._arrives.query()):
            return None
        value = float(self._host)
        self._host = self._arrives = None
        return value
