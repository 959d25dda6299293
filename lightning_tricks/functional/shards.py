"""Sums over all ranks of quantities that each rank computes of its own shards.

Tensors are grouped by where they live: plain ones, which every rank has whole, and DTensors by their mesh and by the
axes of it that hold different parts. Each group's numbers are summed over those axes, and only over those.

Cost:
    One all-reduce for each mesh that tensors are sharded on, and each axis of it that shards.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

__all__ = ["Placement", "by_placement", "local_part", "local_tensor", "part_like", "placement_of", "reduce_over_shards"]

Placement = tuple[Any, tuple[bool, ...]] | None
"""Where a shard lives: its mesh and, for each axis of it, whether the axis holds different parts. None: a plain
tensor."""


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as it is.

    Args:
        tensor: plain or DTensor.

    Example:
        >>> local_tensor(torch.ones(1))
        tensor([1.])
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; a complex one as its real and imaginary parts.

    Args:
        tensor: plain or DTensor.

    Example:
        >>> local_part(torch.tensor([1 + 2j]))
        tensor([[1., 2.]])
    """
    local = local_tensor(tensor)
    return torch.view_as_real(local) if local.is_complex() else local


def part_like(local: Tensor, tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor as a tensor that is sharded as another one.

    Args:
        local: the part.
        tensor: plain, for which the part is the whole, or DTensor.

    Example:
        >>> part_like(torch.ones(1), torch.zeros(1))
        tensor([1.])
    """
    if not isinstance(tensor, DTensor):
        return local
    mesh, placements = tensor.device_mesh, tensor.placements
    wrapped: Tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return wrapped


def placement_of(tensor: Tensor) -> Placement:
    """Return where a tensor's parts live.

    Args:
        tensor: plain, or a DTensor that owes no sum between ranks.

    Example:
        >>> placement_of(torch.zeros(2)) is None
        True
    """
    if not isinstance(tensor, DTensor):
        return None
    return tensor.device_mesh, tuple(not placement.is_replicate() for placement in tensor.placements)


def by_placement(tensors: Sequence[Tensor]) -> dict[Placement, list[int]]:
    """Group tensors by where they live.

    Args:
        tensors: plain, DTensor, or both; the same on every rank.

    Returns:
        The indices of each group's tensors. The order of groups is that of the tensors, so the same on every rank.

    Example:
        >>> by_placement([torch.zeros(1), torch.zeros(2)])
        {None: [0, 1]}
    """
    groups: dict[Placement, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        groups[placement_of(tensor)].append(index)
    return dict(groups)


def reduce_over_shards(value: Tensor, placement: Placement, operation: str = "sum") -> Tensor:
    """Combine what each rank computed of its shards, over the mesh axes that hold different parts.

    Args:
        value: a tensor of the same shape on every rank.
        placement: where the shards live.
        operation: "sum" or "max".

    Example:
        >>> reduce_over_shards(torch.tensor(3.0), None)
        tensor(3.)
    """
    if placement is None or not any(placement[1]):
        return value
    mesh, sharded = placement
    placements = [Partial(operation) if axis else Replicate() for axis in sharded]
    from_local: Callable[..., DTensor] = DTensor.from_local
    reduced: Tensor = from_local(value, mesh, placements, run_check=False).full_tensor()
    return reduced
