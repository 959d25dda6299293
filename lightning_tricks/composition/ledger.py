"""The ledger of step verdicts: what became of each optimizer step of a run.

Each call of an optimizer's step gets exactly one verdict. Where the host knows it, an integer is counted; where only
the device knows (a fused optimizer reads ``found_inf`` inside of its kernel), a counter on the device is, and the host
reads it when somebody asks.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["VERDICTS", "OptimizerLedger", "StepLedger", "Verdict"]

Verdict = Literal["applied", "skipped_overflow", "skipped_guard", "skipped_empty"]

VERDICTS: tuple[Verdict, ...] = ("applied", "skipped_overflow", "skipped_guard", "skipped_empty")
"""`applied`: the optimizer moved the weights. `skipped_overflow`: the loss scaler found inf or nan. `skipped_guard`: a
trick vetoed the step. `skipped_empty`: there was no loss to step on."""


class OptimizerLedger:
    """Counts of the verdicts of one optimizer's steps.

    Reading may synchronise with the device, under a fused optimizer with a loss scaler or a guard; counting never does.

    Example:
        >>> ledger = OptimizerLedger()
        >>> ledger.count("applied")
        >>> ledger.count_on_device(overflow=torch.tensor(1.0), veto=torch.tensor(0.0))
        >>> ledger.applied, ledger.skipped_overflow, ledger.last
        (1, 1, 'skipped_overflow')
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = dict.fromkeys(VERDICTS, 0)
        self._last: Verdict | None = None
        self._rolled_back = 0
        # Of steps that only the device knows: how many per verdict, and the index of the last one's verdict.
        self._unread: Tensor | None = None
        self._unread_last: Tensor | None = None

    @property
    def applied(self) -> int:
        """Steps that moved the weights."""
        return self._read()["applied"]

    @property
    def skipped_overflow(self) -> int:
        """Steps that the loss scaler left out."""
        return self._read()["skipped_overflow"]

    @property
    def skipped_guard(self) -> int:
        """Steps that a trick vetoed."""
        return self._read()["skipped_guard"]

    @property
    def skipped_empty(self) -> int:
        """Steps without a loss."""
        return self._read()["skipped_empty"]

    @property
    def rolled_back(self) -> int:
        """How often a trick went back to an earlier state; the steps since then are not counted any more."""
        return self._rolled_back

    @property
    def skipped(self) -> int:
        """Steps that were left out, for whatever reason."""
        return self.total - self.applied

    @property
    def total(self) -> int:
        """All steps that have a verdict."""
        return sum(self._read().values())

    @property
    def last(self) -> Verdict | None:
        """The last step's verdict, None before the first."""
        if self._unread_last is not None:
            self._last, self._unread_last = VERDICTS[int(self._unread_last)], None
        return self._last

    @property
    def known_on_host(self) -> bool:
        """Whether reading costs no synchronisation now."""
        return self._unread is None

    def count(self, verdict: Verdict) -> None:
        """Count a step whose verdict the host knows.

        Args:
            verdict: one of `VERDICTS`.
        """
        self._counts[verdict] += 1
        self._last, self._unread_last = verdict, None

    def count_on_device(self, overflow: Tensor, veto: Tensor) -> None:
        """Count a step whose verdict only the device knows, without synchronising.

        Args:
            overflow: scalar, above zero where the loss scaler found inf or nan.
            veto: scalar, above zero where a trick vetoed the step. An overflow goes before it.
        """
        overflowed = overflow > 0
        vetoed = (veto > 0) & ~overflowed
        # Made of tensors that are on the device already: a Python number would be copied there, and waited for.
        flags = (~(overflowed | vetoed), overflowed, vetoed, torch.zeros_like(vetoed))
        counts = torch.stack(flags).long()
        self._unread = counts if self._unread is None else self._unread + counts
        self._unread_last = counts.argmax()

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the last verdict, as plain values."""
        return {**self._read(), "last": self.last, "rolled_back": self._rolled_back}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take counts over from a checkpoint.

        Args:
            state: what `state_dict` returned.
        """
        self._unread = self._unread_last = None
        self._counts = {verdict: int(state[verdict]) for verdict in VERDICTS}
        self._last = state["last"]
        self._rolled_back = int(state.get("rolled_back", 0))  # not there in checkpoints before it was counted

    def rewind(self, state: dict[str, Any]) -> None:
        """Go back to earlier counts, since the run did, and count that.

        Args:
            state: what `state_dict` returned then.
        """
        rolled_back = self._rolled_back + 1
        self.load_state_dict(state)
        self._rolled_back = rolled_back

    def _read(self) -> dict[str, int]:
        if self._unread is not None:
            for verdict, count in zip(VERDICTS, self._unread.tolist(), strict=True):
                self._counts[verdict] += count
            self._unread = None
        return self._counts


class StepLedger(Sequence[OptimizerLedger]):
    """The ledgers of all optimizers of a run, by the optimizer's index in ``trainer.optimizers``."""

    def __init__(self) -> None:
        self._ledgers: list[OptimizerLedger] = []

    def __getitem__(self, index: int) -> OptimizerLedger:  # type: ignore[override]
        return self._ledgers[index]

    def __len__(self) -> int:
        return len(self._ledgers)

    def __iter__(self) -> Iterator[OptimizerLedger]:
        return iter(self._ledgers)

    def open(self, num_optimizers: int) -> None:
        """Hold a ledger for each optimizer. Counts that are there, or were loaded, are kept.

        Args:
            num_optimizers: how many optimizers the run has.

        Raises:
            ValueError: a checkpoint held the ledgers of another number of optimizers.
        """
        if self._ledgers and len(self._ledgers) != num_optimizers:
            raise ValueError(
                f"expected the ledger of a run with {num_optimizers} optimizer(s), got one of {len(self._ledgers)}: "
                "resume with the optimizers that the checkpoint was written with"
            )
        while len(self._ledgers) < num_optimizers:
            self._ledgers.append(OptimizerLedger())

    def clear(self) -> None:
        """Forget everything: a new run begins."""
        self._ledgers.clear()

    def assume_applied(self, steps: int, num_optimizers: int) -> None:
        """Stand in for a checkpoint that was written without a ledger: count its steps as applied.

        Args:
            steps: the Trainer's ``global_step``, which counts the steps of all optimizers (PL#17958).
            num_optimizers: how many optimizers share them, evenly for want of better knowledge.
        """
        self.open(num_optimizers)
        for ledger in self._ledgers:
            ledger.load_state_dict({**dict.fromkeys(VERDICTS, 0), "applied": steps // num_optimizers, "last": None})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every optimizer's ledger."""
        return {"optimizers": [ledger.state_dict() for ledger in self._ledgers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the ledgers over from a checkpoint.

        Args:
            state: what `state_dict` returned.
        """
        states = state["optimizers"]
        del self._ledgers[len(states) :]
        for index, one in enumerate(states):
            if index == len(self._ledgers):
                self._ledgers.append(OptimizerLedger())
            self._ledgers[index].load_state_dict(one)  # in place: schedules hold on to their optimizer's ledger
