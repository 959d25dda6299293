"""Hyperparameters that change while training, as callbacks: any number of a parameter group or of the module."""

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_tricks._lightning import MisconfigurationException, other_rate_writers
from lightning_tricks._schedule import Schedule
from lightning_tricks._scored_weights import show_in_state_dict
from lightning_tricks._validation import (
    check_choice,
    check_duration,
    check_indices,
    check_int,
    refuse_missing_optimizers,
)
from lightning_tricks.composition import OptimizerStep, Summary, Touches, Trick, step_ledger
from lightning_tricks.composition.following import Follower
from lightning_tricks.composition.horizon import steps_if_needed
from lightning_tricks.composition.trick import key_of
from lightning_tricks.functional.hyperparameters import (
    Place,
    dropout_factor,
    dropout_places,
    group_places,
    module_places,
    parse_target,
)
from lightning_tricks.functional.patching import Removable
from lightning_tricks.functional.schedules import resolve_duration

__all__ = ["DropoutScheduler", "HyperparameterScheduler"]


class _SetsPlaces(Trick):
    """Sets numbers after each applied step, and puts them back after fit."""

    touches = Touches.HYPERPARAMETERS
    costs = "a Python assignment a number and step"

    @abstractmethod
    def find(self, trainer: pl.Trainer, module: pl.LightningModule, index: int) -> list[Place]:
        """Return the numbers that follow optimizer `index`."""

    @abstractmethod
    def value_at(self, step: int, place: Place, index: int) -> float:
        """Return what a number is to be after `step` applied steps of optimizer `index`."""

    def optimizers_of(self, trainer: pl.Trainer) -> list[int]:
        """Return the optimizers that are followed."""
        if not trainer.optimizers:
            raise MisconfigurationException(
                f"{self.title} counts the steps of an optimizer, but {type(trainer.lightning_module).__name__} has none"
            )
        return [0]

    @override
    def reset(self) -> None:
        self._followed: dict[int, tuple[Follower, list[Place]]] = {}
        self._undo: list[Removable] = []

    @override
    def writes(self, trainer: pl.Trainer, module: pl.LightningModule) -> dict[Hashable, str]:
        return {p.key: p.label for index in self.optimizers_of(trainer) for p in self.find(trainer, module, index)}

    @override
    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._put_back()
        for index in self.optimizers_of(trainer):
            places = self.find(trainer, module, index)
            follower = Follower(step_ledger(trainer)[index], functools.partial(self._set, index))
            self._followed[index] = follower, places
            follower.act()
        if any(place.is_tensor for _, places in self._followed.values() for place in places):
            self._undo.append(show_in_state_dict(trainer, module, functools.partial(_own_buffers, self)))

    def _set(self, index: int, step: int) -> None:
        for place in self._followed[index][1]:
            place.set(self.value_at(step, place, index))

    @override
    def after_step(self, trainer: pl.Trainer, module: pl.LightningModule, step: OptimizerStep) -> None:
        if step.index in self._followed:
            self._followed[step.index][0].step()

    @override
    def catch_up(self, trainer: pl.Trainer) -> None:
        for follower, _ in self._followed.values():
            follower.catch_up()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._put_back()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._put_back()

    def _put_back(self) -> None:
        for _, places in self._followed.values():
            for place in places:
                place.restore()
        self._followed.clear()
        while self._undo:
            self._undo.pop().remove()

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the groups' own numbers, for a resume with or without this callback."""
        for index, (_, places) in self._followed.items():
            groups = checkpoint["optimizer_states"][index].get("param_groups", ())  # only rank 0 may have them
            for place in places:
                for own, saved in zip(trainer.optimizers[index].param_groups, groups, strict=False):
                    if place.owner is own:
                        place.put_own(saved)

    @override
    def state_dict(self) -> dict[str, Any]:
        # Not empty, since an empty state is not loaded: a rollback tells of itself by loading one.
        return {"applied": {index: follower.ledger.applied for index, (follower, _) in self._followed.items()}}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for follower, _ in self._followed.values():  # while training: a rollback, after the ledger was rewound
            follower.act()

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        places = [place for _, one in self._followed.values() for place in one]
        shown = ", ".join(f"{place.label} (own {place.own:g}, now {place.get():g})" for place in places[:3])
        return Summary(f"{len(places)} numbers: {shown}{', ...' if len(places) > 3 else ''}")


def _own_buffers(trick: _SetsPlaces) -> dict[str, Tensor]:
    """What a checkpoint shows in the place of buffers that are set: their own values."""
    places = [place for _, found in trick._followed.values() for place in found if place.is_tensor]
    return {place.label: place.own_tensor() for place in places}


class HyperparameterScheduler(_SetsPlaces):
    """Let a number of the parameter groups or of the module follow a schedule over the applied steps.

    Args:
        target: ``"optimizer.NAME"`` for a number of each parameter group, as ``"optimizer.weight_decay"`` or
            ``"optimizer.betas[0]"``; else a glob over the names of modules in the LightningModule (``*`` matches dots
            too) and an attribute, as ``"model.*.dropout.p"``.
        schedule: one of this package's schedules, which multiplies the number's own value, or a function from the
            number of applied steps to the value. By a function, a group whose weight decay is 0 beside others that
            have one is left alone.
        optimizers: indices of the optimizers whose groups are set; a module's number follows the first of them. None:
            all.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind; the target matches nothing; an optimizer does not exist
            (at the start of fit).
        MisconfigurationException: something else sets the same number.

    Cost:
        A Python assignment a number and step. `torch.compile` compiles anew for each value of an attribute.

    Example:
        >>> from lightning_tricks import HyperparameterScheduler, WarmupLinearScheduler
        >>> decay = HyperparameterScheduler("optimizer.weight_decay", lambda step: 0.1 if step < 1000 else 0.01)
        >>> dropout = HyperparameterScheduler("model.*.dropout.p", WarmupLinearScheduler(500))
    """

    job = "set a hyperparameter"
    buys = "weight decay, momentum, dropout or any other number on a schedule"

    def __init__(
        self,
        target: str,
        schedule: Schedule | Callable[[int], float],
        *,
        optimizers: list[int] | None = None,
    ) -> None:
        self.target = target
        self._target = parse_target(target)
        if not isinstance(schedule, Schedule) and not callable(schedule):
            raise TypeError(
                "expected `schedule` to be a schedule of this package or a function from the applied step to the "
                f"value, got {schedule!r}"
            )
        if isinstance(schedule, Schedule) and schedule.unit != "steps":
            raise ValueError(f"expected `schedule` to go by steps, got one of {schedule.unit}")
        if isinstance(schedule, Schedule) and (
            schedule.optimizers is not None or isinstance(schedule.total_steps, dict)
        ):
            raise ValueError(
                "expected `schedule` without `optimizers` and with one `total_steps`: say which optimizers here, got "
                f"optimizers={schedule.optimizers} and total_steps={schedule.total_steps}"
            )
        self.schedule = schedule
        self.optimizers = optimizers
        self._scope = None if optimizers is None else check_indices("optimizers", optimizers)
        # By the class attribute's name, so that two tricks with one job are refused.
        self.job = "set the learning rate" if target == "optimizer.lr" else f"set {target}"  # type: ignore[misc]
        self.reset()

    @property
    @override
    def title(self) -> str:
        return f"{type(self).__name__}({self.target!r})"

    @override
    def rivals(self, trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
        return other_rate_writers(trainer) if self.target == "optimizer.lr" else []

    @property
    @override
    def scope(self) -> frozenset[int] | None:
        return self._scope

    @property
    @override
    def state_key(self) -> str:
        arguments = {"target": self.target, "optimizers": sorted(self._scope or ())}
        return f"{type(self).__qualname__}{arguments}"

    @override
    def optimizers_of(self, trainer: pl.Trainer) -> list[int]:
        super().optimizers_of(trainer)
        refuse_missing_optimizers("optimizers", self._scope, len(trainer.optimizers))
        indices = sorted(self._scope) if self._scope is not None else list(range(len(trainer.optimizers)))
        return indices if self._target.path is None else indices[:1]

    @override
    def find(self, trainer: pl.Trainer, module: pl.LightningModule, index: int) -> list[Place]:
        if self._target.path is not None:
            return module_places(self._target, module)
        places = group_places(self._target, trainer.optimizers[index], index)
        if isinstance(self.schedule, Schedule) or self._target.name != "weight_decay":
            return places
        return [place for place in places if place.own] or places

    @override
    def reset(self) -> None:
        super().reset()
        self._lengths: dict[int, tuple[int, int]] = {}
        if isinstance(self.schedule, Schedule):
            self.schedule.reset()

    @override
    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if isinstance(self.schedule, Schedule):
            self._lengths = {i: self.schedule.resolve(i, trainer, module) for i in self.optimizers_of(trainer)}
        super().start(trainer, module)

    @override
    def value_at(self, step: int, place: Place, index: int) -> float:
        if not isinstance(self.schedule, Schedule):
            value = self.schedule(step)  # as it is: a number that is an int may have to stay one
            if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
                raise ValueError(
                    f"expected `schedule` of {self.title} to return a number, got {value!r} at applied step {step}"
                )
            return value
        total, warmup = self._lengths[index]
        return self.schedule.lr_at(step, place.own, warmup_steps=warmup, total_steps=total)

    @override
    def metrics(self, trainer: pl.Trainer, stepped: Collection[int]) -> Mapping[str, float | Tensor]:
        return {
            key_of(f"hyperparameter/{self.target}", index): places[0].get()
            for index, (_, places) in self._followed.items()
        }

    @override
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if not isinstance(self.schedule, Schedule):
            return state
        if not self._lengths:  # before training no length is known
            return state | self.schedule.state_dict()
        return state | {"warmups": {i: self.schedule.lengths(warmup) for i, (_, warmup) in self._lengths.items()}}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if isinstance(self.schedule, Schedule) and "warmups" in state_dict:
            self.schedule.load_state_dict(state_dict)
        super().load_state_dict(state_dict)


class DropoutScheduler(_SetsPlaces):
    """Use dropout for the first part of the run only, or for the rest of it only.

    Early dropout helps a model that underfits, late dropout one that overfits. It acts on every rate of dropout that
    the module has: `nn.Dropout` and its kin, stochastic depth, and the numbers that attention layers keep.

    Args:
        mode: ``"early"``: off after `steps`; ``"late"``: off before; ``"constant"``: on throughout, as without this.
        steps: an int is a number of applied steps, a float in [0, 1) a fraction of the run.
        total_steps: applied steps of the run, for a fraction of it; None: from the Trainer. Manual optimization must
            give it.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; the module has no dropout (at the start
            of fit).
        MisconfigurationException: something else sets the same number; the length of the run cannot be known.

    Cost:
        A Python assignment a layer and step.

    Reference:
        Liu, Xu, Jin, Shen, Darrell (2023), "Dropout Reduces Underfitting", arXiv:2303.01500, section 4.

    Example:
        >>> from lightning_tricks import DropoutScheduler
        >>> early = DropoutScheduler("early", steps=0.2)
    """

    job = "set dropout"
    buys = "dropout where it helps: early against underfitting, late against overfitting"

    def __init__(
        self,
        mode: Literal["early", "late", "constant"] = "early",
        *,
        steps: int | float,
        total_steps: int | None = None,
    ) -> None:
        check_choice("mode", mode, ("early", "late", "constant"))
        self.mode = mode
        self.steps = check_duration("steps", steps)
        self.total_steps = None if total_steps is None else check_int("total_steps", total_steps, minimum=1)
        self.reset()

    @override
    def reset(self) -> None:
        super().reset()
        self._first: int | None = None
        self._saved: dict[str, Any] = {}

    @override
    def find(self, trainer: pl.Trainer, module: pl.LightningModule, index: int) -> list[Place]:
        places = dropout_places(module)
        if not places:
            raise ValueError(
                f"{type(self).__name__} expected a module with dropout, but {type(module).__name__} has none: drop it "
                "from Trainer(callbacks=...)"
            )
        return places

    @override
    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._first = self._resolve(trainer, module)
        super().start(trainer, module)
        if not any(place.own for _, places in self._followed.values() for place in places):
            rank_zero_warn(f"{type(self).__name__} changed nothing: every rate of dropout is 0")

    def _resolve(self, trainer: pl.Trainer, module: pl.LightningModule) -> int:
        if isinstance(self.steps, int):
            return self.steps
        if self._saved.get("steps") == self.steps:  # of a run of another length, which must not turn dropout on again
            return int(self._saved["first"])
        total = self.total_steps or steps_if_needed(trainer, module, "steps", self.steps, by=self)
        assert total is not None
        return resolve_duration(self.steps, total)

    @override
    def value_at(self, step: int, place: Place, index: int) -> float:
        assert self._first is not None
        return place.own * dropout_factor(step, mode=self.mode, steps=self._first)

    @override
    def metrics(self, trainer: pl.Trainer, stepped: Collection[int]) -> Mapping[str, float | Tensor]:
        places = [place for _, found in self._followed.values() for place in found]
        return {"dropout/rate": max(place.get() for place in places)}

    @override
    def state_dict(self) -> dict[str, Any]:
        resolved = self._saved if self._first is None else {"steps": self.steps, "first": self._first}
        return {**super().state_dict(), **resolved}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = dict(state_dict)
        super().load_state_dict(state_dict)
