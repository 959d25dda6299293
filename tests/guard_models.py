"""A module with bad batches, and what the tests of guards look at."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.models import Net

FACTORS = {"nan": float("nan"), "inf": float("inf"), "spike": 1000.0}


class Poisoned(Net):
    """The loss is multiplied at batches of these total indices, on this rank alone if one is named."""

    def __init__(self, poison: dict[int, str] | None = None, rank: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.poison = poison or {}
        self.on_rank = rank

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        total = self.trainer.current_epoch * int(self.trainer.num_training_batches) + batch_idx
        if total in self.poison and self.on_rank in (None, self.global_rank):
            return loss * FACTORS[self.poison[total]]
        return loss


class Watch(pl.Callback):
    """The rate before each batch, and the weights and what is logged after it."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.rates: list[float] = []
        self.logged: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.rates.append(float(trainer.optimizers[0].param_groups[0]["lr"]))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.weights.append({name: one.detach().clone() for name, one in pl_module.state_dict().items()})
        self.logged.append({key: float(value) for key, value in trainer.callback_metrics.items()})


def steady_data(num_batches: int, batch_size: int = 8, seed: int = 3) -> DataLoader:
    """Batches of one distribution, in order: their loss does not vary much."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_batches * batch_size, 8, generator=generator)
    y = x @ torch.linspace(-1, 1, 8)[:, None] + 0.3 * torch.randn(len(x), 1, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)
