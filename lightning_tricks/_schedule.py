"""What the learning-rate schedules share: a curve over the applied steps of the ledger, whoever skips the others."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from rich.console import Console
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_tricks._lightning import (
    MisconfigurationException,
    add_scheduler,
    callbacks_of,
    is_fast_dev_run,
    other_rate_writers,
    remove_scheduler,
    schedulers_of,
)
from lightning_tricks._preview import draw_as_png, draw_in_terminal
from lightning_tricks._validation import (
    check_amount,
    check_indices,
    check_int,
    check_number,
    refuse_missing_optimizers,
)
from lightning_tricks.composition import OptimizerLedger, OptimizerStep, Summary, Touches, Trick, step_ledger
from lightning_tricks.composition.following import Follower
from lightning_tricks.composition.horizon import optimizer_steps_of_run
from lightning_tricks.functional.schedules import duration_unit, even_start_factor, resolve_duration

__all__ = ["Schedule"]

_MOST_POINTS = 2000


class Schedule(Trick):
    """A learning rate that is a closed form of the applied steps: a warmup, then a shape that a subclass gives.

    Args:
        warmup: an int is a number of steps, a float in [0, 1) a fraction of the run.
        min_lr_ratio: the rate at the end, as a share of each group's own, in [0, 1].
        min_lr: the rate at the end, the same for all groups; replaces `min_lr_ratio`.
        start_factor: the share of the rate at step 0, in [0, 1]; None for even steps, 1 / (warmup + 1).
        total_steps: applied steps until the end of the curve; a mapping gives each optimizer its own. None: from the
            Trainer.
        optimizers: indices of the optimizers to schedule; None for all.
        decay: length of a last part, of a curve that has one.

    Attributes:
        unit: what the curve goes by: "steps", "samples" or "tokens".
    """

    touches = Touches.HYPERPARAMETERS
    job = "set the learning rate"
    costs = "one scalar read a step where a fused optimizer may skip one, else nothing to speak of"

    def __init__(
        self,
        warmup: int | float | str,
        *,
        min_lr_ratio: float,
        min_lr: float | None,
        start_factor: float | None,
        total_steps: int | str | dict[int, int] | None,
        optimizers: list[int] | None,
        decay: int | float | str | None = None,
    ) -> None:
        self.warmup = check_amount("warmup", warmup)
        self.min_lr_ratio = check_number("min_lr_ratio", min_lr_ratio, maximum=1.0)
        self.min_lr = None if min_lr is None else check_number("min_lr", min_lr, finite=True)
        self.start_factor = None if start_factor is None else check_number("start_factor", start_factor, maximum=1.0)
        if isinstance(total_steps, Mapping):
            check_indices("total_steps", total_steps)
        for one in total_steps.values() if isinstance(total_steps, Mapping) else [total_steps]:
            if one is not None and not isinstance(one, str):
                check_int("total_steps", one, minimum=1)
        self._scope = None if optimizers is None else check_indices("optimizers", optimizers)
        if isinstance(total_steps, str):
            check_amount("total_steps", total_steps)
        self.total_steps = total_steps
        self.optimizers = optimizers
        self.decay = None if decay is None else check_amount("decay", decay)
        lengths = {"warmup": self.warmup, "decay": self.decay, "total_steps": self._total}
        self.unit = _common_unit({name: one for name, one in lengths.items() if one is not None})
        self.reset()

    @property
    def _total(self) -> int | str | None:
        """The length that was given, or one of them."""
        given = self.total_steps
        return next(iter(given.values())) if isinstance(given, Mapping) else given

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
        self._schedulers: dict[int, _FollowsLedger] = {}
        self._saved: dict[int, dict[str, Any]] = {}
        self._seen = 0.0  # samples or tokens of the applied steps
        self._unread: list[tuple[float, bool | Tensor]] = []  # of further steps, and whether they were applied

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._refuse_uncounted(trainer)
        refuse_missing_optimizers("optimizers", self._scope, len(trainer.optimizers))
        if isinstance(self.total_steps, Mapping):
            refuse_missing_optimizers("total_steps", self.total_steps, len(trainer.optimizers))
        indices = sorted(self._scope) if self._scope is not None else range(len(trainer.optimizers))
        self._refuse_other_schedulers(trainer, pl_module, [trainer.optimizers[index] for index in indices])
        for index in indices:
            self._schedulers[index] = _FollowsLedger(self, trainer.optimizers[index])
            add_scheduler(trainer, self._schedulers[index])
            if self.total_steps is not None or not pl_module.automatic_optimization:
                self.resolve(index, trainer, pl_module)  # what needs no data is refused before any is read

    @override
    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for index, scheduler in self._schedulers.items():
            scheduler.total_steps, scheduler.warmup_steps = self.resolve(index, trainer, module)
            ledger = step_ledger(trainer)[index]
            if self.unit != "steps" and ledger.applied and not self._seen and not self._unread:
                raise MisconfigurationException(
                    f"{type(self).__name__} goes by {self.unit}, and the checkpoint tells of {ledger.applied} applied "
                    f"steps, but not how many {self.unit} they had: give the lengths in steps to resume from it"
                )
            scheduler.begin(ledger)

    def resolve(self, index: int, trainer: pl.Trainer, module: pl.LightningModule) -> tuple[int, int]:
        """Return the total steps and the warmup steps of optimizer `index`.

        Args:
            index: of the optimizer.
            trainer: the Trainer, with the data set up.
            module: its module.
        """
        total = self._total_steps_of(index, trainer, module)
        saved = self._saved.get(index, {})
        if saved.get("warmup") == self.warmup and not self._too_long(saved["warmup_steps"], total):
            return total, int(saved["warmup_steps"])
        warmup = resolve_duration(self.warmup, total)
        too_long = self._too_long(warmup, total)
        if too_long and is_fast_dev_run(trainer):
            return total, min(warmup, total)
        if too_long:
            raise ValueError(too_long)
        return total, warmup

    def _too_long(self, warmup_steps: int, total_steps: int) -> str | None:
        """Why the run has no room for the curve; None where it has."""
        if warmup_steps <= total_steps:
            return None
        return (
            f"expected `warmup` to be no longer than the run, got warmup={self.warmup} and total_steps={total_steps}: "
            "shorten the warmup, give a fraction of the run, or train longer"
        )

    @abstractmethod
    def curve(
        self, step: float, *, warmup_steps: int, total_steps: int, start_factor: float, min_ratio: float
    ) -> float:
        """Return the multiple of the learning rate after `step` applied steps: a function of `functional.schedules`."""

    def _total_steps_of(self, index: int, trainer: pl.Trainer, module: pl.LightningModule) -> int:
        given = self.total_steps.get(index) if isinstance(self.total_steps, Mapping) else self.total_steps
        if given is not None:
            return resolve_duration(given, 0)
        if not module.automatic_optimization:
            raise MisconfigurationException(
                f"{type(self).__name__} cannot know how often {type(module).__name__} steps optimizer {index}, since "
                "it optimizes manually: pass total_steps=..., an int or a mapping by optimizer index"
            )
        return optimizer_steps_of_run(trainer)

    def _refuse_other_schedulers(
        self, trainer: pl.Trainer, module: pl.LightningModule, optimizers: Sequence[Optimizer]
    ) -> None:
        for config in schedulers_of(trainer):
            if any(config.scheduler.optimizer is optimizer for optimizer in optimizers):
                raise MisconfigurationException(
                    f"{type(self).__name__} and {type(config.scheduler).__name__}, which "
                    f"{type(module).__name__}.configure_optimizers returns, would both {self.job}: return the "
                    f"optimizer alone, or drop {type(self).__name__} from Trainer(callbacks=...)"
                )

    def _refuse_uncounted(self, trainer: pl.Trainer) -> None:
        counts = [one.counts for one in callbacks_of(trainer) if isinstance(one, Trick) and one.counts is not None]
        if self.unit != "steps" and self.unit not in counts:
            by = '"samples"' if self.unit == "samples" else "a function that counts them"
            raise MisconfigurationException(
                f"{type(self).__name__} goes by {self.unit}, which nobody counts in this run: list "
                f"GradientAccumulation(1, weigh_by={by}), with any number of batches a step"
            )

    def position(self, ledger: OptimizerLedger) -> float:
        """Return where on the curve the run is. Synchronises where only the device knows the last step's verdict.

        Args:
            ledger: of the optimizer.
        """
        if self.unit == "steps":
            return ledger.applied
        while self._unread:
            weight, applied = self._unread.pop(0)
            self._seen += weight * float(applied)
        return self._seen

    @override
    def after_step(self, trainer: pl.Trainer, module: pl.LightningModule, step: OptimizerStep) -> None:
        if step.weight is not None and self.unit != "steps":
            self._unread.append((step.weight, step.applied))
        if step.index in self._schedulers:
            self._schedulers[step.index].step()

    @override
    def catch_up(self, trainer: pl.Trainer) -> None:
        for scheduler in self._schedulers.values():
            scheduler.follower.catch_up()

    def lr_at(self, step: float, base_lr: float, *, warmup_steps: int, total_steps: int) -> float:
        """Return the learning rate for the step after `step` applied ones.

        Args:
            step: applied steps so far, 0 or more; or samples, or tokens, as the lengths are.
            base_lr: the group's own rate, at the top of the curve.
            warmup_steps: length of the warmup.
            total_steps: length of the curve.

        Raises:
            ValueError: `min_lr` is above the group's own rate.
        """
        if base_lr == 0.0:  # a group that is frozen by its rate stays so
            return 0.0
        if self.min_lr is not None and self.min_lr > base_lr:
            raise ValueError(
                f"expected `min_lr` to be at most the learning rate of every parameter group, got min_lr={self.min_lr} "
                f"and a group with {base_lr:g}: lower it, or use min_lr_ratio"
            )
        ratio = self.min_lr_ratio if self.min_lr is None else self.min_lr / base_lr
        start = even_start_factor(warmup_steps) if self.start_factor is None else self.start_factor
        return base_lr * self.curve(
            step, warmup_steps=warmup_steps, total_steps=total_steps, start_factor=start, min_ratio=ratio
        )

    def plot(self, total_steps: int | None = None, *, base_lr: float = 1.0, path: str | Path | None = None) -> None:
        """Draw the learning rate over a run: in the terminal, or as a PNG file with the `plot` extra.

        Args:
            total_steps: length of the run; None for the schedule's own, or, where it has none, 1000, or 10 times the
                warmup if that is more. In samples or tokens where the schedule goes by them.
            base_lr: the rate at the top, above 0.
            path: where to write a PNG file; None for the terminal.

        Raises:
            ValueError: an argument is out of range; the run has no room for the warmup.
            ImportError: `path` is given, and matplotlib is not installed.
        """
        if total_steps is not None:
            check_int("total_steps", total_steps, minimum=1)
        own = self._total
        fixed = 0 if isinstance(self.warmup, float) else resolve_duration(self.warmup, 0)
        total = total_steps or (resolve_duration(own, 0) if own else max(1000, 10 * fixed))
        warmup = resolve_duration(self.warmup, total)
        too_long = self._too_long(warmup, total)
        if too_long:
            raise ValueError(too_long)
        check_number("base_lr", base_lr, above=True)
        steps = (
            range(total + 1) if total <= _MOST_POINTS else [total * k // _MOST_POINTS for k in range(_MOST_POINTS + 1)]
        )
        values = [self.lr_at(step, base_lr, warmup_steps=warmup, total_steps=total) for step in steps]
        title = f"{type(self).__name__}: learning rate over {total} {self.unit}, {warmup} of warmup"
        if path is None:
            Console().print(draw_in_terminal(values, title=title, last=total), highlight=False, soft_wrap=True)
        else:
            draw_as_png(steps, values, title=title, path=path, xlabel=f"applied {self.unit}")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._detach(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._detach(trainer)

    def _detach(self, trainer: pl.Trainer) -> None:
        self._saved = self.state_dict().get("warmups", {})
        for scheduler in self._schedulers.values():
            remove_scheduler(trainer, scheduler)
        self._schedulers.clear()

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        curves = [
            f"optimizer {index}: {one.warmup_steps} {self.unit} of warmup, {one.total_steps} in all, "
            f"{one.follower.ledger.applied} applied, {len(one.optimizer.param_groups)} group(s)"
            for index, one in self._schedulers.items()
        ]
        return Summary("\n".join(curves))

    def lengths(self, warmup_steps: int) -> dict[str, Any]:
        """Return what a resume with another horizon has to know.

        Args:
            warmup_steps: of the warmup.
        """
        return {"warmup": self.warmup, "warmup_steps": warmup_steps}

    @override
    def state_dict(self) -> dict[str, Any]:
        resolved = {index: self.lengths(one.warmup_steps) for index, one in self._schedulers.items() if one.total_steps}
        states = resolved or self._saved  # before training starts no length is known
        seen = {}
        if self.unit != "steps":
            ledger = next((one.follower.ledger for one in self._schedulers.values()), OptimizerLedger())
            seen = {"seen": self.position(ledger)}
        return {"warmups": states, **seen} if states else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = dict(state_dict["warmups"])
        self._seen, self._unread = state_dict.get("seen", 0.0), []


def _common_unit(lengths: dict[str, Any]) -> str:
    units = {name: duration_unit(one) for name, one in lengths.items() if one != 0}
    counted = {unit for unit in units.values() if unit is not None}
    unit = next((one for one in counted if one != "steps"), "steps")
    if unit != "steps" and (counted != {unit} or "total_steps" not in lengths):
        found = ", ".join(f"{name}={one!r}" for name, one in lengths.items())
        raise ValueError(
            f"expected all lengths of a curve in {unit}, `total_steps` too, or as fractions of the run, got {found}"
        )
    return unit


class _FollowsLedger(LRScheduler):
    """What the Trainer sees of a schedule: a scheduler whose `step` sets the rate that the ledger calls for.

    Calling it twice changes nothing, whoever does. The base class's constructor is left out on purpose: it patches the
    optimizer's `step` and takes a first step.
    """

    def __init__(self, curve: Schedule, optimizer: Optimizer) -> None:
        self.curve = curve
        self.optimizer = optimizer
        self.follower = Follower(OptimizerLedger(), self.set_rates)  # the run's from `begin` on, as are the two lengths
        self.warmup_steps = 0
        self.total_steps = 0
        self.last_epoch = 0

    def begin(self, ledger: OptimizerLedger) -> None:
        """Take each group's own rate as the top of its curve, and set the rate for the first step."""
        self.follower = Follower(ledger, self.set_rates)
        for group in self.optimizer.param_groups:
            group["initial_lr"] = float(group.get("initial_lr", group["lr"]))
        self.follower.act()

    def set_rates(self, applied: int) -> None:
        """Set the rate for the step after `applied` ones."""
        self.last_epoch = applied
        position = self.curve.position(self.follower.ledger)
        for group in self.optimizer.param_groups:
            base = group.setdefault("initial_lr", float(group["lr"]))  # a group may be added while training
            lr = self._lr(position, base)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    @override
    def step(self, epoch: int | None = None) -> None:
        """Set the rate for the next step if that costs no synchronisation now; else it is set before the next batch."""
        self.follower.step()

    @override
    def get_last_lr(self) -> list[float | Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}  # the position is the ledger's, the rest the callback's

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load nothing, whatever scheduler wrote it."""

    def _lr(self, step: float, base_lr: float) -> float:
        return self.curve.lr_at(step, base_lr, warmup_steps=self.warmup_steps, total_steps=self.total_steps)
