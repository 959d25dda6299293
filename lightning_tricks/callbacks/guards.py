"""Guards: they judge a step before it is taken, and keep one that would do harm from the weights."""

import os
from collections.abc import Collection, Mapping
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks._guard import Guard, Judgement
from lightning_tricks._lightning import callbacks_of
from lightning_tricks._rollback import lower_rates, refuse_shortage, restore_rates_, restore_run_, take_snapshot
from lightning_tricks._validation import check_choice, check_int, check_number
from lightning_tricks.composition import OptimizerStep, Summary, current_step
from lightning_tricks.composition.per_optimizer import PerOptimizer
from lightning_tricks.composition.trick import key_of
from lightning_tricks.functional.clipping import is_nonfinite, named_gradients, nonfinite_names
from lightning_tricks.functional.guards import SpikeWindow, shown_limits
from lightning_tricks.functional.snapshots import SnapshotRing

__all__ = ["LossSpikeGuard", "NonFiniteGuard"]

# Of the loss and of the gradient norm. With six deviations a loss 12% above its centre can be a spike, and a norm of
# seven times its centre: norms grow by as much in the first hundreds of steps of sound runs.
_LEAST_SPREAD = (0.02, 1.0)


class NonFiniteGuard(Guard):
    """Leave out steps whose loss or gradient norm is inf or nan, on whichever rank, before they harm the weights.

    Beside a clipper the guard owns the verdict. What a loss scaler overflows on is the scaler's to skip and does not
    count here. A run that is resumed leaves out what its log of events, ``guard_events.jsonl`` in the Trainer's log
    folder, names; that takes the same batches, so a stateful loader and `ExactResume`.

    What the forward pass has written by then is not taken back: running statistics of BatchNorm take part in a bad
    batch. `LossSpikeGuard("rollback")` restores them.

    Logs ``guard/nonfinite``, how many steps of the run were not finite.

    Args:
        action: ``"skip"`` leaves the step out, ``"raise"`` raises and names the parameters, ``"stop"`` leaves it out
            and ends the fit.
        max_consecutive: how many steps in a row may be left out; one more raises, with a report; of a fused optimizer
            when the Trainer next logs, though the streak be over. 1 or more.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; LBFGS with an action that leaves a step
            out (at the start of fit).
        RuntimeError: in training, with ``action="raise"``, or after too many steps in a row.

    Cost:
        The norm of the gradients, which a clipper in the list shares; with several processes one scalar all-reduce a
        step; one scalar read a step, and none with ``action="skip"`` and a fused optimizer.

    Example:
        >>> from lightning_tricks import NonFiniteGuard
        >>> guard = NonFiniteGuard("stop")
    """

    job = "guard against steps that are not finite"
    buys = "no step on inf or nan: it is left out, counted and logged"
    costs = "the gradient norm, one scalar read a step (none with a fused optimizer)"

    def __init__(self, action: Literal["skip", "raise", "stop"] = "skip", *, max_consecutive: int = 10) -> None:
        check_choice("action", action, ("skip", "raise", "stop"))
        super().__init__(action, check_int("max_consecutive", max_consecutive, minimum=1), None)

    @override
    def _judge(self, index: int, judgement: Judgement) -> Tensor:
        return _is_nonfinite(judgement)

    @override
    def _act(self, trainer: pl.Trainer, module: pl.LightningModule, step: OptimizerStep, judgement: Judgement) -> None:
        if self.action == "stop":
            trainer.should_stop = True
            return
        (loss, norm), limits = judgement.read()
        self._record(judgement, [loss, norm], limits)
        culprits = ", ".join(nonfinite_names(named_gradients(module, step.parameters(), step.gradients()))) or "none"
        raise RuntimeError(
            f"expected a finite loss and gradient norm, got {loss} and {norm} at epoch {judgement.place['epoch']}, "
            f"batch {judgement.place['batch_idx']}; gradients that are not finite: {culprits}. The weights are as "
            'before this step. Look at this batch, or let NonFiniteGuard("skip") leave such steps out.'
        )

    @override
    def metrics(self, trainer: pl.Trainer, stepped: Collection[int]) -> Mapping[str, float | Tensor]:
        super().metrics(trainer, stepped)
        return {"guard/nonfinite": float(self.num_events)}

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        named = f"; {len(self._named)} batch(es) named by an earlier run are left out" if self._named else ""
        return Summary(f"{self.action} on inf or nan, at most {self.max_consecutive} in a row{named}")


class LossSpikeGuard(Guard):
    """Leave out steps whose loss or gradient norm spikes, before they harm the weights, or go back to before them.

    A step is judged by the loss (the mean over a window's micro-batches and over ranks) and the gradient norm, against
    the median and the median absolute deviation of applied steps. Steps that are not finite are bad as well, unless a
    `NonFiniteGuard` is listed beside. More than 10 bad ones in a row, a fifth of a hundred and more, or more than 10
    rollbacks without getting on raise with a report. Running statistics of BatchNorm are taken back by ``"rollback"``
    alone.

    ``"rollback"`` restores weights, optimizer, schedules, loss scaler, random states, the ledger and what other tricks
    keep, from a snapshot in memory, at the end of the batch, and goes on with the data that comes next; a second
    rollback before the next snapshot goes back to the one before. The ledger counts it as ``rolled_back``;
    ``global_step`` goes on. Snapshots are not saved: after a resume the checkpoint is the first one, and a batch that
    the log names is left out without going back for it again.

    Every event goes to a log, one JSON object a line: run, guard, optimizer, step, epoch, batch_idx, loss, norm,
    threshold, exceeded, verdict, action and more. A resumed run leaves out the batches that it names; that takes the
    same batches, so a stateful loader and `ExactResume`.

    Logs ``guard/spikes`` (how many steps were bad so far), ``guard/loss_threshold`` and ``guard/norm_threshold``; for
    optimizer i > 0 the thresholds with ``/i`` behind.

    Args:
        action: ``"skip"`` leaves the step out, ``"rollback"`` also goes back, ``"stop"`` leaves it out and ends the
            fit, ``"warn"`` only tells.
        z_threshold: robust standard deviations above the centre from which it is a spike, above 0.
        window_steps: how many applied steps are compared with, 2 or more.
        warmup_steps: applied steps before which nothing is a spike, 2 or more and at most `window_steps`.
        snapshot_every_steps: applied steps between snapshots, 1 or more.
        num_snapshots: how many are kept, 1 or more.
        lr_factor: what the learning rate is multiplied with for `snapshot_every_steps` applied steps after a rollback,
            in (0, 1].
        events_path: the log of events; None for ``guard_events.jsonl`` in the Trainer's log folder.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; the log cannot be written there; LBFGS
            with an action that leaves a step out (both at the start of fit).
        MemoryError: the snapshots would not fit, with both figures, before one is taken.
        RuntimeError: in training, after too many bad steps in a row.

    Cost:
        That of `NonFiniteGuard`; every eighth of a window two medians of it, on the device; with
        ``action="rollback"`` `num_snapshots` copies of weights and optimizer state, and one scalar read a step also
        with a fused optimizer. Taking a snapshot waits for the device.

    Reference:
        Chowdhery et al. (2022), "PaLM", arXiv:2204.02311, section 5.1.

    Example:
        >>> from lightning_tricks import LossSpikeGuard
        >>> guard = LossSpikeGuard("rollback", snapshot_every_steps=500, lr_factor=0.5)
    """

    job = "guard against loss spikes"
    buys = "a spike of loss or gradient norm is left out, or undone, before it costs the run"
    costs = "as NonFiniteGuard; to roll back, copies of weights and optimizer state"

    def __init__(
        self,
        action: Literal["skip", "rollback", "stop", "warn"] = "skip",
        *,
        z_threshold: float = 6.0,
        window_steps: int = 128,
        warmup_steps: int = 32,
        snapshot_every_steps: int = 100,
        num_snapshots: int = 2,
        lr_factor: float = 1.0,
        events_path: str | None = None,
    ) -> None:
        check_choice("action", action, ("skip", "rollback", "stop", "warn"))
        self.z_threshold = check_number("z_threshold", z_threshold, above=True)
        self.window_steps = check_int("window_steps", window_steps, minimum=2)
        self.warmup_steps = check_int("warmup_steps", warmup_steps, minimum=2)
        if warmup_steps > window_steps:
            raise ValueError(f"expected `warmup_steps` to be at most `window_steps`={window_steps}, got {warmup_steps}")
        self.snapshot_every_steps = check_int("snapshot_every_steps", snapshot_every_steps, minimum=1)
        self.num_snapshots = check_int("num_snapshots", num_snapshots, minimum=1)
        self.lr_factor = check_number("lr_factor", lr_factor, above=True, maximum=1.0)
        if events_path is not None and not isinstance(events_path, (str, os.PathLike)):
            raise TypeError(f"expected `events_path` to be a path or None, got {events_path!r}")
        super().__init__(action, 10, events_path)

    @override
    def reset(self) -> None:
        super().reset()
        self._windows: PerOptimizer[SpikeWindow] = PerOptimizer(self._window)
        self._values: dict[int, Tensor] = {}
        self._limits: dict[int, Tensor] = {}
        self._ring = SnapshotRing(self.num_snapshots)
        self._judges_nonfinite = True
        self._rolls_back = False
        self._rollbacks_to_newest = 0
        self._steps_since_snapshot: dict[int, int] = {}
        self._lowered_steps: dict[int, int] = {}
        self._rates: list[tuple[dict[str, Any], Any]] = []

    @override
    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        super().start(trainer, module)
        # One event, one account of it.
        self._judges_nonfinite = not any(isinstance(one, NonFiniteGuard) for one in callbacks_of(trainer))
        self._rolls_back = False
        self._ring.clear()
        if self.action == "rollback":
            # Refused here; taken before the first batch, when everything else has begun.
            refuse_shortage(self._ring, trainer, module)

    # Each step

    def _window(self) -> SpikeWindow:
        return SpikeWindow(self.z_threshold, self.window_steps, self.warmup_steps, _LEAST_SPREAD)

    @override
    def _judge(self, index: int, judgement: Judgement) -> Tensor:
        values = self._values[index] = judgement.values
        window = self._windows.get(index, values.device)
        judgement.limits = self._limits[index] = window.limits(values)
        bad = window.exceeds(values)
        return bad if self._judges_nonfinite else bad & ~_is_nonfinite(judgement)

    @override
    def _act(self, trainer: pl.Trainer, module: pl.LightningModule, step: OptimizerStep, judgement: Judgement) -> None:
        if self.action == "stop":
            trainer.should_stop = True
        else:
            self._rolls_back = True  # at the end of the batch, when schedulers and scaler have done their part

    @override
    def _learn(self, step: OptimizerStep, judgement: Judgement | None) -> None:
        values = self._values.pop(step.index, None)
        if values is not None:
            device = values.device
        else:  # another guard left it out before this one measured anything
            device = next(one.device for group in step.optimizer.param_groups for one in group["params"])
        window = self._windows.get(step.index, device)
        window.step(values, step.applied)
        if step.applied is not False:
            self._steps_since_snapshot[step.index] = self._steps_since_snapshot.get(step.index, 0) + 1
            self._lowered_steps[step.index] = max(self._lowered_steps.get(step.index, 0) - 1, 0)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        self._restore_rates()
        if self._lowered_steps.get(current_step(trainer, optimizer).index):
            self._rates = lower_rates(optimizer, self.lr_factor)

    @override
    def after_step(self, trainer: pl.Trainer, module: pl.LightningModule, step: OptimizerStep) -> None:
        self._restore_rates()
        super().after_step(trainer, module, step)

    def _restore_rates(self) -> None:
        restore_rates_(self._rates)
        self._rates = []

    # Snapshots, between batches

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        due = max(self._steps_since_snapshot.values(), default=0) >= self.snapshot_every_steps
        if self.action == "rollback" and (due or not len(self._ring)):
            self._take_snapshot(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._rolls_back:
            return
        self._rolls_back = False
        if self._rollbacks_to_newest >= 1:
            self._ring.drop_newest()  # it was taken too late
        self._rollbacks_to_newest += 1
        if self._rollbacks_to_newest > self.max_consecutive:
            raise RuntimeError(self._report(f"the run went back {self._rollbacks_to_newest} times without getting on"))
        # The windows go on: rewound, they might not be warm, and let the next spike of a cluster through.
        restore_run_(self._ring, trainer, pl_module)
        self._steps_since_snapshot.clear()
        if self.lr_factor < 1.0:
            self._lowered_steps = dict.fromkeys(range(len(trainer.optimizers)), self.snapshot_every_steps)

    def _take_snapshot(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        before = self._ring.bytes_of_one
        take_snapshot(self._ring, trainer, module)
        self._steps_since_snapshot.clear()
        self._rollbacks_to_newest = 0
        if self._ring.bytes_of_one > before:  # the table could only estimate the optimizer's state
            rank_zero_info(f"LossSpikeGuard: {self._size()}")

    def _size(self) -> str:
        return f"{self.num_snapshots} snapshot(s) of {self._ring.bytes_of_one:,} bytes on {self._ring.storage}"

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._ring.clear()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore_rates()
        self._ring.clear()
        super().on_exception(trainer, pl_module, exception)

    # What is shown and saved

    @override
    def metrics(self, trainer: pl.Trainer, stepped: Collection[int]) -> Mapping[str, float | Tensor]:
        super().metrics(trainer, stepped)
        values: dict[str, float | Tensor] = {"guard/spikes": float(self.num_events)}
        for index in stepped:
            if index in self._limits:
                thresholds = shown_limits(self._limits[index])
                values[key_of("guard/loss_threshold", index)] = thresholds[0]
                values[key_of("guard/norm_threshold", index)] = thresholds[1]
        return values

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        found = f"{self.action} {self.z_threshold:g} deviations above the median of {self.window_steps} applied steps"
        if self._ring.bytes_of_one:
            found += f"\n{self._size()}, every {self.snapshot_every_steps} applied steps"
        if self._named:
            found += f"\n{len(self._named)} batch(es) named by an earlier run are left out"
        return Summary(found)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "windows": self._windows.state_dict(),
            "lowered_steps": dict(self._lowered_steps),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._windows.load_state_dict(state_dict["windows"])
        self._lowered_steps = dict(state_dict["lowered_steps"])


def _is_nonfinite(judgement: Judgement) -> Tensor:
    """Whether the loss, if there is one, or the norm is inf or nan."""
    return is_nonfinite(judgement.norm if judgement.loss is None else judgement.loss + judgement.norm)
