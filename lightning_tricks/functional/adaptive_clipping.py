"""Adaptive gradient clipping: no unit of a weight moves by more than a fraction of its own norm.

The threshold is not one number for the model but one for each unit, in proportion to the unit's weights, so that it
needs no tuning as depth, batch size or learning rate change. It is what lets networks without normalisation train at
large batches. A unit is a row of a matrix or a filter of a convolution (all that feeds one output); a vector or scalar
is one unit.

Formula:
    g_i <- min(1, clip_factor * max(|w_i|, eps) / |g_i|) * g_i    for each unit i

Reference:
    Brock, De, Smith, Simonyan (2021), "High-Performance Large-Scale Image Recognition Without Normalization",
    arXiv:2102.06171, equation 3.

Cost:
    One read of the weights and gradients for the norms, one read and write for the scaling; a few kernels a parameter.
    No host synchronisation.

Sharding:
    Units that lie on one rank cost nothing. Those that span ranks (vectors under FSDP2, rows of matrices split by
    columns) cost one all-reduce of their partial sums for each mesh axis, for all parameters together.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_tricks.functional.shards import local_tensor

__all__ = ["clip_unitwise_", "unitwise_scales"]

_SMALLEST_NORM = 1e-6


def unitwise_scales(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], clip_factor: float = 0.01, eps: float = 1e-3
) -> list[Tensor]:
    """Compute the factor that each unit's gradient is to be scaled with.

    Args:
        parameters: weights of any shape; plain, DTensor, or both.
        gradients: their gradients, of the same shapes and placements.
        clip_factor: the largest ratio of a gradient's norm to its weight's, above 0.
        eps: the least weight norm that is assumed, above 0, so that units that start at zero can leave it.

    Returns:
        For each parameter a tensor in (0, 1] that broadcasts over this rank's part of it; nan where the gradient is.

    Example:
        >>> weight, gradient = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[0.1, 0.0], [0.1, 0.0]])
        >>> unitwise_scales([weight], [gradient], clip_factor=0.01)[0].flatten()
        tensor([5.0000e-01, 1.0000e-04])
    """
    weights = _unit_norms(parameters)
    grads = _unit_norms(gradients)
    scales = []
    for weight, grad in zip(weights, grads, strict=True):
        threshold = weight.clamp(min=eps) * clip_factor
        scale = threshold / grad.clamp(min=_SMALLEST_NORM)
        scales.append(torch.where(grad < threshold, torch.ones_like(scale), scale))
    return scales


def clip_unitwise_(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], clip_factor: float = 0.01, eps: float = 1e-3
) -> list[Tensor]:
    """Scale each unit's gradient in place to at most `clip_factor` times its weight's norm.

    Args:
        parameters: as for `unitwise_scales`.
        gradients: as for `unitwise_scales`.
        clip_factor: as for `unitwise_scales`.
        eps: as for `unitwise_scales`.

    Returns:
        The factors, as from `unitwise_scales`.

    Example:
        >>> weight, gradient = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.1, 0.0]])
        >>> scales = clip_unitwise_([weight], [gradient])
        >>> gradient
        tensor([[0.0500, 0.0000]])
    """
    scales = unitwise_scales(parameters, gradients, clip_factor, eps)
    if gradients:
        torch._foreach_mul_([local_tensor(one) for one in gradients], scales)
    return scales


def _unit_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Norm of each unit, with the dimensions that it spans kept as ones; in float32 at least."""
    norms = []
    owed: dict[tuple[Any, int], list[int]] = defaultdict(list)  # by mesh and axis: the tensors whose units span it
    for index, tensor in enumerate(tensors):
        local = local_tensor(tensor.detach())
        spanned = tuple(range(1, local.ndim)) if local.ndim > 1 else tuple(range(local.ndim))
        dtype = local.dtype if local.dtype in (torch.float64, torch.complex128) else torch.float32
        magnitude = local.abs() if local.is_complex() else local.to(dtype)
        norms.append(torch.linalg.vector_norm(magnitude, dim=spanned, keepdim=True) if spanned else magnitude.abs())
        if isinstance(tensor, DTensor):
            for axis, placement in enumerate(tensor.placements):
                # Partial gradients are summed up by whoever made them; a strided shard has a `dim` too.
                if getattr(placement, "dim", None) in spanned:
                    owed[tensor.device_mesh, axis].append(index)
    for (mesh, axis), indices in owed.items():
        squares = torch.cat([norms[index].flatten() for index in indices]).square()
        dist.all_reduce(squares, group=mesh.get_group(axis))
        totals = torch.split(squares.sqrt(), [norms[index].numel() for index in indices])
        for index, total in zip(indices, totals, strict=True):
            norms[index] = total.view_as(norms[index])
    return norms
