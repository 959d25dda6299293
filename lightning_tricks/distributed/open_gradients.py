"""The gradients of an accumulation window that is not complete: as whole tensors, and back.

Within a window no rank has told the others of its gradients. Their mean over the ranks, on every rank in the place of
its own, gives the same sum at the window's end, so a checkpoint holds that: the same on any number of ranks.

**Cost**: one all-reduce of each gradient, one at a time; rank 0 holds the whole on the CPU.

**Sharding**: FSDP2 keeps each rank's whole gradients beside its shards until a backward reduces them.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_tricks.distributed.full_state import whole
from lightning_tricks.distributed.sharding import drop_unreduced_gradients_, held_parameters, units_of

__all__ = [
    "drop_open_gradients_",
    "local_open_gradients",
    "mean_open_gradients",
    "put_open_gradients_",
    "take_open_gradients_",
]


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
        The name of each parameter that has a gradient on some rank, and the whole mean, in fp32 at least.
    """
    unreduced = _unreduced_of_units(module)
    parameters = dict(module.named_parameters())
    several = dist.is_initialized() and dist.get_world_size() > 1
    # On each rank other parameters may have been used.
    has = [[part is not None for part in _parts(one, unreduced)] for one in parameters.values()]
    used = torch.tensor(has, dtype=torch.int32)
    if several:
        used = used.to(next(iter(parameters.values())).device)
        dist.all_reduce(used, dist.ReduceOp.MAX)
    for (name, parameter), (own, common) in zip(parameters.items(), used.tolist(), strict=True):
        mine, shared = _parts(parameter, unreduced)
        dtype = torch.promote_types(parameter.dtype, torch.float32)  # the same on every rank
        mean = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        if own:
            if mine is not None:
                mean.copy_(mine.to_dense() if mine.is_sparse else mine)
            if several:
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
        if common:
            assert shared is not None
            mean += whole(shared)
        if own or common:
            yield name, mean


def take_open_gradients_(module: nn.Module) -> None:
    """Reduce the window's gradients now, as the backward of its last micro-batch would. A collective.

    Args:
        module: sharded or not, inside of a window.
    """
    if not dist.is_initialized() or (dist.get_world_size() == 1 and not units_of(module)):
        return
    parameters = dict(module.named_parameters())
    for name, mean in mean_open_gradients(module):
        _put(parameters[name], mean)
    drop_unreduced_gradients_(module)


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
    drop_open_gradients_(module)
    for name, gradient in gradients.items():
        _put(parameters[name], gradient)


def drop_open_gradients_(module: nn.Module) -> None:
    """Forget all gradients, also those of FSDP2 that `zero_grad` does not reach.

    Args:
        module: sharded or not.
    """
    drop_unreduced_gradients_(module)
    for parameter in module.parameters():
        parameter.grad = None


def _put(parameter: Tensor, gradient: Tensor) -> None:
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        gradient = gradient.to(mesh.device_type, parameter.dtype)
        shard = distribute_tensor(gradient, mesh, parameter.placements, src_data_rank=None)
        parameter.grad = shard.to(parameter.device)
    else:
        parameter.grad = gradient.to(parameter.device, parameter.dtype, copy=True)


def _parts(parameter: Tensor, unreduced: Mapping[Tensor, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """This rank's own gradient, and that which the ranks have in common already."""
    if isinstance(parameter, DTensor):
        return unreduced.get(parameter), parameter.grad
    return parameter.grad, None


def _unreduced_of_units(module: nn.Module) -> dict[Tensor, Tensor]:
    """The gradients that FSDP2 holds unsharded, by the sharded parameter."""
    found: dict[Tensor, Tensor] = {}
    for held in held_parameters(module):
        gradient = held.unsharded_accumulated_grad
        if gradient is None and hasattr(held, "_unsharded_param"):
            gradient = held._unsharded_param.grad
        if gradient is not None:
            found[held.sharded_param] = gradient
    return found
