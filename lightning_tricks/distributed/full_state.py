"""The state of a sharded model as one ordinary state dict, and back.

What is saved has the keys, shapes and order of a model and an optimizer that were never sharded, so that it loads
anywhere: on another number of ranks, in one process, without this package. An optimizer numbers its parameters in the
order of its groups, which need not be that of the model; its own numbering is kept.

**Cost**: saving gathers one tensor after another; rank 0 holds the whole on the CPU. Loading: each rank reads its part
of each tensor, so that of a memory-mapped file nobody reads the whole.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # private: torch 2.13
from torch.optim import Optimizer

__all__ = [
    "copy_from_whole_",
    "gather_state_dict",
    "load_full_optimizer_state_",
    "load_full_state_",
    "read_state_dict",
    "whole",
]


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor; a plain one is returned as it is. A collective: on every rank.

    Args:
        tensor: sharded, replicated, partial or plain.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device.type != tensor.device_mesh.device_type:  # offloaded
        tensor = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def gather_state_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """Gather all tensors of a state dict onto rank 0's CPU. A collective: on every rank.

    Args:
        state: of a module or an optimizer, nested as it likes.

    Returns:
        The same structure with whole CPU tensors on rank 0; on the other ranks nothing.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0

    def gather(tensor: Tensor) -> Tensor | None:
        gathered = whole(tensor.detach())
        return gathered.cpu() if first else None

    gathered = _map_tensors(gather, OrderedDict(state) if isinstance(state, OrderedDict) else dict(state))
    if hasattr(state, "_metadata"):  # the versions of the modules, for those that read older states
        gathered._metadata = state._metadata
    return gathered if first else {}


@torch.no_grad()
def copy_from_whole_(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded; each rank reads its part.

    Args:
        target: sharded or plain.
        value: of the same shape, the same on every rank.

    Raises:
        ValueError: the shapes differ.
    """
    if target.shape != value.shape:
        raise ValueError(f"expected a tensor of shape {tuple(target.shape)}, got one of {tuple(value.shape)}")
    if isinstance(target, DTensor):
        _copy_part_(target, value)
    else:
        target.copy_(value)


def load_full_state_(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load an ordinary state dict into a sharded module; each rank reads its part.

    Args:
        module: sharded or not.
        state: whole tensors, the same on every rank.
        strict: whether the keys must be the module's.

    Raises:
        RuntimeError: as `torch.nn.Module.load_state_dict` does, for keys and shapes.
    """
    own = module.state_dict()
    loaded = OrderedDict(state)
    loaded._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]
    for key, value in state.items():
        target = own.get(key)
        if isinstance(target, DTensor) and isinstance(value, Tensor) and value.shape == target.shape:
            _copy_part_(target, value)
            loaded[key] = target
    module.load_state_dict(loaded, strict=strict)


def load_full_optimizer_state_(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load an ordinary optimizer state into an optimizer of sharded parameters; each rank reads its part.

    Args:
        optimizer: any; its parameters sharded or not.
        state: what `Optimizer.state_dict` returns, with whole tensors, its groups as this optimizer's.

    Raises:
        ValueError: as `torch.optim.Optimizer.load_state_dict` does, for groups of other sizes.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of_number = dict(zip(numbers, parameters, strict=False))  # other sizes: the optimizer says so itself
    parts = {
        number: {key: _state_like(value, of_number.get(number)) for key, value in values.items()}
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": parts})


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Open a file of weights without reading them: its tensors are mapped into memory and read where they are used.

    Args:
        path: what `torch.save` wrote of a state dict, or of a checkpoint with one under ``"state_dict"``.

    Raises:
        FileNotFoundError: there is no such file.
    """
    content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return content.get("state_dict", content)  # type: ignore[no-any-return]


def _map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return type(tree)((key, _map_tensors(function, value)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_tensors(function, value) for value in tree)
    return tree


def _copy_part_(target: DTensor, value: Tensor) -> None:
    """Copy this rank's part of a whole tensor, and read no other."""
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, target.device_mesh, target.placements)
    part = value[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
    target.to_local().copy_(part)


def _state_like(value: Any, parameter: Tensor | None) -> Any:
    """Optimizer state is split as its parameter where it has its shape; the rest is whole on every rank."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.ndim == 0:
        return value
    if value.shape == parameter.shape:
        part = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        assert isinstance(part, DTensor)
        _copy_part_(part, value)
        return part
    mesh = parameter.device_mesh
    return DTensor.from_local(value.to(parameter.device), mesh, (Replicate(),) * mesh.ndim, run_check=False)
