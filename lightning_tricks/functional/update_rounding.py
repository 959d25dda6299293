"""The share of weight updates that the weights' own dtype rounds away.

A weight near one cannot take an update below half the distance to its neighbour: 2e-3 in bf16, 2e-4 in fp16, 3e-8 in
fp32. In fp16, 1.0 - 1e-9 is 1.0. Weights that are kept in 16 bits therefore stop learning as the learning rate falls,
while the loss still shows gradients.

Formula:
    vanished = #{i: g_i != 0 and w_after_i == w_before_i} / #{i: g_i != 0}

Reference:
    Micikevicius et al. (2018), "Mixed Precision Training", arXiv:1710.03740, section 3.1; Zamirai et al. (2020),
    "Revisiting BFloat16 Training", arXiv:2010.06192, section 3.

Cost:
    On the steps that are looked at: one copy of the weights, one read of gradients and weights.

Sharding:
    Each rank counts its own shards; one sum of two numbers over ranks for each mesh.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_tricks.functional.shards import by_placement, local_part, reduce_over_shards

__all__ = ["copy_of", "vanished_and_due"]


def copy_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors, each where it lives.

    Args:
        tensors: plain, DTensor, or both.

    Example:
        >>> copy_of([torch.ones(1)])
        [tensor([1.])]
    """
    return [tensor.detach().clone() for tensor in tensors]


def vanished_and_due(before: Sequence[Tensor], after: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Count the weights that had a gradient and did not change, and those that had one, over all ranks.

    Args:
        before: copies of the weights before the step.
        after: the weights; of the same placements.
        gradients: what the optimizer stepped on.

    Returns:
        Two float64 numbers, on the device.

    Example:
        >>> before = [torch.tensor([1.0, 1.0, 1.0], dtype=torch.float16)]
        >>> after = [before[0] - torch.tensor([1e-9, 1e-2, 0.0]).half()]
        >>> vanished_and_due(before, after, [torch.tensor([1.0, 1.0, 0.0])])
        tensor([1., 2.], dtype=torch.float64)
    """
    total: Tensor | None = None
    for placement, indices in by_placement(after).items():
        counts = []
        for index in indices:
            due = local_part(gradients[index]) != 0
            vanished = due & (local_part(after[index]) == local_part(before[index]))
            counts.append(torch.stack([vanished.sum(), due.sum()]))
        summed = reduce_over_shards(torch.stack(counts).sum(dim=0).double(), placement)
        total = summed if total is None else total + summed.to(total.device)
    return torch.zeros(2, dtype=torch.float64) if total is None else total
