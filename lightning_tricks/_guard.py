"""What the guards share: judging a step before it is taken, vetoing it, and an account of what was left out."""

import math
import os
import uuid
from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_tricks._lightning import batch_index, is_local_path
from lightning_tricks.composition import OptimizerStep, Touches, Trick, current_step
from lightning_tricks.composition.event_log import append_event, read_events
from lightning_tricks.functional.clipping import gradient_norm, is_nonfinite
from lightning_tricks.functional.guards import account_of, loss_and_norm

__all__ = ["Guard", "Judgement"]

_MOST_UNREAD = 128
# Of a hundred steps and more no fifth may be bad: a kind of batch that is always left out is no accident.
_FIRST_JUDGED, _MOST_BAD = 100, 5
EVENTS_FILE = "guard_events.jsonl"
_PLACE = ("optimizer", "epoch", "batch_idx", "step_in_batch")
_LEAVES_OUT = ("skip", "rollback", "stop")
_LEFT_OUT = ("skipped_guard", "rolled_back")


@dataclass
class Judgement:
    """What a guard made of one step.

    Args:
        place: where in the run: the optimizer, the step, the epoch and the batch.
        loss: the mean over ranks, float32; None where there was none.
        norm: the gradient norm, a scalar.
        bad: a boolean scalar, on the device as the others are.
        limits: what loss and norm were compared with, None for nothing.
        named: whether an earlier run had left this batch out, so that the step is, whatever is made of it now.
        vetoed: whether the host knows that this guard left the step out.
    """

    place: dict[str, int]
    loss: Tensor | None
    norm: Tensor
    bad: Tensor = field(init=False)
    limits: Tensor | None = None
    named: bool = False
    vetoed: bool = False

    def read(self) -> tuple[list[float], list[float]]:
        """Loss and norm, and their limits, as numbers. Synchronises with the device."""
        return self.values.tolist(), [math.nan, math.nan] if self.limits is None else self.limits.tolist()

    @property
    def values(self) -> Tensor:
        """Loss and norm, float32; -inf for a loss that there was not."""
        return loss_and_norm(self.loss, self.norm)


class Guard(Trick):
    """A trick that may veto a step.

    A plain optimizer's step is vetoed on the host, at one scalar read a step. A fused optimizer's is vetoed on the
    device with ``action="skip"``; what became of it is read when the Trainer logs, and so is its event written.

    Args:
        action: what to do about a bad step.
        max_consecutive: how many steps in a row may be bad.
        events_path: the log of events, None for the Trainer's log folder.
    """

    touches = Touches.STEP
    reads_loss = True
    rewinds = False  # its account of events goes on

    def __init__(self, action: str, max_consecutive: int, events_path: str | Path | None) -> None:
        self.action = action
        self.max_consecutive = max_consecutive
        self.events_path = events_path
        self.reset()

    @abstractmethod
    def _judge(self, index: int, judgement: Judgement) -> Tensor:
        """Return whether a step of optimizer `index` is bad, a boolean scalar on the device."""

    def _act(self, trainer: pl.Trainer, module: pl.LightningModule, step: OptimizerStep, judgement: Judgement) -> None:
        """Do what the action asks for besides leaving the step out; for actions that are taken at once."""

    def _learn(self, step: OptimizerStep, judgement: Judgement | None) -> None:
        """Take in what became of a step; None if another guard had left it out before this one saw it."""

    @override
    def reset(self) -> None:
        self.num_events = 0
        self._consecutive: dict[int, int] = {}
        self._judged: dict[int, Judgement] = {}
        self._unread: list[tuple[Judgement, bool | Tensor, bool | Tensor]] = []
        self._latest: deque[str] = deque(maxlen=5)
        self._named: set[tuple[int, int, int, int]] = set()
        self._turn: dict[int, tuple[int, int, int]] = {}
        self._too_many = self._num_judged = self._num_bad = 0
        self._run = ""
        self._loaded = self._writes = False
        self._paths: list[str] = []
        self._warned = False

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, LBFGS) and self.action not in ("raise", "warn"):
                raise ValueError(
                    f"expected an action that leaves no step out for LBFGS, got {self.action!r}: it moves the weights "
                    f"within a step. Drop {type(self).__name__}, or take another optimizer"
                )

    @override
    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._judged.clear()  # what an exception left
        self._consecutive.clear()  # whoever resumes, perhaps after a report, begins anew
        self._turn.clear()
        self._too_many = self._num_judged = self._num_bad = 0
        folder = trainer.log_dir or trainer.default_root_dir  # on every rank: it is a collective
        if self.events_path is None and not is_local_path(folder):
            rank_zero_warn(f"{type(self).__name__} cannot write its log to {folder}: it is {EVENTS_FILE} here instead.")
            folder = "."
        path = str(self.events_path or Path(folder) / EVENTS_FILE)
        path = os.path.abspath(path)  # a resumed run may begin elsewhere
        # A second fit of one Trainer sees other batches: only a checkpoint goes on with the same.
        resumed, self._loaded = self._loaded and self.action in _LEAVES_OUT, False
        events = [one for where in {*self._paths, path} for one in read_events(Path(where))] if resumed else []
        named = [
            tuple(one[key] for key in _PLACE)
            for one in events
            if one.get("run") == self._run and one["guard"] == type(self).__name__ and one["verdict"] in _LEFT_OUT
        ]
        # Only rank 0 writes, perhaps where only it can read.
        fault = _why_not_writable(Path(path)) if trainer.is_global_zero else ""
        self._run, named, fault = trainer.strategy.broadcast((self._run or uuid.uuid4().hex, named, fault))
        if fault and self.events_path is None:
            rank_zero_warn(
                f"{type(self).__name__} cannot write its log of events to {path}: {fault}. It goes on without."
            )
        elif fault:
            raise ValueError(f"expected `events_path` to be a file that can be written, got {path!r}: {fault}")
        self._writes = trainer.is_global_zero and not fault
        self._named = set(named)
        self._paths = list(dict.fromkeys([*self._paths, path]))

    # Each step

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        step = current_step(trainer, optimizer)
        if not step.parameters():
            return
        norm = step.measured(gradient_norm, 2.0)
        place = self._place(trainer, step.index)
        judgement = Judgement(place, self._loss_of_all_ranks(trainer, step, norm), norm)
        judgement.named = tuple(place[key] for key in _PLACE) in self._named
        bad = judgement.bad = self._judge(step.index, judgement)
        if step.scaler is not None:  # an overflow is the scaler's to skip
            bad = judgement.bad = bad & ~is_nonfinite(norm)
        self._judged[step.index] = judgement
        self._num_judged += 1
        step.judged = step.judged or self.action != "warn"
        if judgement.named:
            step.veto(True)
        elif self.action == "skip":
            judgement.vetoed = step.veto(bad)
        elif self.action != "warn" and bool(bad):
            self._act(trainer, pl_module, step, judgement)
            judgement.vetoed = step.veto(True)

    def _place(self, trainer: pl.Trainer, index: int) -> dict[str, int]:
        epoch, batch = trainer.current_epoch, batch_index(trainer)
        before = self._turn.get(index, (-1, -1, -1))
        turn = before[2] + 1 if before[:2] == (epoch, batch) else 0
        self._turn[index] = epoch, batch, turn
        return {
            "optimizer": index,
            "step": trainer.global_step,
            "epoch": epoch,
            "batch_idx": batch,
            "step_in_batch": turn,
        }

    def _loss_of_all_ranks(self, trainer: pl.Trainer, step: OptimizerStep, norm: Tensor) -> Tensor | None:
        """The mean over ranks, nan where any rank's is."""
        loss = step.loss
        if loss is None:
            return None
        if trainer.world_size > 1:
            loss = trainer.strategy.reduce(loss.clone(), reduce_op="mean")
        return loss.to(norm.device, torch.float32)

    @override
    def after_step(self, trainer: pl.Trainer, module: pl.LightningModule, step: OptimizerStep) -> None:
        judgement = self._judged.pop(step.index, None)
        if judgement is not None or step.verdict == "skipped_guard":
            self._learn(step, judgement)
        if judgement is None:
            return
        if judgement.named:
            self.num_events += 1
        elif step.verdict is None or self.action == "warn":
            self._unread.append((judgement, step.applied, step.overflowed))
            if len(self._unread) >= _MOST_UNREAD:
                self._read()
        elif judgement.vetoed:
            self._record(judgement, *judgement.read())
        elif step.verdict == "applied":
            self._consecutive[step.index] = 0
        self._refuse_endless()

    def _refuse_endless(self) -> None:
        """Raise if too many steps in a row were bad, or too many of all."""
        if self._num_judged >= _FIRST_JUDGED and self._num_bad * _MOST_BAD > self._num_judged and self.action != "warn":
            raise RuntimeError(self._report(f"{self._num_bad} of {self._num_judged} steps were bad"))
        if self._too_many and self.action != "warn":
            raise RuntimeError(self._report(f"{self._too_many} steps in a row were bad"))

    def _read(self) -> None:
        """Find out what became of the steps that only the device knew of: one transfer for all of them."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        read = torch.stack([account_of(one.values, one.limits, (one.bad, *known)) for one, *known in unread]).tolist()
        for (judgement, *_), (loss, norm, *limits, bad, applied, overflowed) in zip(unread, read, strict=True):
            if bad and not overflowed:
                self._record(judgement, [loss, norm], limits, applied=bool(applied))
            elif applied:
                self._consecutive[judgement.place["optimizer"]] = 0

    def _record(
        self,
        judgement: Judgement,
        values: list[float],
        limits: list[float],
        *,
        applied: bool = False,
    ) -> None:
        """Count an event, write it down, and tell of the first."""
        loss, norm = values
        exceeded = next((i for i in range(2) if math.isfinite(values[i]) and values[i] > limits[i]), None)
        verdict = {"rollback": "rolled_back", "raise": "raised"}.get(self.action, "skipped_guard")
        event = {
            "run": self._run,
            "guard": type(self).__name__,
            **judgement.place,
            "loss": None if judgement.loss is None else loss,
            "norm": norm,
            "threshold": None if exceeded is None else limits[exceeded],
            "exceeded": "nonfinite" if exceeded is None else ("loss", "norm")[exceeded],
            "verdict": "applied" if applied else verdict,
            "action": self.action,
        }
        self._write(event)
        limit = "" if exceeded is None else f", above {('loss', 'norm')[exceeded]} {limits[exceeded]:.4g}"
        text = (
            f"step {event['step']} (epoch {event['epoch']}, batch {event['batch_idx']}, optimizer "
            f"{event['optimizer']}): loss {loss:.4g}, gradient norm {norm:.4g}{limit}"
        )
        self.num_events += 1
        self._num_bad += 1
        self._latest.append(text)
        if self.action == "warn" or not self._warned:
            self._warned = True
            done = "taken all the same" if applied else "left out"
            done += {"rollback": ", and the run goes back", "stop": ", and the fit ends"}.get(self.action, "")
            rank_zero_warn(f"{type(self).__name__}: {text}. The step is {done}. All events are in {self._paths[-1]}.")
        index = judgement.place["optimizer"]
        self._consecutive[index] = self._consecutive.get(index, 0) + 1
        if self._consecutive[index] > self.max_consecutive:
            self._too_many = self._consecutive[index]

    def _write(self, event: dict[str, Any]) -> None:
        if not self._writes:
            return
        try:
            append_event(Path(self._paths[-1]), event)
        except OSError as error:  # the run is worth more than its log
            self._writes = False
            rank_zero_warn(f"{type(self).__name__} cannot write its log of events any more: {error}")

    def _report(self, what: str) -> str:
        events = "\n".join(f"  {one}" for one in self._latest)
        return (
            f"{type(self).__name__}: {what}, so that leaving out more would not help. None of them changed the "
            f"weights. The last events:\n{events}\nLower the learning rate or lengthen the warmup, look at these "
            f"batches, or resume from an earlier checkpoint; all events are in {self._paths[-1]}."
        )

    # What is shown and saved

    @override
    def metrics(self, trainer: pl.Trainer, stepped: Collection[int]) -> Mapping[str, float | Tensor]:
        self._read()
        self._refuse_endless()
        return {}

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._read()
        self._refuse_endless()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, torch.AcceleratorError):  # nothing can be read from the device then
            self._read()

    @override
    def state_dict(self) -> dict[str, Any]:
        self._read()
        return {"run": self._run, "paths": self._paths, "num_events": self.num_events}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = True
        self._run = state_dict["run"]
        self._paths = list(state_dict["paths"])
        self.num_events = state_dict["num_events"]


def _why_not_writable(path: Path) -> str:
    """Why a file cannot be written there, "" if it can. Writes nothing: there may never be an event."""
    if path.is_dir():
        return "it is a folder"
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if there != path and not there.is_dir():
        return f"{str(there)!r} is no folder"
    return "" if os.access(there, os.W_OK) else f"{str(there)!r} is read-only"
