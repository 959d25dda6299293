"""What exact accumulation costs beside Lightning's own, what it communicates, and what an early release saves."""

import itertools
import statistics

import torch

import lightning_tricks as lt
from tests.benchmarks.sharding import Ranks
from tests.benchmarks.side_by_side import Result, Run, Stack, lower_quartile, milliseconds, times_of_rounds
from tests.callbacks.test_gradient_release import peak_growths
from tests.cost_cases import costs

WIDTH, DEPTH, BATCH = 160, 12, 1050  # a batch of about 20 ms on one core
WINDOW = 4


def exact_accumulation(name: str) -> Result:
    """Windows whose batches differ in weight, so that the gradients are corrected in each."""

    def uneven() -> lt.GradientAccumulation:
        counts = itertools.cycle((3, 5, 7))
        return lt.GradientAccumulation(WINDOW, weigh_by=lambda batch: next(counts))

    runs: list[Run] = [
        lambda: (Stack(WIDTH, DEPTH), [uneven()], {"log_every_n_steps": 50}),
        lambda: (Stack(WIDTH, DEPTH), [], {"log_every_n_steps": 50, "accumulate_grad_batches": WINDOW}),
    ]
    found = times_of_rounds(runs, torch.randn(BATCH, WIDTH), steps=8, rounds=24)
    # Each round within itself: a machine that is slow for a while is slow for both.
    windows = [[lower_quartile(sums_of(times, WINDOW)) for times in rounds] for rounds in found]
    value = statistics.median(ours / stock for ours, stock in zip(*windows, strict=True))
    middle = [statistics.median(one) for one in windows]
    return Result(name, f"{value:.3f}", "at most 1.02", value <= 1.02, milliseconds(middle))


def sums_of(times: list[float], size: int) -> list[float]:
    return [sum(times[start : start + size]) for start in range(0, len(times) - size + 1, size)]


def reductions(name: str) -> Result:
    with Ranks() as ranks:
        rank = ranks.run(costs, "fsdp2", accumulation=3, ours=True)[0]
    units = rank["units"] - 1  # the root has no parameters of its own
    scatters = [count for _, count in rank["collectives"]]
    return Result(
        name, str(sum(scatters[:3])), str(units), scatters == [0, 0, units] * 2, f"{units} units, {scatters} by batch"
    )


def early_release(name: str) -> Result:
    parameters, (plain, released) = peak_growths()
    value = (plain - released) / parameters
    return Result(name, f"{value:.2f} bytes", "4 within 1%", abs(value / 4 - 1) <= 0.01, f"{parameters:,} parameters")
