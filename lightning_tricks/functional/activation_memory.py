"""Measure the activation bytes that a forward pass holds for its backward pass.

Autograd saves tensors for the backward pass; `torch.autograd.graph.saved_tensors_hooks` shows each of them. Several may
share one storage, and parameters are saved too although they take no further memory, so storages are counted once and
those of parameters left out.

Cost:
    One Python call for each saved tensor while measuring.

Sharding:
    Counts what this rank holds.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["SavedActivations", "measure_saved_activations"]


@dataclass
class SavedActivations:
    """Storages that autograd holds, counted while `measure_saved_activations` was active.

    Storages are told apart by address. One that is freed while measuring, and its address given to another, is counted
    once: the count is of what is held, never more.
    """

    _bytes: dict[int, int] = field(default_factory=dict, repr=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages seen."""
        return sum(self._bytes.values())


@contextmanager
def measure_saved_activations(leave_out: Iterable[Tensor] = ()) -> Iterator[SavedActivations]:
    """Count the bytes that autograd saves inside of the block.

    Args:
        leave_out: tensors whose storages do not count: parameters, buffers, the batch.

    Yields:
        The count, complete when the block is left.

    Example:
        >>> x = torch.ones(256, requires_grad=True)
        >>> with measure_saved_activations(leave_out=[x]) as saved:
        ...     y = x.exp()
        >>> saved.num_bytes
        1024
    """
    known = {_storage(tensor).data_ptr() for tensor in leave_out}
    saved = SavedActivations()

    def pack(tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage.data_ptr() not in known:
            saved._bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
