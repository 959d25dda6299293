"""What the tricks that split parameter groups share: when it happens, and older checkpoints."""

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_tricks._lightning import MisconfigurationException, callbacks_of, schedulers_of
from lightning_tricks.composition import Touches, Trick
from lightning_tricks.functional.parameter_groups import (
    GroupSplit,
    rescale_scheduler_,
    split_further,
    split_groups_,
)
from lightning_tricks.functional.patching import Removable, patch_

__all__ = ["SplitsGroups", "schedulers_in"]


class SplitsGroups(Trick):
    """Splits the groups of what `configure_optimizers` returned, before any strategy sees it."""

    touches = Touches.MODULE
    mark: ClassVar[str | None] = None
    """A setting that it leaves in every group."""

    @override
    def reset(self) -> None:
        self._splits: list[GroupSplit] = []

    @abstractmethod
    def prepare(self, module: pl.LightningModule, optimizers: list[Optimizer]) -> None:
        """Look at the module, whose parameters are those of the optimizers now."""

    @abstractmethod
    def key_of(self, parameter: Tensor, group: dict[str, Any]) -> Any:
        """Return what a parameter's part of its group is told by; parts are in the order of these keys."""

    @abstractmethod
    def change(self, group: dict[str, Any], key: Any) -> None:
        """Change the settings of a part, also those that a checkpoint had for the whole group."""

    @override
    def edit(self, module: pl.LightningModule) -> Removable:
        configure = functools.partial(_configure_then_split, self, module, module.configure_optimizers)
        return patch_(module, "configure_optimizers", configure)

    def split(self, module: pl.LightningModule, configured: Any) -> None:
        """Split the groups of the optimizers that `configure_optimizers` returned, and adapt the schedulers there."""
        found = list(_leaves(configured))
        optimizers = [one for one in found if isinstance(one, Optimizer)]
        if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
            raise MisconfigurationException(
                f"{type(self).__name__} expected optimizers that take several parameter groups, got LBFGS, whose step "
                f"depends on all parameters at once: drop {type(self).__name__} from Trainer(callbacks=...)"
            )
        self.prepare(module, optimizers)
        self._splits = [split_groups_(optimizer, self.key_of, self.change) for optimizer in optimizers]
        for one in found:
            for optimizer, split in zip(optimizers, self._splits, strict=True):
                if getattr(one, "optimizer", None) is optimizer:
                    split.adapt_scheduler_(one)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if all(split.before == split.after for split in self._splits) and not self._changes():
            rank_zero_warn(f"{type(self).__name__} changed nothing: {self._why_nothing()}")

    def _changes(self) -> bool:
        return len({part.key for split in self._splits for part in split.parts}) > 1

    @abstractmethod
    def _why_nothing(self) -> str: ...

    @override
    def adapt_checkpoint(self, trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
        tricks = [one for one in callbacks_of(trainer) if isinstance(one, SplitsGroups)]
        if self is not tricks[0]:
            return  # the first one does it for all, of which the older run may have had any
        states = checkpoint.get("optimizer_states", [])
        schedulers = list(zip(schedulers_of(trainer), checkpoint.get("lr_schedulers", ()), strict=False))
        for index, optimizer in enumerate(trainer.optimizers):
            if index >= len(states) or "param_groups" not in states[index]:
                continue
            splits = [one._splits[index] for one in tricks]
            further = split_further(splits, states[index], [one.change for one in tricks], [one.mark for one in tricks])
            if further is None:
                sizes = [len(group["params"]) for group in states[index]["param_groups"]]
                names = ", ".join(one.title for one in tricks)
                raise MisconfigurationException(
                    f"{names} expected a checkpoint whose optimizer {index} has groups of {splits[-1].after} "
                    f"parameters, as this run, or of {splits[0].before}, as without, got one with groups of {sizes}: "
                    "group the parameters as in the run that was saved, or load its weights alone"
                )
            states[index] = further.adapt_state(states[index])
            for config, state in schedulers:
                if config.scheduler.optimizer is optimizer:
                    further.adapt_scheduler_(state)

    @override
    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Have the arguments of this run, also where a checkpoint brought the settings of another."""
        for optimizer in trainer.optimizers:
            before = [group.get("lr_scale", 1.0) for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                if group["params"]:
                    self.change(group, self.key_of(group["params"][0], group))
            factors = [g.get("lr_scale", 1.0) / scale for g, scale in zip(optimizer.param_groups, before, strict=True)]
            for config in schedulers_of(trainer):
                if config.scheduler.optimizer is optimizer and set(factors) != {1.0}:
                    rescale_scheduler_(config.scheduler, factors)


def schedulers_in(configured: Any) -> list[Any]:
    """Return the schedulers of what `configure_optimizers` returned, those inside of others too.

    Args:
        configured: that, in any form that Lightning takes.
    """
    found = [one for one in _leaves(configured) if getattr(one, "optimizer", None) is not None]
    for scheduler in found:  # grows on the way
        found += getattr(scheduler, "_schedulers", ())
    return found


def _configure_then_split(trick: SplitsGroups, module: pl.LightningModule, configure: Callable[[], Any]) -> Any:
    configured = configure()
    trick.split(module, configured)
    return configured


def _leaves(configured: Any) -> Iterator[Any]:
    """Optimizers and schedulers in whatever form Lightning takes."""
    if isinstance(configured, (list, tuple)):
        for one in configured:
            yield from _leaves(one)
    elif isinstance(configured, dict):
        yield from _leaves(list(configured.values()))
    elif hasattr(configured, "scheduler"):  # an LRSchedulerConfig
        yield configured.scheduler
    else:
        yield configured
