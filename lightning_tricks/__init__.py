"""The engineering tricks of training for any LightningModule, right together.

List a callback in ``lightning.pytorch.Trainer(callbacks=[...])``, or name a strategy; the module does not change.
Importing the package registers the strategy strings: ``fsdp2``, ``hsdp``, ``zero1`` and so on.
"""

from lightning_tricks.callbacks import (
    ActivationCheckpointing,
    AdaptiveGradientClipping,
    EarlyGradientRelease,
    ExactResume,
    ExponentialMovingAverage,
    Float8Training,
    GradientAccumulation,
    GradientMonitor,
    GradientNoiseScaleMonitor,
    GradientNormClipping,
    GradientValueClipping,
    LayerwiseLearningRateDecay,
    LearningRateWarmup,
    LossScaleMonitor,
    LossSpikeGuard,
    MicroBatching,
    NonFiniteGuard,
    PercentileGradientClipping,
    StochasticWeightAverage,
    VanishingUpdateMonitor,
    WarmupCosineRestartsScheduler,
    WarmupCosineScheduler,
    WarmupInverseSqrtScheduler,
    WarmupLinearScheduler,
    WarmupPolynomialScheduler,
    WarmupStableDecayScheduler,
    WeightDecayGroups,
    ZScoreGradientClipping,
    load_averaged_weights,
)
from lightning_tricks.composition import (
    OptimizerLedger,
    OptimizerStep,
    StepLedger,
    Summary,
    Touches,
    Trick,
    current_step,
    step_ledger,
)
from lightning_tricks.distributed.policy import ShardingPlan, ShardingPolicy
from lightning_tricks.functional.equivalence import assert_accumulation_equivalent
from lightning_tricks.precision import FP16Precision
from lightning_tricks.strategies import FSDP2Strategy, ZeRO1Strategy

__version__ = "0.1.0"

__all__ = [
    "ActivationCheckpointing",
    "AdaptiveGradientClipping",
    "EarlyGradientRelease",
    "ExactResume",
    "ExponentialMovingAverage",
    "FP16Precision",
    "FSDP2Strategy",
    "Float8Training",
    "GradientAccumulation",
    "GradientMonitor",
    "GradientNoiseScaleMonitor",
    "GradientNormClipping",
    "GradientValueClipping",
    "LayerwiseLearningRateDecay",
    "LearningRateWarmup",
    "LossScaleMonitor",
    "LossSpikeGuard",
    "MicroBatching",
    "NonFiniteGuard",
    "OptimizerLedger",
    "OptimizerStep",
    "PercentileGradientClipping",
    "ShardingPlan",
    "ShardingPolicy",
    "StepLedger",
    "StochasticWeightAverage",
    "Summary",
    "Touches",
    "Trick",
    "VanishingUpdateMonitor",
    "WarmupCosineRestartsScheduler",
    "WarmupCosineScheduler",
    "WarmupInverseSqrtScheduler",
    "WarmupLinearScheduler",
    "WarmupPolynomialScheduler",
    "WarmupStableDecayScheduler",
    "WeightDecayGroups",
    "ZScoreGradientClipping",
    "ZeRO1Strategy",
    "assert_accumulation_equivalent",
    "current_step",
    "load_averaged_weights",
    "step_ledger",
]
