"""Layer 2: the techniques as Lightning callbacks, each a thin shell over `functional` and `composition`."""

from lightning_tricks.callbacks.accumulation import GradientAccumulation
from lightning_tricks.callbacks.activation_memory import ActivationMemoryMonitor
from lightning_tricks.callbacks.activation_offloading import ActivationOffloading
from lightning_tricks.callbacks.adaptive_clipping import AdaptiveGradientClipping
from lightning_tricks.callbacks.checkpointing import ActivationCheckpointing
from lightning_tricks.callbacks.clipping import GradientNormClipping, GradientValueClipping
from lightning_tricks.callbacks.compilation import ModelCompilation
from lightning_tricks.callbacks.float8 import Float8Training
from lightning_tricks.callbacks.gradient_flow import GradientMonitor
from lightning_tricks.callbacks.gradient_release import EarlyGradientRelease
from lightning_tricks.callbacks.guards import LossSpikeGuard, NonFiniteGuard
from lightning_tricks.callbacks.hyperparameters import DropoutScheduler, HyperparameterScheduler
from lightning_tricks.callbacks.learned_clipping import PercentileGradientClipping, ZScoreGradientClipping
from lightning_tricks.callbacks.learning_rate_warmup import LearningRateWarmup
from lightning_tricks.callbacks.loss_scale import LossScaleMonitor
from lightning_tricks.callbacks.micro_batching import MicroBatching
from lightning_tricks.callbacks.noise_scale import GradientNoiseScaleMonitor
from lightning_tricks.callbacks.parameter_groups import LayerwiseLearningRateDecay, WeightDecayGroups
from lightning_tricks.callbacks.random_state import ExactResume
from lightning_tricks.callbacks.schedule_free import ScheduleFree
from lightning_tricks.callbacks.schedules import (
    WarmupCosineRestartsScheduler,
    WarmupCosineScheduler,
    WarmupInverseSqrtScheduler,
    WarmupLinearScheduler,
    WarmupPolynomialScheduler,
    WarmupStableDecayScheduler,
)
from lightning_tricks.callbacks.update_rounding import VanishingUpdateMonitor
from lightning_tricks.callbacks.weight_averaging import (
    ExponentialMovingAverage,
    StochasticWeightAverage,
    load_averaged_weights,
)

__all__ = [
    "ActivationCheckpointing",
    "ActivationMemoryMonitor",
    "ActivationOffloading",
    "AdaptiveGradientClipping",
    "DropoutScheduler",
    "EarlyGradientRelease",
    "ExactResume",
    "ExponentialMovingAverage",
    "Float8Training",
    "GradientAccumulation",
    "GradientMonitor",
    "GradientNoiseScaleMonitor",
    "GradientNormClipping",
    "GradientValueClipping",
    "HyperparameterScheduler",
    "LayerwiseLearningRateDecay",
    "LearningRateWarmup",
    "LossScaleMonitor",
    "LossSpikeGuard",
    "MicroBatching",
    "ModelCompilation",
    "NonFiniteGuard",
    "PercentileGradientClipping",
    "ScheduleFree",
    "StochasticWeightAverage",
    "VanishingUpdateMonitor",
    "WarmupCosineRestartsScheduler",
    "WarmupCosineScheduler",
    "WarmupInverseSqrtScheduler",
    "WarmupLinearScheduler",
    "WarmupPolynomialScheduler",
    "WarmupStableDecayScheduler",
    "WeightDecayGroups",
    "ZScoreGradientClipping",
    "load_averaged_weights",
]
