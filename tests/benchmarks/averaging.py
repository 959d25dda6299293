"""The exponential moving average against Lightning's, and against torch's own kernel alone."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader

import lightning_tricks as lt
from tests.benchmarks.side_by_side import Result, Stack
from tests.models import trainer

SIZES = {"200 tensors of 8 x 8": (8, 100), "24M": (1000, 24)}


@dataclass
class Contest:
    """One module trained for a step with either callback, and what each does in a step and in a validation."""

    width: int
    depth: int

    def __post_init__(self) -> None:
        self.ours, self.theirs = lt.ExponentialMovingAverage(), EMAWeightAveraging()
        self.modules = [self._trained(one) for one in (self.ours, self.theirs)]
        (self.part,) = self.ours._parts.values()
        self.part.put_back()  # the module holds the average after fit
        self.live = [one.detach() for one in self.modules[1].parameters()]
        self.copies = [one.clone() for one in self.live]

    def _trained(self, callback: pl.Callback) -> pl.LightningModule:
        module = Stack(self.width, self.depth)
        run = trainer(callback, max_steps=1, max_epochs=-1)
        run.fit(module, DataLoader(torch.randn(1, 2, self.width), batch_size=None))
        return module

    def update_ours(self) -> None:
        self.part.follow(self.part.applied + 1)

    def update_theirs(self) -> None:
        self.theirs._average_model.update_parameters(self.modules[1])

    def update_plain(self) -> None:
        torch._foreach_lerp_(self.copies, self.live, 1e-4)

    def swap_ours(self) -> None:
        self.part.show()
        self.part.put_back()

    def swap_theirs(self) -> None:
        for _ in range(2):
            self.theirs._swap_models(self.modules[1])


def seconds(functions: list[Callable[[], Any]], *, rounds: int = 25) -> list[float]:
    """Seconds of a call of each, by turns; the lower quartile."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, of in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            of.append(time.perf_counter() - start)
    return [statistics.quantiles(of[2:], n=4)[0] for of in times]


def average_update(name: str) -> Result:
    faster, over, detail = [], [], []
    for label, size in SIZES.items():
        contest = Contest(*size)
        ours, theirs, plain = seconds([contest.update_ours, contest.update_theirs, contest.update_plain])
        faster.append(theirs / ours)
        over.append(ours / plain)
        detail.append(f"{label}: {1e3 * ours:.2f} / {1e3 * theirs:.2f} / {1e3 * plain:.2f} ms")
    value = f"{faster[0]:.1f} and {faster[1]:.1f} times faster; {over[0]:.2f} and {over[1]:.2f} of a lerp"
    holds = min(faster) >= 5 and max(over) <= 1.5
    return Result(name, value, "at least 5; at most 1.5", holds, "; ".join(detail))


def average_swap(name: str) -> Result:
    faster, detail = [], []
    for label, size in SIZES.items():
        contest = Contest(*size)
        ours, theirs = seconds([contest.swap_ours, contest.swap_theirs])
        faster.append(theirs / ours)
        detail.append(f"{label}: {1e3 * ours:.3f} / {1e3 * theirs:.2f} ms")
    value = f"{faster[0]:.0f} and {faster[1]:.0f} times faster"
    return Result(name, value, "at least 10", min(faster) >= 10, "; ".join(detail))
