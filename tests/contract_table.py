"""The table of the contract: one row a trick. A new trick adds its row here and its own tests beside."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)

import lightning_tricks as lt
from tests.models import ManualNet, Net, trainer

NUM_TURNS = 5
STRATEGIES = ("ddp", "zero1", "fsdp2", "fsdp2 by hand")


@dataclass(frozen=True)
class Row:
    """What the contract has to know of a trick.

    Args:
        name: the public class.
        acting: keyword arguments with which it does something to the runs of the contract.
        neutral: keyword arguments with which it does nothing; None where there are none.
        manual: arguments that manual optimization needs besides.
        refusals: what cannot be supported: each a function that runs a fit, and words of its error.
        same_weights: whether the weights after an acting run are those of a run without the trick, bit for bit.
        module: arguments that the modules of its runs take.
        across_ranks: how far a run of two processes may be from one of one.
        accumulates: batches a step when it acts, for a trick that accumulates by itself.
        by_ranks: keys of its logs that depend on how many ranks share a global batch.
        refused: words of the modes and strategies that it refuses at the start of fit.
        averages: whether checkpoints hold an average of the weights in their place, and the weights beside.
        config: arguments for a YAML, where those of `acting` cannot stand in one.
        turn: for one of several rows that differ in a formula alone: each takes its share of the modes, by turns.
    """

    name: str
    acting: dict[str, Any]
    neutral: dict[str, Any] | None
    manual: dict[str, Any] = field(default_factory=dict)
    refusals: tuple[tuple[Callable[[], Any], str], ...] = ()
    same_weights: bool = False
    module: dict[str, Any] = field(default_factory=dict)
    across_ranks: float = 1e-6
    accumulates: int = 1
    by_ranks: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    averages: bool = False
    config: dict[str, Any] | None = None
    turn: int | None = None

    def takes(self, mode: int) -> bool:
        return self.turn is None or mode % NUM_TURNS == self.turn

    def refuses(self, mode: str) -> bool:
        return any(word in mode for word in self.refused)

    def runs_under(self, strategy: str) -> bool:
        """Whether the row is run under a strategy; of those that take turns, one is."""
        turn = self.turn is None or strategy == "one process" or STRATEGIES.index(strategy) == self.turn
        return turn and not self.refuses(strategy)

    def num_steps(self, num_batches: int) -> int:
        return -(-num_batches // self.accumulates)

    def net(self, **options: Any) -> Net:
        return Net(**self.module, **options)

    def build(self, kind: str, *, manual: bool = False) -> lt.Trick:
        arguments = getattr(self, kind) | (self.manual if manual else {})
        return getattr(lt, self.name)(**arguments)


def _fit(*callbacks: Callback, module: Net | None = None, **options: Any) -> Callable[[], Any]:
    from tests.models import loader

    return lambda: trainer(*callbacks, **options).fit(module or Net(), loader())


class ClipsByItself(Net):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class SchedulesByItself(Net):
    def configure_optimizers(self) -> Any:
        import torch

        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class FetchesByItself(Net):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class LbfgsNet(Net):
    def configure_optimizers(self) -> Any:
        import torch

        return torch.optim.LBFGS(self.parameters())


class LinearNet(Net):
    def __init__(self) -> None:
        super().__init__()
        from torch import nn

        self.net = nn.Linear(8, 1)


def half_of(step: int) -> float:
    return 0.5 if step % 2 else 0.1


MANUAL = ("manual", "two optimizers")

ROWS = (
    Row(
        "GradientAccumulation",
        acting={"steps": 2},
        neutral={"steps": 1},
        accumulates=2,
        refused=(*MANUAL, "accumulation"),
        refusals=(
            (_fit(lt.GradientAccumulation(2), accumulate_grad_batches=2), r"accumulate_grad_batches=2"),
            (_fit(lt.GradientAccumulation(2), GradientAccumulationScheduler({0: 2})), r"GradientAccumulationSch"),
            (_fit(lt.GradientAccumulation(2), lt.GradientAccumulation(4)), r"GradientAccumulation"),
            (_fit(lt.GradientAccumulation(2), module=ManualNet()), r"ManualNet optimizes manually"),
            (_fit(lt.GradientAccumulation(2), module=LbfgsNet()), r"LBFGS"),
            (_fit(lt.GradientAccumulation(2), module=FetchesByItself()), r"dataloader_iter"),
        ),
    ),
    Row(
        "EarlyGradientRelease",
        acting={},
        neutral={},
        same_weights=True,
        refusals=((_fit(lt.EarlyGradientRelease(), lt.EarlyGradientRelease()), r"EarlyGradientRelease"),),
    ),
    Row(
        "MicroBatching",
        acting={"max_size": 3},
        neutral={"max_size": 1000},
        refused=MANUAL,
        refusals=(
            (_fit(lt.MicroBatching(2), lt.MicroBatching(4)), r"MicroBatching"),
            (_fit(lt.MicroBatching(2), module=ManualNet()), r"ManualNet optimizes manually"),
            (_fit(lt.MicroBatching(), module=FetchesByItself()), r"dataloader_iter"),
        ),
    ),
    Row(
        "GradientNoiseScaleMonitor",
        acting={"decay": 0.5},
        by_ranks=("noise/scale",),  # a micro-batch is a rank's
        neutral={},
        same_weights=True,
        refused=MANUAL,
        refusals=(
            (_fit(lt.GradientNoiseScaleMonitor(), lt.GradientNoiseScaleMonitor()), r"GradientNoiseScaleMonitor"),
            (_fit(lt.GradientNoiseScaleMonitor(), module=ManualNet()), r"ManualNet optimizes manually"),
        ),
    ),
    Row(
        "GradientNormClipping",
        acting={"max_norm": 0.05},
        neutral={"max_norm": float("inf")},
        refusals=(
            (_fit(lt.GradientNormClipping(), gradient_clip_val=1.0), r"gradient_clip_val=1.0"),
            (_fit(lt.GradientNormClipping(), lt.GradientValueClipping(1.0)), r"GradientValueClipping"),
            (_fit(lt.GradientNormClipping(), module=ClipsByItself()), r"configure_gradient_clipping"),
            (_fit(lt.GradientNormClipping({1: 1.0})), r"got index 1"),
        ),
    ),
    Row(
        "GradientValueClipping",
        acting={"max_value": 0.01},
        neutral={"max_value": 1e30},
        refusals=(
            (_fit(lt.GradientValueClipping(1.0), gradient_clip_val=1.0), r"gradient_clip_val=1.0"),
            (_fit(lt.GradientValueClipping(1.0), module=ClipsByItself()), r"configure_gradient_clipping"),
        ),
    ),
    Row(
        "AdaptiveGradientClipping",
        acting={"clip_factor": 0.01},
        neutral={"clip_factor": 1e30},
        refusals=(
            (_fit(lt.AdaptiveGradientClipping(), gradient_clip_val=1.0), r"gradient_clip_val=1.0"),
            (_fit(lt.AdaptiveGradientClipping(), lt.GradientNormClipping()), r"AdaptiveGradientClipping"),
            (_fit(lt.AdaptiveGradientClipping(exclude="decoder.*")), r"(?s)decoder.*LayerNorm \(3\)"),
            (_fit(lt.AdaptiveGradientClipping(exclude="net*")), r"leaves none"),
        ),
    ),
    Row(
        "ZScoreGradientClipping",
        acting={"z_threshold": 0.1, "warmup_steps": 1, "max_norm": 0.5},
        neutral={"z_threshold": 1e9},
        refusals=(
            (_fit(lt.ZScoreGradientClipping(), gradient_clip_val=1.0), r"gradient_clip_val=1.0"),
            (_fit(lt.ZScoreGradientClipping(), lt.PercentileGradientClipping()), r"PercentileGradientClipping"),
        ),
    ),
    Row(
        "PercentileGradientClipping",
        acting={"percentile": 10, "history_steps": 5, "warmup_steps": 1},
        neutral={"warmup_steps": 1000},
        refusals=(
            (_fit(lt.PercentileGradientClipping(), gradient_clip_val=1.0), r"gradient_clip_val=1.0"),
            (_fit(lt.PercentileGradientClipping(), module=ClipsByItself()), r"configure_gradient_clipping"),
        ),
    ),
    Row(
        "NonFiniteGuard",
        acting={"max_consecutive": 3},
        neutral={},
        same_weights=True,  # there is nothing to leave out
        refusals=(
            (_fit(lt.NonFiniteGuard(), lt.NonFiniteGuard("stop")), r"NonFiniteGuard"),
            (_fit(lt.NonFiniteGuard(), module=LbfgsNet()), r"LBFGS"),
        ),
    ),
    Row(
        "LossSpikeGuard",
        acting={"z_threshold": 0.02, "window_steps": 4, "warmup_steps": 2},
        neutral={"z_threshold": 1e9},
        refusals=(
            (_fit(lt.LossSpikeGuard(), lt.LossSpikeGuard("warn")), r"LossSpikeGuard"),
            (_fit(lt.LossSpikeGuard(), module=LbfgsNet()), r"LBFGS"),
            (_fit(lt.LossSpikeGuard(events_path="/")), r"it is a folder"),
        ),
    ),
    Row(
        "GradientMonitor",
        acting={"every_n_steps": 2},
        neutral={},
        same_weights=True,
        refusals=(
            (_fit(lt.GradientMonitor(), lt.GradientMonitor()), r"GradientMonitor"),
            (_fit(lt.GradientMonitor(blocks="encoder.*")), r"(?s)encoder.*Block \(3\)"),
        ),
    ),
    Row(
        "VanishingUpdateMonitor",
        acting={"every_n_steps": 2},
        neutral={},
        same_weights=True,
        refusals=((_fit(lt.VanishingUpdateMonitor(), lt.VanishingUpdateMonitor()), r"VanishingUpdateMonitor"),),
    ),
    Row(
        "LossScaleMonitor",
        acting={"alarm_after_skips": 3},
        neutral={},
        same_weights=True,
        refusals=((_fit(lt.LossScaleMonitor(), lt.LossScaleMonitor()), r"LossScaleMonitor"),),
    ),
    Row(
        "WarmupCosineScheduler",
        acting={"warmup": 3},
        neutral={"warmup": 0, "min_lr_ratio": 1.0},
        manual={"total_steps": 20},
        refusals=(
            (_fit(lt.WarmupCosineScheduler(100)), r"warmup=100 and total_steps=7"),
            (_fit(lt.WarmupCosineScheduler(1), module=SchedulesByItself()), r"StepLR"),
            (_fit(lt.WarmupCosineScheduler(1, optimizers=[2])), r"got index 2"),
            (_fit(lt.WarmupCosineScheduler(1, total_steps={3: 9})), r"got index 3"),
            (_fit(lt.WarmupCosineScheduler(1, min_lr=1.0)), r"min_lr"),
            (_fit(lt.WarmupCosineScheduler(1), max_epochs=-1), r"total_steps"),
        ),
    ),
    *(
        Row(
            name,
            acting={"warmup": 2, **acting},
            neutral={"warmup": 0, "min_lr_ratio": 1.0, **acting},
            manual={"total_steps": 20},
            turn=turn,
            refusals=(
                (_fit(getattr(lt, name)(100, **acting)), r"warmup=100 .*total_steps=7"),
                (_fit(getattr(lt, name)(1, **acting), module=SchedulesByItself()), r"StepLR"),
                (_fit(getattr(lt, name)(1, **acting), lt.LearningRateWarmup(2)), r"LearningRateWarmup"),
                (_fit(getattr(lt, name)(1, **acting), max_epochs=-1), r"total_steps"),
            ),
        )
        for turn, (name, acting) in enumerate(
            {
                "WarmupLinearScheduler": {},
                "WarmupStableDecayScheduler": {"decay": 0.3, "decay_shape": "sqrt"},
                "WarmupInverseSqrtScheduler": {},
                "WarmupCosineRestartsScheduler": {"num_cycles": 2},
                "WarmupPolynomialScheduler": {"power": 2.0},
            }.items()
        )
    ),
    Row(
        "LearningRateWarmup",
        acting={"warmup": 4},
        neutral={"warmup": 0},
        refusals=(
            (_fit(lt.LearningRateWarmup(100)), r"warmup=100 and total_steps=7"),
            (_fit(lt.LearningRateWarmup(1, optimizers=[2])), r"got index 2"),
            (_fit(lt.LearningRateWarmup(0.5), max_epochs=-1), r"total_steps"),
            (_fit(lt.LearningRateWarmup(0.5), module=ManualNet()), r"total_steps"),
        ),
    ),
    Row(
        "HyperparameterScheduler",
        acting={"target": "optimizer.weight_decay", "schedule": half_of},
        neutral={"target": "net.*.dropout.p", "schedule": lt.WarmupLinearScheduler(0, min_lr_ratio=1.0, total_steps=9)},
        config={
            "target": "optimizer.weight_decay",
            "schedule": {"class_path": "lightning_tricks.WarmupCosineScheduler", "init_args": {"warmup": 2}},
        },
        refusals=(
            (
                _fit(lt.HyperparameterScheduler("optimizer.lr", half_of), lt.LearningRateWarmup(2)),
                r"LearningRateWarmup",
            ),
            (
                _fit(lt.HyperparameterScheduler("optimizer.lr", half_of), module=SchedulesByItself()),
                r"StepLR, which SchedulesByItself.*lr of optimizer 0, group 0",
            ),
            (
                _fit(lt.HyperparameterScheduler("net.0.*.p", half_of), lt.HyperparameterScheduler("*.p", half_of)),
                r"'net.0.\*.p'.*'\*.p'.*would both set net.0.dropout.p",
            ),
            (
                _fit(lt.HyperparameterScheduler("*.dropout.p", half_of), lt.DropoutScheduler(steps=2)),
                r"HyperparameterScheduler.*DropoutScheduler would both set net.0.dropout.p",
            ),
            (_fit(lt.HyperparameterScheduler("optimizer.momentum", half_of)), r"momentum.*AdamW, which has.*betas"),
            (_fit(lt.HyperparameterScheduler("decoder.*.p", half_of)), r"no module matches"),
            (_fit(lt.HyperparameterScheduler("net.*.q", half_of)), r"none with a number q"),
            (_fit(lt.HyperparameterScheduler("optimizer.lr", half_of, optimizers=[1])), r"got index 1"),
            (
                _fit(lt.HyperparameterScheduler("optimizer.eps", lt.WarmupLinearScheduler(100))),
                r"warmup=100 and total_steps=7",
            ),
        ),
    ),
    Row(
        "DropoutScheduler",
        acting={"mode": "early", "steps": 2},
        neutral={"mode": "constant", "steps": 2},
        refusals=(
            (_fit(lt.DropoutScheduler(steps=2), lt.DropoutScheduler("late", steps=2)), r"DropoutScheduler"),
            (_fit(lt.DropoutScheduler(steps=2), module=LinearNet()), r"LinearNet has none"),
            (_fit(lt.DropoutScheduler(steps=0.5), module=ManualNet()), r"total_steps"),
            (_fit(lt.DropoutScheduler(steps=0.5), max_epochs=-1), r"total_steps"),
        ),
    ),
    Row(
        "WeightDecayGroups",
        acting={"weight_decay": 0.5},
        neutral={"exclude": ()},
        refusals=(
            (_fit(lt.WeightDecayGroups(), lt.WeightDecayGroups(0.1)), r"WeightDecayGroups"),
            (_fit(lt.WeightDecayGroups(exclude="decoder.*")), r"(?s)decoder.*Block \(3\)"),
            (_fit(lt.WeightDecayGroups(), module=LbfgsNet()), r"LBFGS"),
        ),
    ),
    Row(
        "LayerwiseLearningRateDecay",
        acting={"decay": 0.5},
        neutral={"decay": 1.0},
        refusals=(
            (_fit(lt.LayerwiseLearningRateDecay(), lt.LayerwiseLearningRateDecay(0.5)), r"LayerwiseLearningRateDecay"),
            (_fit(lt.LayerwiseLearningRateDecay(blocks="encoder.*")), r"(?s)encoder.*Block \(3\)"),
            (_fit(lt.LayerwiseLearningRateDecay(), module=LbfgsNet()), r"LBFGS"),
        ),
    ),
    Row(
        "ExponentialMovingAverage",
        acting={"decay": 0.5, "average_buffers": True},
        neutral={"start_step": 1000},
        averages=True,
        refusals=(
            (_fit(lt.ExponentialMovingAverage(), lt.ExponentialMovingAverage(0.9)), r"ExponentialMovingAverage"),
            (_fit(lt.ExponentialMovingAverage(), lt.StochasticWeightAverage()), r"StochasticWeightAverage"),
            (_fit(lt.ExponentialMovingAverage(), EMAWeightAveraging()), r"EMAWeightAveraging"),
            (_fit(lt.ExponentialMovingAverage(), StochasticWeightAveraging(0.1)), r"StochasticWeightAveraging"),
        ),
    ),
    Row(
        "StochasticWeightAverage",
        acting={"start": 2},
        neutral={"start": 1000, "total_steps": 2000},
        manual={"update_batchnorm": False},
        refusals=(
            (_fit(lt.StochasticWeightAverage(), lt.StochasticWeightAverage(0.1)), r"StochasticWeightAverage"),
            (_fit(lt.StochasticWeightAverage(), WeightAveraging()), r"WeightAveraging"),
            (_fit(lt.StochasticWeightAverage(7)), r"start=7 and total_steps=7"),
            (_fit(lt.StochasticWeightAverage(), max_epochs=-1), r"total_steps"),
            (_fit(lt.StochasticWeightAverage(), module=ManualNet()), r"total_steps"),
            (_fit(lt.StochasticWeightAverage(3), module=ManualNet(batchnorm=True)), r"update_batchnorm=False"),
        ),
    ),
    Row(
        "ActivationCheckpointing",
        acting={"every": 1},
        neutral={},
        same_weights=True,
        refusals=(
            (_fit(lt.ActivationCheckpointing("encoder.*")), r"(?s)encoder.*Block \(3\).*Linear"),
            (_fit(lt.ActivationCheckpointing(), lt.ActivationCheckpointing()), r"ActivationCheckpointing"),
        ),
    ),
    Row(
        "Float8Training",
        acting={"emulate": True, "exclude": ()},
        neutral={"emulate": True, "exclude": "net.*"},
        module={"width": 16},
        across_ranks=2e-2,  # scales are those of a rank's own batch
        refusals=(
            (_fit(lt.Float8Training(), lt.Float8Training()), r"Float8Training"),
            (_fit(lt.Float8Training()), r"got cpu: train in bf16 here, or pass emulate=True"),
            (_fit(lt.Float8Training(emulate=True, exclude="decoder.*")), r"(?s)decoder.*Block \(3\)"),
        ),
    ),
    Row(
        "ExactResume",
        acting={},
        neutral={},
        same_weights=True,
        refusals=((_fit(lt.ExactResume(), lt.ExactResume()), r"ExactResume"),),
    ),
    Row(
        "ScheduleFree",
        acting={},
        neutral=None,
        averages=True,
        module={"optimizer": "schedulefree"},
        refused=("zero1",),
        refusals=(
            (_fit(lt.ScheduleFree()), r"ScheduleFree expected an optimizer of the package schedulefree.*got AdamW"),
            (_fit(lt.ScheduleFree(), lt.ExponentialMovingAverage()), r"ExponentialMovingAverage"),
            (_fit(lt.ScheduleFree(), WeightAveraging()), r"WeightAveraging"),
        ),
    ),
    Row(
        "ActivationMemoryMonitor",
        acting={},
        neutral={},
        same_weights=True,
        refusals=((_fit(lt.ActivationMemoryMonitor(), lt.ActivationMemoryMonitor()), r"ActivationMemoryMonitor"),),
    ),
    Row(
        "ActivationOffloading",
        acting={"min_bytes": 1},
        neutral={"min_bytes": 2**30},
        same_weights=True,
        refusals=((_fit(lt.ActivationOffloading(), lt.ActivationOffloading()), r"ActivationOffloading"),),
    ),
    Row(
        "ModelCompilation",
        acting={"backend": "aot_eager"},
        neutral={"backend": "eager"},
        same_weights=True,
        refusals=(
            (_fit(lt.ModelCompilation(), lt.ModelCompilation()), r"ModelCompilation"),
            (_fit(lt.ModelCompilation("encoder.*")), r"(?s)encoder.*Block \(3\).*Linear"),
        ),
    ),
)
