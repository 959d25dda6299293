"""A monitor of dynamic loss scaling."""

from collections.abc import Collection, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_tricks._lightning import loss_scaler
from lightning_tricks._validation import check_int
from lightning_tricks.composition import OptimizerStep, Summary, Touches, Trick, step_ledger
from lightning_tricks.functional.loss_scale import COLLAPSED_SCALE, OverflowStreak

__all__ = ["LossScaleMonitor"]


class LossScaleMonitor(Trick):
    """Show what the loss scaler of fp16 training does, and raise the alarm when it cannot keep up.

    Logs ``amp/scale``, ``amp/skipped`` (steps left out so far, over all optimizers) and ``amp/skip_rate`` (their share
    of all steps). Warns once when steps in a row are left out, or when the scale falls below one. Where the precision
    has no scaler (bf16, fp32), it says so at the start of fit and logs nothing.

    Args:
        alarm_after_skips: how many steps in a row are left out before the alarm, 1 or more.

    Raises:
        TypeError, ValueError: `alarm_after_skips` is no int of at least 1.

    Cost:
        One read of the scale on logged steps. Under a fused optimizer a few scalar operations on the device each step,
        and the alarm is raised at the next logged step.

    Reference:
        Micikevicius et al. (2018), "Mixed Precision Training", arXiv:1710.03740, section 3.2.

    Example:
        >>> from lightning_tricks import LossScaleMonitor
        >>> monitor = LossScaleMonitor(alarm_after_skips=20)
    """

    touches = Touches.NOTHING
    job = "monitor the loss scale"
    buys = "fp16: the scale, the steps it skipped, and an alarm when training is unhealthy"
    costs = "one scalar read on logged steps"

    def __init__(self, *, alarm_after_skips: int = 10) -> None:
        self.alarm_after_skips = check_int("alarm_after_skips", alarm_after_skips, minimum=1)
        self.reset()

    @override
    def reset(self) -> None:
        self._streaks: dict[int, OverflowStreak] = {}
        self._alarmed = False

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if loss_scaler(trainer) is None:
            rank_zero_warn(
                f"LossScaleMonitor has nothing to watch: precision {trainer.precision} has no loss scaler. "
                'bf16 and fp32 need none; drop the callback, or train with precision="16-mixed".'
            )

    @override
    def after_step(self, trainer: pl.Trainer, module: pl.LightningModule, step: OptimizerStep) -> None:
        if step.scaler is None:
            return
        streak = self._streaks.setdefault(step.index, OverflowStreak())
        streak.step(step.overflowed)
        if isinstance(streak.current, int) and streak.current >= self.alarm_after_skips:
            self._alarm(trainer, f"{streak.current} steps in a row overflowed")

    @override
    def metrics(self, trainer: pl.Trainer, stepped: Collection[int]) -> Mapping[str, float | Tensor]:
        scaler = loss_scaler(trainer)
        if scaler is None:
            return {}
        scale = scaler.get_scale()
        longest = max((int(streak.longest) for streak in self._streaks.values()), default=0)
        if longest >= self.alarm_after_skips:
            self._alarm(trainer, f"{longest} steps in a row overflowed")
        elif scale < COLLAPSED_SCALE:
            self._alarm(trainer, f"the loss scale fell to {scale}")
        ledgers = list(step_ledger(trainer))
        skipped = sum(ledger.skipped_overflow for ledger in ledgers)
        return {
            "amp/scale": scale,
            "amp/skipped": float(skipped),
            "amp/skip_rate": skipped / max(sum(ledger.total for ledger in ledgers), 1),
        }

    def _alarm(self, trainer: pl.Trainer, what: str) -> None:
        if self._alarmed:
            return
        self._alarmed = True
        rank_zero_warn(
            f"LossScaleMonitor: {what} (loss scale now {loss_scaler(trainer).get_scale()}). Gradients are likely inf "
            "or nan by themselves, so that no scale helps. Try a lower learning rate or a longer warmup, look for a "
            "division by zero, log or sqrt in the loss, and try bf16-mixed, whose range needs no scaling."
        )

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        scaler = loss_scaler(trainer)
        if scaler is None:
            return Summary(f"nothing: precision {trainer.precision} has no loss scaler", 'precision="16-mixed"')
        return Summary(f"loss scale {scaler.get_scale():g}, alarm after {self.alarm_after_skips} skips in a row")

    @override
    def state_dict(self) -> dict[str, Any]:
        streaks = {index: (int(one.current), int(one.longest)) for index, one in self._streaks.items()}
        return {"streaks": streaks, "alarmed": self._alarmed}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._streaks = {index: OverflowStreak(*counts) for index, counts in state_dict["streaks"].items()}
        self._alarmed = state_dict["alarmed"]
