"""A warmup in front of whatever learning-rate schedule the module has, as a callback."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from lightning_tricks._lightning import (
    is_fast_dev_run,
    other_rate_writers,
    schedulers_of,
)
from lightning_tricks._validation import (
    check_duration,
    check_indices,
    check_int,
    check_number,
    refuse_missing_optimizers,
)
from lightning_tricks.composition import OptimizerLedger, OptimizerStep, Summary, Touches, Trick, step_ledger
from lightning_tricks.composition.following import Follower
from lightning_tricks.composition.horizon import steps_if_needed
from lightning_tricks.functional.learning_rate_warmup import MultipliedRates
from lightning_tricks.functional.patching import Removable, swap_class_
from lightning_tricks.functional.schedules import even_start_factor, resolve_duration, warmup_factor

__all__ = ["LearningRateWarmup"]


class LearningRateWarmup(Trick):
    """Multiply the learning rate by a linear warmup, in front of what the module itself sets it with.

    The module's own schedulers, those that `configure_optimizers` returns, go on undelayed, of any kind: by step or by
    epoch, several of them, ReduceLROnPlateau on its metric. What they see is their own rate; the optimizer sees it
    times ``start_factor + (1 - start_factor) * min(1, k / warmup)`` after k applied steps. So it is with a rate that
    the module sets between steps. Schedulers that go by the step, and those that the module steps itself, are held on
    steps that a loss scaler or a guard left out. A checkpoint holds the schedulers' own rate, so it is resumed with and
    without this callback.

    Args:
        warmup: an int is a number of applied steps, a float in [0, 1) a fraction of the run, which stays the number of
            steps that it was at first when the run is resumed with another length.
        start_factor: the share of the rate at step 0, in [0, 1]. None: even steps whose first one is above zero,
            1 / (warmup + 1).
        total_steps: applied steps of the run, for a fraction of it; None: from the Trainer. Manual optimization must
            give it, since only the module knows when it steps.
        optimizers: indices of the optimizers to warm up; None for all.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; the warmup is longer than the run, an
            optimizer does not exist (both at the start of fit).
        MisconfigurationException: a fraction of a run whose length cannot be known; another callback that sets the
            learning rate.

    Cost:
        A few Python floats a step of the warmup. Where only the device knows a step's verdict (a fused optimizer beside
        a loss scaler, a clipper or a guard) one scalar read a step, at the start of the next batch.

    Reference:
        Goyal et al. (2017), "Accurate, Large Minibatch SGD", arXiv:1706.02677, section 2.2.

    Example:
        >>> from lightning_tricks import LearningRateWarmup
        >>> warmup = LearningRateWarmup(500)
    """

    touches = Touches.HYPERPARAMETERS
    job = "set the learning rate"
    buys = "a warmup in front of the module's own schedulers, ReduceLROnPlateau too"
    costs = "as WarmupCosineScheduler"

    def __init__(
        self,
        warmup: int | float,
        *,
        start_factor: float | None = None,
        total_steps: int | None = None,
        optimizers: list[int] | None = None,
    ) -> None:
        self.warmup = check_duration("warmup", warmup)
        self.start_factor = None if start_factor is None else check_number("start_factor", start_factor, maximum=1.0)
        self.total_steps = None if total_steps is None else check_int("total_steps", total_steps, minimum=1)
        self.optimizers = optimizers
        self._scope = None if optimizers is None else check_indices("optimizers", optimizers)
        self.reset()

    @property
    @override
    def scope(self) -> frozenset[int] | None:
        return self._scope

    @property
    @override
    def state_key(self) -> str:
        return self._scoped_state_key(optimizers=sorted(self._scope or ()))

    @override
    def rivals(self, trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
        return other_rate_writers(trainer)

    @override
    def reset(self) -> None:
        self._warmed: dict[int, _Warmed] = {}
        self._undo: list[Removable] = []
        self._saved: dict[int, dict[str, Any]] = {}
        self._running = False

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        refuse_missing_optimizers("optimizers", self._scope, len(trainer.optimizers))
        self._detach()
        indices = range(len(trainer.optimizers)) if self._scope is None else sorted(self._scope)
        self._warmed = {index: _Warmed(self, index) for index in indices}
        for config in schedulers_of(trainer):
            optimizer = getattr(config.scheduler, "optimizer", None)
            # Where Lightning steps it at the end of epochs, a step that was left out has no bearing on it.
            held = config.interval == "step" or not pl_module.automatic_optimization
            for index in indices:
                if optimizer is trainer.optimizers[index]:
                    self._undo.append(self._warmed[index].take_scheduler(config.scheduler, held=held))

    @override
    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for index, warmed in self._warmed.items():
            steps = self._warmup_steps(index, trainer, module)
            warmed.begin(MultipliedRates(trainer.optimizers[index]), step_ledger(trainer)[index], steps)
            for scheduler, applied in zip(
                warmed.schedulers, self._saved.get(index, {}).get("applied", ()), strict=False
            ):
                scheduler.applied = applied
        self._saved, self._running = {}, True

    def _warmup_steps(self, index: int, trainer: pl.Trainer, module: pl.LightningModule) -> int:
        total = self.total_steps
        if total is None:
            total = steps_if_needed(trainer, module, "warmup", self.warmup, by=self)
        if total is None:
            return int(self.warmup)
        saved = self._saved.get(index, {})
        if saved.get("warmup") == self.warmup and saved["warmup_steps"] <= total:
            return int(saved["warmup_steps"])  # a fraction of another run, whose end must not come again
        steps = resolve_duration(self.warmup, total)
        if steps > total and not is_fast_dev_run(trainer):
            raise ValueError(
                f"expected `warmup` to be no longer than the run, got warmup={self.warmup} and total_steps={total}: "
                "shorten the warmup, give a fraction of the run, or train longer"
            )
        return steps

    @override
    def after_step(self, trainer: pl.Trainer, module: pl.LightningModule, step: OptimizerStep) -> None:
        if step.index in self._warmed:
            self._warmed[step.index].follower.step()

    @override
    def catch_up(self, trainer: pl.Trainer) -> None:
        for warmed in self._warmed.values():
            warmed.catch_up()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._detach()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._detach()

    def _detach(self) -> None:
        self._running = False
        while self._undo:
            self._undo.pop().remove()

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        return Summary("\n".join(f"optimizer {index}: {warmed}" for index, warmed in self._warmed.items()))

    # Checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        # Lightning asks the callbacks before the schedulers, which have to be where the ledger is.
        for warmed in self._warmed.values():
            warmed.catch_up()
        began = {index: warmed.state_dict() for index, warmed in self._warmed.items() if warmed.rates is not None}
        return {"optimizers": began or self._saved}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._running:
            self._saved = dict(state_dict["optimizers"])
            return
        for index, state in state_dict["optimizers"].items():  # a rollback: the rates of then are back in the groups
            self._warmed[index].go_back(state)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        for index, warmed in self._warmed.items():
            if warmed.rates is None:
                continue
            groups = checkpoint["optimizer_states"][index].get("param_groups", ())  # only rank 0 may have them
            for group, own in zip(groups, warmed.rates.own, strict=False):
                group["lr"] = torch.full_like(group["lr"], own) if isinstance(group["lr"], Tensor) else own


@dataclass
class _Held:
    """A scheduler of the module's whose steps go through the warmup."""

    scheduler: Any
    step: Callable[..., Any]
    held: bool
    applied: int = 0
    waiting: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


class _Warmed:
    """One optimizer in its warmup, with the schedulers that set its rate."""

    def __init__(self, callback: LearningRateWarmup, index: int) -> None:
        self.callback = callback
        self.rates: MultipliedRates | None = None
        self.warmup_steps = 0
        self.factor = 1.0
        self.schedulers: list[_Held] = []
        self.follower = Follower(OptimizerLedger(), self.show)  # the run's own from `begin` on

    def __str__(self) -> str:
        names = ", ".join(type(one.scheduler).__name__ for one in self.schedulers) or "a constant rate"
        return f"{self.warmup_steps} steps of warmup in front of {names}"

    def take_scheduler(self, scheduler: Any, *, held: bool) -> Removable:
        """Let the scheduler's steps go through here. In its class: what lies in its own dict is saved with it."""
        one = _Held(scheduler, type(scheduler).step, held)
        self.schedulers.append(one)
        return swap_class_(scheduler, {"step": lambda _, *args, **kwargs: self.step_scheduler(one, args, kwargs)})

    def begin(self, rates: MultipliedRates, ledger: OptimizerLedger, warmup_steps: int) -> None:
        self.rates, self.warmup_steps = rates, warmup_steps
        self.follower = Follower(ledger, self.show)
        for one in self.schedulers:
            one.applied = ledger.applied
        self.follower.act()

    def show(self, applied: int) -> None:
        """Show the rate for the next step."""
        assert self.rates is not None
        start = self.callback.start_factor
        start = even_start_factor(self.warmup_steps) if start is None else start
        self.factor = warmup_factor(applied, warmup_steps=self.warmup_steps, start_factor=start)
        self.rates.multiply_(self.factor)

    def step_scheduler(self, one: _Held, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Step a scheduler on its own rate, now or once the verdict is known."""
        if self.rates is None:  # before training
            one.step(one.scheduler, *args, **kwargs)
            return
        one.waiting.append((args, kwargs))
        if self.follower.ledger.known_on_host or not one.held:
            self._step(one)

    def catch_up(self) -> None:
        for one in self.schedulers:
            self._step(one)
        self.follower.catch_up()
        if self.rates is not None:  # what somebody else wrote since the last step, before a guard lowers it for one
            self.rates.multiply_(self.factor)

    def _step(self, one: _Held) -> None:
        while one.waiting:
            args, kwargs = one.waiting.pop(0)
            if one.held and self._was_left_out(one):
                continue
            assert self.rates is not None
            self.rates.multiply_(1.0)
            one.step(one.scheduler, *args, **kwargs)
            self.follower.act()

    def _was_left_out(self, one: _Held) -> bool:
        """Whether the optimizer did not move since the scheduler's last step, for the last step was left out."""
        ledger = self.follower.ledger
        moved = ledger.applied != one.applied
        one.applied = ledger.applied
        return not moved and ledger.last not in ("applied", None)

    def go_back(self, state: dict[str, Any]) -> None:
        assert self.rates is not None
        self.rates.load(state["own"])
        for one, applied in zip(self.schedulers, state["applied"], strict=True):
            one.applied, one.waiting = applied, []
        self.follower.act()

    def state_dict(self) -> dict[str, Any]:
        own = [] if self.rates is None else self.rates.own
        return {
            "own": own,
            "applied": [one.applied for one in self.schedulers],
            "warmup": self.callback.warmup,
            "warmup_steps": self.warmup_steps,
        }
