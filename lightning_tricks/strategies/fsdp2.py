"""Fully sharded data parallel (FSDP2, ZeRO stages 2 and 3) as a strategy."""

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import CheckpointIO, DoublePrecision, HalfPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks._checkpoint_io import AtomicCheckpointIO
from lightning_tricks._lightning import (
    DEFAULT_TIMEOUT,
    MisconfigurationException,
    callbacks_that_copy_the_module,
    precision_of,
    set_device_mesh,
    torch_optimizer,
    turn_off_inference_mode,
)
from lightning_tricks._validation import check_choice, check_int
from lightning_tricks.distributed.faults import explain_
from lightning_tricks.distributed.full_state import (
    gather_state_dict,
    load_full_optimizer_state_,
    load_full_state_,
    read_state_dict,
    whole,
)
from lightning_tricks.distributed.meshes import SHARD, data_parallel_mesh
from lightning_tricks.distributed.policy import ShardingPlan, ShardingPolicy
from lightning_tricks.distributed.sharding import (
    apply_forward_methods,
    finish_reduction_,
    is_sharded,
    mesh_of,
    reshard_,
    shard_,
    without_gradient_sync,
)
from lightning_tricks.functional.blocks import BlockSelector
from lightning_tricks.functional.patching import Removable, patch_

__all__ = ["FSDP2Strategy"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FSDP2Strategy(ModelParallelStrategy):
    """Shard parameters, gradients and optimizer state over all ranks; the module does not change.

    Each rank holds 1/W of all three. A unit of modules (see `ShardingPolicy`) is gathered for its forward and its
    backward. fp32 training equals one process on the same global batch up to rounding. Runs on GPUs (NCCL) and CPUs
    (gloo), under Lightning's launcher, torchrun and SLURM.

    Args:
        policy: which modules are units: a `ShardingPolicy`, or what its first argument takes.
        reshard_after_forward: whether a unit is freed between its forward and its backward. ``True`` (ZeRO-3) holds
            one unit at a time; ``False`` (ZeRO-2) gathers once a step and holds all; an int reshards to groups of that
            many ranks.
        replicate_size: how many copies of the model there are, each sharded over ``world_size / replicate_size``
            neighbouring ranks (HSDP); ``"num_nodes"`` for one a node.
        mp_policy: what is gathered and reduced in which dtype. ``"auto"`` and ``"autocast"`` gather as the parameters
            are and leave ``precision="bf16-mixed"`` to autocast, as DDP does, but ``"auto"`` reduces in fp32 where
            parameters are bf16 or fp16 (``"bf16-true"``). ``"fsdp"``, with ``"bf16-mixed"``, gathers in bf16 and
            reduces in fp32: half the traffic of gathers. A `torch.distributed.fsdp.MixedPrecisionPolicy` is taken as
            it is. BatchNorm stays in fp32 in each of them.
        cpu_offload: whether shards and optimizer state live on the CPU.
        save_distributed_checkpoint: whether a checkpoint is a folder to which each rank writes its shards, rather than
            one ordinary file. Both load under any number of ranks and any strategy of this package; the file also
            without it.
        async_checkpoint: whether such a folder is written while training goes on.
        timeout: how long a rank waits for the others before it ends with an error.
        weights: a file to read the initial weights from, straight into the shards: a state dict, or a checkpoint with
            one. With it a model on the meta device needs no `reset_parameters`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; at the start of fit, sizes that do not
            multiply to the world size, a selector that matches nothing, units that share a parameter, a module that is
            sharded already, a precision that is not supported.

    Cost:
        1.5 times the communication of DDP (reshard), or the same (without).

    Reference:
        Zhao et al. (2023), "PyTorch FSDP", arXiv:2304.11277; Rajbhandari et al. (2020), "ZeRO", arXiv:1910.02054.

    Example:
        >>> from lightning_tricks import FSDP2Strategy, ShardingPolicy
        >>> strategy = FSDP2Strategy(ShardingPolicy("model.layers.*", ignore="frozen"), replicate_size=2)
    """

    def __init__(
        self,
        policy: ShardingPolicy | str | type[nn.Module] | Callable[[str, nn.Module], bool] | Sequence[BlockSelector] = (
            "auto"
        ),
        *,
        reshard_after_forward: bool | int = True,
        replicate_size: int | Literal["num_nodes"] = 1,
        mp_policy: MixedPrecisionPolicy | Literal["auto", "autocast", "fsdp"] = "auto",
        cpu_offload: bool = False,
        save_distributed_checkpoint: bool = False,
        async_checkpoint: bool = False,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        weights: str | Path | None = None,
    ) -> None:
        super().__init__(save_distributed_checkpoint=save_distributed_checkpoint, timeout=timeout)
        self.policy = policy if isinstance(policy, ShardingPolicy) else ShardingPolicy(policy)
        if replicate_size != "num_nodes":
            check_int("replicate_size", replicate_size, minimum=1)
        if not isinstance(reshard_after_forward, bool):
            check_int("reshard_after_forward", reshard_after_forward, minimum=1)
        if not isinstance(mp_policy, MixedPrecisionPolicy):
            check_choice("mp_policy", mp_policy, ("auto", "autocast", "fsdp"))
        if async_checkpoint and not save_distributed_checkpoint:
            raise ValueError(
                "expected `save_distributed_checkpoint=True` beside `async_checkpoint=True`, got False: one file is "
                "written by rank 0 alone, with no part in the background"
            )
        self.reshard_after_forward = reshard_after_forward
        self.replicate_size = replicate_size
        self.mp_policy = mp_policy
        self.cpu_offload = cpu_offload
        self.async_checkpoint = async_checkpoint
        self.weights = weights
        self.plan: ShardingPlan | None = None
        self._undo: list[Removable] = []
        self._synchronizes = True
        self._pending: tuple[Mapping[str, Any], bool] | None = None

    # Before the run

    @override
    def setup_environment(self) -> None:
        self._setup_distributed()
        if self._device_mesh is None:
            replicate_size = self.num_nodes if self.replicate_size == "num_nodes" else self.replicate_size
            self._device_mesh = data_parallel_mesh(self.root_device.type, self.world_size, replicate_size)
        set_device_mesh(self._module, self._device_mesh)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        module = self._module
        if mesh_of(module) is None:
            self._refuse_unsupported(trainer)
            self._shard(module)
        elif mesh_of(module) != self.device_mesh:
            raise ValueError(
                f"expected a module that was sharded over {self.device_mesh}, got one that an earlier run sharded over "
                f"{mesh_of(module)}. Build the module anew and load its weights from a checkpoint"
            )
        if self._pending is not None:
            self._load_weights(*self._pending)
            self._pending = None
        turn_off_inference_mode(trainer)
        self._undo.append(apply_forward_methods(module, _STEPS))
        self._undo.append(patch_(module, "log", functools.partial(_log_whole, module.log)))
        self.barrier()
        if fitting:
            # An evaluation before leaves units gathered, of which an optimizer would take copies for the weights.
            reshard_(module)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        own = set(self._module.parameters())
        for index, optimizer in enumerate(self.optimizers):
            strangers = [one for group in optimizer.param_groups for one in group["params"] if one not in own]
            if strangers:
                raise ValueError(
                    f"expected optimizer {index} ({type(optimizer).__name__}) to hold the sharded module's parameters, "
                    f"got {len(strangers)} others, the first of shape {tuple(strangers[0].shape)}: training would not "
                    "reach the module. Build the optimizer in configure_optimizers, from self.parameters()"
                )
            hook = functools.partial(_reshard_after_step, self._module)
            self._undo.append(optimizer.register_step_post_hook(hook))

    def _refuse_unsupported(self, trainer: pl.Trainer) -> None:
        module, precision = self._module, precision_of(self.precision_plugin)
        if precision == "64-true" or isinstance(self.precision_plugin, DoublePrecision):
            count = sum(parameter.numel() for parameter in module.parameters())
            raise MisconfigurationException(
                f"{type(self).__name__} expected a precision of 32 bits or fewer, got 64-true, which would hold and "
                f"send {count} parameters x 8 bytes = {8 * count} bytes where 32-true takes {4 * count}. "
                'Use precision="32-true" or "bf16-mixed"'
            )
        copying = callbacks_that_copy_the_module(trainer)
        if copying:
            raise MisconfigurationException(
                f"{type(self).__name__} expected no callback that copies the module, which a sharded one cannot be "
                f"(PL#21414), got {', '.join(copying)}. Drop it"
            )
        wrappers = (FullyShardedDataParallel, DistributedDataParallel)
        wrapped = [type(one).__name__ for one in module.modules() if isinstance(one, wrappers)]
        if wrapped or is_sharded(module):
            how = wrapped[0] if wrapped else "fully_shard or DTensors"
            raise MisconfigurationException(
                f"{type(self).__name__} shards the module by itself: expected a plain one, got one that is sharded "
                f"already ({how}), by configure_model or before fit. Drop that, or use Lightning's "
                "ModelParallelStrategy, which leaves sharding to the module"
            )

    def _shard(self, module: pl.LightningModule) -> None:
        """The recipe: what converts modules, then precision, then sharding."""
        if self._layer_sync is not None:
            self.model = self._layer_sync.apply(module)
        _convert_(module, self.precision_plugin)
        mp_policy = self._mixed_precision()
        precise = (_BatchNorm,) if mp_policy is not None else ()
        self.plan = self.policy.plan(
            module,
            self.device_mesh[SHARD].size(),
            root=module.automatic_optimization,
            full_precision=precise,
        )
        self._refuse_group_size()
        if self._pending is None and self.weights is not None:
            self._pending = read_state_dict(self.weights), module.strict_loading
        shard_(
            module,
            self.plan,
            self.device_mesh,
            reshard_after_forward=self.reshard_after_forward,
            mp_policy=mp_policy,
            offload_policy=CPUOffloadPolicy(pin_memory=self.root_device.type != "cpu") if self.cpu_offload else None,
            provided=() if self._pending is None else self._pending[0].keys(),
        )
        _move_the_rest_(module, self.root_device)
        rank_zero_info(f"{type(self).__name__} shards\n{self.plan}")
        if len(self.plan.units) == 1:
            rank_zero_warn(
                f"{type(self).__name__} found no repeated blocks in {type(module).__name__}: it is one unit, whose "
                "parameters are all gathered at once. Name what to gather apart by `policy`"
            )

    def _refuse_group_size(self) -> None:
        shard_size, size = self.device_mesh[SHARD].size(), self.reshard_after_forward
        if not isinstance(size, bool) and shard_size % size:
            raise ValueError(
                f"expected `reshard_after_forward` to divide the ranks of a shard group, got {size} for {shard_size} = "
                f"world size {self.world_size} / replicate size {self.world_size // shard_size}"
            )

    def _mixed_precision(self) -> MixedPrecisionPolicy | None:
        precision = precision_of(self.precision_plugin)
        if isinstance(self.mp_policy, MixedPrecisionPolicy):
            return self.mp_policy
        if self.mp_policy == "fsdp":
            if precision != "bf16-mixed":
                raise MisconfigurationException(
                    f'expected precision="bf16-mixed" beside mp_policy="fsdp", got {precision!r}. '
                    'Use mp_policy="auto", or a MixedPrecisionPolicy'
                )
            # Autocast stays on: it keeps losses and softmax in fp32, and finds the rest in bf16 already.
            return MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
        if self.mp_policy == "auto" and precision in ("bf16-true", "16-true"):
            return MixedPrecisionPolicy(reduce_dtype=torch.float32)
        return None

    # Each step

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        if output is None and self._module.automatic_optimization and self._synchronizes:
            finish_reduction_(self._module)  # the window's last micro-batch has no backward that would
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().predict_step, *args, **kwargs)

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = step(*args, **kwargs)
        reshard_(self._module)  # no backward comes that would
        return output

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._synchronizes = False
        try:
            with without_gradient_sync(self._module):
                yield
        finally:
            self._synchronizes = True

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return super().reduce(whole(tensor) if isinstance(tensor, Tensor) else tensor, group, reduce_op)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # After the run

    @override
    def teardown(self) -> None:
        while self._undo:
            self._undo.pop().remove()
        super().teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._pending = None
        explain_(exception, self.global_rank)

    # Checkpoints

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return False  # the weights wait in their file until the module is sharded; `weights_only` reaches us only so

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return gather_state_dict(self._module.state_dict())

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return gather_state_dict(torch_optimizer(optimizer).state_dict())

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if mesh_of(self._module) is None:
            self._pending = checkpoint["state_dict"], strict
        else:
            self._load_weights(checkpoint["state_dict"], strict)

    def _load_weights(self, state: Mapping[str, Any], strict: bool) -> None:
        load_full_state_(self._module, state, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_full_optimizer_state_(optimizer, state)

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module


def _convert_(module: nn.Module, plugin: Precision) -> None:
    """Convert the module to the precision's dtype, but for BatchNorm: running statistics stall in 16 bits."""
    precise = [one for one in module.modules() if isinstance(one, _BatchNorm)]
    kept = [{key: value.clone() for key, value in one.state_dict().items()} for one in precise]
    plugin.convert_module(module)
    for one, state in zip(precise, kept, strict=True):
        if isinstance(plugin, HalfPrecision):
            one.float().load_state_dict(state)


def _move_the_rest_(module: nn.Module, device: torch.device) -> None:
    """Move what is not sharded: modules without parameters, such as metrics. Shards may live on another device."""
    for one in module.modules():
        if next(one.parameters(), None) is None:
            one.to(device)


# Functions of the module, not closures: they end up inside of objects that get pickled.


def _log_whole(log: Callable[..., None], name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    log(name, whole(value) if isinstance(value, Tensor) else value, *args, **kwargs)


def _reshard_after_step(module: nn.Module, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The shards have moved: whatever a forward without a backward left gathered is out of date."""
    reshard_(module)
