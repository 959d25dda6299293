"""Every private or undocumented name of Lightning that this package touches, one small function each.

Seen in lightning 2.6.6. Where a touch works around an upstream fault, the issue number stands beside it.
"""

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout as DEFAULT_TIMEOUT
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from lightning_tricks.functional.patching import Removable, patch_, swap_class_

__all__ = [
    "DEFAULT_TIMEOUT",
    "MisconfigurationException",
    "accumulates",
    "add_scheduler",
    "attach_logging",
    "batch_index",
    "batches_begun",
    "callbacks_of",
    "callbacks_that_copy_the_module",
    "changes_batch_on_device",
    "estimate_steps_by",
    "free_memory_cache",
    "has_static_graph",
    "is_compiled",
    "is_fast_dev_run",
    "is_fitting",
    "is_last_batch",
    "is_last_epoch",
    "is_local_path",
    "is_logging_step",
    "is_out_of_memory",
    "is_training_batch",
    "logged_step",
    "loss_scaler",
    "module_overrides",
    "other_accumulation",
    "other_rate_writers",
    "precision_of",
    "remove_scheduler",
    "schedulers_of",
    "set_callbacks",
    "set_device_mesh",
    "steer_accumulation",
    "step_without_a_batch",
    "takes_loader_iter",
    "torch_optimizer",
    "train_batches_per_epoch",
    "trainer_of",
    "turn_off_inference_mode",
    "unprocessed_batches",
    "unscaled_loss",
    "unscales_by_itself",
    "unsupported_strategy",
    "wrapped_io",
]


def is_logging_step(trainer: pl.Trainer) -> bool:
    """Whether the Trainer writes what is logged on this batch (`log_every_n_steps`) to its loggers."""
    return bool(trainer._logger_connector.should_update_logs) or is_fast_dev_run(trainer)


def logged_step(trainer: pl.Trainer) -> int:
    """The step that `self.log` would write to the loggers: batches that an optimizer stepped on."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def is_compiled(module: pl.LightningModule) -> bool:
    """Whether the user handed `torch.compile(module)` to the Trainer, which unwraps it."""
    return module._compiler_ctx is not None


def trainer_of(module: pl.LightningModule) -> pl.Trainer | None:
    """The Trainer that a module is attached to, None without one."""
    return module._trainer


def is_fast_dev_run(trainer: pl.Trainer) -> bool:
    """Whether the Trainer only tries a few batches out."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def is_fitting(trainer: pl.Trainer) -> bool:
    """Whether the Trainer runs `fit`, of which training and validation are parts."""
    return trainer.state.fn == TrainerFn.FITTING


def callbacks_of(trainer: pl.Trainer) -> list[Callback]:
    """The Trainer's callbacks, in the order in which it calls them."""
    return trainer.callbacks  # type: ignore[attr-defined,no-any-return]


def set_callbacks(trainer: pl.Trainer, callbacks: list[Callback]) -> None:
    """Replace the Trainer's callbacks: a new list, since Lightning may be walking the old one."""
    trainer.callbacks = callbacks  # type: ignore[attr-defined]


def module_overrides(hook: str, module: pl.LightningModule) -> bool:
    """Whether the module, or a base of it that is the user's, defines a hook of LightningModule itself."""
    return bool(is_overridden(hook, module))


def accumulates(trainer: pl.Trainer) -> bool:
    """Whether this batch is a micro-batch of a window that goes on, which the Trainer never logs."""
    return trainer.lightning_module.automatic_optimization and bool(trainer.fit_loop._should_accumulate())


def loss_scaler(trainer: pl.Trainer) -> Any:
    """The enabled `torch.amp.GradScaler` of the Trainer's precision plugin, None where there is none."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def unscaled_loss(trainer: pl.Trainer, loss: Tensor) -> Tensor:
    """The loss that the hooks get, as a scalar before the scaler multiplied it; without waiting for the device."""
    loss = loss.detach().float()
    loss = loss.sum() if loss.dim() else loss
    scaler = loss_scaler(trainer)
    return loss if scaler is None else loss / scaler.scale(torch.ones_like(loss))


def unscales_by_itself(optimizer: Optimizer) -> bool:
    """Whether the optimizer (a fused one) takes scaled gradients, so that Lightning does not unscale before hooks."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def unsupported_strategy(trainer: pl.Trainer) -> str | None:
    """Why the Trainer's strategy cannot be right with the tricks, None where it can."""
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        return 'DeepSpeed steps, scales, clips and accumulates inside of its own engine. Use strategy="ddp"'
    if isinstance(trainer.strategy, FSDPStrategy):
        return (
            "FSDP1 flattens parameters, so that a rank sees pieces of no parameter's own shape (PL#19235). "
            'Use strategy="fsdp2"'
        )
    schedules = [one.scheduling for one in callbacks_of(trainer) if isinstance(one, GradientAccumulationScheduler)]
    accumulation = max([trainer.accumulate_grad_batches, *(k for one in schedules for k in one.values())])
    if has_static_graph(trainer) and accumulation > 1:
        return (
            f"static_graph=True fails inside of torch with accumulate_grad_batches={accumulation} (PL#20395): "
            "drop one of the two"
        )
    if "XLA" in type(trainer.strategy).__name__:
        return "nothing of this package was run on XLA"
    return None


def has_static_graph(trainer: pl.Trainer) -> bool:
    """Whether DDP was told that its graph never changes, which it does in micro-batches without communication."""
    return isinstance(trainer.strategy, DDPStrategy) and bool(trainer.strategy._ddp_kwargs.get("static_graph"))


def other_accumulation(trainer: pl.Trainer) -> list[str]:
    """What of Lightning's own accumulates gradients in this run, as the user wrote it."""
    flag = trainer.accumulate_grad_batches
    flags = [] if flag == 1 else [f"Trainer(accumulate_grad_batches={flag})"]
    return flags + [
        type(one).__name__ for one in callbacks_of(trainer) if isinstance(one, GradientAccumulationScheduler)
    ]


def steer_accumulation(
    trainer: pl.Trainer, *, is_open: Callable[[], bool], is_first: Callable[[], bool]
) -> list[Removable]:
    """Decide when the Trainer steps and when it zeroes gradients; the loss is still divided by its own number.

    Lightning counts batches from the start of each epoch and steps on its last one (PL#19987, PL#21808).

    Args:
        trainer: the Trainer.
        is_open: whether the window goes on after the current batch. Picklable, as the Trainer is.
        is_first: whether the current batch is the first one of its window.
    """
    loop = trainer.fit_loop.epoch_loop
    zero = functools.partial(_zero_grad_of_window, loop.automatic_optimization, is_first)
    return [
        patch_(loop, "_should_accumulate", is_open),
        patch_(loop.automatic_optimization, "_make_zero_grad_fn", zero),
    ]


def _zero_grad_of_window(loop: Any, is_first: Callable[[], bool], batch_idx: int, optimizer: Optimizer) -> Any:
    return functools.partial(_zero_grad, loop, batch_idx, optimizer) if is_first() else None


def _zero_grad(loop: Any, batch_idx: int, optimizer: Optimizer) -> None:
    loop._on_before_zero_grad(optimizer)
    loop._optimizer_zero_grad(batch_idx, optimizer)


def is_last_batch(trainer: pl.Trainer) -> bool:
    """Whether the current training batch is the last one of its epoch."""
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def is_last_epoch(trainer: pl.Trainer) -> bool:
    """Whether no epoch follows on the current one, as far as the number of epochs tells."""
    epochs = trainer.max_epochs
    return epochs is not None and epochs != -1 and int(trainer.fit_loop.epoch_progress.current.processed) + 1 >= epochs  # type: ignore[attr-defined]


def batches_begun(trainer: pl.Trainer) -> int:
    """How many training batches the run has fetched, those that are None included."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.ready)


def unprocessed_batches(trainer: pl.Trainer) -> int:
    """How many batches were begun but not finished: 1 while one is trained on, and after an exception in it."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return int(progress.ready - progress.processed)


def step_without_a_batch(trainer: pl.Trainer) -> None:
    """Take an optimizer step of automatic optimization on the gradients that are there."""
    loop = trainer.fit_loop.epoch_loop
    loop.automatic_optimization._optimizer_step(loop.batch_idx, functools.partial(torch.zeros, ()))
    loop.update_lr_schedulers("step", update_plateau_schedulers=False)


def takes_loader_iter(module: pl.LightningModule) -> bool:
    """Whether `training_step` takes its batches from the loader by itself, so that none is known before it runs."""
    return bool(is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True))


def changes_batch_on_device(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Whether what `training_step` gets may be another batch than the one that is moved to the device."""
    hooks = ("transfer_batch_to_device", "on_after_batch_transfer")
    data = trainer.datamodule  # type: ignore[attr-defined]
    return any(is_overridden(hook, module) or (data and is_overridden(hook, data)) for hook in hooks)


def is_training_batch(trainer: pl.Trainer) -> bool:
    """Whether the batch that is being moved to the device is one to train on."""
    return bool(trainer.training) and not trainer.sanity_checking


def estimate_steps_by(trainer: pl.Trainer, count: Callable[[pl.Trainer], int]) -> Removable:
    """Let `estimated_stepping_batches` give the steps that `count` finds for the run.

    It is a property, so the Trainer's class is replaced by one of the same name.

    Args:
        trainer: the Trainer.
        count: called where the run is bounded.
    """
    kind = type(trainer)

    def estimated_stepping_batches(self: pl.Trainer) -> int | float:
        batches = kind.estimated_stepping_batches.fget(self)  # type: ignore[attr-defined]
        unbounded = self.max_epochs in (None, -1) or self.num_training_batches == float("inf")
        return batches if unbounded else count(self)

    return swap_class_(trainer, {"estimated_stepping_batches": property(estimated_stepping_batches)})


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device, or the machine, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or bool(is_oom_error(error))


def free_memory_cache() -> None:
    """Collect garbage, and give what torch's allocator keeps back to the device."""
    garbage_collection_cuda()


def schedulers_of(trainer: pl.Trainer) -> list[LRSchedulerConfig]:
    """The learning-rate schedulers that the Trainer steps and saves."""
    return trainer.strategy.lr_scheduler_configs


def other_rate_writers(trainer: pl.Trainer) -> list[str]:
    """Names of Lightning's own callbacks in the list that set the learning rate."""
    return [type(one).__name__ for one in callbacks_of(trainer) if isinstance(one, StochasticWeightAveraging)]


def add_scheduler(trainer: pl.Trainer, scheduler: Any, name: str | None = None) -> None:
    """Let the Trainer step, save and show a scheduler that no `configure_optimizers` returned."""
    trainer.strategy.lr_scheduler_configs.append(LRSchedulerConfig(scheduler, name=name, interval="step"))


def remove_scheduler(trainer: pl.Trainer, scheduler: Any) -> None:
    """Undo `add_scheduler`."""
    configs = trainer.strategy.lr_scheduler_configs
    configs[:] = [config for config in configs if config.scheduler is not scheduler]


def train_batches_per_epoch(trainer: pl.Trainer) -> float:
    """Batches a rank sees in one epoch, inf where the loader has no length. To be asked from `on_train_start` on.

    Asked earlier, Lightning would set the data up before it has loaded the loader's position from a checkpoint.
    """
    return trainer.num_training_batches


def batch_index(trainer: pl.Trainer) -> int:
    """The index of the current training batch in its epoch."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1


def callbacks_that_copy_the_module(trainer: pl.Trainer) -> list[str]:
    """Names of Lightning's own callbacks in the list that deep-copy the module, which a sharded one refuses."""
    copying = (WeightAveraging, StochasticWeightAveraging)
    return [type(one).__name__ for one in callbacks_of(trainer) if isinstance(one, copying)]


def precision_of(plugin: Any) -> str:
    """The name of the Trainer's precision, as `Trainer(precision=...)` takes it."""
    return str(getattr(plugin, "precision", "32-true"))


def set_device_mesh(module: pl.LightningModule, mesh: Any) -> None:
    """What `LightningModule.device_mesh` shows."""
    module._device_mesh = mesh


def torch_optimizer(optimizer: Optimizer) -> Optimizer:
    """The torch optimizer inside of what `self.optimizers()` returns."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def turn_off_inference_mode(trainer: pl.Trainer) -> None:
    """Evaluate under `torch.no_grad`, as `Trainer(inference_mode=False)` does.

    What FSDP2 gathers under `torch.inference_mode` cannot be trained on afterwards; Lightning knows that of FSDP1 only.
    """
    evaluation = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    for loop in (*evaluation, trainer.predict_loop):
        loop.inference_mode = False


def is_local_path(path: Any) -> bool:
    """Whether a path is one of this machine's file system, not of a bucket."""
    return bool(_is_local_file_protocol(path))


def attach_logging(trainer: pl.Trainer) -> None:
    """Let the callbacks log by the module's `log` as it is now: Lightning binds them before the strategy's setup."""
    trainer._callback_connector._attach_model_logging_functions()


def wrapped_io(io: Any, inner: Any) -> Any:
    """Put what reads and writes files into a plugin that wraps it, such as AsyncCheckpointIO, or in its place."""
    if isinstance(io, _WrappingCheckpointIO):
        io.checkpoint_io = inner
    return inner if io is None else io
