"""Samples whose gradients are known, so that the noise scale is. Imported by the pool's processes."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_tricks as lt
from tests.functional.test_noise_scale import SlowNoiseScale
from tests.models import trainer as quiet_trainer

TRUE_GRADIENT, DEVIATION = 0.5, 2.0
DIM = 16
TRUE_SCALE = DEVIATION**2 / TRUE_GRADIENT**2  # tr(cov) / |G|^2, the dimension cancels


class Linear(pl.LightningModule):
    """The gradient of a batch is the mean of its rows; the weights do not move."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DIM))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (batch @ self.weight).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def batches(num_batches: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 4, (num_batches,), generator=generator).tolist()
    return [TRUE_GRADIENT + DEVIATION * torch.randn(size, DIM, generator=generator) for size in sizes]


def slow_scale(parts: list[list[Tensor]], window: int, decay: float) -> float:
    """By hand, from the rows, for all ranks."""
    slow = SlowNoiseScale(decay)
    for start in range(0, len(parts[0]), window):
        firsts = [part[start].mean(dim=0) for part in parts]
        rows = torch.cat([batch for part in parts for batch in part[start : start + window]])
        small_square = sum(float(one.square().sum()) for one in firsts) / len(firsts)
        small = len(firsts) / sum(1 / len(part[start]) for part in parts)
        slow.step(small_square, float(rows.mean(dim=0).square().sum()), small, len(rows))
    return slow.trace / slow.signal


def scales(strategy: str, num_batches: int = 40, **options: Any) -> tuple[float, float]:
    """What the monitor logs, and what it should."""
    distributed = torch.distributed.is_initialized()
    rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed else (0, 1)
    parts = [batches(num_batches, seed) for seed in range(ranks)]
    trainer = quiet_trainer(
        lt.GradientAccumulation(4), lt.GradientNoiseScaleMonitor(decay=0.9), strategy=strategy, devices=ranks,
        use_distributed_sampler=False, **options,
    )  # fmt: skip
    trainer.fit(Linear(), DataLoader(parts[rank], batch_size=None))
    return float(trainer.callback_metrics["noise/scale"]), slow_scale(parts, 4, 0.9)
