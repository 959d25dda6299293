"""Averages of weights under strategies: what the processes of the pool run."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

import lightning_tricks as lt
from tests.distributed_cases import BY_HAND, ShardedNet, strategy_of
from tests.models import Net, rank_loader, seeded, trainer, weights

KINDS = {
    "ema": lambda: lt.ExponentialMovingAverage(0.6),
    "swa": lambda: lt.StochasticWeightAverage(3),
}


class Scores(pl.Callback):
    """The losses of validation, and a checkpoint at the end of the first epoch."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.losses: list[float] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0 and self.path is not None:
            trainer.save_checkpoint(self.path)


def averaged(
    kind: str,
    strategy: str,
    *,
    save: str | None = None,
    resume: str | None = None,
    rank: int | None = None,
    world_size: int = 2,
    folder: bool = False,
) -> dict[str, Any]:
    """Train two epochs, or the second of them; full weights at the end, and what validation scored."""
    rank = torch.distributed.get_rank() if rank is None else rank
    module = seeded(lambda: (ShardedNet if strategy == BY_HAND else Net)(optimizer="momentum"), 0 if save else 7)
    scores, average = Scores(save), KINDS[kind]()
    chosen = lt.FSDP2Strategy(save_distributed_checkpoint=True) if folder else strategy_of(strategy, world_size)
    if strategy == BY_HAND:
        chosen = ModelParallelStrategy(world_size, 1, save_distributed_checkpoint=False)
    run = trainer(
        average,
        scores,
        strategy=chosen,
        devices=world_size,
        use_distributed_sampler=False,
        max_epochs=2,
        accumulate_grad_batches=1,
        num_sanity_val_steps=0,
        precision="32-true",
    )
    data = rank_loader(rank, world_size)
    run.fit(module, data, rank_loader(rank, world_size), ckpt_path=resume)
    copy = Net(optimizer="momentum")
    average.copy_to(copy)
    return {"weights": weights(module), "losses": scores.losses, "copy": weights(copy)}


def averaged_under(
    kind: str, strategy: str, folder: str, reference: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]:
    """A whole run that saves, one that resumes from the reference's file, and one from a folder of shards."""
    whole = averaged(kind, strategy, save=f"{folder}/{kind}-{strategy}.ckpt")
    resumed = averaged(kind, strategy, resume=reference)
    if strategy != "fsdp2":
        return whole, resumed, None
    averaged(kind, strategy, save=f"{folder}/{kind}-folder.ckpt", folder=True)
    return whole, resumed, averaged(kind, strategy, resume=f"{folder}/{kind}-folder.ckpt", folder=True)
