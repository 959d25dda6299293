"""Gradient accumulation whose step is that of the large batch."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_tricks._batchnorm import warn_of_batchnorm
from lightning_tricks._lightning import (
    MisconfigurationException,
    batches_begun,
    changes_batch_on_device,
    estimate_steps_by,
    has_static_graph,
    is_last_batch,
    is_last_epoch,
    is_training_batch,
    other_accumulation,
    steer_accumulation,
    step_without_a_batch,
    takes_loader_iter,
    train_batches_per_epoch,
    unprocessed_batches,
)
from lightning_tricks._open_window import mean_of_ranks, restore_window_, save_window
from lightning_tricks._validation import check_bool
from lightning_tricks.composition import (
    OptimizerStep,
    Summary,
    Touches,
    Trick,
    current_step,
    current_window,
    step_ledger,
)
from lightning_tricks.composition.horizon import optimizer_steps_of_run
from lightning_tricks.distributed.open_gradients import take_open_gradients_
from lightning_tricks.distributed.scalars import RankReduction
from lightning_tricks.functional.accumulation import (
    AccumulationSchedule,
    discard_gradient_of,
    scale_gradient_of,
)
from lightning_tricks.functional.batch_weights import check_weight, resolve_weigher
from lightning_tricks.functional.clipping import scale_gradients_
from lightning_tricks.functional.patching import Removable, patch_

__all__ = ["GradientAccumulation"]


class GradientAccumulation(Trick):
    """Step once in so many batches, with the gradient that their union has as one large batch on all ranks.

    For a loss that is a mean, over samples or over what `weigh_by` counts. The batches of a window (micro-batches) may
    differ in size, also from rank to rank; one that counts nothing, or whose `training_step` returns None (in one
    process), changes nothing; a window that is shorter than the others is weighted rightly. Ranks communicate gradients
    once a window. In the place of ``Trainer(accumulate_grad_batches=...)``, beside which it is refused.

    Logs ``accumulation/loss``: the window's weighted mean over all ranks, one point a step.

    A checkpoint that is written inside of a window holds its gradients, and a resumed run goes on in it.

    Args:
        steps: micro-batches a window, 1 or more; or a mapping to that from the number of applied steps, such as
            ``{0: 1, 1000: 4}`` for a warmup of the batch size, or ``{"epoch": {0: 1, 5: 4}}`` from the epoch. A window
            keeps the size that it began with.
        weigh_by: what a batch counts in the mean: ``"samples"``; ``"batches"``, each the same; a function of the batch
            that returns a number or a tensor with one element, such as
            ``lambda batch: (batch["labels"] != -100).sum()``; or the import path of one.
        carry_over: whether a window goes on in the next epoch. If not, a step on an epoch's last batch ends it. One
            that is open when the fit ends is stepped with what it has.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; while training, a weight is negative or
            not finite, or a batch's samples cannot be counted.
        MisconfigurationException: at the start of fit, in manual optimization, beside Lightning's own accumulation,
            LBFGS or ``DDPStrategy(static_graph=True)``; or where batches cannot be weighed.

    Cost:
        One multiplication of the gradients a window if its micro-batches differ. With several ranks one number is
        summed a window, unless it is by ``"batches"``. A function of the batch is called before the batch is moved
        to the device; where a hook of the module or the data module changes it there, afterwards, at one scalar read a
        batch. A checkpoint inside of a window is larger by the gradients.

    Reference:
        Goyal et al. (2017), "Accurate, Large Minibatch SGD", arXiv:1706.02677, section 2.3 and 3.

    Example:
        >>> from lightning_tricks import GradientAccumulation
        >>> accumulation = GradientAccumulation(8, weigh_by=lambda batch: (batch["labels"] != -100).sum())
    """

    touches = Touches.GRADIENT_WEIGHTS
    job = "accumulate gradients"
    buys = "the step of a batch that does not fit: exact for short windows, unequal batches and mean losses over tokens"
    costs = "one number summed over the ranks a step, and a multiplication of the gradients where batches differ"
    reads_loss = True
    rewinds = False  # the conductor's window does

    def __init__(
        self,
        steps: int | Mapping[Any, Any] = 4,
        *,
        weigh_by: str | Callable[[Any], Any] = "samples",
        carry_over: bool = False,
    ) -> None:
        self.steps = steps
        self.schedule = AccumulationSchedule.parse(steps)
        self.weigh_by = weigh_by
        self._weigh = resolve_weigher(weigh_by)
        self.carry_over = check_bool("carry_over", carry_over)
        self._undo: list[Removable] = []
        self._discarding: list[Any] = []
        self.reset()

    @override
    def reset(self) -> None:
        self._trainer: pl.Trainer | None = None
        self._number = -1  # of the window
        self._batch: int | None = None  # how many the run has begun, with the one that training last saw
        self._begun = False
        self._seen = 0  # micro-batches of the window so far, the current one included
        self._stepped = False  # whether the window ended with the current batch
        self._size = self.schedule.at(0, 0)
        self._reference: float | None = 1.0 if self._weigh is None else None
        self._weighed: float | None = None
        self._contributed = False  # whether the current batch added to the gradients, or began to
        self._ends_now = False
        self._total: RankReduction | None = None
        self._loss: Tensor | None = None
        self._to_resume: dict[str, Any] | None = None

    # Before the run

    @override
    def rivals(self, trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
        return other_accumulation(trainer)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._remove()
        self._trainer = None
        self._undo.append(patch_(trainer, "accumulate_grad_batches", self.schedule.at(0, 0)))
        self._undo.append(estimate_steps_by(trainer, optimizer_steps_of_run))

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        name = type(self).__name__
        if not pl_module.automatic_optimization:
            raise MisconfigurationException(
                f"{name} decides when the Trainer steps, but {type(pl_module).__name__} optimizes manually and steps "
                "by itself: accumulate there, or set automatic_optimization = True"
            )
        if self.schedule.largest == 1:
            return
        if has_static_graph(trainer):
            raise MisconfigurationException(
                f"{name} expected DDP without static_graph=True, which fails inside of torch with several "
                "micro-batches (PL#20395): drop one of the two"
            )
        if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
            raise MisconfigurationException(
                f"{name} expected an optimizer that looks at a batch once, got LBFGS, which evaluates the last batch "
                "of a window several times and the others never again"
            )
        if self._weigh is not None and takes_loader_iter(pl_module):
            raise MisconfigurationException(
                f"{name} weighs a batch before training_step sees it, but {type(pl_module).__name__}.training_step "
                'takes dataloader_iter and fetches its own: take the batch, or pass weigh_by="batches"'
            )

    @override
    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._trainer, self._begun, self._batch = trainer, False, None
        self._undo += steer_accumulation(trainer, is_open=self._is_open, is_first=self._is_first)
        if self._weigh is not None and not changes_batch_on_device(trainer, module):
            move = functools.partial(_weigh_then_move, self, trainer, trainer.strategy.batch_to_device)
            self._undo.append(patch_(trainer.strategy, "batch_to_device", move))
        self._resume(trainer, module)
        batches = train_batches_per_epoch(trainer)
        if batches < self.schedule.largest and not self.carry_over:
            rank_zero_warn(
                f"{type(self).__name__}: an epoch has {batches} batch(es), fewer than the {self.schedule.largest} of a "
                "window, so that each epoch's end is a step. Pass carry_over=True to accumulate over it"
            )
        if self.schedule.largest > 1:
            warn_of_batchnorm(self, module)

    # Each batch

    @override
    def weigh(self, batch: Any) -> float | None:
        return None if self._weigh is None else check_weight(self._weigh(batch))

    def take_weight_of(self, batch: Any) -> None:
        """Weigh the batch that training is about to see."""
        self._weighed = self.weigh(batch)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._contributed = False
        self._end_discarding()  # of a backward that failed
        window = current_window(trainer)
        if self._begun:  # but never trained on, since a hook skipped the rest of the epoch
            self._seen -= 1
        self._batch = batches_begun(trainer)
        if window.number != self._number:
            self._number, self._seen, self._stepped = window.number, 0, False
            self._size = self.schedule.at(self._applied(trainer), trainer.current_epoch)
            trainer.accumulate_grad_batches = self._size
        self._seen += 1
        self._begun = True
        if self._weigh is None:
            return
        weight = self.weigh(batch) if self._weighed is None else self._weighed
        assert weight is not None
        self._weighed = None
        window.weight = weight
        if self._reference is None:
            self._reference = RankReduction(weight, trainer.strategy.root_device, "max").value() or None
        if weight and self._reference is not None and not self._alone(trainer):
            window.gradient_share = weight / self._reference
        if trainer.world_size > 1 and not self._is_open():
            # None from training_step is an error there, so that each batch will have counted.
            self._total = RankReduction(window.weight_sum + weight, trainer.strategy.root_device)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._begun = False

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._contributed = True
        if not loss.requires_grad:
            return  # torch says so in a moment
        window = current_window(trainer)
        if window.weight == 0:
            self._discarding = discard_gradient_of(loss, pl_module.parameters())
        else:
            scale_gradient_of(loss, window.gradient_share)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_discarding()

    def _end_discarding(self) -> None:
        while self._discarding:
            self._discarding.pop().remove()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        window, step = current_window(trainer), current_step(trainer, optimizer)
        ranks = trainer.world_size
        if self._total is not None:
            window.total_weight = self._total.value()
            self._total = None
        total = window.weight_sum * ranks if window.total_weight is None else window.total_weight
        step.weight = total
        self._loss = step.loss = window.mean_loss(self._size, ranks)
        if total == 0 or self._reference is None:
            step.leave_empty()
            return
        if self._alone(trainer):
            return
        factor = self._reference * self._size * ranks / total
        if factor != 1.0:
            scale_gradients_(step.gradients(), factor)

    @override
    def after_step(self, trainer: pl.Trainer, module: pl.LightningModule, step: OptimizerStep) -> None:
        self._stepped = True

    def _alone(self, trainer: pl.Trainer) -> bool:
        """Whether the window is one batch of one rank, beside which there is nothing to weigh."""
        return self._size == 1 and trainer.world_size == 1

    def _is_first(self) -> bool:
        return self._seen == 1

    def _is_open(self) -> bool:
        """Whether the window goes on after the current batch."""
        trainer = self._trainer
        assert trainer is not None
        if self._ends_now:
            return False
        if self._batch is None:  # of a run that is resumed, before its first batch
            return self._seen > 0 and not self._stepped
        if self._batch != batches_begun(trainer):  # the loader gave None, on which nobody trains
            return True
        if self._stepped or self._seen >= self._size:
            return False
        return not is_last_batch(trainer) or (self.carry_over and not is_last_epoch(trainer))

    def _applied(self, trainer: pl.Trainer) -> int:
        # Where the size does not depend on it, a verdict that only the device knows need not be read.
        return 0 if len(self.schedule.steps) == 1 or self.schedule.by_epoch else step_ledger(trainer)[0].applied

    # What others ask

    @property
    @override
    def counts(self) -> str | None:
        return "tokens" if callable(self.weigh_by) else self.weigh_by if self.weigh_by == "samples" else None

    @override
    def count_steps(self, batches: int, epochs: int) -> int | None:
        return self.schedule.num_windows(batches, epochs, carry_over=self.carry_over)

    @override
    def metrics(self, trainer: pl.Trainer, stepped: Any) -> Mapping[str, float | Tensor]:
        return {} if self._loss is None else {"accumulation/loss": mean_of_ranks(trainer, self._loss)}

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        unit = "epoch" if self.schedule.by_epoch else "step"
        sizes = [f"{number} from {unit} {key} on" for key, number in self.schedule.steps.items()]
        size = sizes if len(sizes) > 1 else [str(self.schedule.largest)]
        weigh_by = self.weigh_by if isinstance(self.weigh_by, str) else getattr(self.weigh_by, "__name__", "a function")
        end = "carried over the epoch's end" if self.carry_over else "ended by the epoch"
        return Summary(f"{', '.join(size)} batch(es) a step, weighed by {weigh_by}, {end}")

    # The end, and checkpoints

    @override
    def finish(self, trainer: pl.Trainer, module: pl.LightningModule, *, training_ends: bool) -> None:
        is_open = self._seen > 0 and not self._stepped and current_window(trainer).has_loss
        if not is_open or (self.carry_over and not training_ends):
            return
        # Training was stopped inside of a window, or the epoch's last batch was none: step with what there is.
        take_open_gradients_(module)
        if self._weigh is not None and trainer.world_size > 1:
            self._total = RankReduction(current_window(trainer).weight_sum, trainer.strategy.root_device)
        self._ends_now = True
        try:
            step_without_a_batch(trainer)
        finally:
            self._ends_now = False

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._remove()
        self._trainer = None

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._remove()

    def _remove(self) -> None:
        self._end_discarding()
        while self._undo:
            self._undo.pop().remove()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"seen": 0, "stepped": self._stepped, "size": self._size, "reference": self._reference}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seen, self._stepped = state_dict["seen"], state_dict["stepped"]
        self._size = state_dict["size"]
        if self._weigh is not None:
            self._reference = state_dict["reference"]
        self._to_resume = state_dict.get("window")

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        unfinished = unprocessed_batches(trainer)
        completed = self._seen - unfinished
        if self._trainer is None or completed <= 0 or self._stepped:
            return
        if (unfinished and self._contributed) or (trainer.interrupted and trainer.world_size > 1):
            rank_zero_warn(
                f"{type(self).__name__}: this checkpoint lacks the gradients of the {completed} micro-batch(es) of the "
                "window that is open: it was asked for in the middle of a batch, or after an error on one of several "
                "ranks. A run that resumes from it begins a new window"
            )
            return
        window = save_window(trainer, pl_module)
        checkpoint["callbacks"][self.state_key] |= {"seen": completed, "window": window}

    def _resume(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        window, self._to_resume = self._to_resume, None
        if window is not None:
            restore_window_(trainer, module, window)
            self._number = current_window(trainer).number
            trainer.accumulate_grad_batches = self._size


# Functions of the module, not closures: they end up inside of objects that get pickled and copied.


def _weigh_then_move(
    accumulation: GradientAccumulation,
    trainer: pl.Trainer,
    move: Callable[..., Any],
    batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Weigh the batch where it still is on the host, so that nobody waits for the device."""
    if is_training_batch(trainer) and batch is not None:
        accumulation.take_weight_of(batch)
    return move(batch, *args, **kwargs)
