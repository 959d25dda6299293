"""Averages of weights under strategies: what the processes of the pool run."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lightning_tricks as lt
from lightning_tricks.functional.weight_averaging import WeightAverage, put_back_, show_
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
        val_check_interval=2,  # in the middle of an epoch: nothing but the average gathers weights anew then
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


def averages_of_shards() -> list[str]:
    """Averages of tensors on two meshes, as tensor parallelism and FSDP2 place them, against those of the whole."""
    torch.manual_seed(0)
    line, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    cases = {
        "rows": ((5, 3), line, [Shard(0)], torch.float32),
        "columns": ((4, 6), line, [Shard(1)], torch.float32),
        "replicated": ((3,), line, [Replicate()], torch.float32),
        "one rank has nothing": ((1, 2), line, [Shard(0)], torch.float32),
        "both": ((4, 4), grid, [Replicate(), Shard(1)], torch.float32),
        "16 bits": ((6, 2), line, [Shard(0)], torch.bfloat16),
    }
    whole = {name: torch.randn(shape, dtype=dtype) for name, (shape, _, _, dtype) in cases.items()}
    live = {
        name: torch.nn.Parameter(distribute_tensor(whole[name], mesh, placements))
        for name, (_, mesh, placements, _) in cases.items()
    }
    average, expected = WeightAverage(live), WeightAverage(whole)
    moved = {name: torch.randn(one.shape).to(one) for name, one in whole.items()}
    for name, one in live.items():
        one.data.copy_(distribute_tensor(moved[name], one.device_mesh, one.placements))
    average.update_(list(live.values()), share=0.3)
    expected.update_(list(moved.values()), share=0.3)
    faults = [
        f"{name}: {tensor.full_tensor()} instead of {right}"
        for (name, tensor), right in zip(average.tensors.items(), expected.local, strict=True)
        if not torch.equal(tensor.full_tensor(), right)
    ]
    distances = float(average.distance(list(live.values()))), float(expected.distance(list(moved.values())))
    if abs(distances[0] - distances[1]) > 1e-5:
        faults.append(f"distances {distances}")
    held = show_(list(live.values()), average.local)
    for (name, one), right in zip(live.items(), expected.local, strict=True):
        if not torch.equal(one.detach().full_tensor(), right.to(one.dtype)):
            faults.append(f"{name} does not show the average")
    put_back_(list(live.values()), held)
    faults += [f"{n} is not back" for n, one in live.items() if not torch.equal(one.detach().full_tensor(), moved[n])]
    return faults
