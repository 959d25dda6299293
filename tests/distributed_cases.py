"""What the two-process tests run on each rank. Imported by the processes of the pool, so nothing here knows pytest."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from tests.contract_table import ROWS
from tests.models import Net, fit, rank_loader, seeded, weights


class ShardedNet(Net):
    """FSDP2 as Lightning wants it written by hand."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.net[:-1]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def strategy_of(name: str, world_size: int) -> Any:
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    return name


def trained(
    callbacks: list[pl.Callback], strategy: str, rank: int, world_size: int, *, net: dict[str, Any], **options: Any
) -> tuple[pl.Trainer, dict[str, torch.Tensor]]:
    """Train on this rank's part of every global batch; return the Trainer and the full weights."""
    kind = ShardedNet if strategy == "fsdp2" else Net
    module = seeded(lambda: kind(**net))
    trainer = fit(
        module,
        *callbacks,
        data=rank_loader(rank, world_size),
        strategy="auto" if strategy == "one process" else strategy_of(strategy, world_size),
        devices=world_size,
        use_distributed_sampler=False,
        **options,
    )
    return trainer, weights(module)


def contract_runs(strategy: str, rank: int | None = None, world_size: int = 2) -> dict[str, Any]:
    """Every row of the contract, acting, on the optimizers that the comparison needs; weights by row and optimizer."""
    rank = torch.distributed.get_rank() if rank is None else rank
    results = {}
    for row in ROWS:
        for optimizer in ("momentum", "adamw"):
            trainer, result = trained(
                [row.build("acting")],
                strategy,
                rank,
                world_size,
                net={"optimizer": optimizer},
                accumulate_grad_batches=3,
                max_epochs=2,
            )
            logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
            results[row.name, optimizer] = result, logged
    return results
