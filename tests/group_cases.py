"""Splits of parameter groups under strategies: what the processes of the pool run."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI

import lightning_tricks as lt
from tests.models import Net, make_optimizer, rank_loader, seeded, trainer, weights

TRICKS = {
    "decay": lambda: [lt.WeightDecayGroups(0.3)],
    "rates": lambda: [lt.LayerwiseLearningRateDecay(0.5)],
    "both": lambda: [lt.LayerwiseLearningRateDecay(0.5), lt.WeightDecayGroups(0.3)],
    "none": lambda: [],
}


class Scheduled(Net):
    """Two groups, and a scheduler with a function for each."""

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.parameters(), **self.options)
        head = list(self.net[-1].parameters())
        body = [one for block in self.net[:-1] for one in block.parameters()]
        optimizer = torch.optim.AdamW([{"params": body}, {"params": head, "lr": 0.02}], lr=0.01, eps=1e-3)
        lambdas = [lambda k: 0.95**k, lambda k: 0.9**k]
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambdas), "interval": "step"}]


class Settings(pl.Callback):
    """Rate and weight decay of each parameter at each step, by name."""

    def __init__(self) -> None:
        self.seen: list[dict[str, tuple[float, float]]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        self.seen.append(
            {
                names[id(parameter)]: (group["lr"], group["weight_decay"])
                for group in optimizer.param_groups
                for parameter in group["params"]
            }
        )


def grouped(
    tricks: str,
    strategy: Any,
    *,
    save: str | None = None,
    resume: str | None = None,
    rank: int | None = None,
    world_size: int = 2,
) -> dict[str, Any]:
    """Train two epochs, or the second; full weights, and each parameter's settings at each step."""
    rank = torch.distributed.get_rank() if rank is None else rank
    module, settings = seeded(Scheduled, 7 if resume else 0), Settings()
    run = trainer(
        *TRICKS[tricks](),
        settings,
        strategy=strategy,
        devices=world_size,
        use_distributed_sampler=False,
        max_epochs=1 if save else 2,
    )
    run.fit(module, rank_loader(rank, world_size), ckpt_path=resume)
    if save:
        run.save_checkpoint(save)
    return {"weights": weights(module), "settings": settings.seen}


def grouped_under(strategy: str, reference: str, folder: str) -> dict[str, Any]:
    """Whole runs with the tricks; runs with all of them from a file of a run without, and from a folder of shards."""
    found = {tricks: grouped(tricks, strategy) for tricks in TRICKS}
    found["resumed"] = grouped("both", strategy, resume=reference)
    if strategy == "fsdp2":
        sharded = lambda: lt.FSDP2Strategy(save_distributed_checkpoint=True)  # noqa: E731
        grouped("none", sharded(), save=folder)
        found["from folder"] = grouped("both", sharded(), resume=folder)
    return found


def built_by_command_line(config: str) -> list[dict[str, tuple[float, float]]]:
    class WithData(Scheduled):
        def __init__(self) -> None:
            super().__init__()

        def train_dataloader(self) -> Any:
            return rank_loader(0, 1)

    cli = LightningCLI(WithData, args=["--config", config], run=False, save_config_callback=None)
    settings = Settings()
    cli.trainer.callbacks.append(settings)
    cli.trainer.fit(cli.model)
    return settings.seen
