"""What the tests of checkpoints run on each rank."""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy

import lightning_tricks as lt
from lightning_tricks.distributed import sharded_checkpoint
from lightning_tricks.distributed.sharded_checkpoint import read_meta
from tests import strategy_models as models
from tests.distributed_cases import ShardedNet
from tests.models import Net, assert_same, seeded, weights
from tests.strategy_cases import data_of, strategy_trainer

SAVERS: dict[str, Any] = {
    "fsdp2 file": lambda: lt.FSDP2Strategy(),
    "fsdp2 folder": lambda: lt.FSDP2Strategy(save_distributed_checkpoint=True),
    "fsdp2 async folder": lambda: lt.FSDP2Strategy(save_distributed_checkpoint=True, async_checkpoint=True),
    "hsdp": lambda: lt.FSDP2Strategy(replicate_size=2),
    "zero1": lambda: lt.ZeRO1Strategy(),
    "zero2": lambda: lt.FSDP2Strategy(reshard_after_forward=False),
    "ddp": lambda: "ddp",
    "one process": lambda: "auto",
}


class AnyOptimizer(models.TiedModule):
    """Also optimizers whose state has other shapes than the parameters, or none."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adafactor":
            return torch.optim.Adafactor(self.parameters(), lr=0.01)
        return super().configure_optimizers()


class OtherOrder(AnyOptimizer):
    """The same groups, in the other order."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.param_groups.reverse()
        return optimizer


class SaveAfter(pl.Callback):
    """Save after so many batches."""

    def __init__(self, path: Path, batches: int = 7) -> None:
        self.path, self.batches = path, batches

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batches:
            trainer.save_checkpoint(self.path)


class HalvesTheRate(pl.Callback):
    """So that a resumed run needs the settings of the saved groups too: its own begin at the full rate."""

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] *= 0.5


def world() -> tuple[int, int]:
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def train(
    strategy: str,
    optimizer: str,
    *callbacks: pl.Callback,
    seed: int = 0,
    ckpt_path: Any = None,
    kind: Any = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Weights after 10 batches."""
    rank, world_size = world()
    module = seeded(lambda: (kind or AnyOptimizer)(optimizer=optimizer), seed)
    run = strategy_trainer(SAVERS[strategy](), world_size, *callbacks, HalvesTheRate(), max_epochs=1, **options)
    run.fit(module, data_of(module, rank, world_size), ckpt_path=ckpt_path)
    return weights(module)


def save(strategy: str, optimizer: str, path: str) -> dict[str, torch.Tensor]:
    return train(strategy, optimizer, SaveAfter(Path(path)))


def save_all(savers: list[str], optimizers: list[str], folder: str) -> None:
    for saver in savers:
        for optimizer in optimizers:
            save(saver, optimizer, checkpoint(folder, saver, optimizer))


def checkpoint(folder: str, saver: str, optimizer: str) -> str:
    return f"{folder}/{saver}-{optimizer}-{world()[1]}.ckpt"


def resume(cases: list[tuple[str, str, str]]) -> list[dict[str, torch.Tensor]]:
    return [train(strategy, optimizer, seed=5, ckpt_path=path) for strategy, optimizer, path in cases]


def resume_in_other_order(path: str) -> dict[str, torch.Tensor]:
    return train("fsdp2 file", "adamw", seed=5, ckpt_path=path, kind=OtherOrder)


def train_by_hand(saver: str, path: str, seed: int = 0, resumes: bool = False) -> dict[str, torch.Tensor]:
    """A module whose optimizer has one group: with several, stock Lightning cannot load even its own files."""
    rank, world_size = world()
    stock = saver == "stock"
    module = seeded(lambda: (ShardedNet if stock else Net)(optimizer="momentum"), seed)
    strategy = ModelParallelStrategy(world_size, 1) if stock else SAVERS[saver]()
    callbacks = [] if resumes else [SaveAfter(Path(path))]
    run = strategy_trainer(strategy, world_size, *callbacks, max_epochs=1)
    run.fit(module, data_of(module, rank, world_size), ckpt_path=path if resumes else None)
    return weights(module)


def kept_checkpoints(saver: str, folder: str) -> tuple[dict[str, int], list[str]]:
    """The checkpoints that ModelCheckpoint keeps, with their steps, and the names of all else in the folder."""
    callbacks = [
        ModelCheckpoint(folder, "best-{step}", monitor="val_loss", save_top_k=2, every_n_train_steps=2, save_last=True),
        ModelCheckpoint(folder, "every-{step}", save_top_k=-1, every_n_train_steps=4),
    ]
    rank, world_size = world()
    module = seeded(lambda: Net(optimizer="momentum"))
    run = strategy_trainer(
        SAVERS[saver](), world_size, *callbacks, max_epochs=1, enable_checkpointing=True, val_check_interval=2
    )
    run.fit(module, data_of(module, rank, world_size), data_of(module, rank, world_size))
    torch.distributed.barrier()
    found = sorted(Path(folder).iterdir())
    checkpoints = [path for path in found if path.suffix == ".ckpt"]
    steps = {path.name: read(path)["global_step"] for path in checkpoints}
    return steps, [path.name for path in found if path not in checkpoints]


def read(path: Path) -> dict[str, Any]:
    return read_meta(path) if path.is_dir() else torch.load(path, weights_only=True)


class Opaque:
    """What `torch.load(weights_only=True)` refuses."""


class HoldsAnObject(AnyOptimizer):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["opaque"] = Opaque()


def needs_trust(saver: str, path: str) -> list[str]:
    """What becomes of a resume from a checkpoint that holds an object, by `weights_only`."""
    train(saver, "sgd", SaveAfter(Path(path)), kind=HoldsAnObject)
    found = []
    rank, world_size = world()
    for weights_only in (None, True, False):
        module = HoldsAnObject(optimizer="sgd")
        run = strategy_trainer(SAVERS[saver](), world_size, max_epochs=1)
        try:
            run.fit(module, data_of(module, rank, world_size), ckpt_path=path, weights_only=weights_only)
            found.append("resumed")
        except UnpicklingError:
            found.append("refused")
    return found


def interrupted_save(path: str) -> list[str]:
    """A save that fails on the way, over one that is whole: what is there afterwards, and whether it resumes."""
    save("fsdp2 folder", "adamw", path)
    before = resume([("fsdp2 file", "adamw", path)])[0]
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(sharded_checkpoint, "save", _half_a_save)
        with pytest.raises(RuntimeError, match="killed"):
            save("fsdp2 folder", "adamw", path)
    torch.distributed.barrier()
    assert_same(resume([("fsdp2 file", "adamw", path)])[0], before)
    return sorted(one.name for one in Path(path).parent.iterdir())


def _half_a_save(content: Any, storage_writer: Any, planner: Any) -> None:
    (Path(storage_writer.path) / "__0_0.distcp").write_bytes(b"half")
    raise RuntimeError("killed")
