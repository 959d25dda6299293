"""What the tests of the strategies run on each rank. Imported by the processes of the pools."""

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

import lightning_tricks as lt
from tests import strategy_models as models
from tests.models import rank_loader, seeded, weights
from tests.models import trainer as quiet_trainer

STRATEGIES: dict[str, Callable[[], Any]] = {
    "fsdp2": lambda: "fsdp2",
    "hsdp 2 x 2": lambda: lt.FSDP2Strategy(replicate_size=2),
    "zero1": lambda: "zero1",
    "zero2": lambda: "zero2",
    "zero3": lambda: "zero3",
    "fsdp2_offload": lambda: "fsdp2_offload",
    "one process": lambda: "auto",
}

# Module, callbacks, options of the Trainer; 20 batches, or 21 in windows of 3, the last one short.
VARIANTS: dict[str, tuple[type[pl.LightningModule], Callable[[], list[pl.Callback]], dict[str, Any]]] = {
    "plain": (models.PlainModule, list, {}),
    "accumulation": (models.PlainModule, list, {"accumulate_grad_batches": 3}),
    "clipping by norm": (models.PlainModule, lambda: [lt.GradientNormClipping(0.05)], {}),
    "clipping by value": (models.PlainModule, lambda: [lt.GradientValueClipping(0.01)], {}),
    "Lightning's clipping": (models.PlainModule, list, {"gradient_clip_val": 0.05}),
    "tied": (models.TiedModule, list, {}),
    "frozen": (models.FrozenModule, list, {}),
    "checkpointing": (models.TiedModule, lambda: [lt.ActivationCheckpointing()], {}),
    "all at once": (
        models.TiedModule,
        lambda: [lt.GradientNormClipping(0.05), lt.ActivationCheckpointing(), lt.WarmupCosineScheduler(3)],
        {"accumulate_grad_batches": 3},
    ),
    "GPT-2": (models.GPT2Module, list, {}),
    "Llama": (models.LlamaModule, list, {}),
}


def run_variant(strategy: str, variant: str, optimizer: str, rank: int, world_size: int) -> pl.LightningModule:
    kind, callbacks, options = VARIANTS[variant]
    module = seeded(lambda: kind(optimizer=optimizer))
    return run(module, strategy, rank, world_size, *callbacks(), **options)[1]


def run(
    module: pl.LightningModule, strategy: str, rank: int, world_size: int, *callbacks: pl.Callback, **options: Any
) -> tuple[pl.Trainer, pl.LightningModule]:
    trainer = strategy_trainer(strategy, world_size, *callbacks, **options)
    trainer.fit(module, data_of(module, rank, world_size))
    return trainer, module


def strategy_trainer(strategy: Any, world_size: int, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    made = STRATEGIES[strategy]() if isinstance(strategy, str) and strategy in STRATEGIES else strategy
    defaults = {"max_epochs": 2, "use_distributed_sampler": False, "devices": world_size}
    return quiet_trainer(*callbacks, strategy=made, **{**defaults, **options})


def data_of(module: pl.LightningModule, rank: int, world_size: int) -> DataLoader:
    if isinstance(module, models.LanguageModule):
        return models.token_loader(rank, world_size)
    return rank_loader(rank, world_size, num_samples=80)


@functools.cache
def expected(variant: str, optimizer: str) -> dict[str, torch.Tensor]:
    return weights(run_variant("one process", variant, optimizer, 0, 1))


def trained_weights(strategy: str, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """Weights after training, by variant and optimizer."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return {pair: weights(run_variant(strategy, *pair, rank, world_size)) for pair in pairs}
