"""What monitors and guards add to a step, and what a snapshot costs."""

import statistics
import time

import torch
from torch import nn

import lightning_tricks as lt
from lightning_tricks.functional.snapshots import SnapshotRing, training_tensors
from tests.benchmarks.side_by_side import Result, Run, Stack, added_to_first, milliseconds

WIDTH, DEPTH, BATCH = 160, 12, 1050  # a step of about 20 ms on one core
NEVER = 10**9


def gradient_monitor(name: str) -> Result:
    """What it adds between its looks, and a fiftieth of what a look adds."""

    def run(every: int) -> Run:
        return lambda: (
            Stack(WIDTH, DEPTH),
            [lt.LossScaleMonitor(), *([lt.GradientMonitor(every_n_steps=every)] if every else [])],
            {"log_every_n_steps": 50},
        )

    runs = [run(0), run(NEVER), run(1)]
    (between, looking), results = added_to_first(runs, torch.randn(BATCH, WIDTH), steps=20, rounds=30)
    value = between + (looking - between) / 50
    return Result(name, f"{100 * value:.2f}%", "at most 1%", value <= 0.01, milliseconds(results))


def guards(name: str) -> Result:
    def run(*tricks: type) -> Run:
        return lambda: (
            Stack(WIDTH, DEPTH),
            [lt.GradientNormClipping(1.0), *(trick() for trick in tricks)],
            {"log_every_n_steps": 50},
        )

    runs = [run(), run(lt.NonFiniteGuard), run(lt.LossSpikeGuard)]
    values, results = added_to_first(runs, torch.randn(BATCH, WIDTH), steps=40, rounds=30)
    shown = " and ".join(f"{100 * value:.2f}%" for value in values)
    return Result(name, shown, "at most 1% each", max(values) <= 0.01, milliseconds(results))


def snapshot(name: str) -> Result:
    """A snapshot of 25M weights and AdamW's state against a clone of the same tensors."""
    module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(1, 1024)).sum().backward()
    optimizer.step()
    tensors = list(training_tensors(module, [optimizer]).values())
    ring = SnapshotRing(2)
    for _ in range(2):
        ring.take(module, [optimizer])
    times: tuple[list[float], list[float]] = [], []
    for _ in range(15):
        start = time.perf_counter()
        ring.take(module, [optimizer])
        middle = time.perf_counter()
        clones = [one.clone() for one in tensors]
        times[1].append(time.perf_counter() - middle)
        times[0].append(middle - start)
        del clones
    ours, theirs = (statistics.median(one) for one in times)
    value = ours / theirs
    return Result(name, f"{value:.2f}", "at most 1.3", value <= 1.3, milliseconds([ours, theirs]))
