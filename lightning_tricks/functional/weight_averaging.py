"""Averages of weights over the steps of a run.

The average of the last iterates is a better model than the last iterate, for the price of a copy of the weights: the
noise of single steps averages out, as it would by a smaller learning rate, and training goes on at the large one.

Formula, for weights w_k after applied step k:
    exponential:    a_k = d_k * a_(k-1) + (1 - d_k) * w_k,  d_k = min(d, (1 + n) / (10 + n)) for the n-th update from 0
    half-life h:    d = 2 ^ (-1 / h)
    equal weights:  a_n = a_(n-1) + (w_n - a_(n-1)) / (n + 1)

Reference:
    Polyak, Juditsky (1992), "Acceleration of Stochastic Approximation by Averaging"; Tarvainen, Valpola (2017), "Mean
    Teachers", arXiv:1703.01780, equation 2. The warmup of the decay is that of TensorFlow's ExponentialMovingAverage.
    Equal weights: Izmailov et al. (2018), "Averaging Weights Leads to Wider Optima and Better Generalization",
    arXiv:1803.05407.

Differs:
    Nothing, but that the average is kept in fp32 where the weights have 16 bits: in bf16 steps of 1 - d are lost.

Cost:
    4 bytes a parameter (8 for double precision), one read of the weights and one of the average a step. For 16-bit
    weights, or an average on another device, a buffer of at most 16 MiB or the largest tensor.

Sharding:
    Elementwise on each rank's own part; no communication.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_tricks.functional.clipping import gradient_norm
from lightning_tricks.functional.shards import local_tensor

__all__ = ["WeightAverage", "decay_of_half_life", "put_back_", "show_", "warmed_decay"]

_STAGED_ELEMENTS = 4 * 2**20


def decay_of_half_life(half_life_steps: float) -> float:
    """Return the decay after which, in so many steps, a step's weight in the average has halved.

    Args:
        half_life_steps: a number of steps, positive.

    Example:
        >>> decay_of_half_life(1), round(decay_of_half_life(6931.0), 6)
        (0.5, 0.9999)
    """
    return float(0.5 ** (1.0 / half_life_steps))


def warmed_decay(decay: float, num_updates: int) -> float:
    """Return the decay of an update, smaller for the first ones: an average of ten steps has no memory of ten thousand.

    Args:
        decay: what it rises to, in (0, 1).
        num_updates: updates before this one.

    Example:
        >>> [round(warmed_decay(0.999, n), 3) for n in (0, 10, 10_000)]
        [0.1, 0.55, 0.999]
    """
    return min(decay, (1 + num_updates) / (10 + num_updates))


class WeightAverage:
    """A running average of tensors, begun as a copy of them.

    Args:
        tensors: what to average, by name: parameters or buffers of floating point, plain or sharded.
        device: where to keep the average; None for the tensors' own.

    Attributes:
        names: of the tensors.
        local: this rank's parts of the average, in fp32 or as precise as the tensors.

    Example:
        >>> weight = torch.tensor([0.0], dtype=torch.bfloat16)
        >>> average = WeightAverage({"weight": weight})
        >>> average.update_([weight.fill_(1.0)], share=0.25)
        >>> average.tensors
        {'weight': tensor([0.2500])}
    """

    @torch.no_grad()
    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> None:
        self.names: list[str] = []
        self.local: list[Tensor] = []
        self._device = device
        self._like: list[tuple[Any, Any, Any, Any] | None] = []
        self._sharded = False
        self._direct: list[int] = []
        self._staged: list[list[int]] = []
        self.add(tensors)

    @torch.no_grad()
    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Average further tensors, from their present value on.

        Args:
            tensors: as for the constructor.
        """
        for name, tensor in tensors.items():
            local = local_tensor(tensor.detach())
            dtype = torch.promote_types(local.dtype, torch.float32)
            self.names.append(name)
            self.local.append(torch.empty_like(local, dtype=dtype, device=self._device).copy_(local))
            sharded = isinstance(tensor, DTensor)
            self._sharded |= sharded
            self._like.append(
                (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()) if sharded else None  # type: ignore[attr-defined]
            )
        self._plan([local_tensor(tensor) for tensor in tensors.values()])

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The average by name, sharded as what it is of. Shares memory with it."""
        return self.named(self.local)

    def named(self, local: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return this rank's parts of tensors by name, sharded as what is averaged.

        Args:
            local: in the order of `names`.
        """
        return dict(zip(self.names, map(_wrapped, local, self._like), strict=True))

    @torch.no_grad()
    def update_(self, tensors: Sequence[Tensor], share: float) -> None:
        """Move the average towards the tensors as they are now.

        Args:
            tensors: in the order of `names`.
            share: how far, from 0 for not at all to 1 for all the way.
        """
        live = [local_tensor(one) for one in tensors] if self._sharded else tensors
        if self._direct and not self._staged:
            torch._foreach_lerp_(self.local, list(live), share)
            return
        if self._direct:
            own, others = [self.local[i] for i in self._direct], [live[i] for i in self._direct]
            torch._foreach_lerp_(own, others, share)
        for indices in self._staged:
            own = [self.local[i] for i in indices]
            staged = _views(own)
            torch._foreach_copy_(staged, [live[i] for i in indices])
            torch._foreach_lerp_(own, staged, share)

    @torch.no_grad()
    def show_(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Let the tensors be the average; as the function `show_`, and faster where nothing needs a cast or a copy.

        Args:
            tensors: in the order of `names`.

        Returns:
            What they held, for `put_back_`.
        """
        if self._sharded or self._staged:
            return show_(tensors, self.local)
        held = [one.data for one in tensors]
        put_back_(tensors, self.local)
        return held

    @torch.no_grad()
    def distance(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the Euclidean distance between the average and the tensors, over all shards; a scalar. A collective.

        Args:
            tensors: in the order of `names`.
        """
        live = [local_tensor(one) for one in tensors]
        difference = [own - one.to(own) for own, one in zip(self.local, live, strict=True)]
        return gradient_norm([_wrapped(one, like) for one, like in zip(difference, self._like, strict=True)])

    def _plan(self, live: list[Tensor]) -> None:
        """Decide which tensors go through a buffer of the average's dtype and device, and which together."""
        first = len(self.local) - len(live)
        size = 0
        for index, (own, one) in enumerate(zip(self.local[first:], live, strict=True), start=first):
            if own.dtype == one.dtype and own.device == one.device:
                self._direct.append(index)
                continue
            alike = bool(self._staged) and _alike(self.local[self._staged[-1][0]], own)
            if not alike or size == 0 or size + own.numel() > _STAGED_ELEMENTS:
                self._staged.append([])
                size = 0
            self._staged[-1].append(index)
            size += own.numel()


@torch.no_grad()
def show_(parameters: Sequence[Tensor], averages: Sequence[Tensor]) -> list[Tensor]:
    """Let parameters hold an average, and return what they held.

    Plain ones change the memory that they point to, without a copy where the average has their dtype and device; the
    average must not be updated then. Sharded ones are copied to, since FSDP2 keeps pointers of its own.

    Args:
        parameters: plain or sharded.
        averages: this rank's parts, as in `WeightAverage.local`.

    Returns:
        This rank's parts of what the parameters held, for `put_back_`.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> held = show_([weight], [torch.tensor([5.0])])
        >>> weight.item(), put_back_([weight], held), weight.item()
        (5.0, None, 1.0)
    """
    held, shown = [], []
    for parameter, average in zip(parameters, averages, strict=True):  # what needs memory first
        if isinstance(parameter, DTensor):
            held.append(parameter.to_local().clone())
            shown.append(average)
        else:
            held.append(before := parameter.data)
            shown.append(average if _alike(average, before) else average.to(before))
    try:
        put_back_(parameters, shown)
    except BaseException:
        put_back_(parameters, held)
        raise
    return held


@torch.no_grad()
def put_back_(parameters: Sequence[Tensor], held: Sequence[Tensor]) -> None:
    """Let parameters hold these tensors: undo `show_`, bit for bit.

    Args:
        parameters: the same.
        held: what it returned.

    Example:
        >>> put_back_([], [])
    """
    sharded = any(issubclass(kind, DTensor) for kind in set(map(type, parameters)))  # a look at each takes longer
    for parameter, before in zip(parameters, held, strict=True):
        if sharded and isinstance(parameter, DTensor):
            parameter.to_local().copy_(before)
        else:
            parameter.data = before


def _wrapped(local: Tensor, like: tuple[Any, Any, Any, Any] | None) -> Tensor:
    if like is None:
        return local
    mesh, placements, shape, stride = like
    wrapped: Tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return wrapped


def _alike(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and first.device == second.device


def _views(tensors: list[Tensor]) -> list[Tensor]:
    """Memory for copies of tensors of one dtype and device, in one piece."""
    buffer = tensors[0].new_empty(sum(one.numel() for one in tensors))
    sizes = [one.numel() for one in tensors]
    return [part.view(one.shape) for part, one in zip(torch.split(buffer, sizes), tensors, strict=True)]
