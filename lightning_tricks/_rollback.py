"""Go back to where a run was a while ago, without a checkpoint: all that a resume would restore but the data."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_tricks._lightning import callbacks_of, schedulers_of
from lightning_tricks.composition import Trick, current_window, step_ledger
from lightning_tricks.distributed.open_gradients import drop_open_gradients_
from lightning_tricks.functional.random_state import capture_random_state, restore_random_state_
from lightning_tricks.functional.snapshots import SnapshotRing

__all__ = ["lower_rates", "refuse_shortage", "restore_rates_", "restore_run_", "take_snapshot"]


def refuse_shortage(ring: SnapshotRing, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise on every rank if the ring does not fit the memory of one. A collective.

    Args:
        ring: the ring.
        trainer: the Trainer.
        module: the module.

    Raises:
        MemoryError: says how much is needed and how much is free.
    """
    shortage = ring.shortage(module, trainer.optimizers, _tensors_of_others(trainer))
    if not trainer.strategy.reduce_boolean_decision(not shortage):
        raise MemoryError(shortage or "the snapshots do not fit the free memory of another rank, which says how much")


def take_snapshot(ring: SnapshotRing, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Take a snapshot of the run: weights, optimizers, schedules, loss scaler, random states, ledger, and the tricks.

    Args:
        ring: where to keep it.
        trainer: the Trainer, between two batches.
        module: the module.
    """
    refuse_shortage(ring, trainer, module)
    values = {
        "epoch": trainer.current_epoch,
        "schedulers": [config.scheduler.state_dict() for config in schedulers_of(trainer)],
        "precision": trainer.precision_plugin.state_dict(),
        "random": capture_random_state(),
        "ledger": [ledger.state_dict() for ledger in step_ledger(trainer)],
        "tricks": [other.state_dict() for other in _others(trainer)],
    }
    ring.take(module, trainer.optimizers, values, _tensors_of_others(trainer))


def restore_run_(ring: SnapshotRing, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Bring the newest snapshot back, and let the ledger count that. ``global_step`` and the data go on.

    Args:
        ring: what `take_snapshot` filled.
        trainer: the Trainer, between two batches.
        module: the module.
    """
    values: dict[str, Any] = ring.restore_(module, trainer.optimizers, _tensors_of_others(trainer))
    for optimizer in trainer.optimizers:  # gradients of a window that is open belong to other weights
        optimizer.zero_grad(set_to_none=True)
    drop_open_gradients_(module)
    current_window(trainer).close()
    for config, state in zip(schedulers_of(trainer), values["schedulers"], strict=True):
        config.scheduler.load_state_dict(state)
    trainer.precision_plugin.load_state_dict(values["precision"])
    restore_random_state_(values["random"])
    for ledger, state in zip(step_ledger(trainer), values["ledger"], strict=True):
        ledger.rewind(state)
    if values["epoch"] != trainer.current_epoch:
        # From the same random state the next epoch would be shuffled as this one was, and as at the last rollback.
        torch.rand(step_ledger(trainer)[0].rolled_back)
    for other, state in zip(_others(trainer), values["tricks"], strict=True):
        if state:  # as Lightning does: nothing saved, nothing loaded
            other.load_state_dict(state)


def lower_rates(optimizer: Optimizer, factor: float) -> list[tuple[dict[str, Any], Any]]:
    """Multiply an optimizer's learning rates, for one step.

    Args:
        optimizer: the optimizer.
        factor: what to multiply with.

    Returns:
        For `restore_rates_`.
    """
    before = []
    # ZeRO-1's optimizer has taken its settings over into the one inside when a step's hooks run.
    for groups in (optimizer.param_groups, getattr(getattr(optimizer, "optim", None), "param_groups", [])):
        for group in groups:
            before.append((group, group["lr"]))
            group["lr"] = group["lr"] * factor  # a tensor is replaced, not written to: a scheduler holds on to it
    return before


def restore_rates_(rates: list[tuple[dict[str, Any], Any]]) -> None:
    """Undo `lower_rates`.

    Args:
        rates: what that returned.
    """
    for group, rate in rates:
        group["lr"] = rate


def _others(trainer: pl.Trainer) -> list[Trick]:
    """The tricks whose state goes back."""
    return [one for one in callbacks_of(trainer) if isinstance(one, Trick) and one.rewinds]


def _tensors_of_others(trainer: pl.Trainer) -> dict[str, Tensor]:
    """What the tricks keep on the device, by names that tell them apart."""
    return {
        f"{number} {name}": tensor
        for number, other in enumerate(_others(trainer))
        for name, tensor in other.tensors().items()
    }
