"""A language model whose loss is a mean over tokens, and its large-batch twin. Imported by the pool's processes."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torchdata.stateful_dataloader import StatefulDataLoader

import lightning_tricks as lt
from tests.models import fp16, seeded, weights
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
        labels = batch["labels"].flatten()
        losses = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="none")
        return losses.sum() / (labels != IGNORED).sum()  # without a label nan, and nan in every gradient

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        return None if batch_idx in self.none_at else loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        whole = lambda grad: grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()  # noqa: E731
        gradients = {name: whole(p.grad) for name, p in self.named_parameters() if p.grad is not None}
        if gradients:  # a step without a loss has none
            self.seen.append(gradients)

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
    data: Sequence[Batch | None],
    *callbacks: pl.Callback,
    dtype: torch.dtype = torch.float32,
    module: Transformer | None = None,
    ckpt_path: Any = None,
    **options: Any,
) -> tuple[pl.Trainer, Transformer]:
    module = seeded(Transformer).to(dtype) if module is None else module
    trainer = quiet_trainer(*callbacks, **options)
    trainer.fit(module, StatefulDataLoader(list(data), batch_size=None), ckpt_path=ckpt_path, weights_only=True)
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


class Stop(pl.Callback):
    """End the fit after so many batches, as a timer or a user does."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.fit_loop.total_batch_idx + 1 >= self.after


class Save(pl.Callback):
    """Write a checkpoint after so many batches."""

    def __init__(self, after: int, path: Any) -> None:
        self.after, self.path = after, path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.after:
            trainer.save_checkpoint(self.path)


def part_of_rank(num_batches: int) -> tuple[list[Batch], list[list[Batch]], dict[str, Any]]:
    """This rank's batches, those of all, and the Trainer's options."""
    distributed = torch.distributed.is_initialized()
    rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed else (0, 1)
    parts = [token_batches(num_batches, seed=r) for r in range(ranks)]
    return parts[rank], parts, {"devices": ranks, "use_distributed_sampler": False}


def tokens(steps: Any = 4, **options: Any) -> lt.GradientAccumulation:
    return lt.GradientAccumulation(steps, weigh_by="tests.accumulation_cases.count_tokens", **options)


def errors_when_epochs_end_with_none(strategies: Sequence[str]) -> dict[str, float]:
    """Lightning takes no step there; nothing of the window may reach the next epoch's."""
    mine, parts, options = part_of_rank(6)
    found = {}
    for strategy in strategies:
        _, module = run([*mine, None], tokens(), dtype=torch.float64, strategy=strategy, max_epochs=2, **options)
        windows = [[part[i] for i in window for part in parts] for window in windows_of(6, 4, 2)]
        found[strategy] = largest_relative_error(module, large_batch_run(windows, dtype=torch.float64))
    return found


def errors_when_stopped(strategies: Sequence[str]) -> dict[str, tuple[float, int]]:
    """A fit that is stopped inside of its second window: the largest error, and how many steps were taken."""
    mine, parts, options = part_of_rank(8)
    found = {}
    for strategy in strategies:
        trainer, module = run(
            mine, tokens(), Stop(after=6), dtype=torch.float64, strategy=strategy, max_epochs=2, **options
        )
        windows = [[part[i] for i in window for part in parts] for window in ([0, 1, 2, 3], [4, 5])]
        reference = large_batch_run(windows, dtype=torch.float64)
        found[strategy] = largest_relative_error(module, reference), trainer.global_step
    return found


STRATEGIES = {
    "bucket view": lambda: DDPStrategy(gradient_as_bucket_view=True),
    "unused": lambda: DDPStrategy(find_unused_parameters=True),
}


def resumed_inside_of_a_window(strategy: str, path: str, *, scaled: bool = False) -> tuple[float, float, int, bool]:
    """Largest differences of weights and of the last logged loss between a resumed and an uninterrupted run, how many
    gradients the checkpoint holds, and whether saving changed the run."""
    mine, _, options = part_of_rank(6)

    def go(*callbacks: pl.Callback, ckpt_path: Any = None) -> tuple[pl.Trainer, Transformer]:
        module = seeded(lambda: Transformer(momentum=0.9), seed=0 if ckpt_path is None else 99)
        plugins = [fp16()] if scaled else []
        return run(
            mine, tokens(carry_over=True), *callbacks, module=module, ckpt_path=ckpt_path, max_epochs=3,
            strategy=STRATEGIES[strategy]() if strategy in STRATEGIES else strategy, plugins=plugins, **options,
        )  # fmt: skip

    _, unsaved = go()
    whole, module = go(Save(10, path))  # the second batch of the third window
    gradients = torch.load(path, weights_only=True)["callbacks"]["GradientAccumulation"]["window"]["gradients"]
    again, resumed = go(ckpt_path=path)
    one, other = weights(module), weights(resumed)
    difference = max(float((one[name] - other[name]).abs().max()) for name in one)
    losses = [float(trainer.callback_metrics["accumulation/loss"]) for trainer in (whole, again)]
    assert whole.global_step == again.global_step == 5  # 18 batches in windows of 4
    return difference, abs(losses[0] - losses[1]), len(gradients), not same_weights(unsaved, module)


def empty_windows(strategies: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The ledger where the second of three windows has no valid token on any rank, and the first none on rank 1.

    A guard reads the loss of all ranks, so each has to have one.
    """
    _, _, options = part_of_rank(1)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    data = token_batches(6, empty=(2, 3, *((0, 1) if rank else ())), seed=rank)
    found = {}
    for strategy in strategies:
        module = seeded(lambda: Transformer(momentum=0.9))
        guard = lt.LossSpikeGuard("warn")
        trainer, _ = run(data, tokens(2), guard, module=module, strategy=strategy, **options)
        assert all(one.isfinite().all() for one in weights(module).values())
        found[strategy] = [one.state_dict() for one in lt.step_ledger(trainer)]
    return found


def error_of_a_fit_after_one_that(ended: str) -> float:
    """Under FSDP2: what an open window of an earlier fit leaves must not reach a later one. The largest error there."""
    mine, parts, options = part_of_rank(6)
    module = seeded(Ends).double()
    module.ends = ended
    trainer = quiet_trainer(
        tokens(3), *([Stop(after=5)] if ended == "stopped" else []), strategy="fsdp2", max_epochs=2, **options
    )
    words = ""
    try:
        trainer.fit(module, StatefulDataLoader(mine, batch_size=None))
    except RuntimeError as error:
        words = str(error)
    assert words == ("boom" if ended == "failed" else "")
    steps = 2 if ended == "stopped" else 1
    assert trainer.global_step == len(module.seen) == steps
    module.seen.clear()
    module.ends = "never"
    reference = large_batch_run(
        [[part[i] for i in window for part in parts] for window in ([0, 1, 2], [3, 4])[:steps]], dtype=torch.float64
    )
    reference.seen.clear()
    optimizer = reference.configure_optimizers()
    for window in ([0, 1, 2], [3, 4, 5]):
        optimizer.zero_grad()
        reference.loss(union([part[i] for i in window for part in parts])).backward()
        reference.on_before_optimizer_step(optimizer)
        optimizer.step()
    again = quiet_trainer(tokens(3), strategy="fsdp2", **options)
    again.fit(module, StatefulDataLoader(mine, batch_size=None))
    return largest_relative_error(module, reference)


class Ends(Transformer):
    """Fails in the second batch of its second window, if it is to."""

    ends = "never"

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if self.ends == "failed" and batch_idx == 4:
            raise RuntimeError("boom")
        return super().training_step(batch, batch_idx)


def reductions_under_ddp() -> list[int]:
    """How many buckets DDP reduced in each batch, in windows of 3."""
    mine, _, options = part_of_rank(6)
    counts: list[int] = []

    def hook(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        counts[-1] += 1
        return allreduce_hook(None, bucket)

    class Begin(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
            trainer.strategy.model.register_comm_hook(None, hook)  # Lightning does so on GPUs only

        def on_train_batch_start(self, *args: Any) -> None:
            counts.append(0)

    run(mine, tokens(3), Begin(), strategy="ddp", **options)
    return counts


def error_in_parts(strategy: str, scaled: bool = False) -> float:
    """The largest error of batches in parts of 2, in windows of 3, against the large batch of all ranks."""
    _, parts, options = part_of_rank(6)
    rank = torch.distributed.get_rank()
    for part in parts:  # as sharded parameters want it: every rank cuts into as many parts
        part[:] = [union([batch, batch, batch, batch]) for batch in part]
        part[:] = [{key: value[:4] for key, value in batch.items()} for batch in part]
    dtype, lr = (torch.float32, 1e-3) if scaled else (torch.float64, 0.1)
    module = seeded(lambda: Transformer(lr=lr)).to(dtype)
    plugins = [fp16(2.0**10)] if scaled else []
    tricks = [lt.MicroBatching(3), tokens(3)]
    run(parts[rank], *tricks, module=module, strategy=strategy, max_epochs=2, plugins=plugins, **options)
    windows = [[part[i] for i in window for part in parts] for window in windows_of(6, 3, 2)]
    return largest_relative_error(module, large_batch_run(windows, dtype=dtype, lr=lr))


def refusals_when_sharded() -> list[str]:
    """The words of what is refused under FSDP2."""
    rank = torch.distributed.get_rank()
    _, _, options = part_of_rank(1)
    words = []
    for size, samples in (("auto", (4, 4)), (2, (8, 3))):
        batch = {"tokens": torch.zeros(samples[rank], LENGTH, dtype=torch.long)}
        batch["labels"] = batch["tokens"]
        try:
            run([batch], lt.MicroBatching(size), strategy="fsdp2", **options)
        except Exception as error:
            words.append(str(error))
    return words
