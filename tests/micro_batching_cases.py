"""Batches of every structure, and a module that runs out of memory when it is told to. Imported by the pool."""

import gc
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding

import lightning_tricks as lt
from tests.models import make_optimizer, seeded, weights
from tests.models import trainer as quiet_trainer

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Record:
    inputs: Any
    rest: Any


# Each puts two things together.
CONTAINERS = {
    "dict": lambda one, other: {"one": one, "other": other},
    "ordered": lambda one, other: OrderedDict(one=one, other=other),
    "encoding": lambda one, other: BatchEncoding({"one": one, "other": other}),
    "list": lambda one, other: [one, other],
    "tuple": lambda one, other: (one, other),
    "named tuple": Pair,
    "dataclass": Record,
}
# What may lie beside the tensors that count, by the number of samples.
EXTRAS = {
    "nothing": lambda n: None,
    "number": lambda n: 0.5,
    "scalar": lambda n: torch.tensor(2.0),
    "shared": lambda n: torch.ones(1, 3),
    "words": lambda n: [f"sample {i}" for i in range(n)],
    "empty": lambda n: [],
}


def leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        for one in batch.values():
            yield from leaves(one)
    elif isinstance(batch, (list, tuple)):
        for one in batch:
            yield from leaves(one)
    elif is_dataclass(batch):
        for field in fields(batch):
            yield from leaves(getattr(batch, field.name))
    else:
        yield batch


def build(structure: Sequence[str], extra: str, x: Tensor, y: Tensor) -> Any:
    """A batch: the containers, from the outside in, around x and y, with something else beside each."""
    batch: Any = y
    for name in reversed(structure[1:]):
        batch = CONTAINERS[name](EXTRAS[extra](len(x)), batch)
    return CONTAINERS[structure[0]](x, batch)


@dataclass(frozen=True)
class Run:
    """What is tried.

    Args:
        structure: the containers around each batch.
        extra: what else lies in it.
        sizes: samples of each batch.
        capacity: samples that fit the memory of the rank that fails.
        fails_on: that rank.
        at_call: one more error at this call of its `training_step`, whatever the size.
        in_backward: whether it fails there.
    """

    structure: tuple[str, ...]
    extra: str
    sizes: tuple[int, ...]
    capacity: int
    fails_on: int
    at_call: int
    in_backward: bool


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Limited(pl.LightningModule):
    """A regression that runs out of memory on batches that are too large for it, on one rank."""

    def __init__(self, run: Run | None = None, error: type[Exception] = torch.OutOfMemoryError) -> None:
        super().__init__()
        self.run, self.error = run, error
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.calls = 0
        self.sizes: list[int] = []
        self.alive: list[weakref.ref[Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = [
            one
            for one in leaves(batch)
            if isinstance(one, Tensor) and one.dim() and one.shape[0] and one.shape[-1] != 3
        ]
        words = [one for one in leaves(batch) if isinstance(one, str)]
        assert len(words) % len(x) == 0  # cut as the tensors are
        self.calls += 1
        self.seen += len(x)
        hidden = self.net[0](x)
        self.alive.append(weakref.ref(hidden))
        fails = False
        if self.run is not None and self.global_rank == self.run.fails_on:
            fails = len(x) > self.run.capacity or (self.calls == self.run.at_call and len(x) > 1)
            if fails and not self.run.in_backward:
                raise self.error("CUDA out of memory. Tried to allocate 2.00 GiB")
        if fails:
            hidden = Fails.apply(hidden)
        else:
            self.sizes.append(len(x))
        return (self.net[2](self.net[1](hidden)) - y).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses_kept = sum(one() is not None for one in self.alive)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.parameters(), "momentum", fused=False, lr=0.05)


def batches_of(run: Run, rank: int) -> list[Any]:
    generator = torch.Generator().manual_seed(100 * len(run.sizes) + rank)
    made = []
    for size in run.sizes:
        x = torch.randn(size, 8, generator=generator, dtype=torch.float64)
        made.append(build(run.structure, run.extra, x, x.sum(dim=1, keepdim=True).sin()))
    return made


def fit_run(run: Run, *callbacks: pl.Callback, fails: bool, strategy: str = "auto", **options: Any) -> Limited:
    distributed = torch.distributed.is_initialized()
    rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed else (0, 1)
    module = seeded(lambda: Limited(run if fails else None)).double()
    trainer = quiet_trainer(*callbacks, strategy=strategy, devices=ranks, use_distributed_sampler=False, **options)
    trainer.fit(module, DataLoader(batches_of(run, rank), batch_size=None))
    return module


def faults_of(run: Run, strategy: str = "auto") -> list[str]:
    """What is wrong with a run that runs out of memory, against one that does not."""
    micro_batching = lt.MicroBatching()
    module = fit_run(run, micro_batching, fails=True, strategy=strategy)
    plain = fit_run(run, fails=False, strategy=strategy)
    faults = []
    one, other = weights(module), weights(plain)
    difference = max(float((one[name] - other[name]).abs().max()) for name in one)
    if difference > 1e-12:
        faults.append(f"weights or buffers differ by {difference}")
    gc.collect()
    if any(reference() is not None for reference in module.alive[:-1]):
        faults.append("activations are still alive")
    if module.global_rank == run.fails_on and max(run.sizes) > run.capacity:
        if not micro_batching.state_dict()["retries"]:
            faults.append("no batch was done again")
        if micro_batching.state_dict()["size"] > max(run.capacity, 1):
            faults.append(f"the size is {micro_batching.state_dict()['size']}")
    if module.losses_kept:
        faults.append("activations live on until the garbage is collected")
    if "training_step" in vars(module) or "log" in vars(module):
        faults.append("the module is left edited")
    return faults


def faults_of_all(runs: Sequence[Run], strategy: str) -> list[tuple[Run, list[str]]]:
    gc.collect()
    gc.freeze()  # what was imported need not be walked each time that a run collects its garbage
    found = [(run, faults_of(run, strategy)) for run in runs]
    gc.unfreeze()
    return [(run, faults) for run, faults in found if faults]


class LogsTogether(Limited):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("own", loss, sync_dist=True, batch_size=1)
        return loss


def logged_over_ranks() -> list[float]:
    """What is logged over the ranks: of whole batches, in parts of 4, and where one rank runs out of memory."""
    rank = torch.distributed.get_rank()
    run = Run(("list",), "nothing", (9 if rank == 0 else 4,), capacity=5, fails_on=0, at_call=0, in_backward=False)
    found = []
    for tricks, fails in (([], False), ([lt.MicroBatching(4)], False), ([lt.MicroBatching()], True)):
        module = seeded(lambda fails=fails: LogsTogether(run if fails else None)).double()
        trainer = quiet_trainer(*tricks, strategy="ddp", devices=2, use_distributed_sampler=False)
        trainer.fit(module, DataLoader(batches_of(run, rank), batch_size=None))
        found.append(float(trainer.callback_metrics["own"]))
    return found
