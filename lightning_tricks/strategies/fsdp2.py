"""Fully sharded data parallel (FSDP2, ZeRO stages 2 and 3) as a strategy."""

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.plugins import CheckpointIO, HalfPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks._checkpoint_io import with_atomic_files
from lightning_tricks._lightning import (
    DEFAULT_TIMEOUT,
    MisconfigurationException,
    attach_logging,
    callbacks_that_copy_the_module,
    is_local_path,
    precision_of,
    set_device_mesh,
    torch_optimizer,
    turn_off_inference_mode,
)
from lightning_tricks._validation import check_choice, check_int, check_timeout
from lightning_tricks.distributed.faults import explain_
from lightning_tricks.distributed.full_state import (
    gather_state_dict,
    load_full_optimizer_state_,
    read_state_dict,
    whole,
)
from lightning_tricks.distributed.meshes import data_parallel_mesh, shard_size_of
from lightning_tricks.distributed.policy import ShardingPlan, ShardingPolicy
from lightning_tricks.distributed.precision import FULL_PRECISION, convert_, mixed_precision_policy
from lightning_tricks.distributed.sharded_checkpoint import (
    CheckpointFolders,
    is_sharded_checkpoint,
    named_optimizer_state,
    read_meta,
    read_sharded_optimizer_state,
)
from lightning_tricks.distributed.sharding import (
    apply_forward_methods,
    average_kept_gradients_,
    broadcast_buffers_,
    move_unsharded_,
    refuse_optimizer,
    refuse_scaler,
    refuse_sparse,
    reset_,
    reshard_,
    shard_,
    sharded_by,
    sharding_of,
    units_of,
    without_gradient_sync,
)
from lightning_tricks.distributed.weights import FileWeights, FolderWeights
from lightning_tricks.functional.blocks import BlockSelector
from lightning_tricks.functional.patching import Removable, patch_

__all__ = ["FSDP2Strategy"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FSDP2Strategy(ModelParallelStrategy):
    """Shard parameters, gradients and optimizer state over all ranks; the module does not change.

    Each rank holds 1/W of all three. A unit of modules (see `ShardingPolicy`) is gathered for its forward and its
    backward. fp32 training equals one process on the same global batch up to rounding.

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
            reduces in fp32: half the traffic of gathers. Else a `torch.distributed.fsdp.MixedPrecisionPolicy`, which
            holds for the units' inputs but not for the batch. BatchNorm stays in fp32 in each of them.
        cpu_offload: whether shards and optimizer state live on the CPU.
        save_distributed_checkpoint: whether a checkpoint is a folder to which each rank writes its shards, rather than
            one ordinary file. Either loads under any number of ranks; the file also under ZeRO1Strategy, DDP and in
            one process, as does what ``python -m lightning_tricks consolidate`` makes of a folder.
        async_checkpoint: whether such a folder is written while training goes on.
        timeout: how long a rank waits for the others before it ends with an error.
        weights: where to read the initial weights from, straight into the shards: a file of a state dict, or a
            checkpoint of either kind. With it a model on the meta device needs no `reset_parameters`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; at the start of fit, sizes that do not
            multiply to the world size, a selector that matches nothing, units that share a parameter, a module that is
            sharded already, a precision that is not supported.

    Cost:
        1.5 times the communication of DDP (reshard), or the same (without). Accumulation holds whole gradients.
        Buffers follow each rank's own batches in training; evaluations and checkpoints have rank 0's.

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
        check_timeout(timeout)
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
        self._pending: FileWeights | FolderWeights | None = None
        self._runs = False
        self._folder: Path | None = None
        self._folders = CheckpointFolders(asynchronous=async_checkpoint)

    # Before the run

    def _get_process_group_backend(self) -> str:
        backend = super()._get_process_group_backend()
        return "cpu:gloo,cuda:nccl" if self.cpu_offload and backend == "nccl" else backend

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
        self._refuse_unsupported(trainer)
        sharding = sharding_of(module)
        if sharding is None:
            self._shard(module)
        elif (sharding.mesh, sharding.settings) == (self.device_mesh, self._settings):
            reset_(module)
        else:
            raise ValueError(
                f"expected a module that was sharded over {self.device_mesh} with {self._settings}, got one that an "
                f"earlier run sharded over {sharding.mesh} with {sharding.settings}. Build the module anew and load "
                "its weights from a checkpoint"
            )
        if self._pending is not None:
            self._pending.load_(module)
            self._pending = None
        self._runs = True
        turn_off_inference_mode(trainer)
        self._undo += apply_forward_methods(module, _STEPS)
        self._undo.append(patch_(module, "log", functools.partial(_log_whole, module.log)))
        attach_logging(trainer)  # the callbacks' `log` is the module's
        self.barrier()
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            refuse_optimizer(optimizer, self._module)
            hook = functools.partial(_reshard_after_step, units_of(self._module))
            self._undo.append(optimizer.register_step_post_hook(hook))

    def _refuse_unsupported(self, trainer: pl.Trainer) -> None:
        copying = callbacks_that_copy_the_module(trainer)
        if copying:
            raise MisconfigurationException(
                f"{type(self).__name__} expected no callback that copies the module, which a sharded one cannot be "
                f"(PL#21414), got {', '.join(copying)}. Drop it"
            )
        refuse_sparse(self._module)
        how = sharded_by(self._module)
        if how is not None and sharding_of(self._module) is None:
            raise MisconfigurationException(
                f"{type(self).__name__} shards the module by itself: expected a plain one, got one that is sharded "
                f"already ({how}), by configure_model or before fit. Drop that, or use Lightning's "
                "ModelParallelStrategy, which leaves sharding to the module"
            )

    def _shard(self, module: pl.LightningModule) -> None:
        """The recipe: what converts modules, then precision, then sharding."""
        if self._layer_sync is not None:
            self.model = self._layer_sync.apply(module)
        if isinstance(self.precision_plugin, HalfPrecision):
            convert_(module, self.precision_plugin.convert_module)
        mp_policy = mixed_precision_policy(self.mp_policy, precision_of(self.precision_plugin))
        precise = FULL_PRECISION if mp_policy is not None else ()
        self.plan = self.policy.plan(
            module,
            shard_size_of(self.device_mesh, self.reshard_after_forward),
            root=module.automatic_optimization,
            full_precision=precise,
        )
        if getattr(self.precision_plugin, "scaler", None) is not None:
            refuse_scaler(self.plan)
        if self._pending is None and self.weights is not None:
            path, strict = Path(self.weights), module.strict_loading
            folder = is_sharded_checkpoint(path)
            self._pending = FolderWeights(path, strict) if folder else FileWeights(read_state_dict(path), strict)
        shard_(
            module,
            self.plan,
            self.device_mesh,
            reshard_after_forward=self.reshard_after_forward,
            mp_policy=mp_policy,
            offload_policy=CPUOffloadPolicy(pin_memory=self.root_device.type != "cpu") if self.cpu_offload else None,
            provided=() if self._pending is None else self._pending.names(),
            settings=self._settings,
        )
        move_unsharded_(module, self.root_device)
        rank_zero_info(f"{type(self).__name__} shards\n{self.plan}")
        if len(self.plan.units) == 1:
            rank_zero_warn(
                f"{type(self).__name__} found no repeated blocks in {type(module).__name__}: it is one unit, whose "
                "parameters are all gathered at once. Name what to gather apart by `policy`"
            )

    @property
    def _settings(self) -> dict[str, Any]:
        """What a module keeps from the run that sharded it."""
        precision = precision_of(self.precision_plugin)
        return {
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": mixed_precision_policy(self.mp_policy, precision),
            "weights in": precision if precision in ("bf16-true", "16-true") else "32-true",
            "cpu_offload": self.cpu_offload,
        }

    # Each step

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        average_kept_gradients_(self._module)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().predict_step, *args, **kwargs)

    @override
    def on_validation_start(self) -> None:
        broadcast_buffers_(self._module)

    @override
    def on_test_start(self) -> None:
        broadcast_buffers_(self._module)

    @override
    def on_predict_start(self) -> None:
        broadcast_buffers_(self._module)

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = step(*args, **kwargs)
        reshard_(self._module)  # no backward comes that would
        return output

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        # One rank has nothing to save, and may end a window with a step that has no loss: nothing would reduce then.
        with without_gradient_sync(self._module) if self.world_size > 1 else nullcontext():
            yield

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
        self._runs = False
        self._folders.wait()
        super().teardown()
        self.checkpoint_io.teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._pending = None
        self._folders.abandon()
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
        self._checkpoint_io = with_atomic_files(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = self._module.state_dict()
        return state if self._save_distributed_checkpoint else gather_state_dict(state)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = torch_optimizer(optimizer)
        if self._save_distributed_checkpoint:
            return named_optimizer_state(optimizer, self._module)
        return gather_state_dict(optimizer.state_dict())

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if not self._save_distributed_checkpoint:
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        if storage_options is not None or not is_local_path(filepath):
            raise ValueError(
                f"expected a path of a file system that all ranks share, without storage options, got {filepath}. "
                "Use save_distributed_checkpoint=False for other places"
            )
        state_dict, optimizer_states = checkpoint.pop("state_dict"), checkpoint.pop("optimizer_states", None)
        path = Path(filepath).expanduser()
        self._folders.save(path, state_dict, optimizer_states, checkpoint)
        if not self._runs or self._module.trainer.interrupted or path.name.startswith("hpc_ckpt"):
            self._folders.wait()  # the process may end, or be requeued, right after

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        self._folders.remove_later(functools.partial(super().remove_checkpoint, filepath))

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self._folders.wait()
        path = Path(checkpoint_path).expanduser()
        self._folder = path if is_sharded_checkpoint(path) else None
        if self._folder is not None:
            return read_meta(self._folder, weights_only=weights_only)
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        weights = FolderWeights(self._folder, strict) if self._folder else FileWeights(checkpoint["state_dict"], strict)
        if sharding_of(self._module) is None:
            self._pending = weights
        else:
            weights.load_(self._module)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"expected the state of {len(self.optimizers)} optimizers, got a checkpoint of {len(states)}"
            )
        for index, (optimizer, state) in enumerate(zip(self.optimizers, states, strict=True)):
            if self._folder is not None:
                state = read_sharded_optimizer_state(optimizer, self._module, self._folder, index, state)
            load_full_optimizer_state_(optimizer, state)

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module


# Functions of the module, not closures: they end up inside of objects that get pickled.


def _log_whole(log: Callable[..., None], name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    log(name, whole(value) if isinstance(value, Tensor) else value, *args, **kwargs)


def _reshard_after_step(units: list[FSDPModule], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The shards have moved: whatever a forward without a backward left gathered is out of date."""
    for unit in units:
        unit.reshard()
