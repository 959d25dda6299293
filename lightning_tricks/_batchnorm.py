"""A warning that tricks share which show a model less than the whole batch."""

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_tricks.functional.accumulation import batchnorm_layers

__all__ = ["warn_of_batchnorm"]

_SHOWN = 8


def warn_of_batchnorm(trick: object, module: pl.LightningModule) -> None:
    """Warn, with names, if a module has layers whose output depends on the other samples of a batch.

    Args:
        trick: who shows it micro-batches.
        module: the module.
    """
    names = batchnorm_layers(module)
    if names:
        rank_zero_warn(
            f"{type(trick).__name__}: {len(names)} BatchNorm layer(s) see micro-batches, whose statistics are not "
            f"those of the whole batch: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}. GroupNorm "
            "or LayerNorm has none; Trainer(sync_batchnorm=True) takes them over all ranks; larger micro-batches come "
            "closer"
        )
