"""Gradient clipping by global norm and by value, on plain tensors and on shards.

Clipping by norm scales all gradients by one number, so that their joint norm is at most a threshold and their
direction stays; clipping by value clamps each element alone, which bends the direction.

Formula:
    norm = (sum over all elements of |g|^p)^(1/p)
    g <- min(1, max_norm / (norm + 1e-6)) * g

Reference:
    Pascanu, Mikolov, Bengio (2013), "On the difficulty of training recurrent neural networks", arXiv:1211.5063,
    algorithm 1. The 1e-6 is that of `torch.nn.utils.clip_grad_norm_`.

Differs:
    From torch's functions in three points. Gradients of several meshes, and DTensors beside plain tensors, may be
    mixed (pytorch#180346). Norms of half-precision gradients are summed and returned in float32 (a float16 norm
    overflows at 65504, a bfloat16 one carries three digits). The norm comes back as a full plain tensor on every rank.

Cost:
    One read of the gradients for the norm, one read and write for the scaling; one scalar all-reduce for each mesh
    that gradients are sharded on. No host synchronisation.

Sharding:
    Each rank reduces its own shard; the partial sums are summed over the mesh axes that shard, and only over those.
    Scaling and clamping are elementwise and touch the local shard alone.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lightning_tricks.functional.shards import Placement, by_placement, local_part, reduce_over_shards

__all__ = [
    "StepCount",
    "clip_by_norm_",
    "clip_by_value_",
    "clip_coefficient",
    "count_exceeding",
    "exceeds",
    "gradient_norm",
    "is_nonfinite",
    "named_gradients",
    "nonfinite_names",
    "scale_gradients_",
]

_EPSILON = 1e-6


def gradient_norm(gradients: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Compute the p-norm of all gradients together, as if they were one vector.

    Args:
        gradients: tensors of any shape, floating or complex dtype and device; plain, DTensor, or both. A complex
            element counts as its real and its imaginary part.
        norm_type: p, positive; `math.inf` for the largest absolute value.

    Returns:
        A scalar, the same on every rank: float64 if any gradient is, else float32; on the first gradient's device.
        Zero for an empty sequence.

    Raises:
        ValueError: a gradient is sparse.

    Example:
        >>> gradient_norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
        tensor(5.)
    """
    if not gradients:
        return torch.zeros(())
    device = gradients[0].device
    dtype = torch.float64 if any(gradient.dtype == torch.float64 for gradient in gradients) else torch.float32
    norms = []
    for placement, members in _by_placement(gradients).items():
        norm = _local_norm(members, norm_type, dtype).to(device)
        norms.append(_across_shards(norm, placement, norm_type))
    total: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def clip_coefficient(norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """Return min(1, max_norm / (norm + 1e-6)), the factor that clipping by norm scales gradients with.

    Args:
        norm: the norm before clipping, a scalar.
        max_norm: the threshold, not negative, a number or a scalar on the norm's device; inf gives 1.

    Returns:
        A scalar in [0, 1] of the norm's dtype and device; nan where the norm is nan.

    Example:
        >>> clip_coefficient(torch.tensor(2.0), max_norm=1.0)
        tensor(0.5000)
    """
    if isinstance(max_norm, Tensor):
        coefficient = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
        return torch.where(max_norm == math.inf, 1.0, coefficient)  # an infinite norm would make it nan
    if math.isinf(max_norm):
        return torch.ones_like(norm)
    return (max_norm / (norm + _EPSILON)).clamp(max=1.0)


def exceeds(norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """Return 1 where clipping by norm changes the gradients, 0 where it leaves them alone.

    Args:
        norm: the norm before clipping, a scalar.
        max_norm: the threshold.

    Returns:
        A scalar of the norm's dtype and device.

    Example:
        >>> exceeds(torch.tensor(2.0), max_norm=1.0)
        tensor(1.)
    """
    return (norm > max_norm).to(norm.dtype)


@dataclass
class StepCount:
    """How many steps something held for, since somebody last asked, counted without synchronising.

    Example:
        >>> clips = StepCount()
        >>> clips.step(exceeds(torch.tensor(2.0), 1.0))
        >>> clips.step(exceeds(torch.tensor(2.0), 1.0), applied=torch.tensor(0.0))
        >>> clips.take(), clips.take()
        (tensor(1.), None)
    """

    count: Tensor | None = None

    def step(self, held: Tensor, applied: bool | Tensor = True) -> None:
        """Count one step.

        Args:
            held: a scalar, true or 1 where it held.
            applied: whether the step counts; a bool, or a scalar holding 0 or 1.
        """
        counted = (held * applied).float()
        self.count = counted if self.count is None else self.count + counted

    def take(self) -> Tensor | None:
        """Return the count and begin anew; None if no step was counted."""
        count, self.count = self.count, None
        return count


def is_nonfinite(norm: Tensor) -> Tensor:
    """Return whether a norm is inf or nan, as a boolean scalar on the norm's device.

    Args:
        norm: a scalar.

    Example:
        >>> is_nonfinite(torch.tensor(float("nan")))
        tensor(True)
    """
    return (norm - norm) != 0  # inf - inf is nan; two kernels, where isfinite takes four


def clip_by_norm_(gradients: Sequence[Tensor], max_norm: float | Tensor, norm: Tensor) -> Tensor:
    """Scale the gradients in place so that their norm is at most `max_norm`.

    Args:
        gradients: as for `gradient_norm`.
        max_norm: the threshold, not negative, a number or a scalar on the norm's device; inf changes nothing.
        norm: the norm that `gradient_norm` gave for the same gradients.

    Returns:
        The factor applied, a scalar in [0, 1].

    Example:
        >>> gradients = [torch.tensor([3.0, 4.0])]
        >>> coefficient = clip_by_norm_(gradients, max_norm=1.0, norm=gradient_norm(gradients))
        >>> gradients[0]
        tensor([0.6000, 0.8000])
    """
    coefficient = clip_coefficient(norm, max_norm)
    if isinstance(max_norm, Tensor) or not math.isinf(max_norm):
        scale_gradients_(gradients, coefficient)
    return coefficient


def scale_gradients_(gradients: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply the gradients in place.

    Args:
        gradients: as for `gradient_norm`.
        factor: a number, or a scalar on the device.

    Example:
        >>> gradients = [torch.tensor([3.0, 4.0])]
        >>> scale_gradients_(gradients, torch.tensor(0.5))
        >>> gradients[0]
        tensor([1.5000, 2.0000])
    """
    for local in _by_device(gradients):
        torch._foreach_mul_(local, factor.to(local[0].device) if isinstance(factor, Tensor) else factor)


def clip_by_value_(gradients: Sequence[Tensor], max_value: float) -> None:
    """Clamp every element of the gradients in place to [-max_value, max_value].

    A nan stays a nan, and an inf becomes `max_value`: look for both before.

    Args:
        gradients: as for `gradient_norm`.
        max_value: the threshold, not negative.

    Example:
        >>> gradients = [torch.tensor([3.0, -0.1])]
        >>> clip_by_value_(gradients, max_value=1.0)
        >>> gradients[0]
        tensor([ 1.0000, -0.1000])
    """
    for local in _by_device(gradients):
        torch._foreach_clamp_min_(local, -max_value)
        torch._foreach_clamp_max_(local, max_value)


def count_exceeding(gradients: Sequence[Tensor], max_value: float) -> Tensor:
    """Count the elements whose absolute value is above `max_value`, over all ranks.

    Args:
        gradients: as for `gradient_norm`.
        max_value: the threshold, not negative.

    Returns:
        An int64 scalar, the same on every rank.

    Example:
        >>> count_exceeding([torch.tensor([3.0, -0.1, -2.0])], max_value=1.0)
        tensor(2)
    """
    if not gradients:
        return torch.zeros((), dtype=torch.int64)
    device = gradients[0].device
    total = torch.zeros((), dtype=torch.int64, device=device)
    for placement, members in _by_placement(gradients).items():
        # One tensor at a time: a foreach would hold a second copy of every gradient.
        counts = [(member.abs() > max_value).sum().to(device) for member in members]
        total += reduce_over_shards(torch.stack(counts).sum(), placement, "sum")
    return total


def named_gradients(
    module: nn.Module, parameters: Sequence[Tensor], gradients: Sequence[Tensor]
) -> list[tuple[str, Tensor]]:
    """Pair each gradient with the name of its parameter.

    Args:
        module: the model.
        parameters: some of its parameters, or others.
        gradients: theirs; they may have been taken off the parameters since.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> named_gradients(layer, [layer.bias], [torch.tensor([2.0])])
        [('bias', tensor([2.]))]
    """
    names = {id(one): name for name, one in module.named_parameters()}
    labels = [names.get(id(one), "a parameter outside of the module") for one in parameters]
    return list(zip(labels, gradients, strict=True))


def nonfinite_names(named_gradients: Iterable[tuple[str, Tensor]], limit: int = 3) -> list[str]:
    """Name the first gradients that hold an inf or a nan. Synchronises with the device.

    Args:
        named_gradients: pairs of a name and a gradient; of shards, the same pairs on every rank.
        limit: how many names to return at most.

    Returns:
        Names in the order given, the same on every rank.

    Example:
        >>> nonfinite_names([("weight", torch.tensor([1.0])), ("bias", torch.tensor([float("nan")]))])
        ['bias']
    """
    names: list[str] = []
    for name, gradient in named_gradients:
        if len(names) == limit:
            break
        if not bool(torch.isfinite(gradient_norm([gradient], math.inf))):
            names.append(name)
    return names


def _by_device(gradients: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Local tensors in lists that a foreach function takes: of one device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        local = local_part(gradient)
        groups[local.device, local.dtype].append(local)
    return groups.values()


def _by_placement(gradients: Sequence[Tensor]) -> dict[Placement, list[Tensor]]:
    """Local tensors by where they live."""
    settled = []
    for gradient in gradients:
        if gradient.is_sparse:
            raise ValueError(
                f"expected dense gradients, got a sparse one of shape {tuple(gradient.shape)}: "
                "build the embedding with sparse=False, or leave clipping out"
            )
        if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
            # A sum still owed between ranks has no norm yet.
            whole = [Replicate() if p.is_partial() else p for p in gradient.placements]
            gradient = gradient.redistribute(placements=whole)
        settled.append(gradient)
    groups = by_placement(settled)
    return {placement: [local_part(settled[index]) for index in indices] for placement, indices in groups.items()}


def _local_norm(tensors: list[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    """p-norm of this rank's tensors, computed in `dtype`."""
    filled: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():  # a small parameter leaves some ranks without a shard
            filled[tensor.device, tensor.dtype].append(tensor)
    device = tensors[0].device
    if not filled:
        return torch.zeros((), dtype=dtype, device=device)
    norms = [
        norm.to(device) for group in filled.values() for norm in torch._foreach_norm(group, norm_type, dtype=dtype)
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def _across_shards(norm: Tensor, placement: Placement, norm_type: float) -> Tensor:
    if placement is None or not any(placement[1]):
        return norm
    if math.isinf(norm_type):
        # A maximum over ranks may lose a nan: hand it on as what it is here, not finite.
        return reduce_over_shards(norm.nan_to_num(nan=math.inf, posinf=math.inf), placement, "max")
    total: Tensor = reduce_over_shards(norm**norm_type, placement, "sum") ** (1.0 / norm_type)
    return total
