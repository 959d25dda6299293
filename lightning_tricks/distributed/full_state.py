"""The state of a sharded model as one ordinary state dict, and back.

What is saved has the keys, shapes and order of a model and an optimizer that were never sharded, so that it loads
anywhere: on another number of ranks, in one process, without this package. An optimizer numbers its parameters in the
order of its groups, which need not be that of the model; its own numbering is kept.

**Cost**: saving gathers one tensor after another; rank 0 holds the whole on the CPU. Loading: each rank reads its part
of each tensor, so that of a memory-mapped file nobody reads the whole.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

__all__ = ["gather_state_dict", "load_full_optimizer_state_", "load_full_state_", "read_state_dict", "whole"]


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

    gathered = _map_tensors(gather, dict(state))
    return gathered if first else {}


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
    loaded = dict(state)
    for key, value in state.items():
        part = _like(value, own.get(key))
        if isinstance(part, DTensor):  # one after another: all parts at once would be a second copy of the shards
            loaded[key] = own[key].copy_(part)
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
        return {key: _map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_tensors(function, value) for value in tree)
    return tree


def _like(value: Any, own: Any) -> Any:
    """This rank's part of a whole tensor, split as `own` is."""
    if not isinstance(own, DTensor) or not isinstance(value, Tensor) or value.shape != own.shape:
        return value
    value = value.to(own.dtype) if isinstance(value, DTensor) else value.to(own.device, own.dtype)
    # Without a source rank nothing is sent: every rank has the tensor, or the file it lies in.
    return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


def _state_like(value: Any, parameter: Tensor | None) -> Any:
    """Optimizer state is split as its parameter where it has its shape; the rest is whole on every rank."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.ndim == 0:
        return value
    whole_everywhere = (Replicate(),) * parameter.device_mesh.ndim
    placements = parameter.placements if value.shape == parameter.shape else whole_everywhere
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, placements, src_data_rank=None)
