"""Activation checkpointing as a callback."""

from collections.abc import Callable, Sequence

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_tricks._validation import check_int
from lightning_tricks.composition import Summary, Touches, Trick
from lightning_tricks.functional.blocks import BlockSelector, validate_selector
from lightning_tricks.functional.checkpointing import ActivationCheckpointingHandle, apply_activation_checkpointing

__all__ = ["ActivationCheckpointing"]


class ActivationCheckpointing(Trick):
    """Hold the inputs of the model's blocks instead of all their activations, and recompute the rest in backward.

    The gradients are those without it, bit for bit: random state, autocast and buffers are the same in both passes.
    Names, types and state-dict keys stay; evaluation is untouched; after fit the module is as before.

    Args:
        blocks: which modules to checkpoint. ``"auto"`` takes the repeated blocks of the model (for Hugging Face models
            those of their ``_no_split_modules`` that repeat). Else a class, the name of a class, a glob over the
            modules' names in the LightningModule (``"model.layers.*"``), a predicate of (name, module), or a list of
            these. Of nested matches the outermost is taken.
        every: checkpoint each n-th of these blocks only, from the first; 1 or more.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range, or nothing matches (at the start of
            fit, with the module types there are).

    Cost:
        15 to 33% more FLOPs. Memory falls from all activations to one input a block and the activations of one block.

    Reference:
        Chen, Xu, Zhang, Guestrin (2016), "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.

    Example:
        >>> from lightning_tricks import ActivationCheckpointing
        >>> every_second_layer = ActivationCheckpointing("model.layers.*", every=2)
    """

    touches = Touches.MODULE
    job = "checkpoint activations"
    buys = "activation memory of one block instead of all"
    costs = "15 to 33% more FLOPs"

    def __init__(
        self,
        blocks: str | type[nn.Module] | Callable[[str, nn.Module], bool] | Sequence[BlockSelector] = "auto",
        *,
        every: int = 1,
    ) -> None:
        validate_selector(blocks)
        self.blocks = blocks
        self.every = check_int("every", every, minimum=1)
        self._wrapped: list[str] = []
        self._already: list[str] = []

    @override
    def edit(self, module: pl.LightningModule) -> ActivationCheckpointingHandle:
        handle = apply_activation_checkpointing(module, self.blocks, every=self.every)
        self._wrapped, self._already = list(handle.wrapped), list(handle.already)
        if not self._wrapped:
            rank_zero_warn(
                f"ActivationCheckpointing changed nothing: all {len(self._already)} matching blocks are checkpointed "
                "already. Drop the callback, or turn the model's own checkpointing off."
            )
        return handle

    @override
    def summary(self, trainer: pl.Trainer) -> Summary:
        found = f"{len(self._wrapped)} blocks: {_abbreviate(self._wrapped)}"
        if self._already:
            found += f"; left {len(self._already)} alone that were checkpointed already"
        return Summary(found)


def _abbreviate(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]}"
