"""Where the activation memory goes, by block."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from typing_extensions import override

from lightning_tricks._lightning import MisconfigurationException, is_compiled, logged_step
from lightning_tricks._preview import bars_as_png, bars_in_terminal
from lightning_tricks.composition import Summary, Touches, Trick
from lightning_tricks.functional.activation_memory import SavedActivations, measure_saved_activations
from lightning_tricks.functional.blocks import repeated_blocks

__all__ = ["ActivationMemoryMonitor"]

_BATCHES = 3


class ActivationMemoryMonitor(Trick):
    """Measure what autograd saves within `training_step` for the backward pass, and which block saves it.

    The first three batches of a run are measured and logged: ``activation/saved_bytes``, the total;
    ``activation/saved_bytes/<block>`` for each repeated block of the model (each child where nothing repeats) and for
    what lies outside of them; ``activation/peak_bytes``, the most saved bytes that were alive at once, with those that
    a backward pass recomputes. Storages count once, on this rank; parameters do not, nor what is dropped to be
    recomputed. `saved` keeps the last measurement.

    Raises:
        MisconfigurationException: at the start of fit, the module is compiled as a whole, and shows no saved tensors.

    Cost:
        A Python call for each saved tensor of the first three batches; afterwards nothing.

    Example:
        >>> from lightning_tricks import ActivationMemoryMonitor
        >>> monitor = ActivationMemoryMonitor()
    """

    touches = Touches.MODULE
    rank = -1  # what it looks at lies within what others do around a training step
    job = "monitor activation memory"
    buys = "where the activation memory goes, block by block"
    costs = "a Python call a saved tensor, in the first three batches"

    def __init__(self) -> None:
        self.reset()

    @override
    def reset(self) -> None:
        self.saved: SavedActivations | None = None
        self._of_batch: list[SavedActivations] = []
        self._batches = 0

    @override
    def edit(self, module: pl.LightningModule) -> None:
        if is_compiled(module):
            raise MisconfigurationException(
                f"{type(self).__name__} cannot see what a module that is compiled as a whole saves: measure it without "
                "torch.compile"
            )

    @override
    def run_training_step(
        self, trainer: pl.Trainer, module: pl.LightningModule, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._batches >= _BATCHES or not torch.is_grad_enabled():
            return step(*args, **kwargs)
        blocks: dict[str, nn.Module] = repeated_blocks(module) or dict(module.named_children())
        with measure_saved_activations(blocks=blocks) as saved:
            output = step(*args, **kwargs)
        self._of_batch.append(saved)
        return output

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._of_batch.clear()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._of_batch:
            return
        self.saved = max(self._of_batch, key=lambda saved: saved.num_bytes)  # of micro-batches
        self._of_batch = []
        self._batches += 1
        values = {
            "activation/saved_bytes": float(self.saved.num_bytes),
            "activation/peak_bytes": float(self.saved.peak_bytes),
            **{f"activation/saved_bytes/{name}": float(size) for name, size in self.saved.by_block.items()},
        }
        for logger in trainer.loggers:  # the first batches are few, and need not be among those that the Trainer logs
            logger.log_metrics(values, step=logged_step(trainer))

    def plot(self, path: str | Path | None = None) -> str | None:
        """Draw the saved bytes of each block as bars, the largest first.

        Args:
            path: of a PNG file to write (needs the extra ``plot``); None for text.

        Returns:
            The bars as lines of text, None where a file was written.

        Raises:
            RuntimeError: nothing was measured yet.
        """
        if self.saved is None:
            raise RuntimeError("expected a measurement to draw, got none: fit with this callback first")
        mebibytes = {name: size / 2**20 for name, size in sorted(self.saved.by_block.items(), key=lambda one: -one[1])}
        title = f"activations saved: {self.saved.num_bytes / 2**20:.1f} MiB"
        if path is None:
            return bars_in_terminal(mebibytes, title=title)
        bars_as_png(mebibytes, title=title, path=path, xlabel="MiB")
        return None

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        return Summary(f"measures the first {_BATCHES} batches")
