"""Schedule-free optimizers: which weights they hold, and which they mean.

They keep three sequences: z takes the steps, x is the average that is the result, and gradients are taken at y between
the two. The parameters hold y while training; the optimizer's own ``eval()`` and ``train()`` turn them into x and back,
but for rounding.

Formula: y = (1 - beta) z + beta x, with x_(k+1) = (1 - c) x_k + c z_(k+1) and no schedule for the rate of z.

Reference:
    Defazio, Yang, Mehta, Mishchenko, Khaled, Cutkosky (2024), "The Road Less Scheduled", arXiv:2405.15682. The
    optimizers are those of the package `schedulefree`.

Differs:
    In that y is put back as it was, bit for bit, after a look at x.

Cost:
    A copy of the weights while x is looked at.

Sharding:
    Elementwise on each rank's part, as the optimizer's own switches.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_tricks.functional.shards import local_tensor

__all__ = ["evaluation_weights", "is_schedule_free", "show_evaluation_weights_", "train_on_"]


def is_schedule_free(optimizer: Optimizer) -> bool:
    """Whether an optimizer switches its parameters between training and evaluation.

    Args:
        optimizer: any.

    Example:
        >>> is_schedule_free(torch.optim.SGD([torch.zeros(1)], lr=0.1))
        False
    """
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


@torch.no_grad()
def show_evaluation_weights_(optimizer: Optimizer) -> list[Tensor]:
    """Turn the parameters into x, and return this rank's parts of what they held, for `train_on_`.

    Args:
        optimizer: a schedule-free one.

    Example:
        >>> import schedulefree
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = schedulefree.SGDScheduleFree([weight], lr=0.5, momentum=0.5)
        >>> optimizer.train()
        >>> for _ in range(2):
        ...     weight.grad = torch.ones(1)
        ...     optimizer.step()
        >>> y = weight.item()
        >>> held = show_evaluation_weights_(optimizer)
        >>> weight.item() == y, train_on_(optimizer, held), weight.item() == y
        (False, None, True)
    """
    held = [local_tensor(one.detach()).clone() for one in _parameters(optimizer)]
    try:
        optimizer.eval()  # type: ignore[attr-defined]
    except BaseException:
        train_on_(optimizer, held)
        raise
    return held


@torch.no_grad()
def train_on_(optimizer: Optimizer, held: Sequence[Tensor]) -> None:
    """Put back what the parameters held before `show_evaluation_weights_`, bit for bit.

    Args:
        optimizer: the same.
        held: what that returned.

    Example:
        >>> train_on_(torch.optim.SGD([torch.zeros(1)], lr=0.1), [torch.ones(1)])
    """
    for parameter, before in zip(_parameters(optimizer), held, strict=True):
        local_tensor(parameter.detach()).copy_(before)
    for group in optimizer.param_groups:
        group["train_mode"] = True


@contextmanager
def evaluation_weights(optimizer: Optimizer) -> Iterator[None]:
    """Let the parameters be x while the context lasts.

    Args:
        optimizer: a schedule-free one, in training.

    Example:
        >>> import schedulefree
        >>> optimizer = schedulefree.SGDScheduleFree([torch.nn.Parameter(torch.ones(1))], lr=0.5)
        >>> optimizer.train()
        >>> with evaluation_weights(optimizer):
        ...     optimizer.param_groups[0]["train_mode"]
        False
    """
    # The weights come back bit for bit, so a backward pass that has yet to come may go on with them.
    plain = tuple(one for one in _parameters(optimizer) if not isinstance(one, DTensor))
    with torch.autograd._unsafe_preserve_version_counter(plain):  # type: ignore[attr-defined]  # private: torch 2.13
        held = show_evaluation_weights_(optimizer)
        try:
            yield
        finally:
            train_on_(optimizer, held)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
