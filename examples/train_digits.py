"""Train a small BatchNorm CNN on scikit-learn's handwritten digits, with the tricks in the callbacks.

    python examples/train_digits.py             # about half a minute on two CPU cores
    python examples/train_digits.py --compare   # and a plain Trainer's run of the same length beside it

One batch in fifty is spoilt on purpose (its images hold an inf), as a broken file or sensor would: the plain Trainer's
weights end as nan, with the tricks the step is left out and training goes on.
"""

import argparse
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks as lt


class Residual(nn.Module):
    """Two convolutions with BatchNorm, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(x + self.second_norm(self.second(y)))


class DigitsCNN(pl.LightningModule):
    def __init__(self, channels: int = 24, depth: int = 3, spoil: bool = True) -> None:
        super().__init__()
        self.spoil = spoil
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.body = nn.Sequential(*(Residual(channels) for _ in range(depth)))
        self.head = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(self.stem(images)).mean(dim=(2, 3)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, digits = batch
        logits = self(images)
        if self.spoil and self.trainer.fit_loop.total_batch_idx % 50 == 49:
            logits = logits * float("inf")
        loss = F.cross_entropy(logits, digits)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, digits = batch
        self.log("accuracy", (self(images).argmax(dim=1) == digits).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1797 images of 8 x 8: the first 1400 to train on, the rest held out."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    return TensorDataset(images[:1400], labels[:1400]), TensorDataset(images[1400:], labels[1400:])


def train(callbacks: list[pl.Callback], options: argparse.Namespace) -> tuple[pl.Trainer, float, float]:
    pl.seed_everything(1, verbose=False)
    training, held_out = digits()
    module = DigitsCNN()
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        callbacks=callbacks,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
    )
    trainer.fit(module, DataLoader(training, batch_size=64, shuffle=True, drop_last=True))
    clip_rate = float(trainer.callback_metrics.get("grad/clip_rate", 0.0))  # validation has metrics of its own
    accuracy = trainer.validate(module, DataLoader(held_out, batch_size=256), verbose=False)[0]["accuracy"]
    return trainer, accuracy, clip_rate


class History(pl.Callback):
    """What each optimizer step showed, for the picture."""

    def __init__(self) -> None:
        self.loss: list[float] = []
        self.norm: list[float] = []
        self.rate: list[float] = []
        self.verdict: list[str] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer) -> None:
        self.rate.append(float(optimizer.param_groups[0]["lr"]))

    def on_train_batch_end(self, trainer: pl.Trainer, *args) -> None:
        self.loss.append(float(trainer.callback_metrics["loss"]))
        self.norm.append(float(trainer.callback_metrics["grad/norm"]))
        self.verdict.append(lt.step_ledger(trainer)[0].last)


def draw(history: History, threshold: float, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(4, 1, sharex=True, figsize=(8, 8), height_ratios=[3, 3, 2, 1], layout="constrained")
    panels[0].semilogy(history.loss, lw=1)
    panels[0].set(ylabel="training loss")
    panels[1].semilogy(history.norm, color="C1", lw=1, label="norm before clipping")
    panels[1].axhline(threshold, color="black", ls="--", lw=1, label=f"threshold {threshold:g}")
    panels[1].set(ylabel="gradient norm")
    panels[1].legend(loc="upper right")
    panels[2].plot(history.rate, color="C2")
    panels[2].set(ylabel="learning rate", ylim=(0, None))
    skipped = [step for step, verdict in enumerate(history.verdict) if verdict != "applied"]
    panels[3].axvspan(
        0, len(history.loss), color="C2", alpha=0.25, label=f"applied: {len(history.loss) - len(skipped)}"
    )
    panels[3].vlines(skipped, 0, 1, color="C3", lw=2, label=f"skipped, guard: {len(skipped)}")
    panels[3].set(ylabel="verdict", yticks=[], xlabel="optimizer step", ylim=(0, 1))
    panels[3].legend(loc="center right", framealpha=1.0)
    figure.suptitle("A BatchNorm CNN on scikit-learn's digits, one batch in fifty spoilt")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--compare", action="store_true", help="also run a plain Trainer for as many epochs")
    parser.add_argument("--picture", type=Path, default=Path("digits.png"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")

    history, threshold = History(), 1.0
    tricks = [
        lt.GradientNormClipping(threshold),
        lt.LossScaleMonitor(),
        lt.WarmupCosineScheduler(warmup=0.1),
        lt.ActivationCheckpointing("auto"),
        lt.ExactResume(),
    ]
    trainer, accuracy, clip_rate = train([*tricks, history], options)
    ledger = lt.step_ledger(trainer)[0]
    table = Table(title="held-out digits", title_justify="left", show_header=False)
    table.add_row("with lightning_tricks", f"{accuracy:.1%} right")
    if options.compare:
        table.add_row("plain Trainer, as many epochs", f"{train([], options)[1]:.1%} right")
    table.add_row("steps applied, skipped", f"{ledger.applied}, {ledger.skipped}")
    table.add_row("clip rate", f"{clip_rate:.0%}")
    Console().print(table)
    try:
        draw(history, threshold, options.picture)
    except ModuleNotFoundError:
        print('no picture: pip install "lightning_tricks[plot]"')
    else:
        print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
