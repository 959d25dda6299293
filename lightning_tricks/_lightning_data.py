"""As `_lightning.py`, for the training data: its loaders, where in them a run is, and what is done with a batch."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch

__all__ = [
    "call_training_step",
    "has_persistent_workers",
    "load_loader_states",
    "loader_generators",
    "loader_keeps_no_state",
    "loader_states_are_pending",
    "restart_train_iterator",
    "resume_point",
    "saved_loader_states",
    "set_sampler_epochs",
    "train_batches",
]

ResumePoint = Literal["after fit", "inside epoch", "after last batch", "after validation", "after epoch"]


def train_batches(trainer: pl.Trainer) -> Iterator[Any]:
    """Walk the training data anew, each batch as `training_step` gets it: an epoch, or as many as the run had."""
    limit = min(trainer.num_training_batches, int(trainer.fit_loop.epoch_loop.batch_progress.total.ready))
    loader = trainer.fit_loop._combined_loader
    assert loader is not None
    for batch, index, _ in loader:
        if index >= limit:
            return
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        yield trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def call_training_step(trainer: pl.Trainer, batch: Any, batch_idx: int) -> Any:
    """Call the module's `training_step` in the Trainer's precision, past its strategy and its hooks."""
    arguments = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx)
    with trainer.precision_plugin.train_step_context():
        return trainer.lightning_module.training_step(*arguments.values())


def resume_point(trainer: pl.Trainer) -> ResumePoint:
    """Where in an epoch the checkpoint was saved that this run resumes from. To be asked in `on_train_start`."""
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    if fit_loop.resumed_on_epoch_end:
        return "after epoch"
    if not fit_loop.restarting:
        return "after fit"
    if not epoch_loop.batch_progress.is_last_batch:
        return "inside epoch"
    return "after last batch" if epoch_loop.restarted_on_train_batch_end else "after validation"


def loader_generators(trainer: pl.Trainer) -> list[torch.Generator]:
    """Random generators of their own that the training loaders and their samplers draw from, each once."""
    loader = trainer.fit_loop._combined_loader
    owners = [] if loader is None else [o for one in loader.flattened for o in (one, getattr(one, "sampler", None))]
    found = {id(g): g for g in (getattr(o, "generator", None) for o in owners) if isinstance(g, torch.Generator)}
    return list(found.values())


def loader_keeps_no_state(trainer: pl.Trainer) -> bool:
    """Whether a training loader lacks `state_dict` and `load_state_dict`, so that its position is not saved."""
    loader = trainer.fit_loop._combined_loader
    stateful: Callable[[Any], bool] = lambda one: hasattr(one, "state_dict") and hasattr(one, "load_state_dict")  # noqa: E731
    return loader is not None and not all(stateful(one) for one in loader.flattened)


def has_persistent_workers(trainer: pl.Trainer) -> bool:
    """Whether a training loader keeps its worker processes, and with them their random states, between epochs."""
    loader = trainer.fit_loop._combined_loader
    return loader is not None and any(getattr(one, "persistent_workers", False) for one in loader.flattened)


def saved_loader_states(checkpoint: dict[str, Any]) -> list[dict[str, Any]]:
    """The positions of the training loaders in a checkpoint; empty where they keep none."""
    return list(checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader", []))


def load_loader_states(trainer: pl.Trainer, states: list[dict[str, Any]]) -> None:
    """Put the training loaders back to saved positions; they take effect with `restart_train_iterator`."""
    loop = trainer.fit_loop
    if states and loop._combined_loader is not None:
        loop._combined_loader._load_state_dicts(states)
        loop._combined_loader_states_to_load = []


def loader_states_are_pending(trainer: pl.Trainer) -> bool:
    """Whether Lightning came too late to load the loaders' positions.

    `estimated_stepping_batches`, asked in `configure_optimizers`, sets the data up before the checkpoint is read.
    """
    return bool(trainer.fit_loop._combined_loader_states_to_load)


def set_sampler_epochs(trainer: pl.Trainer) -> bool:
    """Tell the training loaders' samplers which epoch the run is in, and return whether any listens.

    After a resume Lightning begins to walk the data before it does, in the order of the first epoch.
    """
    loaders = [] if trainer.fit_loop._combined_loader is None else trainer.fit_loop._combined_loader.flattened
    for loader in loaders:
        _set_sampler_epoch(loader, trainer.fit_loop.epoch_progress.current.processed)  # type: ignore[attr-defined]
    samplers = [getattr(one, name, None) for one in loaders for name in ("sampler", "batch_sampler")]
    samplers += [getattr(one, "sampler", None) for one in samplers]
    return any(hasattr(one, "set_epoch") for one in samplers)


def restart_train_iterator(trainer: pl.Trainer) -> None:
    """Begin to walk the training data, as Lightning does at an epoch's start but not after every resume."""
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is not None:
        iter(fetcher)
