"""Run all benchmarks: ``python -m tests.benchmarks``. Prints ratios measured side by side in one process."""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

import lightning_tricks as lt
from tests.benchmarks.accumulation import early_release, exact_accumulation, reductions
from tests.benchmarks.activation import budgets, extra_time, growth, held, resident_memory
from tests.benchmarks.averaging import average_swap, average_update
from tests.benchmarks.guards import gradient_monitor, guards, snapshot
from tests.benchmarks.sharding import accumulated_step_time, bytes_of_ranks, collectives, step_time
from tests.benchmarks.side_by_side import Result, Run, Stack, milliseconds, seconds_per_step

WIDTH, DEPTH, BATCH = 160, 12, 1050  # a step of about 20 ms on one core


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its name in the README, and the function that runs it."""

    name: str
    run: Callable[[str], Result]


def clipping(name: str) -> Result:
    runs: list[Run] = [
        lambda: (Stack(WIDTH, DEPTH), [lt.GradientNormClipping(1.0)], {"log_every_n_steps": 50}),
        lambda: (Stack(WIDTH, DEPTH), [], {"log_every_n_steps": 50, "gradient_clip_val": 1.0}),
    ]
    results = seconds_per_step(runs, torch.randn(BATCH, WIDTH), steps=30, rounds=28)
    value = results[0] / results[1]
    return Result(name, f"{value:.3f}", "at most 1.03", value <= 1.03, milliseconds(results))


def three_callbacks(name: str) -> Result:
    def tricks() -> list:
        return [lt.GradientNormClipping(1.0), lt.LossScaleMonitor(), lt.WarmupCosineScheduler()]

    runs: list[Run] = [
        lambda: (Stack(WIDTH, DEPTH), tricks(), {"log_every_n_steps": 50}),
        lambda: (Stack(WIDTH, DEPTH), [], {"log_every_n_steps": 50}),
    ]
    results = seconds_per_step(runs, torch.randn(BATCH, WIDTH), steps=30, rounds=28)
    value = results[0] / results[1]
    return Result(name, f"{value:.3f}", "at most 1.05", value <= 1.05, milliseconds(results))


def norm_logging(name: str) -> Result:
    """What logging adds to a step without it, on 200 small tensors, logged each step."""
    runs: list[Run] = [
        lambda: (Stack(8, 100), [lt.GradientNormClipping(float("inf"), nonfinite="ignore")], {}),
        lambda: (Stack(8, 100, log_norms=True), [], {}),
        lambda: (Stack(8, 100), [], {}),
    ]
    results = seconds_per_step(runs, torch.randn(4, 8), steps=30, rounds=8)
    ours, theirs, plain = results
    value = (theirs - plain) / (ours - plain)
    return Result(name, f"{value:.0f} times cheaper", "at least 10", value >= 10, milliseconds(results))


def checkpointing(name: str) -> Result:
    runs: list[Run] = [
        lambda: (Stack(WIDTH, DEPTH), [lt.ActivationCheckpointing()], {}),
        lambda: (Stack(WIDTH, DEPTH), [], {}),
    ]
    results = seconds_per_step(runs, torch.randn(BATCH, WIDTH), steps=60, rounds=5)
    value = results[0] / results[1]
    return Result(name, f"{value:.2f}", "reported", True, milliseconds(results))


BENCHMARKS = (
    Benchmark("a step with `GradientNormClipping` against `Trainer(gradient_clip_val=...)`", clipping),
    Benchmark("clipping, loss-scale monitor and schedule against none, on a step of 20 ms", three_callbacks),
    Benchmark("`grad/norm` against Lightning's `self.log_dict(grad_norm(self, 2))`, 200 tensors", norm_logging),
    Benchmark("a step with `ActivationCheckpointing` against none (it recomputes)", checkpointing),
    Benchmark("peak memory of the process above before, 64 MLP blocks in segments against plain", resident_memory),
    Benchmark("activations held at the end of the forward pass, the same", held),
    Benchmark("growth of what is held with N blocks as an exponent, in segments and plain", growth),
    Benchmark("time that segments add to a step, the same", extra_time),
    Benchmark("held under a budget of 75%, 50% and 25%, and the time to recompute", budgets),
    Benchmark(
        "a window of 4 with `GradientAccumulation` against `Trainer(accumulate_grad_batches=4)`", exact_accumulation
    ),
    Benchmark("reduce-scatters of a window of 3 with `GradientAccumulation` under `fsdp2`", reductions),
    Benchmark("a parameter's bytes that `EarlyGradientRelease` takes off the peak of the forward", early_release),
    Benchmark("what `GradientMonitor` at every 50 steps adds to a step of 20 ms", gradient_monitor),
    Benchmark("what `NonFiniteGuard`, and `LossSpikeGuard`, adds to a step with a clipper", guards),
    Benchmark(
        "an update of `ExponentialMovingAverage` against Lightning's `EMAWeightAveraging`, and against a foreach lerp",
        average_update,
    ),
    Benchmark("the swap of weights for a validation and back against `EMAWeightAveraging`'s", average_swap),
    Benchmark("a snapshot of the rollback ring against a clone of the same tensors", snapshot),
    Benchmark(
        "`fsdp2`, `zero2`, `zero1`: parameters / gradients / optimizer state of a rank against DDP's", bytes_of_ranks
    ),
    Benchmark("collectives of a step, `fsdp2` and `zero2`", collectives),
    Benchmark("a step with `fsdp2` against stock `ModelParallelStrategy` with `fully_shard` by hand", step_time),
    Benchmark("the same, a batch of windows of 4", accumulated_step_time),
)


def main() -> int:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # threads that wait for each other are the larger part of the noise
    table = Table("benchmark", "measured", "bound", "times of a step")
    rows, held = [], True
    for benchmark in BENCHMARKS:
        with contextlib.redirect_stdout(io.StringIO()):
            result = benchmark.run(benchmark.name)
        held &= result.holds
        table.add_row(result.name, result.value, result.bound, result.detail)
        rows.append(f"| {result.name} | {result.value} | {result.bound} | {result.detail} |")
    Console(width=150).print(table)
    if "--markdown" in sys.argv:
        print("\n".join(["| benchmark | measured | bound | times of a step |", "| --- | --- | --- | --- |", *rows]))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
