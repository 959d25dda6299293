"""The base that every trick plugs into: a Lightning callback that declares a few facts about itself.

From these facts the package orders the tricks, refuses pairs that would do a thing twice, edits the module at the right
moment and undoes it, logs, and prints its table.
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_tricks.composition.step import OptimizerStep
from lightning_tricks.functional.patching import Removable

__all__ = ["Summary", "Touches", "Trick", "key_of"]


class Touches(IntEnum):
    """What a trick touches. Tricks run in this order, whatever their order in the list of callbacks."""

    MODULE = 0
    BATCH = 1
    LOSS = 2
    GRADIENT_WEIGHTS = 3
    """Reweights gradients; before anything measures them."""
    GRADIENTS_READ = 4
    """Measures gradients and changes nothing."""
    STEP = 5
    """May veto the step: a guard. After the measuring, before the clipping."""
    GRADIENTS = 6
    """Changes gradients: a clipper."""
    WEIGHTS = 7
    HYPERPARAMETERS = 8
    NOTHING = 9
    """Only reads what became of a step."""
    RANDOM_STATE = 10
    """Last, so that nothing draws a random number after it."""


@dataclass(frozen=True)
class Summary:
    """A trick's row in the table at the start of fit.

    Args:
        found: what it found and changed, in a few words with figures.
        needs: what it asks of the run, "" for nothing.
    """

    found: str
    needs: str = ""


class Trick(Callback):
    """A training technique as a callback.

    A subclass sets the class attributes and overrides what it needs of the methods below and of Lightning's hooks. It
    does no tensor arithmetic of its own: that is layer 0's.
    """

    touches: ClassVar[Touches] = Touches.NOTHING
    rank: ClassVar[int] = 0
    """Its place among those that touch the same, where that matters: the lower first."""
    job: ClassVar[str] = ""
    """What the trick does, as "clip gradients". Two tricks with one job are refused, unless their `scope` differs."""
    buys: ClassVar[str] = ""
    """For the table of tricks: what the user gains."""
    costs: ClassVar[str] = ""
    """For the table of tricks: what it takes."""
    reads_loss: ClassVar[bool] = False
    """Whether it looks at `OptimizerStep.loss`, which is summed up for nobody else."""

    rewinds: ClassVar[bool] = True
    """Whether its state goes back where a guard rolls the run back. Not what it learned of the machine."""

    @property
    def scope(self) -> frozenset[int] | None:
        """Indices of the optimizers that the trick acts on, None for all."""
        return None

    def rivals(self, trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
        """Name what is no trick but does the same job: a Trainer flag, a hook of the module. Refused at start of fit.

        Args:
            trainer: the Trainer, before anything is set up.
            module: the module.

        Returns:
            Names as the user wrote them, such as "Trainer(gradient_clip_val=1.0)".
        """
        return []

    @property
    def title(self) -> str:
        """What to call it in a message; more than its class where several of that are listed together."""
        return type(self).__name__

    def writes(self, trainer: pl.Trainer, module: pl.LightningModule) -> dict[Hashable, str]:
        """Name the numbers that it sets while training: two tricks that set one are refused at the start of fit.

        Args:
            trainer: the Trainer, with optimizers set up.
            module: the module.

        Returns:
            What to call each by what it is: the id of its owner, its name, and the index of an element or None.
        """
        return {}

    def reset(self) -> None:
        """Forget an earlier run: a new one begins with this same object."""

    def edit(self, module: pl.LightningModule) -> Removable | None:
        """Edit the module, before any strategy wraps it and after the user built it.

        Args:
            module: the module, complete.

        Returns:
            What undoes the edit, at the end of fit and on an exception; None if nothing was edited.
        """
        return None

    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Begin: training is about to start, with the data set up and a checkpoint's state loaded.

        Args:
            trainer: the Trainer.
            module: the module.
        """

    def run_training_step(
        self, trainer: pl.Trainer, module: pl.LightningModule, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run the module's `training_step`, for a trick that does something around it.

        Those of several tricks lie in each other, that of the first one innermost.

        Args:
            trainer: the Trainer.
            module: the module.
            step: its `training_step`, as the strategy and the tricks before this one made it.
            args: what to call it with.
            kwargs: likewise.

        Returns:
            What it returns.
        """
        return step(*args, **kwargs)

    def after_step(self, trainer: pl.Trainer, module: pl.LightningModule, step: OptimizerStep) -> None:
        """Act on a step's verdict, right after the optimizer's step was taken or left out.

        Args:
            trainer: the Trainer.
            module: the module.
            step: the step, with its verdict.
        """

    def catch_up(self, trainer: pl.Trainer) -> None:
        """Act on a verdict that only the device knew: before each batch and each step, ahead of every other callback.

        Args:
            trainer: the Trainer.
        """

    def finish(self, trainer: pl.Trainer, module: pl.LightningModule, *, training_ends: bool) -> None:
        """Complete what is open when an epoch ends, before any other callback's hook.

        Args:
            trainer: the Trainer.
            module: the module.
            training_ends: whether it is the end of training.
        """

    def weigh(self, batch: Any) -> float | None:
        """Say what a training batch counts beside others in the mean over all samples.

        Args:
            batch: what `training_step` gets, or a part of it.

        Returns:
            A number from 0 on, None from a trick that does not weigh batches. Without one that does, samples count.
        """
        return None

    @property
    def counts(self) -> str | None:
        """What it sums up for each step as `OptimizerStep.weight`: "samples" or "tokens"; None if neither."""
        return None

    def count_steps(self, batches: int, epochs: int) -> int | None:
        """Count the optimizer steps that a run takes if none is skipped; None from a trick that does not bear on it.

        Args:
            batches: training batches in an epoch.
            epochs: number of epochs.
        """
        return None

    def tensors(self) -> Mapping[str, Tensor]:
        """Return what training changes that is too large for `state_dict`: a rollback brings it back in place."""
        return {}

    def adapt_checkpoint(self, trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
        """Change what is about to be loaded into the optimizers and schedulers.

        Args:
            trainer: the Trainer, with optimizers set up.
            checkpoint: all of it; its ``"optimizer_states"`` and ``"lr_schedulers"`` are yet to be loaded.
        """

    def metrics(self, trainer: pl.Trainer, stepped: Collection[int]) -> Mapping[str, float | Tensor]:
        """Return what to log. Asked only on batches that the Trainer logs.

        Args:
            trainer: the Trainer.
            stepped: indices of the optimizers that stepped since the last time.

        Returns:
            Values by key, such as "grad/norm". This is the place to synchronise.
        """
        return {}

    def summary(self, trainer: pl.Trainer) -> Summary:
        """Return the row for the table at the start of fit.

        Args:
            trainer: the Trainer, with optimizers set up and a checkpoint loaded.
        """
        return Summary("")

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Bring the tricks of this Trainer together. A subclass that overrides this calls it."""
        from lightning_tricks.composition.conductor import compose  # the conductor runs tricks, so it imports this file

        compose(trainer, pl_module, stage)

    def _scoped_state_key(self, **arguments: Any) -> str:
        """Return a state key that tells two of a class apart by the optimizers they act on."""
        return type(self).__qualname__ if self.scope is None else f"{type(self).__qualname__}{arguments}"


def key_of(name: str, index: int) -> str:
    """Return the logged key of an optimizer's quantity: the name alone for the first, ``/i`` behind for others.

    Example:
        >>> key_of("grad/norm", 0), key_of("grad/norm", 1)
        ('grad/norm', 'grad/norm/1')
    """
    return name if index == 0 else f"{name}/{index}"
