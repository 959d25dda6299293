"""A monitor of updates that are lost to rounding."""

from collections.abc import Collection, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks._validation import check_int
from lightning_tricks.composition import OptimizerStep, Summary, Touches, Trick, current_step
from lightning_tricks.composition.trick import key_of
from lightning_tricks.functional.update_rounding import copy_of, vanished_and_due

__all__ = ["VanishingUpdateMonitor"]

_ALARM_ABOVE = 0.5


class VanishingUpdateMonitor(Trick):
    """Show which share of the weights' updates their own dtype rounds away, and warn when it is most of them.

    In ``precision="bf16-true"`` an update below about 1/500 of its weight is lost. Looked at are weights with a
    gradient that is not zero, in groups whose learning rate is not zero.

    Logs ``update/vanished``, from 0 to 1, with the first logged step from each look on; for optimizer i > 0 with ``/i``
    behind. Warns once when it is above a half.

    Args:
        every_n_steps: optimizer steps from one look to the next, 1 or more; the first step is looked at.

    Raises:
        TypeError, ValueError: `every_n_steps` is no int of at least 1.

    Cost:
        On the steps that are looked at a copy of the weights, and a few operations a parameter; no synchronisation but
        on logged steps.

    Reference:
        Micikevicius et al. (2018), arXiv:1710.03740, section 3.1; Zamirai et al. (2020), arXiv:2010.06192.

    Example:
        >>> from lightning_tricks import VanishingUpdateMonitor
        >>> monitor = VanishingUpdateMonitor(every_n_steps=500)
    """

    touches = Touches.GRADIENTS_READ
    job = "monitor updates that are rounded away"
    buys = "the share of updates that 16-bit weights are too coarse for"
    costs = "a copy of the weights, every 200 steps"

    def __init__(self, *, every_n_steps: int = 200) -> None:
        self.every_n_steps = check_int("every_n_steps", every_n_steps, minimum=1)
        self.reset()

    @override
    def reset(self) -> None:
        self._steps: dict[int, int] = {}
        self._before: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._counts: dict[int, tuple[Tensor, bool | Tensor]] = {}
        self._warned = False

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        step = current_step(trainer, optimizer)
        if self._steps.get(step.index, 0) % self.every_n_steps:
            return
        moving = {id(p) for group in optimizer.param_groups if _may_move(group.get("lr", 1.0)) for p in group["params"]}
        parameters = [one for one in step.parameters() if id(one) in moving]
        if parameters:
            self._before[step.index] = parameters, copy_of(parameters)

    @override
    def after_step(self, trainer: pl.Trainer, module: pl.LightningModule, step: OptimizerStep) -> None:
        self._steps[step.index] = self._steps.get(step.index, 0) + 1
        if step.index not in self._before:
            return
        parameters, before = self._before.pop(step.index)
        if step.applied is False:
            self._steps[step.index] -= 1  # the next one is looked at
            return
        kept = [(old, new, new.grad) for old, new in zip(before, parameters, strict=True) if new.grad is not None]
        if kept:
            old, new, gradients = zip(*kept, strict=True)
            self._counts[step.index] = vanished_and_due(old, new, gradients), step.applied

    @override
    def metrics(self, trainer: pl.Trainer, stepped: Collection[int]) -> Mapping[str, float | Tensor]:
        values: dict[str, float | Tensor] = {}
        for index in stepped:
            if index not in self._counts:
                continue
            counts, applied = self._counts.pop(index)
            vanished, due = counts.tolist()
            if due and bool(applied):
                values[key_of("update/vanished", index)] = share = vanished / due
                self._warn(share, trainer)
        return values

    def _warn(self, share: float, trainer: pl.Trainer) -> None:
        if self._warned or share <= _ALARM_ABOVE:
            return
        self._warned = True
        dtypes = sorted({str(one.dtype).removeprefix("torch.") for one in trainer.lightning_module.parameters()})
        rank_zero_warn(
            f"VanishingUpdateMonitor: {share:.0%} of the weights' updates are rounded away by {', '.join(dtypes)}. "
            'Keep the weights in fp32 and compute in 16 bits (precision="bf16-mixed"), round stochastically, or, if '
            "the weights are in fp32, raise the learning rate."
        )

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        dtypes = sorted({str(one.dtype).removeprefix("torch.") for one in trainer.lightning_module.parameters()})
        return Summary(f"weights in {', '.join(dtypes)}, every {self.every_n_steps} steps")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "warned": self._warned}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps = dict(state_dict["steps"])
        self._warned = state_dict["warned"]


def _may_move(rate: float | Tensor) -> bool:
    return isinstance(rate, Tensor) or rate != 0.0  # a tensor is not read
