"""The engineering tricks of training for any LightningModule, right together.

List a callback in ``lightning.pytorch.Trainer(callbacks=[...])``; the module does not change.
"""

from lightning_tricks.callbacks import (
    ActivationCheckpointing,
    ExactResume,
    GradientNormClipping,
    GradientValueClipping,
    LossScaleMonitor,
    WarmupCosineScheduler,
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

__version__ = "0.1.0"

__all__ = [
    "ActivationCheckpointing",
    "ExactResume",
    "GradientNormClipping",
    "GradientValueClipping",
    "LossScaleMonitor",
    "OptimizerLedger",
    "OptimizerStep",
    "StepLedger",
    "Summary",
    "Touches",
    "Trick",
    "WarmupCosineScheduler",
    "current_step",
    "step_ledger",
]
