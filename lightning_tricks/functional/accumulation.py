"""Gradient accumulation that equals the large batch.

A window of micro-batches with mean losses L_i over n_i samples (or tokens) is to have the gradient of their union,
``sum(n_i grad L_i) / sum(n_i)``, on all ranks. Each loss is backpropagated with the weight ``n_i / r`` for a fixed r,
so that a micro-batch of the usual size has weight 1, and the window's gradient is corrected once, by one factor, when
the sum is known. Where all sizes are equal that factor is 1 and nothing is touched.

**Differs** from dividing by the number of micro-batches, which is right for equal sizes and full windows only
(PL#19987, PL#20350).

**Cost**: one multiplication of the gradients a window whose micro-batches differ; one number summed over the ranks.

**Sharding**: the factor is the same for every shard.
"""

import functools
import itertools
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

__all__ = [
    "AccumulationSchedule",
    "batchnorm_layers",
    "discard_gradient_of",
    "scale_gradient_of",
]


@dataclass(frozen=True)
class AccumulationSchedule:
    """How many micro-batches make a window, by the number of steps, or of epochs, before it.

    Args:
        steps: the first step (or epoch) of each number of micro-batches; ascending, beginning with 0.
        by_epoch: whether the keys are epochs.

    Example:
        >>> schedule = AccumulationSchedule({0: 1, 10: 4})
        >>> schedule.at(step=9, epoch=0), schedule.at(step=10, epoch=0)
        (1, 4)
    """

    steps: Mapping[int, int]
    by_epoch: bool = False
    _starts: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", list(self.steps))

    @staticmethod
    def parse(steps: Any) -> "AccumulationSchedule":
        """Build one from what a user gives.

        Args:
            steps: an int, a mapping from applied steps to ints, or ``{"epoch": mapping}`` from epochs.

        Raises:
            TypeError: it is none of these.
            ValueError: keys that do not begin with 0, do not ascend, or numbers below 1.
        """
        by_epoch = isinstance(steps, Mapping) and set(steps) == {"epoch"}
        given = steps["epoch"] if by_epoch else steps
        mapping = given if isinstance(given, Mapping) else {0: given}
        # A command line and YAML give keys as strings.
        mapping = {int(key) if isinstance(key, str) and key.isdigit() else key: k for key, k in mapping.items()}
        for key, number in mapping.items():
            if any(isinstance(one, bool) or not isinstance(one, int) for one in (key, number)):
                raise TypeError(
                    "expected `steps` to be an int, a mapping from applied steps to ints such as {0: 1, 1000: 4}, or "
                    f'{{"epoch": ...}} with a mapping from epochs, got {steps!r}'
                )
            if number < 1:
                raise ValueError(f"expected `steps` of at least 1 micro-batch a window, got {number} in {steps!r}")
        keys = list(mapping)
        if not keys or keys[0] != 0 or any(first >= second for first, second in itertools.pairwise(keys)):
            raise ValueError(f"expected the keys of `steps` to begin with 0 and to ascend, got {steps!r}")
        return AccumulationSchedule(mapping, by_epoch)

    @property
    def largest(self) -> int:
        """The largest number of micro-batches."""
        return max(self.steps.values())

    def at(self, step: int, epoch: int) -> int:
        """Return how many micro-batches the window after so many applied steps has, in an epoch.

        Args:
            step: applied steps so far.
            epoch: the current epoch, from 0.
        """
        return self.steps[self._starts[bisect_right(self._starts, epoch if self.by_epoch else step) - 1]]

    def num_windows(self, batches: int, epochs: int, *, carry_over: bool = False) -> int:
        """Count the windows of a run in which no step is skipped.

        Args:
            batches: micro-batches in an epoch.
            epochs: how many epochs.
            carry_over: whether a window goes on in the next epoch.

        Example:
            >>> schedule = AccumulationSchedule({0: 4})
            >>> schedule.num_windows(6, 3), schedule.num_windows(6, 3, carry_over=True)
            (6, 5)
        """
        done = held = size = 0  # held: micro-batches in the open window
        for epoch in range(epochs):
            if not held and self._is_last_size(done, epoch):
                size, left = self.at(done, epoch), epochs - epoch
                return done + (-(-batches * left // size) if carry_over else -(-batches // size) * left)
            left = batches
            while left > 0:
                size = size if held else self.at(done, epoch)
                if held or left < size:
                    taken = min(size - held, left)
                    held, left = (held + taken) % size, left - taken
                    done += held == 0
                else:
                    windows = min(left // size, self._steps_to_next_size(done))
                    done, left = done + windows, left - windows * size
            if held and not carry_over:
                done, held = done + 1, 0
        return done + (held > 0)

    def _is_last_size(self, step: int, epoch: int) -> bool:
        return (epoch if self.by_epoch else step) >= self._starts[-1]

    def _steps_to_next_size(self, step: int) -> int:
        following = bisect_right(self._starts, step)
        return sys.maxsize if following == len(self._starts) else self._starts[following] - step


def scale_gradient_of(loss: Tensor, factor: float) -> None:
    """Let the backward of a loss arrive multiplied; the loss itself stays as it is.

    Args:
        loss: scalar that requires grad.
        factor: finite.

    Example:
        >>> x = torch.ones(1, requires_grad=True)
        >>> loss = x.sum()
        >>> scale_gradient_of(loss, 0.25)
        >>> loss.backward()
        >>> x.grad
        tensor([0.2500])
    """
    if factor != 1.0:
        loss.register_hook(functools.partial(torch.mul, factor))  # type: ignore[no-untyped-call]


def discard_gradient_of(loss: Tensor, parameters: Iterable[Tensor] = ()) -> list[RemovableHandle]:
    """Let the backward of a loss run, for the communication in it, but add zeros to every gradient.

    A mean over no valid token is nan, and so is its gradient, also when it is multiplied by zero. So each node of the
    graph gets zeros in the place of what arrives there. For the rare micro-batch without a valid token: it walks the
    graph.

    Args:
        loss: scalar that requires grad.
        parameters: those that a reentrant checkpoint may reach in a graph of its own, past this one.

    Returns:
        What undoes it, to be removed after the backward: DDP keeps the last nodes of the graph for all batches.

    Example:
        >>> x = torch.ones(1, requires_grad=True)
        >>> loss = x.sum() / 0.0 * 0.0
        >>> handles = discard_gradient_of(loss)
        >>> loss.backward()
        >>> loss.item(), x.grad
        (nan, tensor([0.]))
    """
    handles, seen = [], set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        handles.append(node.register_prehook(_zeros))
        waiting += [following for following, _ in node.next_functions]
    handles += [one.register_hook(torch.zeros_like) for one in parameters if one.requires_grad]  # type: ignore[no-untyped-call]
    return handles


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if one is None else torch.zeros_like(one) for one in gradients)


def batchnorm_layers(module: nn.Module) -> list[str]:
    """Return the names of layers whose output depends on the other samples of the batch.

    Args:
        module: the model.

    Example:
        >>> batchnorm_layers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        ['1']
    """
    return [name for name, one in module.named_modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
