"""Fully sharded data parallel (ZeRO stages 2 and 3) on a model that knows nothing of it.

Every rank holds 1/W of each parameter, gradient and optimizer state. A unit of modules is gathered before its forward,
freed after it, gathered again before its backward, and its gradients are summed into shards after that.

**Reference**: Rajbhandari et al. (2020), "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054, section 5; Zhao et al. (2023), arXiv:2304.11277. The engine is torch's ``fully_shard`` (FSDP2).
**Cost**: three collectives a unit and step (gather, gather, reduce-scatter), two where a unit is not freed between
forward and backward. Accumulation without communication holds whole gradients until the window's last micro-batch.
**Sharding**: chunks along the first dimension; parameters without a dimension are kept whole, their gradients averaged.
"""

import functools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Adafactor, Adam, Muon, Optimizer, Rprop

from lightning_tricks.distributed.initialization import Materializer, broadcast_from_first_rank_, has_meta_tensors
from lightning_tricks.distributed.policy import ShardingPlan
from lightning_tricks.functional.blocks import inner_first
from lightning_tricks.functional.patching import Patch

__all__ = [
    "Sharding",
    "apply_forward_methods",
    "average_kept_gradients_",
    "broadcast_buffers_",
    "drop_unreduced_gradients_",
    "held_parameters",
    "move_unsharded_",
    "refuse_optimizer",
    "refuse_scaler",
    "refuse_sparse",
    "reset_",
    "reshard_",
    "shard_",
    "sharded_by",
    "sharding_of",
    "units_of",
    "without_gradient_sync",
]


@dataclass
class Sharding:
    """How a module was sharded.

    Args:
        mesh: over which ranks.
        settings: what else a second run must not change.
        kept: the parameters that each rank keeps whole, by name.
        synchronizes: whether the next backward reduces gradients.
    """

    mesh: DeviceMesh
    settings: object
    kept: dict[str, nn.Parameter]
    synchronizes: bool = True


# What was sharded here, so that a second run can tell it from what the user sharded.
_SHARDED: WeakKeyDictionary[nn.Module, Sharding] = WeakKeyDictionary()


def shard_(
    module: nn.Module,
    plan: ShardingPlan,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool | int = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    provided: Collection[str] = (),
    settings: object = None,
) -> None:
    """Fill, synchronise and shard a model unit by unit. A collective: on every rank, with the same plan.

    Args:
        module: the model that the plan was made of; its tensors on any device, or on meta.
        plan: the units.
        mesh: of one axis to shard over, or of two: replicate, shard.
        reshard_after_forward: whether units are freed between forward and backward; an int reshards to groups of that
            many ranks. Units whose plan says otherwise, and the root, stay gathered.
        mp_policy: the dtypes in which parameters are gathered and gradients reduced; None leaves them as they are.
        offload_policy: whether shards live on the CPU; None leaves them on the mesh's device.
        provided: names of tensors that are loaded later, so that meta-device modules need not fill them.
        settings: kept for `sharding_of`.

    Raises:
        ValueError: the module is sharded already; a tensor on meta is filled by nothing.
    """
    if sharded_by(module) is not None:
        raise ValueError(f"expected a module that is not sharded yet, got one sharded by {sharded_by(module)}")
    device = _device_of(mesh)
    kept_names = frozenset((*plan.ignored, *plan.replicated))
    materializer = Materializer(module, device, provided)
    units = {unit.module: unit for unit in plan.units}
    done: set[int] = set()
    for name, one in inner_first(module):
        if has_meta_tensors(one, recurse=False):
            materializer.fill_(name, one)
        if one not in units and one is not module:
            continue
        fresh = [t for t in (*one.parameters(), *one.buffers()) if id(t) not in done and not isinstance(t, DTensor)]
        broadcast_from_first_rank_(fresh, device)
        unit = units.get(one)
        if unit is not None:
            policy = MixedPrecisionPolicy() if unit.full_precision or mp_policy is None else mp_policy
            if one is module:  # its inputs are the batch, targets and all
                policy = replace(policy, cast_forward_inputs=False)
            kept = {parameter for key, parameter in one.named_parameters(prefix=name) if key in kept_names}
            fully_shard(
                one,
                mesh=mesh,
                reshard_after_forward=reshard_after_forward if unit.reshards else False,
                mp_policy=policy,
                offload_policy=offload_policy or OffloadPolicy(),
                ignored_params=kept,
            )
        done.update(id(t) for t in (*one.parameters(), *one.buffers()))
    kept_whole = {name: parameter for name, parameter in module.named_parameters() if name in kept_names}
    _SHARDED[module] = Sharding(mesh, settings, kept_whole)


def sharded_by(module: nn.Module) -> str | None:
    """What has sharded or wrapped the module, or a part of it, whoever did it; None where nothing has.

    Args:
        module: the module to look at.

    Example:
        >>> sharded_by(nn.Linear(2, 2)) is None
        True
    """
    for one in module.modules():
        if isinstance(one, FSDPModule):
            return "fully_shard"
        if isinstance(one, (FullyShardedDataParallel, DistributedDataParallel)):
            return type(one).__name__
    return "DTensor" if any(isinstance(parameter, DTensor) for parameter in module.parameters()) else None


def sharding_of(module: nn.Module) -> Sharding | None:
    """How `shard_` sharded this module; None if it did not.

    Args:
        module: the model.
    """
    return _SHARDED.get(module)


def reset_(module: nn.Module) -> None:
    """Make a sharded module ready for another run, whatever ended the last one. A collective: on every rank.

    Gradients of a window that was left open lie where `zero_grad` does not reach.

    Args:
        module: sharded by `shard_`.

    Raises:
        ValueError: parts of the module were built anew since it was sharded.
    """
    for unit in units_of(module):
        if unit._get_fsdp_state()._is_root:  # private names of torch 2.13
            unit.reset_iter_state()
        unit.reshard()
    drop_unreduced_gradients_(module)
    kept = _SHARDED[module].kept
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor) and name not in kept:
            raise ValueError(
                f"expected the module as an earlier run sharded it, got {name} that is not sharded: it was built anew "
                "since. Let configure_model return at once where the layers exist already"
            )


def held_parameters(module: nn.Module) -> Iterator[Any]:
    """What FSDP2 keeps of each parameter that it shards. Private names of torch 2.13.

    Args:
        module: the model.
    """
    for unit in units_of(module):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            yield from group.fsdp_params


def drop_unreduced_gradients_(module: nn.Module) -> None:
    """Forget the gradients of a window that was left open: they lie where `zero_grad` does not reach.

    Args:
        module: the model.
    """
    for held in held_parameters(module):
        held.unsharded_accumulated_grad = None
        if hasattr(held, "_unsharded_param"):
            held._unsharded_param.grad = None


def move_unsharded_(module: nn.Module, device: torch.device) -> None:
    """Move what is not sharded, such as the states of metrics. Shards stay where they are.

    Args:
        module: the model.
        device: where to.
    """
    move = lambda tensor: tensor if isinstance(tensor, DTensor) else tensor.to(device)  # noqa: E731
    type(module)._apply(module, move)  # type: ignore[no-untyped-call]


def reshard_(module: nn.Module) -> None:
    """Free all parameters that are gathered, so that what the module holds are its shards.

    A forward without a backward leaves the root gathered; whatever reads or writes the weights then (an optimizer, an
    average, a checkpoint) would see copies that the shards know nothing of.

    Args:
        module: the model.
    """
    for unit in units_of(module):
        unit.reshard()


@contextmanager
def without_gradient_sync(module: nn.Module) -> Iterator[None]:
    """Sum gradients on each rank without communication, as in all micro-batches of a window but the last.

    Args:
        module: the model. Each rank holds its whole gradients until a backward outside of the context reduces them.
    """
    before = module not in _SHARDED or _SHARDED[module].synchronizes  # a window may hold a batch that is cut
    _synchronize(module, False)
    try:
        yield
    finally:
        _synchronize(module, before)


def average_kept_gradients_(module: nn.Module) -> None:
    """Average the gradients of the parameters that each rank keeps whole. A collective: after every backward.

    Does nothing where there are none, and within `without_gradient_sync`.

    Args:
        module: sharded by `shard_`.
    """
    sharding = _SHARDED[module]
    gradients = [one.grad for one in sharding.kept.values() if one.requires_grad and one.grad is not None]
    if not gradients or not sharding.synchronizes:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)  # gloo knows no average
    flat.div_(dist.get_world_size())
    means = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


def broadcast_buffers_(module: nn.Module) -> None:
    """Give every rank rank 0's buffers, as DDP does at each forward. A collective: on every rank.

    Args:
        module: the model. Running statistics follow each rank's own batches in training, but an evaluation must not
            depend on the rank.
    """
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)


def refuse_sparse(module: nn.Module) -> None:
    """Raise if a module has sparse gradients, which cannot be reduced into shards.

    Args:
        module: the model.

    Raises:
        ValueError: it has an embedding with ``sparse=True``.
    """
    for name, one in module.named_modules():
        if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.sparse and one.weight.requires_grad:
            raise ValueError(
                f"expected dense gradients, got the embedding {name} with sparse=True, whose gradient cannot be "
                'divided. Use sparse=False, or strategy="ddp"'
            )


def refuse_scaler(plan: ShardingPlan) -> None:
    """Raise if a loss scaler cannot unscale the gradients of a plan's parameters.

    Args:
        plan: the units.

    Raises:
        ValueError: there are parameters without a dimension, which torch's scaler cannot unscale beside shards.
    """
    if plan.replicated:
        raise ValueError(
            f"expected every parameter to have a dimension beside a loss scaler (fp16), got "
            f"{', '.join(plan.replicated)} without one. Give it the shape (1,), or use bf16-mixed"
        )


def refuse_optimizer(optimizer: Optimizer, module: nn.Module) -> None:
    """Raise unless an optimizer can step the sharded parameters of a module.

    Args:
        optimizer: what the user built.
        module: sharded.

    Raises:
        ValueError: its computation fails on sharded parameters, or it holds others than the module's.
    """
    name = type(optimizer).__name__
    # Tried in torch 2.13: their operations have no rule for DTensors.
    if optimizer.defaults.get("fused") and not isinstance(optimizer, Adam):  # nor AdamW, which is one
        raise ValueError(
            f"expected {name} without fused=True, which torch has for sharded parameters in Adam and AdamW only"
        )
    if isinstance(optimizer, (Adafactor, LBFGS, Muon, Rprop)):
        instead = '"ddp"' if isinstance(optimizer, LBFGS) else '"zero1", which divides its state by whole parameters'
        raise ValueError(
            f"expected an optimizer that can step sharded parameters, got torch's {name}, which cannot. "
            f"Use another optimizer, or strategy={instead}"
        )
    own = set(module.parameters())
    strangers = [one for group in optimizer.param_groups for one in group["params"] if one not in own]
    if strangers:
        raise ValueError(
            f"expected {name} to hold the sharded module's parameters, got {len(strangers)} others, the first of shape "
            f"{tuple(strangers[0].shape)}: training would not reach the module. Build the optimizer in "
            "configure_optimizers, from self.parameters()"
        )


def apply_forward_methods(module: nn.Module, names: Collection[str]) -> list[Patch]:
    """Let methods of the root gather its parameters as its forward does.

    Args:
        module: the model. Nothing happens where it is not the root of its units.
        names: its methods.

    Returns:
        The handles that undo it.
    """
    if not isinstance(module, FSDPModule):
        return []
    patches = [Patch(module, name) for name in names]
    for name in names:
        register_fsdp_forward_method(module, name)
    return patches


def units_of(module: nn.Module) -> list[FSDPModule]:
    """The units of a sharded module, itself among them where it is the root.

    Args:
        module: the model.
    """
    return [one for one in module.modules() if isinstance(one, FSDPModule)]


def _synchronize(module: nn.Module, synchronizes: bool) -> None:
    for unit in units_of(module):
        unit.set_requires_gradient_sync(synchronizes, recurse=False)
    if module in _SHARDED:
        _SHARDED[module].synchronizes = synchronizes


@functools.cache
def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
