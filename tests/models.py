"""Modules, data and a quiet Trainer for the tests. The modules know nothing of lightning_tricks."""

import tempfile
from collections.abc import Iterator

import lightning.pytorch as pl
import schedulefree
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    """A residual block, with what makes recomputation hard: dropout and running statistics."""

    def __init__(self, width: int = 8, dropout: float = 0.0, batchnorm: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if batchnorm else nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


class Net(pl.LightningModule):
    """A regression of three blocks.

    `nan_at` and `inf_grad_at` poison the loss, or one parameter's gradient alone, at batches of these indices;
    `none_at` returns no loss there; `fail_at` raises there, in training or in validation. `width` repeats the features.
    """

    def __init__(
        self,
        *,
        optimizer: str = "adamw",
        fused: bool = False,
        lr: float = 0.01,
        dropout: float = 0.0,
        batchnorm: bool = False,
        width: int = 8,
        nan_at: tuple[int, ...] = (),
        none_at: tuple[int, ...] = (),
        fail_at: int | None = None,
        fail_in_validation: bool = False,
    ) -> None:
        super().__init__()
        self.options = {"optimizer": optimizer, "fused": fused, "lr": lr}
        self.nan_at, self.none_at, self.fail_at = nan_at, none_at, fail_at
        self.fail_in_validation = fail_in_validation
        self.net = nn.Sequential(*(Block(width, dropout, batchnorm) for _ in range(3)), nn.Linear(width, 1))
        self.copies = width // 8
        self.losses: list[float] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return (self.net(x.repeat(1, self.copies)) - y).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        if batch_idx == self.fail_at:
            raise RuntimeError("boom in training")
        loss = self.loss(batch)
        self.losses.append(loss.item())
        if batch_idx in self.none_at:
            return None
        return loss * float("nan") if batch_idx in self.nan_at else loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.fail_in_validation and self.trainer.global_step:
            raise RuntimeError("boom in validation")
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.parameters(), **self.options)


class ManualNet(Net):
    """The same in manual optimization."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class TwoOptimizers(Net):
    """Manual optimization of the blocks and the head by two optimizers, the second one with every second batch."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        body, head = self.optimizers()
        for optimizer, acts in ((body, True), (head, batch_idx % 2 == 0)):
            if acts:
                self.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        head = self.net[-1].parameters()
        body = [p for block in self.net[:-1] for p in block.parameters()]
        return [make_optimizer(body, **self.options), make_optimizer(head, **self.options)]


class FixedGradients(pl.LightningModule):
    """One weight vector whose gradient at batch i is the i-th row given, so that every number is known."""

    def __init__(self, gradients: list[list[float]], *, lr: float = 1.0, fused: bool = False) -> None:
        super().__init__()
        self.rows = torch.tensor(gradients)
        self.weight = nn.Parameter(torch.zeros(self.rows.shape[1]))
        self.lr, self.fused = lr, fused
        self.applied: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * self.rows[batch_idx].to(self.weight)).sum()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.weight.grad is not None:  # after all callbacks: what the optimizer will see
            self.applied.append(self.weight.grad.clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.parameters(), optimizer="sgd", fused=self.fused, lr=self.lr)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.zeros(len(self.rows), 1), batch_size=1)


def make_optimizer(parameters, optimizer: str, fused: bool, lr: float) -> torch.optim.Optimizer:
    parameters = list(parameters)
    if optimizer == "adamw":  # a large epsilon, so that rounding is not amplified where runs are compared
        return torch.optim.AdamW(parameters, lr=lr, eps=1e-3, fused=fused)
    if optimizer == "schedulefree":
        free = schedulefree.AdamWScheduleFree(parameters, lr=lr, eps=1e-3)
        free.train()  # for the runs without our callback
        return free
    if optimizer == "momentum":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=fused)
    return torch.optim.SGD(parameters, lr=lr, fused=fused)


def dataset(num_samples: int = 28) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 8, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True).sin())


def loader(num_samples: int = 28, batch_size: int = 4) -> DataLoader:
    return DataLoader(dataset(num_samples), batch_size=batch_size)


class RankBatches:
    """A batch sampler that gives each rank its part of every global batch, in order."""

    def __init__(self, num_samples: int, global_batch: int, rank: int, world_size: int) -> None:
        self.batches = [list(range(i, i + global_batch)) for i in range(0, num_samples, global_batch)]
        self.part = slice(rank * global_batch // world_size, (rank + 1) * global_batch // world_size)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return (batch[self.part] for batch in self.batches)


def rank_loader(rank: int, world_size: int, num_samples: int = 32, global_batch: int = 8) -> DataLoader:
    return DataLoader(dataset(num_samples), batch_sampler=RankBatches(num_samples, global_batch, rank, world_size))


def fp16(init_scale: float = 2.0**8, **options) -> MixedPrecision:
    """fp16 with a loss scaler on CPU, which `precision="16-mixed"` would silently make bf16."""
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, **options)
    return MixedPrecision("16-mixed", device="cpu", scaler=scaler)


SCRATCH = tempfile.TemporaryDirectory(prefix="lightning_tricks_tests")  # for what nobody looks at


def trainer(*callbacks: pl.Callback, **options) -> pl.Trainer:
    defaults = {
        "default_root_dir": SCRATCH.name,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**defaults, **options})


def fit(module: pl.LightningModule, *callbacks: pl.Callback, data=None, **options) -> pl.Trainer:
    run = trainer(*callbacks, **options)
    if data is None and not isinstance(module, FixedGradients):
        data = loader()
    run.fit(module, data)
    return run


def seeded(build, seed: int = 0):
    torch.manual_seed(seed)
    return build()


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Full copies of all parameters and buffers."""
    full = lambda t: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()  # noqa: E731
    return {name: full(tensor) for name, tensor in module.state_dict().items()}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor], **tolerance) -> None:
    """Equal bit for bit, or within a tolerance when one is given."""
    assert first.keys() == second.keys()
    assert first
    for name in first:
        if tolerance:
            torch.testing.assert_close(first[name], second[name], msg=lambda m, name=name: f"{name}: {m}", **tolerance)
        else:
            assert torch.equal(first[name], second[name]), (name, first[name], second[name])


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)
