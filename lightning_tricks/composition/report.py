"""The table that rank 0 prints at the start of fit: each trick, what it found and changed, what it needs."""

from collections.abc import Sequence

import lightning.pytorch as pl
from rich.console import Console
from rich.table import Table

from lightning_tricks.composition.trick import Trick

__all__ = ["print_table"]


def print_table(trainer: pl.Trainer, tricks: Sequence[Trick], console: Console | None = None) -> None:
    """Print one row a trick, on rank 0.

    Args:
        trainer: the Trainer.
        tricks: its tricks in the order in which they run.
        console: where to print; standard output if None.
    """
    if not trainer.is_global_zero:
        return
    table = Table(title="lightning_tricks", title_justify="left")
    for heading in ("trick", "found and changed", "needs"):
        table.add_column(heading, overflow="fold")
    for trick in tricks:
        summary = trick.summary(trainer)
        table.add_row(type(trick).__name__, summary.found, summary.needs)
    (console or Console()).print(table)
