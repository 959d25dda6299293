"""Layer 1: what makes tricks right together. It knows no single technique.

`ledger` keeps the verdict of each optimizer step, `step` settles it, `trick` is the base that a callback plugs into,
`conductor` runs them: order, conflicts, edits and their undo, logging, and the table at the start of fit.
"""

from lightning_tricks.composition.conductor import current_step, current_window, step_ledger, weigh_batch
from lightning_tricks.composition.ledger import OptimizerLedger, StepLedger
from lightning_tricks.composition.step import OptimizerStep
from lightning_tricks.composition.trick import Summary, Touches, Trick

__all__ = [
    "OptimizerLedger",
    "OptimizerStep",
    "StepLedger",
    "Summary",
    "Touches",
    "Trick",
    "current_step",
    "current_window",
    "step_ledger",
    "weigh_batch",
]
