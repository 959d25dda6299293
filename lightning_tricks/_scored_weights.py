"""Let checkpoints hold other weights than the live ones: those that validation scored."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_tricks.functional.patching import Removable, patch_

__all__ = ["show_in_state_dict"]


def show_in_state_dict(
    trainer: pl.Trainer, module: pl.LightningModule, scored: Callable[[], Mapping[str, Tensor]]
) -> Removable:
    """Replace entries of the ``state_dict`` of every checkpoint, also of those that no callback is told about.

    Lightning calls no callback for a file of weights alone.

    Args:
        trainer: the Trainer.
        module: its module.
        scored: returns what to replace by the names in the module's state dict, sharded as its parameters. Picklable.

    Returns:
        What undoes it.
    """
    strategy = trainer.strategy
    shown = functools.partial(_state_dict, strategy.lightning_module_state_dict, module, scored)
    return patch_(strategy, "lightning_module_state_dict", shown)


def _state_dict(
    original: Callable[[], dict[str, Any]], module: nn.Module, scored: Callable[[], Mapping[str, Tensor]]
) -> dict[str, Any]:
    hook = module.register_state_dict_post_hook(functools.partial(_replace, scored()))  # type: ignore[no-untyped-call]
    try:
        return original()
    finally:
        hook.remove()


def _replace(tensors: Mapping[str, Tensor], module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, tensor in tensors.items():
        if prefix + name in state:
            state[prefix + name] = tensor
