"""How many optimizer steps a run will take, from the Trainer's settings."""

import math

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_tricks._lightning import MisconfigurationException, callbacks_of, train_batches_per_epoch
from lightning_tricks.composition.trick import Trick

__all__ = ["optimizer_steps_of_run", "steps_if_needed"]


def optimizer_steps_of_run(trainer: pl.Trainer) -> int:
    """Count the optimizer steps of the whole run in automatic optimization, those before a resume included.

    From ``max_steps``, ``max_epochs``, ``limit_train_batches``, ``accumulate_grad_batches``, the tricks that bear on it
    and a GradientAccumulationScheduler, which Lightning's own ``estimated_stepping_batches`` leaves out.

    Args:
        trainer: a Trainer whose training data is set up: from `on_train_start` on.

    Returns:
        A positive number of steps, whether or not some will be skipped.

    Raises:
        MisconfigurationException: the settings do not bound the run.
    """
    max_steps = math.inf if trainer.max_steps == -1 else trainer.max_steps
    epochs = trainer.max_epochs
    if epochs is None or epochs == -1:
        total = max_steps
    else:
        batches = train_batches_per_epoch(trainer)
        total = max_steps if math.isinf(batches) else min(max_steps, _steps_of_epochs(trainer, int(batches), epochs))
    if math.isinf(total):
        raise MisconfigurationException(
            "the number of optimizer steps of this run cannot be known: "
            f"max_steps={trainer.max_steps}, max_epochs={epochs}, and the training loader may have no length. "
            "Pass total_steps=..., or Trainer(max_steps=...)"
        )
    return max(int(total), 1)


def steps_if_needed(
    trainer: pl.Trainer, module: pl.LightningModule, argument: str, duration: float, *, by: Trick
) -> int | None:
    """Count the optimizer steps of the run for a duration, or return None where they cannot be known and need not be.

    Args:
        trainer: the Trainer, from `on_train_start` on.
        module: its module.
        argument: the duration's name, for the message.
        duration: an int, which stands for itself, or a float, a fraction of the run.
        by: the trick, for the message.

    Raises:
        MisconfigurationException: a fraction of a run that is not bounded, or of manual optimization.
    """
    if not module.automatic_optimization:
        if isinstance(duration, int):
            return None
        raise MisconfigurationException(
            f"{type(by).__name__} cannot know how often {type(module).__name__} steps, since it optimizes manually, "
            f"and so what {argument}={duration} is a fraction of: pass total_steps=..."
        )
    try:
        return optimizer_steps_of_run(trainer)
    except MisconfigurationException:
        if isinstance(duration, int):
            return None
        raise


def _steps_of_epochs(trainer: pl.Trainer, batches: int, epochs: int) -> int:
    for trick in callbacks_of(trainer):
        steps = trick.count_steps(batches, epochs) if isinstance(trick, Trick) else None
        if steps is not None:
            return steps
    schedulers = [one for one in callbacks_of(trainer) if isinstance(one, GradientAccumulationScheduler)]
    if not schedulers:
        return epochs * math.ceil(batches / trainer.accumulate_grad_batches)
    return sum(math.ceil(batches / schedulers[0].get_accumulate_grad_batches(epoch)) for epoch in range(epochs))
