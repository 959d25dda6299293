"""Activation offloading as a callback."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_tricks._validation import check_int
from lightning_tricks.composition import Summary, Touches, Trick
from lightning_tricks.functional.activation_offloading import offload_saved_activations
from lightning_tricks.functional.replay import tensors_of

__all__ = ["ActivationOffloading"]


class ActivationOffloading(Trick):
    """Keep what `training_step` saves for the backward pass in pinned host memory, and bring it back in time.

    On CUDA the copies run beside the computation, and come back one ahead of it. Gradients are those without it, bit
    for bit. With `ActivationCheckpointing` the inputs of the blocks go to the host and the rest is recomputed; a budget
    there counts what is saved, here or there. Parameters, buffers and the batch stay where they are. On a CPU it
    copies and frees nothing.

    Args:
        min_bytes: of what is worth moving, 1 or more, by storage. One that is saved several times moves once.

    Raises:
        TypeError, ValueError: `min_bytes` is no int or less than 1.
        RuntimeError: while training, a saved tensor is written to while it is copied.

    Cost:
        Twice the saved bytes over the bus: free where the computation takes longer than that. A Python call for each
        saved tensor.

    Reference:
        Rhu et al. (2016), "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network
        Design", arXiv:1602.08124.

    Example:
        >>> from lightning_tricks import ActivationOffloading
        >>> offloading = ActivationOffloading(min_bytes=2**20)
    """

    touches = Touches.MODULE
    rank = 1  # around what looks at or recomputes what is saved
    job = "offload activations"
    buys = "activation memory in the host's RAM instead of the GPU's"
    costs = "twice the saved bytes over the bus, beside the computation"

    def __init__(self, *, min_bytes: int = 4 * 2**20) -> None:
        self.min_bytes = check_int("min_bytes", min_bytes, minimum=1)
        self.reset()

    @override
    def reset(self) -> None:
        self._warned = False

    @override
    def run_training_step(
        self, trainer: pl.Trainer, module: pl.LightningModule, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not torch.is_grad_enabled():
            return step(*args, **kwargs)
        held_anyway = [one for one in module.buffers() if one.nbytes >= self.min_bytes]
        with offload_saved_activations(self.min_bytes, leave_out=[*held_anyway, *tensors_of((args, kwargs))]) as moved:
            output = step(*args, **kwargs)
        if not moved.num_bytes and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"ActivationOffloading moved nothing: the largest storage that this batch saved has "
                f"{moved.largest_bytes} bytes, less than min_bytes={self.min_bytes}. Lower it, or drop the callback"
            )
        return output

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        return Summary(f"what is saved from {self.min_bytes / 2**20:.3g} MiB on goes to the host")
