"""Random states in the checkpoint, so that a resumed run is the run that was interrupted."""

from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_tricks._lightning_data import (
    has_persistent_workers,
    load_loader_states,
    loader_generators,
    loader_keeps_no_state,
    loader_states_are_pending,
    restart_train_iterator,
    resume_point,
    saved_loader_states,
    set_sampler_epochs,
)
from lightning_tricks.composition import Summary, Touches, Trick
from lightning_tricks.functional.random_state import capture_random_state, restore_random_state_

__all__ = ["ExactResume"]


class ExactResume(Trick):
    """Keep every rank's random states in the checkpoint, and give them back on resume.

    Python's, NumPy's, torch's and the device's. Lightning saves none of them, so that dropout, augmentation and the
    order of the data differ after a resume. With this callback a resumed run equals the uninterrupted one bit for bit:
    at an epoch's edge with any loader but one of persistent workers, inside of an epoch with a loader that keeps its
    position (torchdata's StatefulDataLoader); with another it warns.

    Random numbers that the module itself draws in ``on_train_start`` are drawn once more on resume.

    Cost:
        About 10 kB a rank in the checkpoint, gathered when one is saved.

    Example:
        >>> from lightning_tricks import ExactResume
        >>> resume = ExactResume()
    """

    touches = Touches.RANDOM_STATE
    job = "save random states"
    buys = "a resumed run that equals the uninterrupted one, with a loader that keeps its position"
    costs = "10 kB a rank in the checkpoint"

    _key = "lightning_tricks.ExactResume"

    def __init__(self) -> None:
        self.reset()

    @override
    def reset(self) -> None:
        self._resumes = False
        self._loaded: list[dict[str, Any]] | None = None
        self._loader_states: list[dict[str, Any]] = []

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        own = {**capture_random_state(), "loaders": [one.get_state() for one in loader_generators(trainer)]}
        states: list[Any] = [own]
        # Every rank comes here and one of them writes; but after an exception the others may never come.
        if trainer.world_size > 1 and not trainer.interrupted:
            states = states * trainer.world_size
            dist.all_gather_object(states, states[trainer.global_rank])
        checkpoint[self._key] = states

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._resumes = True
        self._loaded = checkpoint.get(self._key)
        self._loader_states = saved_loader_states(checkpoint)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._resumes:
            return
        point = resume_point(trainer)
        if set_sampler_epochs(trainer) or loader_states_are_pending(trainer):
            load_loader_states(trainer, self._loader_states)
            restart_train_iterator(trainer)
        self._restore(trainer, self._loaded or [])
        if point in ("after last batch", "after epoch"):
            restart_train_iterator(trainer)
        if has_persistent_workers(trainer):
            rank_zero_warn(
                "ExactResume: a training loader has persistent workers, whose random states nobody can read: what they "
                "draw will differ from the interrupted run's. Use persistent_workers=False."
            )
        if point == "inside epoch" and loader_keeps_no_state(trainer):
            rank_zero_warn(
                "ExactResume: this run goes on inside of an epoch and its training loader keeps no state, so that it "
                "begins anew: the batches will differ from the interrupted run's. Use torchdata's StatefulDataLoader, "
                "or save at the end of epochs."
            )
        self.reset()

    def _restore(self, trainer: pl.Trainer, states: list[dict[str, Any]]) -> None:
        if not states:
            rank_zero_warn(
                "ExactResume: the checkpoint was written without ExactResume and holds no random states: random "
                "numbers will differ from the interrupted run's."
            )
        elif len(states) != trainer.world_size:
            rank_zero_warn(
                f"ExactResume: the checkpoint holds the random states of {len(states)} process(es), this run has "
                f"{trainer.world_size}: random numbers will differ from the interrupted run's."
            )
        if trainer.global_rank < len(states):
            state = states[trainer.global_rank]
            restore_random_state_(state)
            for generator, saved in zip(loader_generators(trainer), state["loaders"], strict=False):
                generator.set_state(saved.cpu())

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        return Summary(f"random states of {trainer.world_size} process(es)", "a stateful loader inside of epochs")
