"""A language model whose loss is a mean over tokens, and its large-batch twin. Imported by the pool's processes."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_tricks as lt
from tests.models import seeded, weights
from tests.models import trainer as quiet_trainer

Batch = dict[str, Tensor]
IGNORED = -100
LENGTH, VOCABULARY, WIDTH = 6, 11, 8


class Transformer(pl.LightningModule):
    """One layer of a transformer; the loss is the mean over the labels that count."""

    def __init__(self, *, lr: float = 0.1, momentum: float = 0.0) -> None:
        super().__init__()
        self.lr, self.momentum = lr, momentum
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.seen: list[dict[str, Tensor]] = []
        self.none_at: set[int] = set()

    def loss(self, batch: Batch) -> Tensor:
        logits = self.head(self.layer(self.embedding(batch["tokens"])))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        return None if batch_idx in self.none_at else loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        whole = lambda grad: grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()  # noqa: E731
        self.seen.append({name: whole(p.grad) for name, p in self.named_parameters() if p.grad is not None})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


def count_tokens(batch: Batch) -> Tensor:
    return (batch["labels"] != IGNORED).sum()


def token_batches(num_batches: int, *, empty: Sequence[int] = (), seed: int = 5) -> list[Batch]:
    """Batches of 1 to 4 samples with 1 to all of their tokens valid; none in those of the indices `empty`."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    batches = []
    for index in range(num_batches):
        tokens = torch.randint(VOCABULARY, (draw(1, 5), LENGTH), generator=generator)
        labels = torch.randint(VOCABULARY, tokens.shape, generator=generator)
        valid = 0 if index in empty else draw(1, labels.numel() + 1)
        labels.view(-1)[torch.randperm(labels.numel(), generator=generator)[valid:]] = IGNORED
        batches.append({"tokens": tokens, "labels": labels})
    return batches


def union(batches: Sequence[Batch]) -> Batch:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def large_batch_run(windows: Sequence[Sequence[Batch]], *, dtype: torch.dtype, **options: Any) -> Transformer:
    """The reference: each window's batches as one, without a Trainer."""
    module = seeded(lambda: Transformer(**options)).to(dtype)
    optimizer = module.configure_optimizers()
    for window in windows:
        optimizer.zero_grad()
        module.loss(union(window)).backward()
        module.on_before_optimizer_step(optimizer)
        optimizer.step()
    return module


def run(
    data: Sequence[Batch],
    *callbacks: pl.Callback,
    dtype: torch.dtype = torch.float32,
    module: Transformer | None = None,
    ckpt_path: Any = None,
    **options: Any,
) -> tuple[pl.Trainer, Transformer]:
    module = seeded(Transformer).to(dtype) if module is None else module
    trainer = quiet_trainer(*callbacks, **options)
    trainer.fit(module, DataLoader(list(data), batch_size=None), ckpt_path=ckpt_path, weights_only=True)
    return trainer, module


def windows_of(num_batches: int, size: int, epochs: int, *, carry_over: bool = False) -> list[list[int]]:
    """Indices of the batches of each window, slowly."""
    windows: list[list[int]] = [[]]
    for _ in range(epochs):
        for index in range(num_batches):
            windows[-1].append(index)
            if len(windows[-1]) == size or (index == num_batches - 1 and not carry_over):
                windows.append([])
    return [window for window in windows if window]


def largest_relative_error(module: Transformer, reference: Transformer) -> float:
    """Of the gradient of each step, as one vector."""
    assert len(module.seen) == len(reference.seen) > 0
    errors = []
    for one, other in zip(module.seen, reference.seen, strict=True):
        assert one.keys() == other.keys()
        difference = torch.cat([(one[name] - other[name]).flatten().double() for name in one])
        errors.append(float(difference.norm() / torch.cat([g.flatten().double() for g in other.values()]).norm()))
    return max(errors)


def error_under(
    strategy: str, dtype: torch.dtype, *, empty: Sequence[int] = (), num_batches: int = 6, **options: Any
) -> float:
    """The largest error of two epochs in windows of 4 against the large batch of all ranks; the first window has
    empty batches on one rank only."""
    distributed = torch.distributed.is_initialized()
    rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed else (0, 1)
    parts = [token_batches(num_batches, empty=empty if r == 0 else (), seed=r) for r in range(ranks)]
    accumulation = lt.GradientAccumulation(4, weigh_by="tests.accumulation_cases.count_tokens", **options)
    _, module = run(
        parts[rank], accumulation, dtype=dtype, strategy=strategy, devices=ranks, max_epochs=2,
        use_distributed_sampler=False,
    )  # fmt: skip
    windows = windows_of(num_batches, 4, 2, carry_over=options.get("carry_over", False))
    reference = large_batch_run([[part[i] for i in window for part in parts] for window in windows], dtype=dtype)
    return largest_relative_error(module, reference)


def errors_under(strategies: Sequence[str]) -> dict[tuple[str, torch.dtype, bool, tuple[int, ...]], float]:
    return {
        (strategy, dtype, carry_over, empty): error_under(strategy, dtype, carry_over=carry_over, empty=empty)
        for strategy in strategies
        for dtype, carry_over, empty in (
            (torch.float64, False, (1,)),
            (torch.float64, True, (0, 3)),
            (torch.float32, True, (1,)),
        )
    }


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    one, other = weights(first), weights(second)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
