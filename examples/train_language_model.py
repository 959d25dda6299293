"""Train a small byte-level GPT on the source text of Python's own standard library, with the tricks in the callbacks.

    python examples/train_language_model.py             # about two minutes on two CPU cores
    python examples/train_language_model.py --compare   # and a plain Trainer's run of the same length beside it

The module below is written as any user would write it: it knows nothing of lightning_tricks.
"""

import argparse
import copy
import math
import sysconfig
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_tricks as lt
from lightning_tricks.functional.activation_memory import measure_saved_activations
from lightning_tricks.functional.checkpointing import apply_activation_checkpointing

CONTEXT = 128


# The model and the data


class Block(nn.Module):
    """Attention and a feed-forward network, each normalised before and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.feed_forward_norm(x))


class ByteGPT(pl.LightningModule):
    def __init__(self, width: int = 96, layers: int = 3, heads: int = 4, lr: float = 2.5e-2) -> None:
        super().__init__()
        self.lr = lr
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, text: Tensor) -> Tensor:
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, text: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(text)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, text: Tensor, batch_idx: int) -> None:
        self.log("bits_per_byte", self.loss(text) / math.log(2))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1)


class Windows(Dataset[Tensor]):
    """Windows of CONTEXT + 1 bytes that follow one another."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * CONTEXT : index * CONTEXT + CONTEXT + 1].long()


def standard_library() -> tuple[bytes, bytes]:
    """Source text of the standard library, by file: nine of ten files to train on, every tenth held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    files = [path for path in sorted(root.rglob("*.py")) if not left_out & set(path.relative_to(root).parts)]
    texts = [path.read_bytes() for path in files]
    training = b"".join(text for index, text in enumerate(texts) if index % 10)
    return training, b"".join(texts[::10])


def order_0_entropy(text: bytes) -> float:
    """Bits per byte of the best code that knows how often each byte comes, and nothing else."""
    share = torch.bincount(torch.frombuffer(bytearray(text), dtype=torch.uint8).long()).double() / len(text)
    return float(-(share * share.log2()).nansum())


# The run


def train(callbacks: list[pl.Callback], options: argparse.Namespace) -> tuple[pl.Trainer, ByteGPT, float]:
    """Train for `options.steps` optimizer steps; return the held-out bits per byte too."""
    pl.seed_everything(1, verbose=False)
    training, held_out = standard_library()
    module = ByteGPT(options.width, options.layers)
    trainer = pl.Trainer(
        max_steps=options.steps,
        accumulate_grad_batches=2,
        callbacks=callbacks,
        accelerator="auto",
        devices=1,
        precision="16-mixed" if torch.cuda.is_available() else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        log_every_n_steps=1,
    )
    trainer.fit(module, DataLoader(Windows(training), batch_size=16, shuffle=True, drop_last=True))
    judge = pl.Trainer(accelerator="auto", devices=1, logger=False, limit_val_batches=options.eval_batches)
    data = DataLoader(Windows(held_out), batch_size=32)
    return trainer, module, judge.validate(module, data, verbose=False)[0]["bits_per_byte"]


class History(pl.Callback):
    """What each optimizer step showed, for the picture."""

    KEYS = ("loss", "grad/norm")

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.verdicts: list[str] = []
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer) -> None:
        self.rates.append(float(optimizer.param_groups[0]["lr"]))

    def on_train_batch_end(self, trainer: pl.Trainer, *args) -> None:
        if len(self.rates) > len(self.rows):
            self.rows.append({key: float(trainer.callback_metrics[key]) for key in self.KEYS})
            self.verdicts.append(lt.step_ledger(trainer)[0].last)


def peak_activation_bytes(module: ByteGPT) -> tuple[int, int]:
    """Activation bytes at the peak of one step: without checkpointing, and with it.

    Without, all blocks' at once. With it, the blocks' inputs, and while a block is recomputed what it saves.
    """
    module = copy.deepcopy(module).cpu()
    text = torch.zeros(16, CONTEXT + 1, dtype=torch.long)

    def saved(run) -> int:
        with measure_saved_activations(leave_out=[*module.parameters(), text]) as held:
            run()
        return held.num_bytes

    plain = saved(lambda: module.loss(text))
    hidden = torch.zeros(16, CONTEXT, module.bytes.embedding_dim, requires_grad=True)
    one_block = saved(lambda: module.blocks[0](hidden))
    handle = apply_activation_checkpointing(module)
    held = saved(lambda: module.loss(text))
    handle.remove()
    return plain, held + one_block


def draw(history: History, threshold: float, path: Path) -> None:
    """Four panels over the optimizer steps: loss, gradient norm, learning rate, and the steps that were left out."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    steps = range(1, len(history.rows) + 1)
    figure, panels = plt.subplots(4, 1, sharex=True, figsize=(8, 8), height_ratios=[3, 3, 2, 1], layout="constrained")
    panels[0].plot(steps, [row["loss"] / math.log(2) for row in history.rows], color="C0", lw=1)
    panels[0].set(ylabel="training loss\n(bits per byte)")
    norms = [row["grad/norm"] for row in history.rows]
    panels[1].semilogy(steps, norms, color="C1", lw=1, label="norm before clipping")
    panels[1].axhline(threshold, color="black", ls="--", lw=1, label=f"threshold {threshold:g}")
    panels[1].set(ylabel="gradient norm")
    panels[1].legend(loc="upper right")
    panels[2].plot(steps, history.rates, color="C2")
    panels[2].set(ylabel="learning rate", ylim=(0, None))
    panels[3].axvspan(
        1, len(history.rows), color="C2", alpha=0.25, label=f"applied: {history.verdicts.count('applied')}"
    )
    for kind, color in (("skipped_overflow", "C3"), ("skipped_guard", "C1"), ("skipped_empty", "C7")):
        hits = [step for step, verdict in zip(steps, history.verdicts, strict=True) if verdict == kind]
        if hits:
            panels[3].vlines(hits, 0, 1, color=color, lw=1, label=f"{kind.replace('_', ', ')}: {len(hits)}")
    panels[3].set(ylabel="verdict", yticks=[], xlabel="optimizer step", ylim=(0, 1))
    panels[3].legend(loc="center right", framealpha=1.0)
    figure.suptitle("A byte-level GPT on Python's standard library")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--eval-batches", type=int, default=60, help="held-out batches of 32 windows to score")
    parser.add_argument("--compare", action="store_true", help="also run a plain Trainer for as many steps")
    parser.add_argument("--picture", type=Path, default=Path("language_model.png"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")

    history, threshold = History(), 1.0
    tricks = [
        lt.GradientNormClipping(threshold),
        lt.LossScaleMonitor(),
        lt.WarmupCosineScheduler(warmup=0.05),
        lt.ActivationCheckpointing("auto"),
        lt.ExactResume(),
    ]
    trainer, module, bits = train([*tricks, history], options)

    ledger = lt.step_ledger(trainer)[0]
    plain_bytes, checkpointed_bytes = peak_activation_bytes(module)
    table = Table(title="held-out text", title_justify="left", show_header=False)
    table.add_row("order-0 entropy", f"{order_0_entropy(standard_library()[1]):.2f} bits per byte")
    table.add_row("with lightning_tricks", f"{bits:.2f} bits per byte")
    if options.compare:
        table.add_row("plain Trainer, as many steps", f"{train([], options)[2]:.2f} bits per byte")
    table.add_row("steps applied, skipped", f"{ledger.applied}, {ledger.skipped}")
    table.add_row("clip rate", f"{float(trainer.callback_metrics['grad/clip_rate']):.0%}")
    saved = plain_bytes - checkpointed_bytes
    table.add_row("peak activation bytes saved", f"{saved / 2**20:.0f} MiB of {plain_bytes / 2**20:.0f} MiB")
    Console().print(table)
    try:
        draw(history, threshold, options.picture)
    except ModuleNotFoundError:
        print('no picture: pip install "lightning_tricks[plot]"')
    else:
        print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
