"""What a rank of a job does. Imported once, by the server that the ranks are forked from."""

import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

import lightning_tricks as lt
from lightning_tricks.distributed import publishing
from tests.guard_models import Poisoned
from tests.models import RankBatches, dataset, seeded, trainer, weights

EPOCHS, BATCHES = 3, 10


class Pace(pl.Callback):
    """Says when training begins, slows it down, and ends this rank where it is told to."""

    def __init__(self, folder: Path, rank: int, end_at: int | None, hang_at: int | None) -> None:
        self.folder, self.rank, self.end_at, self.hang_at = folder, rank, end_at, hang_at

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.rank == 0:
            with (self.folder / "began").open("a") as file:
                file.write(f"{trainer.global_step}\n")

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.rank == 0:
            with (self.folder / "started").open("a") as file:
                file.write(".")
        time.sleep(0.01)
        if self.rank == 1 and trainer.global_step == self.end_at:
            os._exit(3)
        if self.rank == 1 and trainer.global_step == self.hang_at:
            time.sleep(600)


def strategy_of(name: str, timeout: Any) -> Any:
    options = {} if timeout is None else {"timeout": timeout}
    if name == "zero1":
        return lt.ZeRO1Strategy(**options)
    return lt.FSDP2Strategy(save_distributed_checkpoint="folder" in name, async_checkpoint="async" in name, **options)


def die_in_publish(where: str) -> None:
    """End by SIGKILL once a checkpoint is written but not published, or when the one that it replaces has moved."""
    replace = os.replace
    published = 0

    def replace_or_die(source: Any, target: Any) -> None:
        nonlocal published
        published += Path(target).name == "last.ckpt"
        if published == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    publish = publishing.publish

    def publish_or_die(scratch: Path, path: Path) -> None:
        nonlocal published
        published += path.name == "last.ckpt"
        if published == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        publish(scratch, path)

    if where == "between the renames":
        publishing.os.replace = replace_or_die  # type: ignore[attr-defined]
    else:
        from lightning_tricks.distributed import sharded_checkpoint

        publishing.publish = sharded_checkpoint.publish = publish_or_die


def work(rank: int, port: int, folder: str, options: dict[str, Any]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="tests",
    )  # fmt: skip
    output = os.open(os.devnull, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    try:
        train(rank, Path(folder), **options)
    except BaseException as error:
        (Path(folder) / f"error-{rank}").write_text("".join(traceback.format_exception(error)))
        os._exit(1)
    os._exit(0)


def train(
    rank: int,
    folder: Path,
    strategy: str = "fsdp2 folder",
    timeout: Any = None,
    end_at: int | None = None,
    hang_at: int | None = None,
    die: str | None = None,
    poisoned: bool = False,
) -> None:
    if die is not None and rank == 0:
        die_in_publish(die)
    poison = {4: "nan", 11: "spike", 17: "inf", 23: "spike"} if poisoned else {}
    guards = [lt.LossSpikeGuard(z_threshold=50.0, window_steps=16, warmup_steps=8)] if poisoned else []
    module = seeded(lambda: Poisoned(poison, rank=1, dropout=0.3, optimizer="momentum"))
    checkpoints = ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=3 if poisoned else 1)
    data = StatefulDataLoader(dataset(80), batch_sampler=RankBatches(80, 8, rank, 2))
    run = trainer(
        *guards, lt.ExactResume(), Pace(folder, rank, end_at, hang_at), checkpoints, default_root_dir=folder,
        strategy=strategy_of(strategy, timeout), devices=2, max_epochs=EPOCHS, use_distributed_sampler=False,
        enable_checkpointing=True,
    )  # fmt: skip
    run.fit(module, data, ckpt_path="last", weights_only=True)
    final = weights(module)
    if rank == 0:
        assert run.global_step == EPOCHS * BATCHES
        torch.save(final, folder / "final.pt")
