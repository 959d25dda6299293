"""Layer 2: the techniques as Lightning callbacks, each a thin shell over `functional` and `composition`."""

from lightning_tricks.callbacks.checkpointing import ActivationCheckpointing
from lightning_tricks.callbacks.clipping import GradientNormClipping, GradientValueClipping
from lightning_tricks.callbacks.loss_scale import LossScaleMonitor
from lightning_tricks.callbacks.random_state import ExactResume
from lightning_tricks.callbacks.schedules import WarmupCosineScheduler

__all__ = [
    "ActivationCheckpointing",
    "ExactResume",
    "GradientNormClipping",
    "GradientValueClipping",
    "LossScaleMonitor",
    "WarmupCosineScheduler",
]
