"""Time runs of a Trainer side by side: alternately, in one process, so that a noisy machine is noisy for all."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.models import trainer


@dataclass(frozen=True)
class Result:
    """One line of the report.

    Args:
        name: what was compared.
        value: what came out.
        bound: what it is to be.
        holds: whether it is.
        detail: the times behind it.
    """

    name: str
    value: str
    bound: str
    holds: bool
    detail: str


class Stack(pl.LightningModule):
    """Linear layers with a nonlinearity: `depth` blocks of two tensors each."""

    def __init__(self, width: int, depth: int, log_norms: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))
        self.log_norms = log_norms

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.blocks(batch).square().mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.log_norms:  # as Lightning documents it
            self.log_dict(pl.utilities.grad_norm(self, norm_type=2))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Clock(pl.Callback):
    """Seconds between the starts of batches, the first few left out."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *args) -> None:
        self.starts.append(time.perf_counter())

    def steps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.starts[3:], self.starts[4:], strict=False)]


Run = Callable[[], tuple[pl.LightningModule, list[pl.Callback], dict]]


def seconds_per_step(runs: list[Run], data: torch.Tensor, *, steps: int, rounds: int) -> list[float]:
    """Seconds of a step by run: the lower quartile over all rounds, since what disturbs a machine only adds time.

    The runs take turns, in both orders.
    """
    found = times_of_rounds(runs, data, steps=steps, rounds=rounds)
    joined = [[one for times in rounds_of_run for one in times] for rounds_of_run in found]
    return [lower_quartile(times) for times in joined]


def added_to_first(runs: list[Run], data: torch.Tensor, *, steps: int, rounds: int) -> tuple[list[float], list[float]]:
    """What each run after the first adds to a step of the first, as a share; and the seconds of a step of each.

    The median over rounds, each within itself: a machine that is slow for a while is slow for all runs of a round.
    """
    found = [
        [lower_quartile(times) for times in one] for one in times_of_rounds(runs, data, steps=steps, rounds=rounds)
    ]
    shares = [statistics.median(b / a - 1 for a, b in zip(found[0], one, strict=True)) for one in found[1:]]
    return shares, [statistics.median(one) for one in found]


def times_of_rounds(runs: list[Run], data: torch.Tensor, *, steps: int, rounds: int) -> list[list[list[float]]]:
    """Seconds of each step, by run and round."""
    times: list[list[list[float]]] = [[] for _ in runs]
    for round_ in range(rounds):
        order = range(len(runs)) if round_ % 2 == 0 else reversed(range(len(runs)))
        for index in order:
            module, callbacks, options = runs[index]()
            clock = Clock()
            fit = trainer(*callbacks, clock, **{"max_steps": steps, "max_epochs": -1, **options})
            fit.fit(module, DataLoader(data.expand(steps, *data.shape), batch_size=None))
            times[index].append(clock.steps())
    return times


def lower_quartile(times: list[float]) -> float:
    return statistics.quantiles(times, n=4)[0]


def milliseconds(times: list[float]) -> str:
    return " / ".join(f"{1e3 * seconds:.2f} ms" for seconds in times)
