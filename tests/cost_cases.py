"""What sharding costs and saves, counted on each rank."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader

import lightning_tricks as lt
from tests.benchmarks.side_by_side import Stack
from tests.checkpoint_cases import world
from tests.strategy_cases import strategy_trainer


def held(tensors: Any) -> int:
    """Bytes of this rank's parts."""
    local = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
    return sum(one.numel() * one.element_size() for one in local)


class Count(pl.Callback):
    """Bytes at the optimizer's step, and gathers and reduce-scatters of each step."""

    def __init__(self) -> None:
        self.gradients = 0
        self.collectives: list[tuple[int, int]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.mode = CommDebugMode()
        self.mode.__enter__()

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        self.gradients = held(p.grad for p in module.parameters() if p.grad is not None)

    def on_train_batch_end(self, *args: Any) -> None:
        self.mode.__exit__(None, None, None)
        counts = {str(key): value for key, value in self.mode.get_comm_counts().items()}
        gathers = sum(value for key, value in counts.items() if "allgather" in key or "all_gather" in key)
        scatters = sum(value for key, value in counts.items() if "reduce_scatter" in key)
        self.collectives.append((gathers, scatters))


class Model(Stack):
    """Eight blocks of one size, all of whose tensors split evenly."""

    def __init__(self) -> None:
        super().__init__(64, 8)


def costs(strategy: str, accumulation: int = 1, *, ours: bool = False, **options: Any) -> dict[str, Any]:
    rank, world_size = world()
    module, count = Model(), Count()
    made = lt.FSDP2Strategy(**options) if options else strategy
    how = [lt.GradientAccumulation(accumulation)] if ours else []
    windows = 1 if ours else accumulation
    run = strategy_trainer(made, world_size, count, *how, accumulate_grad_batches=windows, max_epochs=1)
    data = torch.randn(6, 4, 64, generator=torch.Generator().manual_seed(rank))
    run.fit(module, DataLoader(data, batch_size=None))
    (optimizer,) = run.optimizers
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    state = [one for values in inner.state.values() for one in values.values() if one.ndim > 0]
    plan = getattr(run.strategy, "plan", None)
    return {
        "parameters": held(module.parameters()),
        "gradients": count.gradients,
        "optimizer state": held(state),
        "collectives": count.collectives,
        "units": len(plan.units) if plan else 0,
        "planned": sum(unit.bytes_of_rank(plan.shard_size, rank) for unit in plan.units) if plan else 0,
        "gathered once": sum(not unit.reshards for unit in plan.units) if plan else 0,
    }


class ByHand(Stack):
    """FSDP2 as stock Lightning wants it written, on the same model."""

    def configure_model(self) -> None:
        if not any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            mesh = self.device_mesh["data_parallel"]
            for block in self.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.blocks, mesh=mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).square().mean()


def scatters_of_parts() -> list[int]:
    """Reduce-scatters of each batch, each in two parts, in windows of 3. CommDebugMode fails on backwards within."""
    rank, world_size = world()
    counts: list[int] = []
    original = torch.distributed.reduce_scatter_single

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return original(*args, **kwargs)

    class Begin(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            counts.append(0)

    run = strategy_trainer("fsdp2", world_size, lt.GradientAccumulation(3), lt.MicroBatching(2), Begin(), max_epochs=1)
    data = torch.randn(6, 4, 64, generator=torch.Generator().manual_seed(rank))
    torch.distributed.reduce_scatter_single = counting
    try:
        run.fit(Model(), DataLoader(data, batch_size=None))
    finally:
        torch.distributed.reduce_scatter_single = original
    return counts
