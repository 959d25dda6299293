"""Averages of the weights as callbacks: exponential, or equal over the last part of the run."""

from collections.abc import Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_tricks._averaged_weights import AveragedWeights, with_aliases
from lightning_tricks._lightning import MisconfigurationException, is_fast_dev_run
from lightning_tricks._recomputed_statistics import recompute_batchnorm_
from lightning_tricks._validation import check_bool, check_duration, check_int, check_number
from lightning_tricks.composition.horizon import steps_if_needed
from lightning_tricks.composition.trick import key_of
from lightning_tricks.distributed.sharded_checkpoint import is_sharded_checkpoint, read_full_checkpoint
from lightning_tricks.functional.batchnorm_statistics import layers_with_statistics
from lightning_tricks.functional.schedules import resolve_duration
from lightning_tricks.functional.weight_averaging import decay_of_half_life, warmed_decay

__all__ = ["ExponentialMovingAverage", "StochasticWeightAverage", "load_averaged_weights"]


class ExponentialMovingAverage(AveragedWeights):
    """Keep an exponential moving average of the weights, validate with it, and end with it.

    The average is kept in fp32 beside the trainable parameters, on their device and shard, and moves with each applied
    step of the optimizer that a parameter belongs to. Validation in fit sees it, and whatever ends that, an error too,
    the weights of training come back bit for bit. After fit the module holds it. A checkpoint's ``state_dict`` is what
    validation scored, the average; a full checkpoint holds the weights to train on with beside it. Before the average
    begins, all these are the weights themselves.

    Args:
        decay: the weight of the average in each update, in (0, 1).
        half_life_steps: steps after which a step's weight in the average has halved, above 0; replaces `decay`.
        start_step: applied steps before the average begins, with the weights as they are then; 0 or more.
        decay_warmup: whether the n-th update takes at most (1 + n) / (10 + n) of the average.
        validate_with_average: whether validation in fit sees the average. If not, the checkpoint's ``state_dict`` is
            the weights of training, and the average stands beside.
        average_buffers: whether buffers of floating point, such as BatchNorm's statistics, are averaged too. Integer
            buffers are always the module's own.
        device: where to keep the average, such as "cpu"; None for the parameters' own device. Another one costs a copy
            of the weights, and a synchronisation, each step.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; a checkpoint's averaged weights are not
            parameters of the module (at the start of training).
        MisconfigurationException: beside a weight averaging of Lightning's own, or another one of this package.

    Cost:
        4 bytes a parameter; one read of the weights and one of the average a step. Validation costs no copy but under
        sharding and for 16-bit weights. Where only the device knows a step's verdict, one scalar read a step. After fit
        the weights of training are kept beside, for checkpoints and a further fit.

    Reference:
        Polyak, Juditsky (1992); Tarvainen, Valpola (2017), "Mean Teachers", arXiv:1703.01780, equation 2.

    Example:
        >>> from lightning_tricks import ExponentialMovingAverage
        >>> average = ExponentialMovingAverage(half_life_steps=500, start_step=1000)
    """

    topic = "ema"
    buys = "the model that averages the last thousands of steps: better than the last one, and less noisy to validate"
    costs = "4 bytes a parameter, one pass over the weights a step"

    def __init__(
        self,
        decay: float = 0.9999,
        *,
        half_life_steps: float | None = None,
        start_step: int = 0,
        decay_warmup: bool = True,
        validate_with_average: bool = True,
        average_buffers: bool = False,
        device: str | torch.device | None = None,
    ) -> None:
        self.decay = check_number("decay", decay, maximum=1.0, above=True)
        if decay == 1.0:
            raise ValueError(f"expected `decay` to be below 1.0, got {decay}: the average would never move")
        if half_life_steps is not None:
            half_life = check_number("half_life_steps", half_life_steps, above=True, finite=True)
            self.decay = decay_of_half_life(half_life)
            if not 0 < self.decay < 1:
                raise ValueError(f"expected `half_life_steps` to be a number of steps of a run, got {half_life_steps}")
        self.half_life_steps = half_life_steps
        self.start_step = check_int("start_step", start_step, minimum=0)
        self.decay_warmup = check_bool("decay_warmup", decay_warmup)
        self.validates = check_bool("validate_with_average", validate_with_average)
        super().__init__(average_buffers=average_buffers, device=device)

    @override
    def share(self, num_updates: int) -> float:
        return 1.0 - self._decay_at(num_updates)

    def _decay_at(self, num_updates: int) -> float:
        return warmed_decay(self.decay, num_updates) if self.decay_warmup else self.decay

    @override
    def begins_at(self, trainer: pl.Trainer, module: pl.LightningModule) -> int:
        return self.start_step

    @override
    def metrics(self, trainer: pl.Trainer, stepped: Collection[int]) -> dict[str, float | Tensor]:
        decays = {
            key_of("ema/decay", index): self._decay_at(part.updates - 1)
            for index, part in self._parts.items()
            if part.updates
        }
        return {**decays, **super().metrics(trainer, stepped)}


class StochasticWeightAverage(AveragedWeights):
    """Average the weights of the last part of the run with equal shares, and end with the average (SWA).

    Until the end nothing of training or validation changes; then the module gets the average, and the running
    statistics of its BatchNorm layers are taken anew with it, in one pass over the training data. The learning rate is
    left to a schedule: a constant or slowly falling one lets the weights move enough to be worth averaging.

    Args:
        start: applied steps before the average begins: an int is a number of steps, a float in [0, 1) a fraction of
            the run.
        every_n_steps: applied steps between the weights that are averaged, 1 or more.
        update_batchnorm: whether the running statistics of BatchNorm are taken anew. That calls `training_step` under
            `torch.no_grad`, its logging left out.
        total_steps: applied steps of the run, for a fraction of it; None: from the Trainer. Manual optimization must
            give it.
        device: where to keep the average; None for the parameters' own device.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; the average would begin after the run.
        MisconfigurationException: the length of the run cannot be known; BatchNorm in manual optimization, where
            `training_step` steps; beside a weight averaging of Lightning's own, or another one of this package.

    Cost:
        4 bytes a parameter; with BatchNorm one more forward pass over the training data.

    Reference:
        Izmailov et al. (2018), "Averaging Weights Leads to Wider Optima and Better Generalization", arXiv:1803.05407.

    Example:
        >>> from lightning_tricks import StochasticWeightAverage
        >>> average = StochasticWeightAverage(0.8, every_n_steps=10)
    """

    topic = "swa"
    buys = "the mean of the last part of the run, in a wide optimum"
    costs = "4 bytes a parameter; with BatchNorm one more forward pass over the data"

    def __init__(
        self,
        start: int | float = 0.75,
        *,
        every_n_steps: int = 1,
        update_batchnorm: bool = True,
        total_steps: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        self.start_after = check_duration("start", start)
        self.every_n_steps = check_int("every_n_steps", every_n_steps, minimum=1)
        self.update_batchnorm = check_bool("update_batchnorm", update_batchnorm)
        self.total_steps = None if total_steps is None else check_int("total_steps", total_steps, minimum=1)
        super().__init__(average_buffers=False, device=device)

    @override
    def share(self, num_updates: int) -> float:
        return 1.0 / (num_updates + 2)  # the average began with the first

    @override
    def takes(self, steps_since_begin: int) -> bool:
        return steps_since_begin % self.every_n_steps == 0

    @override
    def begins_at(self, trainer: pl.Trainer, module: pl.LightningModule) -> int:
        if self.update_batchnorm and not module.automatic_optimization and layers_with_statistics(module):
            raise MisconfigurationException(
                f"{type(self).__name__} cannot take the statistics of BatchNorm anew, since {type(module).__name__} "
                "optimizes manually and would step: pass update_batchnorm=False"
            )
        total = self.total_steps
        if total is None:
            total = steps_if_needed(trainer, module, "start", self.start_after, by=self)
        if total is None:
            return int(self.start_after)
        start = resolve_duration(self.start_after, total)
        if start >= total and not is_fast_dev_run(trainer):
            raise ValueError(
                f"expected `start` to be before the end of the run, got start={self.start_after} and "
                f"total_steps={total}: begin earlier, give a fraction of the run, or train longer"
            )
        return start

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if self._final and self.update_batchnorm:
            statistics = {id(one) for layer in layers_with_statistics(pl_module) for one in layer.buffers()}
            buffers = pl_module.named_buffers()
            self._raw_buffers = {name: one.clone() for name, one in buffers if id(one) in statistics}
            recompute_batchnorm_(trainer, pl_module)

    @override
    def metrics(self, trainer: pl.Trainer, stepped: Collection[int]) -> dict[str, float | Tensor]:
        numbers = {
            key_of("swa/num_averaged", index): float(part.updates + 1)
            for index, part in self._parts.items()
            if part.average is not None
        }
        return {**numbers, **super().metrics(trainer, stepped)}


def load_averaged_weights(module: nn.Module, path: str | PathLike[str], *, weights_only: bool = True) -> None:
    """Load the average out of a checkpoint into a module, without a Trainer.

    Args:
        module: the LightningModule that was trained, or another module with its names and shapes.
        path: a file, full or of weights alone, or a folder of `FSDP2Strategy`. A file of weights alone does not say
            what they are; it is loaded as it is.
        weights_only: whether to refuse what is neither tensor nor plain value, as `torch.load` does. False unpickles
            any object, such as hyperparameters that are classes: for files that you trust.

    Raises:
        FileNotFoundError: nothing is there.
        TypeError: `module` is none.
        ValueError: it is no checkpoint of Lightning, or a full one without an average: of a run without one, or from
            before it began.
        RuntimeError: its names or shapes are not the module's, as from `torch.nn.Module.load_state_dict`.

    Example:
        >>> from lightning_tricks import load_averaged_weights
        >>> load_averaged_weights(nn.Linear(2, 2), "no_such.ckpt")
        Traceback (most recent call last):
        FileNotFoundError: [Errno 2] No such file or directory: 'no_such.ckpt'
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected `module` to be a torch.nn.Module, got {module!r}")
    place = Path(path)
    if is_sharded_checkpoint(place):
        checkpoint = read_full_checkpoint(place, weights_only=weights_only)
    else:
        checkpoint = torch.load(place, map_location="cpu", weights_only=weights_only)
    if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint:
        raise ValueError(f'expected a checkpoint of Lightning, with "state_dict", got {path}, which has none')
    state = dict(checkpoint["state_dict"])
    if "callbacks" in checkpoint:
        state |= with_aliases(module, _average_of(checkpoint["callbacks"], place))
    module.load_state_dict(state)


def _average_of(callbacks: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    # By their form: a class of the user's own has another name.
    entries = [one for one in callbacks.values() if isinstance(one, Mapping) and ("parts" in one or [*one] == ["raw"])]
    if not any(entry.get("raw") or entry.get("average") for entry in entries):
        names = f"{ExponentialMovingAverage.__name__} or {StochasticWeightAverage.__name__}"
        reason = "before the average began" if entries else f"without {names}"
        raise ValueError(f"expected a checkpoint with averaged weights, but {path} has none: it was written {reason}")
    return {name: tensor for entry in entries for name, tensor in entry.get("average", {}).items()}
