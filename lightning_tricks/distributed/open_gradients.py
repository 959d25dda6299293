"""The gradients of an accumulation window that is not complete: as whole tensors, and back.

Within a window no rank has told the others of its gradients. Their mean over the ranks, on every rank in the place of
its own, gives the same sum at the window's end, so a checkpoint holds that: the same on any number of ranks.

**Cost**: one all-reduce of each gradient, one at a time; rank 0 holds the whole on the CPU.

**Sharding**: FSDP2 keeps each rank's whole gradients beside its shards until a backward reduces them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_tricks.distributed.full_state import whole
from lightning_tricks.distributed.sharding import units_of

__all__ = ["local_open_gradients", "mean_open_gradients", "put_open_gradients_", "take_open_gradients_"]


def local_open_gradients(module: nn.Module) -> tuple[list[Tensor], bool]:
    """Return this rank's own gradients, and whether they are those of all ranks already.

    Args:
        module: sharded or not, inside of a window. Lightning's own ModelParallelStrategy communicates in it, too.
    """
    unreduced = _unreduced_of_units(module)
    own = [(unreduced.get(one, one.grad), one in unreduced) for one in module.parameters()]
    gradients = [gradient for gradient, _ in own if gradient is not None]
    return gradients, any(isinstance(gradient, DTensor) and not is_own for gradient, is_own in own)


def mean_open_gradients(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Average the gradients over the ranks, one after another, and leave them as they are. A collective.

    Args:
        module: sharded or not, inside of a window.

    Yields:
        The name of each parameter that has a gradient on some rank, and the whole mean.
    """
    unreduced = _unreduced_of_units(module)
    parameters = dict(module.named_parameters())
    several = dist.is_initialized() and dist.get_world_size() > 1
    parts = {name: _parts(one, unreduced.get(one)) for name, one in parameters.items()}
    # On each rank other parameters may have been used.
    used = torch.tensor([[part is not None for part in parts[name]] for name in parameters], dtype=torch.int32)
    if several:
        device = next((one.device for one in parameters.values()), torch.device("cpu"))
        used = used.to(device)
        dist.all_reduce(used, dist.ReduceOp.MAX)
    for (name, parameter), (local, reduced) in zip(parameters.items(), used.tolist(), strict=True):
        mine, common = parts[name]
        mean = None
        if local:
            mean = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            if mine is not None:
                mean = mean.to(mine.dtype).copy_(mine)
            if several:
                dist.all_reduce(mean)
                mean = mean / dist.get_world_size()
        if reduced:
            assert common is not None
            gathered = whole(common)
            mean = gathered.clone() if mean is None else mean + gathered
        if mean is not None:
            yield name, mean


def take_open_gradients_(module: nn.Module) -> None:
    """Reduce the window's gradients now, as the backward of its last micro-batch would. A collective.

    Args:
        module: sharded or not, inside of a window.
    """
    put_open_gradients_(module, dict(mean_open_gradients(module)))


def put_open_gradients_(module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Give every rank the mean gradients of a window in the place of its own.

    Args:
        module: sharded or not.
        gradients: whole tensors by the parameter's name; who is not named has none.

    Raises:
        ValueError: a name or a shape is not the module's.
    """
    parameters = dict(module.named_parameters())
    for name, gradient in gradients.items():
        if name not in parameters or parameters[name].shape != gradient.shape:
            raise ValueError(
                f"expected the gradients of an open window of this module, got one of {name} with the shape "
                f"{tuple(gradient.shape)}: the checkpoint is of another model"
            )
    for unit in units_of(module):
        for one in _params_of(unit):
            one.unsharded_accumulated_grad = None
            if hasattr(one, "_unsharded_param"):
                one._unsharded_param.grad = None
    for name, parameter in parameters.items():
        given = gradients.get(name)
        if given is None:
            parameter.grad = None
        elif isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            whole_gradient = given.to(mesh.device_type, parameter.dtype)
            shard = distribute_tensor(whole_gradient, mesh, parameter.placements, src_data_rank=None)
            parameter.grad = shard.to(parameter.device)
        else:
            parameter.grad = given.to(parameter.device, parameter.dtype, copy=True)


def _parts(parameter: Tensor, unreduced: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """This rank's own gradient, and that which the ranks have in common already."""
    if isinstance(parameter, DTensor):
        return unreduced, parameter.grad
    return parameter.grad, None


def _params_of(unit: FSDPModule) -> Iterator[Any]:
    """What FSDP2 keeps of each parameter of a unit. Private: torch 2.13 and 2.14."""
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        yield from group.fsdp_params


def _unreduced_of_units(module: nn.Module) -> dict[Tensor, Tensor]:
    """The gradients that FSDP2 holds unsharded, by the sharded parameter."""
    found: dict[Tensor, Tensor] = {}
    for unit in units_of(module):
        for one in _params_of(unit):
            gradient = one.unsharded_accumulated_grad
            if gradient is None and hasattr(one, "_unsharded_param"):
                gradient = one._unsharded_param.grad
            if gradient is not None:
                found[one.sharded_param] = gradient
    return found
