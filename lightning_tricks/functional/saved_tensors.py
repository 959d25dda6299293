"""What autograd saves for the backward pass, as hooks on it see it.

`torch.autograd.graph.saved_tensors_hooks` shows each tensor that is saved. Autograd then no longer notices when one of
them is written to before the backward pass, which would be a wrong gradient: `SavedTensor` does.

Cost:
    A Python call for each saved tensor.

Sharding:
    Knows nothing of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["SavedTensor", "StorageKey", "hooks_around", "is_parameter", "storages_of"]


class SavedTensor:
    """A tensor as it was when autograd saved it.

    Args:
        tensor: what the pack hook was given.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with torch.autograd.graph.saved_tensors_hooks(SavedTensor, SavedTensor.value):
        ...     y = x.exp()
        >>> y.sum().backward()
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # What an operation returned comes together with its node, which would be a cycle. Autograd attaches the node
        # again when it unpacks.
        self._tensor = tensor.detach() if tensor.requires_grad else tensor
        self._version = tensor._version

    def value(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was written to since.
        """
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of {tuple(self._tensor.shape)} is at version {self._tensor._version}, expected version "
                f"{self._version}"
            )
        return self._tensor


def hooks_around() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return what packs and unpacks saved tensors now, for hooks that only look: torch calls the innermost pair alone.

    Example:
        >>> pack, unpack = hooks_around()
        >>> unpack(pack(torch.ones(2)))
        tensor([1., 1.])
    """
    # torch 2.13: no public way to ask
    return torch._C._autograd._top_saved_tensors_default_hooks(False) or (SavedTensor, SavedTensor.value)


class StorageKey(StorageWeakRef):
    """Tells a storage from every other one, also from one that later takes its address, and does not keep it alive.

    A copy or a pickle of it stands for no storage: one of the base class would release what it never held.

    Args:
        storage: the storage.

    Example:
        >>> from copy import copy
        >>> storage = torch.ones(2).untyped_storage()
        >>> StorageKey(storage) == StorageKey(storage), copy(StorageKey(storage)) == StorageKey(storage)
        (True, False)
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        super().__init__(storage)  # type: ignore[no-untyped-call]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorageKey) and self.cdata == other.cdata

    __hash__ = StorageWeakRef.__hash__

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return object, ()


def storages_of(tensor: Tensor) -> dict[StorageKey, int]:
    """Return the storages that a tensor lies in, and their bytes.

    Args:
        tensor: any tensor. Of one that wraps others (a DTensor, a nested tensor) those of its parts on this rank; none
            of one without storage (sparse).

    Returns:
        Bytes by storage.

    Example:
        >>> x = torch.ones(4)
        >>> list(storages_of(x).values()), storages_of(x) == storages_of(x[1:]), storages_of(x) == storages_of(-x)
        ([16], True, False)
    """
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return {key: size for name in names for key, size in storages_of(getattr(tensor, name)).items()}
    if tensor.layout is not torch.strided:
        return {}
    storage = tensor.untyped_storage()
    return {StorageKey(storage): storage.nbytes()}


def is_parameter(tensor: Tensor) -> bool:
    """Tell whether a saved tensor is a parameter or a view of one.

    Args:
        tensor: any tensor.

    Example:
        >>> linear = nn.Linear(2, 2)
        >>> is_parameter(linear.weight.t()), is_parameter(linear.weight * 1)
        (True, False)
    """
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
