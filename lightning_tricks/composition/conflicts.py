"""Refuse, before anything starts, what would do a thing twice or could not be right."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_tricks._lightning import MisconfigurationException, schedulers_of, unsupported_strategy
from lightning_tricks.composition.trick import Trick

__all__ = ["refuse_conflicts", "refuse_other_package", "refuse_two_writers"]


def refuse_other_package(trainer: object) -> None:
    """Raise unless the Trainer is `lightning`'s: `pytorch_lightning` has classes of the same names that are others.

    Args:
        trainer: the Trainer that calls a trick.

    Raises:
        TypeError: it is another package's.
    """
    if not isinstance(trainer, pl.Trainer):
        raise TypeError(
            f"expected a lightning.pytorch.Trainer, got a {type(trainer).__module__.split('.')[0]} "
            f"{type(trainer).__name__}: write `import lightning.pytorch as pl` instead of "
            "`import pytorch_lightning as pl`, for the Trainer, the module and the callbacks alike"
        )


def refuse_conflicts(tricks: Sequence[Trick], trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise if two tricks, or a trick and something else, have one job, or if the strategy cannot be right with them.

    Args:
        tricks: all tricks of the Trainer.
        trainer: the Trainer.
        module: the module.

    Raises:
        MisconfigurationException: names both sides and says which to drop.
    """
    reason = unsupported_strategy(trainer)
    if reason is not None:
        raise MisconfigurationException(
            f"{_names(tricks)} cannot be right under {type(trainer.strategy).__name__}: {reason}"
        )
    for index, first in enumerate(tricks):
        for second in tricks[index + 1 :]:
            if first.job and first.job == second.job and _overlap(first.scope, second.scope):
                raise MisconfigurationException(
                    f"{first.title} and {second.title} would both {first.job}: "
                    f"drop one of them from Trainer(callbacks=...)"
                )
        for rival in first.rivals(trainer, module):
            raise MisconfigurationException(
                f"{type(first).__name__} and {rival} would both {first.job}: "
                f"drop {rival}, or {type(first).__name__} from Trainer(callbacks=...)"
            )


def refuse_two_writers(tricks: Sequence[Trick], trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise if two tricks, or a trick and a scheduler of the module's, set one number.

    Args:
        tricks: all tricks of the Trainer.
        trainer: the Trainer, with optimizers set up.
        module: the module.

    Raises:
        MisconfigurationException: names both sides and what they set.
    """
    writers: dict[Hashable, str] = {}
    for config in schedulers_of(trainer):
        returned = f"{type(config.scheduler).__name__}, which {type(module).__name__}.configure_optimizers returns,"
        writers.update(dict.fromkeys(_written_by(config.scheduler), returned))
    for trick in tricks:
        for key, place in trick.writes(trainer, module).items():
            if key in writers:
                raise MisconfigurationException(
                    f"{writers[key]} and {trick.title} would both set {place}: drop one of them"
                )
            writers[key] = trick.title


def _written_by(scheduler: Any) -> Iterator[Hashable]:
    """The numbers of parameter groups that a scheduler sets."""
    for group in getattr(getattr(scheduler, "optimizer", None), "param_groups", ()):
        yield id(group), "lr", None
        if getattr(scheduler, "cycle_momentum", False):
            yield id(group), "momentum", None
            yield id(group), "betas", 0
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _written_by(inner)


def _overlap(first: frozenset[int] | None, second: frozenset[int] | None) -> bool:
    return first is None or second is None or bool(first & second)


def _names(tricks: Sequence[Trick]) -> str:
    return ", ".join(type(trick).__name__ for trick in tricks)
