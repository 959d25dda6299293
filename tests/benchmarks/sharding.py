"""Sharding on two gloo processes: bytes and collectives by count, and the time of a step against stock Lightning."""

import statistics
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader

import lightning_tricks as lt
from tests.benchmarks.side_by_side import Clock, Result, Stack, milliseconds
from tests.checkpoint_cases import world
from tests.cost_cases import ByHand, costs
from tests.pool import ProcessPool
from tests.strategy_cases import strategy_trainer

WIDTH, DEPTH, BATCH, STEPS = 256, 8, 512, 24
KINDS = ("parameters", "gradients", "optimizer state")


def bytes_of_ranks(name: str) -> Result:
    """The largest departure from the share that the stage promises."""
    with Ranks() as ranks:
        whole = ranks.run(costs, "ddp")[0]
        shares, departures = [], []
        for strategy, sharded in (("fsdp2", KINDS), ("zero2", KINDS), ("zero1", KINDS[2:])):
            found = ranks.run(costs, strategy)
            share = {kind: max(rank[kind] for rank in found) / whole[kind] for kind in KINDS}
            shares.append(f"{strategy} " + " / ".join(f"{share[kind]:.2f}" for kind in KINDS))
            departures += [abs(share[kind] / (0.5 if kind in sharded else 1.0) - 1.0) for kind in KINDS]
    value = max(departures)
    return Result(name, f"off by {100 * value:.1f}%", "at most 2%", value <= 0.02, "; ".join(shares))


def collectives(name: str) -> Result:
    """Gathers and reduce-scatters of a step, by unit that is freed between forward and backward, and by the others."""
    with Ranks() as ranks:
        found = {strategy: ranks.run(costs, strategy)[0] for strategy in ("fsdp2", "zero2")}
    units = found["fsdp2"]["units"] - 1  # the root has no parameters of its own
    sums = {strategy: sum(one["collectives"][-1]) for strategy, one in found.items()}
    holds = sums["fsdp2"] == 3 * (units - 1) + 2 and sums["zero2"] == 2 * units  # the last unit is not freed
    return Result(
        name, f"{sums['fsdp2']} and {sums['zero2']}", f"{3 * units - 1} and {2 * units}", holds, f"{units} units"
    )


def step_time(name: str) -> Result:
    return _against_stock(name, 1, "at most 1.05", 1.05)


def accumulated_step_time(name: str) -> Result:
    return _against_stock(name, 4, "below 1", 1.0)


def _against_stock(name: str, accumulation: int, bound: str, limit: float) -> Result:
    with Ranks() as ranks:
        times = ranks.run(alternate, accumulation, timeout=300)[0]
    value = times[0] / times[1]
    return Result(name, f"{value:.3f}", bound, value <= limit, milliseconds(times))


def alternate(accumulation: int, rounds: int = 16) -> list[float]:
    """Seconds of a batch under ours and under stock, in turns: the lower quartile."""
    rank, world_size = world()
    times: list[list[float]] = [[], []]
    data = torch.randn(STEPS, BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))
    for round_ in range(rounds):
        for index in (0, 1) if round_ % 2 == 0 else (1, 0):
            clock = Clock()
            strategy: Any = ModelParallelStrategy(world_size, 1) if index else lt.FSDP2Strategy()
            module = (ByHand if index else Stack)(WIDTH, DEPTH)
            run = strategy_trainer(
                strategy,
                world_size,
                clock,
                max_epochs=1,
                accumulate_grad_batches=accumulation,
                log_every_n_steps=50,
            )
            run.fit(module, DataLoader(data, batch_size=None))
            times[index] += clock.steps()
    return [statistics.quantiles(one, n=4)[0] for one in times]


class Ranks:
    """Two processes for the length of a benchmark."""

    def __enter__(self) -> ProcessPool:
        self.pool = ProcessPool(2)
        return self.pool

    def __exit__(self, *args: Any) -> None:
        self.pool.close()
