"""The running statistics of BatchNorm for weights that training never ran with: one pass over its data."""

import lightning.pytorch as pl
import torch

from lightning_tricks._deferred_log import DeferredLog
from lightning_tricks._lightning_data import call_training_step, train_batches
from lightning_tricks.functional.batchnorm_statistics import fresh_statistics, layers_with_statistics
from lightning_tricks.functional.random_state import capture_random_state, restore_random_state_

__all__ = ["recompute_batchnorm_"]


def recompute_batchnorm_(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Take the running statistics of BatchNorm anew over the training data, the mean over the ranks. A collective.

    Over as many batches as the run had, at most those of an epoch. Layers in evaluation mode are left alone.

    Args:
        trainer: the Trainer, at the end of training.
        module: its module, in automatic optimization; its `training_step` runs without gradients and logs nothing.
    """
    layers = [layer for layer in layers_with_statistics(module) if layer.training]
    if not layers:
        return
    random_state = capture_random_state()
    try:
        with torch.no_grad(), fresh_statistics(module), DeferredLog(module):  # whose notes nobody replays
            for index, batch in enumerate(train_batches(trainer)):
                call_training_step(trainer, batch, index)
    finally:
        restore_random_state_(random_state)
    if trainer.world_size > 1:
        for layer in layers:
            for statistic in (layer.running_mean, layer.running_var):
                assert statistic is not None
                statistic.copy_(trainer.strategy.reduce(statistic.clone(), reduce_op="mean"))
