"""An accumulation window that is not complete, as part of a checkpoint."""

import functools
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_tricks.composition import current_window
from lightning_tricks.distributed.open_gradients import mean_open_gradients, put_open_gradients_

__all__ = ["mean_of_ranks", "restore_window_", "save_window"]


def save_window(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    """Return the gradients of the open window, reduced over the ranks, and what was counted in it. A collective.

    Args:
        trainer: the Trainer.
        module: the module.
    """
    gradients = {}
    for name, gradient in mean_open_gradients(module):
        if trainer.is_global_zero:
            gradients[name] = gradient.cpu()
    return {"gradients": gradients, **current_window(trainer).state_dict(functools.partial(mean_of_ranks, trainer))}


def restore_window_(trainer: pl.Trainer, module: pl.LightningModule, state: dict[str, Any]) -> None:
    """Go on in a window that a checkpoint was written in, on any number of ranks.

    Args:
        trainer: the Trainer, at the start of training.
        module: the module.
        state: what `save_window` returned.
    """
    put_open_gradients_(module, state["gradients"])
    current_window(trainer).load_state_dict(state, trainer.strategy.root_device)


def mean_of_ranks(trainer: pl.Trainer, value: Tensor) -> Tensor:
    """Return the mean of a tensor over the ranks, and leave it as it is. A collective.

    Args:
        trainer: the Trainer.
        value: this rank's.
    """
    mean: Tensor = trainer.strategy.reduce(value.to(trainer.strategy.root_device, copy=True), reduce_op="mean")
    return mean
