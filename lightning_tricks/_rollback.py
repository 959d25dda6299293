"""Go back to where a run was a while ago, without a checkpoint: all that a resume would restore but the data."""

from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_tricks._lightning import callbacks_of, schedulers_of
from lightning_tricks.composition import Trick, step_ledger
from lightning_tricks.functional.random_state import capture_random_state, restore_random_state_
from lightning_tricks.functional.snapshots import SnapshotRing

__all__ = ["lower_rates", "restore_rates_", "restore_run_", "take_snapshot"]


def take_snapshot(ring: SnapshotRing, trainer: pl.Trainer, module: pl.LightningModule, trick: Trick) -> None:
    """Take a snapshot of the run: weights, optimizers, schedules, loss scaler, random states, ledger, and the tricks.

    Args:
        ring: where to keep it.
        trainer: the Trainer, between two batches.
        module: the module.
        trick: whoever asks; its own state goes on.
    """
    values = {
        "schedulers": [config.scheduler.state_dict() for config in schedulers_of(trainer)],
        "precision": trainer.precision_plugin.state_dict(),
        "random": capture_random_state(),
        "ledger": [ledger.state_dict() for ledger in step_ledger(trainer)],
        "tricks": [other.state_dict() for other in _others(trainer, trick)],
    }
    ring.take(module, trainer.optimizers, values)


def restore_run_(ring: SnapshotRing, trainer: pl.Trainer, module: pl.LightningModule, trick: Trick) -> None:
    """Bring the newest snapshot back, and let the ledger count that. ``global_step`` and the data go on.

    Args:
        ring: what `take_snapshot` filled.
        trainer: the Trainer, between two batches.
        module: the module.
        trick: as for `take_snapshot`.
    """
    values: dict[str, Any] = ring.restore_(module, trainer.optimizers)
    for optimizer in trainer.optimizers:  # of a window that is open they belong to other weights
        optimizer.zero_grad(set_to_none=True)
    for config, state in zip(schedulers_of(trainer), values["schedulers"], strict=True):
        config.scheduler.load_state_dict(state)
    trainer.precision_plugin.load_state_dict(values["precision"])
    restore_random_state_(values["random"])
    for ledger, state in zip(step_ledger(trainer), values["ledger"], strict=True):
        ledger.rewind(state)
    for other, state in zip(_others(trainer, trick), values["tricks"], strict=True):
        if state:  # as Lightning does: nothing saved, nothing loaded
            other.load_state_dict(state)


def lower_rates(optimizer: Optimizer, factor: float) -> list[Any]:
    """Multiply an optimizer's learning rates, for one step.

    Args:
        optimizer: the optimizer.
        factor: what to multiply with.

    Returns:
        For `restore_rates_`.
    """
    before = []
    for group in optimizer.param_groups:
        before.append(group["lr"])
        group["lr"] = group["lr"] * factor  # a tensor is replaced, not written to: a scheduler holds on to it
    return before


def restore_rates_(optimizer: Optimizer, rates: list[Any]) -> None:
    """Undo `lower_rates`.

    Args:
        optimizer: the optimizer.
        rates: what that returned.
    """
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _others(trainer: pl.Trainer, trick: Trick) -> list[Trick]:
    return [one for one in callbacks_of(trainer) if isinstance(one, Trick) and one is not trick]
