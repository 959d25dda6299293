"""The conductor: one callback of ours in each Trainer that lists a trick, put there by the first trick.

It stands first in the list. It keeps the ledger, runs the tricks in the order of what they touch, logs for them, and
undoes whatever was changed, also after an exception, which Lightning tells callbacks about without tearing them down.
"""

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_tricks._lightning import (
    accumulates,
    callbacks_of,
    is_logging_step,
    logged_step,
    loss_scaler,
    module_overrides,
    set_callbacks,
    trainer_of,
    unscaled_loss,
)
from lightning_tricks.composition.conflicts import refuse_conflicts, refuse_other_package, refuse_two_writers
from lightning_tricks.composition.ledger import StepLedger
from lightning_tricks.composition.report import print_table
from lightning_tricks.composition.step import OptimizerStep
from lightning_tricks.composition.trick import Trick
from lightning_tricks.composition.window import Window
from lightning_tricks.functional.patching import Removable, patch_

__all__ = ["Conductor", "compose", "current_step", "current_window", "step_ledger", "weigh_batch"]


def compose(trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
    """Put a conductor in front of the Trainer's callbacks, unless there is one. Called by every trick's `setup`.

    Args:
        trainer: the Trainer.
        module: its module.
        stage: Lightning's: "fit", "validate", "test" or "predict".
    """
    refuse_other_package(trainer)
    if _find(trainer) is None:
        conductor = Conductor()
        set_callbacks(trainer, [conductor, *callbacks_of(trainer)])
        conductor.setup(trainer, module, stage)  # Lightning is walking the old list


def step_ledger(trainer: pl.Trainer) -> StepLedger:
    """Return the verdicts of the Trainer's optimizer steps: ``step_ledger(trainer)[i]`` is optimizer i's.

    Reading may synchronise with the device; keeping the ledger does not.

    Args:
        trainer: a Trainer with at least one callback of this package, from the start of its fit on.

    Returns:
        A sequence of ledgers with the integers `applied`, `skipped_overflow`, `skipped_guard`, `skipped_empty`, and
        `last`, the last verdict's name or None.

    Raises:
        RuntimeError: no trick is listed, or no fit has begun.
    """
    conductor = _find(trainer)
    if conductor is None or not len(conductor.ledger):
        raise RuntimeError(
            "this Trainer keeps no ledger of steps yet: list a callback of lightning_tricks in Trainer(callbacks=...) "
            "(LossScaleMonitor changes nothing), and read it from the start of fit on"
        )
    return conductor.ledger


def current_step(trainer: pl.Trainer, optimizer: Optimizer) -> OptimizerStep:
    """Return the step that `optimizer` is taking. For use in `on_before_optimizer_step`.

    Args:
        trainer: the Trainer.
        optimizer: what the hook was given.

    Raises:
        RuntimeError: no such step runs.
    """
    conductor = _find(trainer)
    if conductor is None or conductor.step is None or conductor.step.optimizer is not optimizer:
        raise RuntimeError(f"{type(optimizer).__name__} is not taking a step now: ask in on_before_optimizer_step")
    return conductor.step


def current_window(trainer: pl.Trainer) -> Window:
    """Return the accumulation window that a Trainer's run is in.

    Args:
        trainer: a Trainer with at least one trick, from the start of its fit on.
    """
    conductor = _find(trainer)
    assert conductor is not None
    return conductor.window


def weigh_batch(trainer: pl.Trainer, batch: Any) -> float | None:
    """Return what a batch counts, by the trick that weighs batches; None without one.

    Args:
        trainer: a Trainer with at least one trick.
        batch: what `training_step` gets, or a part of it.
    """
    weights = (one.weigh(batch) for one in callbacks_of(trainer) if isinstance(one, Trick))
    return next((weight for weight in weights if weight is not None), None)


class Conductor(Callback):
    """Keeps the ledger and runs the tricks. Nobody lists it: the first trick does.

    Attributes:
        ledger: the verdicts of the run.
        tricks: the Trainer's tricks, in the order in which they run.
        step: the optimizer step that is being taken, None between steps.
        window: the accumulation window that the run is in.
    """

    def __init__(self) -> None:
        self.ledger = StepLedger()
        self.tricks: list[Trick] = []
        self.step: OptimizerStep | None = None
        self._undo: list[Removable] = []
        self._building: Removable | None = None
        self._wrapped_step: Removable | None = None
        self._watched: list[Optimizer] = []
        self._stepped: set[int] = set()
        self._warned_of_raw_steps = False
        self.window = Window()
        self._steps_without_ledger = 0

    @property
    def state_key(self) -> str:
        """The ledger's key among the callbacks' states of a checkpoint."""
        return "lightning_tricks.StepLedger"

    # Before the run

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Order the tricks, refuse conflicts, and arrange for the module to be edited once it is complete."""
        set_callbacks(trainer, _in_order(callbacks_of(trainer)))
        self.tricks = [callback for callback in callbacks_of(trainer) if isinstance(callback, Trick)]
        if stage != "fit":
            return
        self.undo()
        self._steps_without_ledger = 0
        refuse_conflicts(self.tricks, trainer, pl_module)
        if trainer.global_step == 0:
            self.ledger.clear()
            for trick in self.tricks:
                trick.reset()
        # The user's module is complete after its `configure_model`, or, without one, after its own `setup`.
        last = "configure_model" if module_overrides("configure_model", pl_module) else "setup"
        build = getattr(pl_module, last)
        self._building = patch_(pl_module, last, functools.partial(_build_then_edit, self, pl_module, build))
        self._undo.append(self._building)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the ledger and begin to watch the optimizers."""
        self.ledger.open(len(trainer.optimizers))
        refuse_two_writers(self.tricks, trainer, pl_module)
        strategy = trainer.strategy
        watched = functools.partial(_watched_optimizer_step, self, trainer, strategy.optimizer_step)
        self._undo.append(patch_(strategy, "optimizer_step", watched))
        load = functools.partial(_adapt_then_load, self, trainer, strategy.load_optimizer_state_dict)
        self._undo.append(patch_(strategy, "load_optimizer_state_dict", load))
        self._watched = list(trainer.optimizers)
        for optimizer in self._watched:
            self._undo.append(optimizer.register_step_pre_hook(functools.partial(_on_torch_step, self)))
            self._undo.append(optimizer.register_step_post_hook(functools.partial(_on_torch_stepped, self)))
        self._stepped.clear()
        self.window.close()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the tricks begin, with all state loaded, and print the table."""
        if self._steps_without_ledger:
            self.ledger.assume_applied(self._steps_without_ledger, len(trainer.optimizers))
            self._steps_without_ledger = 0
        self.ledger.open(len(trainer.optimizers))
        for trick in self.tricks:
            trick.start(trainer, pl_module)
        self._wrap_training_step(pl_module)
        print_table(trainer, self.tricks)

    def _wrap_training_step(self, module: pl.LightningModule) -> None:
        if any(_runs_training_step(trick) for trick in self.tricks):
            step = functools.partial(_training_step_within_tricks, module, module.training_step)
            functools.update_wrapper(step, module.training_step)  # Lightning looks at its signature
            self._wrapped_step = patch_(module, "training_step", step)
            self._undo.append(self._wrapped_step)

    # Each batch

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Begin a micro-batch."""
        self.window.begin_batch()
        for trick in self.tricks:
            trick.catch_up(trainer)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Note that this window has a loss, and sum it up for those who look at it."""
        read = any(trick.reads_loss for trick in self.tricks)
        self.window.add(unscaled_loss(trainer, loss) if read else None)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Make the gradients ready for the tricks."""
        if self.step is None:
            return
        if pl_module.automatic_optimization:
            self.step.prepare(self.window.has_loss)
            self.step.loss = self.window.mean_loss(trainer.accumulate_grad_batches, trainer.world_size)
        else:  # several losses may stand for one optimizer: its gradients tell
            self.step.prepare(has_loss=True)
            self.step.loss = self.window.sum_of_losses()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Log for all tricks, if the Trainer logs this batch and an optimizer stepped since it last did."""
        if not self._stepped or not is_logging_step(trainer) or accumulates(trainer):
            return
        for key, value in self._metrics(trainer).items():
            pl_module.log(key, value, on_step=True, on_epoch=False, batch_size=1)
        self._stepped.clear()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the tricks complete what the epoch left open."""
        self._finish(trainer, pl_module, training_ends=False)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the tricks complete what is open."""
        self._finish(trainer, pl_module, training_ends=True)
        if self._wrapped_step is not None:  # before the strategy takes back its own edit, which lies beneath
            self._wrapped_step.remove()

    def _finish(self, trainer: pl.Trainer, module: pl.LightningModule, *, training_ends: bool) -> None:
        for trick in self.tricks:
            trick.catch_up(trainer)
        unlogged, self._stepped = self._stepped, set()
        for trick in self.tricks:
            trick.finish(trainer, module, training_ends=training_ends)
        for trick in self.tricks:  # which may have stepped
            trick.catch_up(trainer)
        if self._stepped:  # between batches a module cannot log
            values = {key: float(value) for key, value in self._metrics(trainer).items()}
            for logger in trainer.loggers:
                logger.log_metrics(values, step=logged_step(trainer))
        self._stepped = unlogged

    def _metrics(self, trainer: pl.Trainer) -> dict[str, float | Tensor]:
        values: dict[str, float | Tensor] = {
            "step/applied": float(sum(ledger.applied for ledger in self.ledger)),
            "step/skipped": float(sum(ledger.skipped for ledger in self.ledger)),
        }
        for trick in self.tricks:
            values.update(trick.metrics(trainer, self._stepped))
        return values

    def begin_step(self, trainer: pl.Trainer, optimizer: Optimizer) -> OptimizerStep:
        """Begin to watch a step."""
        index = next((i for i, one in enumerate(trainer.optimizers) if one is optimizer), None)
        if index is None:
            raise RuntimeError(
                f"expected a step of one of the Trainer's {len(trainer.optimizers)} optimizers, got one of a "
                f"{type(optimizer).__name__} that configure_optimizers did not return"
            )
        if optimizer not in self._watched:
            raise RuntimeError(
                f"expected the optimizers that training began with, got another {type(optimizer).__name__} for "
                f"optimizer {index}: its steps cannot be followed. Return it from configure_optimizers"
            )
        for trick in self.tricks:
            trick.catch_up(trainer)
        self.step = OptimizerStep(index, optimizer, loss_scaler(trainer))
        return self.step

    def abandon_step(self) -> None:
        """Forget a step that an exception ended, and the loss that led to it."""
        if self.step is not None:
            self.window.forget_batch()
            self.step.abandon()
            self.step = None

    def end_step(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Settle the step's verdict and tell the tricks."""
        step, self.step = self.step, None
        assert step is not None
        step.settle(self.ledger[step.index])
        self.window.close()
        self._stepped.add(step.index)
        for trick in self.tricks:
            trick.after_step(trainer, module, step)

    # After the run

    def undo(self) -> None:
        """Take back every change of the module, the strategy and the optimizers, the last one first."""
        self.abandon_step()
        while self._undo:
            self._undo.pop().remove()
        self._building = self._wrapped_step = None
        self._watched = []

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Undo."""
        self.undo()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Undo: Lightning does not call `teardown` on exceptions."""
        self.undo()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The ledger is part of the checkpoint."""
        return self.ledger.state_dict() if len(self.ledger) else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the ledger over."""
        self.ledger.load_state_dict(state_dict)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Stand in for the ledger of a run that had none of our tricks."""
        if self.state_key not in checkpoint.get("callbacks", {}):
            self._steps_without_ledger = int(checkpoint.get("global_step", 0))

    def edit(self, module: pl.LightningModule) -> None:
        """Let each trick edit the module."""
        for trick in self.tricks:
            handle = trick.edit(module)
            if handle is not None:
                self._undo.append(handle)


def _find(trainer: pl.Trainer) -> Conductor | None:
    return next((callback for callback in callbacks_of(trainer) if isinstance(callback, Conductor)), None)


def _in_order(callbacks: list[Callback]) -> list[Callback]:
    """The conductor first; the tricks in the order of what they touch, in the places that tricks had in the list."""
    conductor = [callback for callback in callbacks if isinstance(callback, Conductor)]
    tricks = sorted((one for one in callbacks if isinstance(one, Trick)), key=lambda one: (one.touches, one.rank))
    rest = iter(tricks)
    others = [
        next(rest) if isinstance(callback, Trick) else callback
        for callback in callbacks
        if not isinstance(callback, Conductor)
    ]
    return [*conductor, *others]


def _runs_training_step(trick: Trick) -> bool:
    return type(trick).run_training_step is not Trick.run_training_step


# Functions of the module, not closures: they end up inside of objects that get pickled and copied.


def _build_then_edit(
    conductor: Conductor, module: pl.LightningModule, build: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    output = build(*args, **kwargs)
    assert conductor._building is not None
    conductor._building.remove()  # once is enough
    conductor.edit(module)
    return output


def _training_step_within_tricks(
    module: pl.LightningModule, step: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    trainer = trainer_of(module)
    conductor = None if trainer is None else _find(trainer)
    if trainer is None or conductor is None:  # a copy of the module, or trial steps without the tricks
        return step(*args, **kwargs)
    for trick in filter(_runs_training_step, conductor.tricks):
        step = functools.partial(trick.run_training_step, trainer, module, step)
    return step(*args, **kwargs)


def _watched_optimizer_step(
    conductor: Conductor, trainer: pl.Trainer, step: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any
) -> Any:
    if _find(trainer) is not conductor:  # the learning-rate finder runs trial steps with callbacks of its own
        return step(optimizer, *args, **kwargs)
    conductor.begin_step(trainer, optimizer)
    if trainer.lightning_module.automatic_optimization:
        closure, *args = args  # type: ignore[assignment]
        args = (functools.partial(_closure_of_window, conductor, closure), *args)
    try:
        output = step(optimizer, *args, **kwargs)
    except BaseException:
        conductor.abandon_step()  # the module may catch it, as one does that retries after running out of memory
        raise
    conductor.end_step(trainer, trainer.lightning_module)
    return output


def _adapt_then_load(
    conductor: Conductor, trainer: pl.Trainer, load: Callable[..., Any], checkpoint: dict[str, Any]
) -> None:
    for trick in conductor.tricks:
        trick.adapt_checkpoint(trainer, checkpoint)
    load(checkpoint)


def _closure_of_window(conductor: Conductor, closure: Callable[[], Any]) -> Any:
    """Where the last micro-batch gave no loss but others did, there is a step to take: None would say there is none.

    Under a loss scaler Lightning would leave all of the window out.
    """
    loss = closure()
    return torch.zeros(()) if loss is None and conductor.window.has_loss else loss


def _on_torch_step(conductor: Conductor, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if conductor.step is not None and conductor.step.optimizer is optimizer:
        conductor.step.on_step()
    elif not conductor._warned_of_raw_steps:
        conductor._warned_of_raw_steps = True
        rank_zero_warn(
            f"a step of {type(optimizer).__name__} went past the Trainer, so that no trick acts on it and no ledger "
            "counts it: call step() of what self.optimizers() returns, not of the torch optimizer"
        )


def _on_torch_stepped(conductor: Conductor, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if conductor.step is not None and conductor.step.optimizer is optimizer:
        conductor.step.on_stepped()
