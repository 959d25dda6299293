"""What a module logs while a batch is run in parts: held back, and logged once, for the whole batch."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_tricks.functional.patching import patch_

__all__ = ["DeferredLog"]

_SIGNATURE = inspect.signature(pl.LightningModule.log)


class DeferredLog:
    """A context in which ``module.log`` only takes notes, so that an attempt that fails leaves none.

    Logging for each part would weigh parts alike in the mean over an epoch, and with ``sync_dist=True`` communicate
    more often on one rank than on another, which is a deadlock.

    Args:
        module: the LightningModule.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self.module = module
        self.part = 0
        self._notes: dict[str, list[tuple[int, dict[str, Any]]]] = {}

    def __enter__(self) -> "DeferredLog":
        self._patch = patch_(self.module, "log", self._note)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._patch.remove()

    def _note(self, *args: Any, **kwargs: Any) -> None:
        noted = dict(_SIGNATURE.bind(self.module, *args, **kwargs).arguments)
        noted.pop("self")
        value = noted["value"]
        noted["value"] = value.detach() if isinstance(value, Tensor) else value
        self._notes.setdefault(noted.pop("name"), []).append((self.part, noted))

    def replay(self, shares: Sequence[float]) -> None:
        """Log each name once, with the value of the whole batch. Call it outside of the context.

        Args:
            shares: of the batch, by part.
        """
        for name, notes in self._notes.items():
            arguments = notes[-1][1]
            values = [one["value"] for _, one in notes]
            if len(notes) > 1 and all(isinstance(value, (Tensor, int, float)) for value in values):
                weights = [shares[part] for part, _ in notes]
                arguments["value"] = _combined(values, weights, arguments.get("reduce_fx", "mean"))
            sizes = [one.get("batch_size") for _, one in notes]
            if all(size is not None for size in sizes):
                arguments["batch_size"] = sum(sizes)
            self.module.log(name, **arguments)


def _combined(values: list[Any], weights: list[float], reduce_fx: str | Callable[[Any], Any]) -> Any:
    """The value of all parts, by the function that would reduce it over batches."""
    if reduce_fx in ("mean", torch.mean):
        total = sum(weights)
        if not total:
            return values[-1]
        return sum(value * (weight / total) for value, weight in zip(values, weights, strict=True) if weight)
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    return getattr(stacked, reduce_fx)() if isinstance(reduce_fx, str) else reduce_fx(stacked)
