"""Schedule-free optimizers in a Trainer: in training mode while training, in evaluation mode wherever it counts."""

import functools
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks._lightning import MisconfigurationException, callbacks_that_copy_the_module, is_fitting
from lightning_tricks._scored_weights import show_in_state_dict
from lightning_tricks.composition import Summary, Touches, Trick
from lightning_tricks.distributed.full_state import copy_from_whole_, gather_state_dict
from lightning_tricks.distributed.sharding import reshard_
from lightning_tricks.functional.patching import Removable
from lightning_tricks.functional.schedule_free import (
    evaluation_weights,
    is_schedule_free,
    show_evaluation_weights_,
    train_on_,
)
from lightning_tricks.functional.shards import local_tensor, part_like

__all__ = ["ScheduleFree"]


class ScheduleFree(Trick):
    """Switch the optimizers of the package `schedulefree` between training and evaluation.

    The module's `configure_optimizers` returns them (``schedulefree.AdamWScheduleFree``, ``SGDScheduleFree``, ...).
    Validation in fit, the end of fit and every checkpoint's ``state_dict`` have the averaged weights that such an
    optimizer means; training goes on with those that it steps on, which come back bit for bit, after an error too, and
    which a full checkpoint holds beside. BatchNorm's running statistics are those of training, as the package's
    documentation warns.

    Raises:
        MisconfigurationException: the module has no such optimizer; ``strategy="zero1"``, whose optimizers are torch's
            own around them; beside an average of the weights.

    Cost:
        A copy of the weights during validation and while saving.

    Reference:
        Defazio et al. (2024), "The Road Less Scheduled", arXiv:2405.15682.

    Example:
        >>> from lightning_tricks import ScheduleFree
        >>> switch = ScheduleFree()
    """

    touches = Touches.WEIGHTS
    job = "average the weights"
    buys = "schedule-free AdamW and SGD, validated and saved with the weights that they mean"
    costs = "a copy of the weights during validation and while saving"

    def __init__(self) -> None:
        self._undo: list[Removable] = []
        self.reset()

    @override
    def rivals(self, trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
        return callbacks_that_copy_the_module(trainer)

    @override
    def reset(self) -> None:
        self._optimizers: list[Optimizer] = []
        self._held: list[list[Tensor]] = []
        self._saved: dict[str, Tensor] = {}
        self._running = False
        self._started = False  # until the next fit, whatever ended this one
        self._final = False

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._remove_patch()
        self._held, self._running, self._started, self._final = [], False, False, False
        self._optimizers = [optimizer for optimizer in trainer.optimizers if is_schedule_free(optimizer)]
        if not self._optimizers:
            names = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)
            raise MisconfigurationException(
                f"{type(self).__name__} expected an optimizer of the package schedulefree, which has train() and "
                f"eval(), from {type(pl_module).__name__}.configure_optimizers under "
                f"{type(trainer.strategy).__name__}, got {names}: return schedulefree.AdamWScheduleFree(...), or drop "
                f'{type(self).__name__}. The Closure variants need no switch; under "zero1" no optimizer has one'
            )
        for optimizer in self._optimizers:
            optimizer.train()  # type: ignore[attr-defined]  # for what steps before training, as LearningRateFinder
        self._undo.append(show_in_state_dict(trainer, pl_module, functools.partial(_scored, self, pl_module)))

    @override
    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        parameters = dict(module.named_parameters())
        for optimizer in self._optimizers:
            optimizer.train()  # type: ignore[attr-defined]
        for name, raw in self._saved.items():
            if name in parameters:
                copy_from_whole_(parameters[name].detach(), raw)
        self._saved, self._running, self._started = {}, True, True

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._running and is_fitting(trainer):
            self._show(pl_module)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._train_on(pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show(pl_module)
        self._final = True

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._running = False
        self._remove_patch()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._running = False
        self._train_on(pl_module)  # what checkpoints show stays patched: one may be written because of the exception

    def _show(self, module: pl.LightningModule) -> None:
        reshard_(module)
        self._held = []
        for optimizer in self._optimizers:
            self._held.append(show_evaluation_weights_(optimizer))

    def _train_on(self, module: pl.LightningModule) -> None:
        if self._final or not self._held:
            return
        reshard_(module)  # an evaluation may have left it gathered, with copies of the other weights
        for optimizer, held in zip(self._optimizers, self._held, strict=False):
            train_on_(optimizer, held)
        self._held = []

    def _remove_patch(self) -> None:
        while self._undo:
            self._undo.pop().remove()

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        return Summary(", ".join(type(optimizer).__name__ for optimizer in self._optimizers))

    # Checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"raw": self._saved}  # before training starts, of the checkpoint that it resumes from

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._running:  # a rollback brings weights and optimizers back by itself
            self._saved = dict(state_dict["raw"])

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if not self._started:
            return
        parameters = {id(one): name for name, one in pl_module.named_parameters()}
        raw: dict[str, Tensor] = {}
        for place, optimizer in enumerate(self._optimizers):
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            held = self._held[place] if self._held else [local_tensor(one.detach()) for one in trained]
            raw |= {parameters[id(one)]: part_like(part, one) for one, part in zip(trained, held, strict=True)}
            saved = checkpoint["optimizer_states"][trainer.optimizers.index(optimizer)]
            for group in saved.get("param_groups", ()):  # only rank 0 may have them
                group["train_mode"] = False  # as the weights that it is saved beside
        checkpoint["callbacks"][self.state_key] = {"raw": gather_state_dict(raw)}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_optimizers": [], "_held": []}


def _scored(switch: ScheduleFree, module: pl.LightningModule) -> dict[str, Tensor]:
    """What a checkpoint shows in the place of the weights that training steps on."""
    if not switch._started or switch._held:
        return {}
    reshard_(module)
    shown = {}
    for optimizer in switch._optimizers:
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        with evaluation_weights(optimizer):
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if id(parameter) in trained:
                    shown[name] = parameter.detach().clone()
    return shown
