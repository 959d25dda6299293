"""Activation memory: a stack of 64 equal MLP blocks, budgets, and the modes on the model of the example.

``python -m tests.benchmarks.activation`` prints the table of modes of the README.
"""

import contextlib
import io
import logging
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_tricks as lt
from examples.train_language_model import CONTEXT, ByteGPT
from lightning_tricks.functional.activation_budget import greedy_choice
from lightning_tricks.functional.activation_memory import measure_saved_activations
from lightning_tricks.functional.checkpointing import apply_activation_checkpointing
from tests.benchmarks.side_by_side import Result, seconds_per_step
from tests.models import trainer

_GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""glibc then gives freed tensors back to the system; else it keeps them, and its gaps are what is measured."""

DEPTH, WIDTH, TOKENS = 64, 128, 8192  # 4 MiB for the input of a block, 24 MiB for what it saves


class MLP(nn.Module):
    def __init__(self, width: int, expansion: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, expansion * width), nn.GELU(), nn.Linear(expansion * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Deep(nn.Module):
    """Blocks that a forward of the user's walks."""

    def __init__(self, depth: int, width: int = WIDTH, expansions: tuple[int, ...] = (2,)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP(width, expansions[i % len(expansions)]) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def held_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes saved at the end of a forward pass, after one that segments measure in."""
    model(x).sum().backward()
    with measure_saved_activations() as saved:
        model(x).sum()
    return saved.num_bytes


def resident_memory(name: str) -> Result:
    """The peak above the process before, each in a process of its own."""
    peaks = {}
    for mode in ("plain", "segments"):
        command = [sys.executable, "-m", "tests.benchmarks.activation", "peak", mode]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **_GIVEN_BACK})
        peaks[mode] = int(done.stdout)
    value = peaks["segments"] / peaks["plain"]
    detail = f"{peaks['segments'] / 2**20:.0f} / {peaks['plain'] / 2**20:.0f} MiB"
    return Result(name, f"1/{1 / value:.1f}", "at most 1/8", value <= 1 / 8, detail)


def print_peak(mode: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = Deep(DEPTH), torch.randn(TOKENS, WIDTH)
    if mode == "segments":
        apply_activation_checkpointing(model, mode="segments")
        model(torch.randn(64, WIDTH)).sum().backward()  # which measures its blocks
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far, of the imports, is forgotten
    before = peak_resident()
    model(x).sum().backward()
    print(peak_resident() - before)


def peak_resident() -> int:
    """Bytes at the peak of this process, as Linux counts them."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["VmHWM"].split()[0])


def held(name: str) -> Result:
    x = torch.randn(64, WIDTH)
    plain, model = held_bytes(Deep(DEPTH), x), Deep(DEPTH)
    apply_activation_checkpointing(model, mode="segments")
    value = held_bytes(model, x) / plain
    return Result(
        name, f"1/{1 / value:.1f}", "at most 1/20", value <= 1 / 20, f"{value * plain:,.0f} / {plain:,} bytes"
    )


def growth(name: str) -> Result:
    """The slope of log bytes over log N, by least squares."""
    depths, x = (16, 32, 64, 128), torch.randn(64, WIDTH)
    slopes = []
    for mode in ("segments", None):
        sizes = []
        for depth in depths:
            model = Deep(depth)
            if mode is not None:
                apply_activation_checkpointing(model, mode=mode)
            sizes.append(math.log(held_bytes(model, x)))
        slopes.append(statistics.linear_regression([math.log(depth) for depth in depths], sizes).slope)
    holds = slopes[0] <= 0.6 and abs(slopes[1] - 1.0) <= 0.02
    detail = f"{DEPTH // 4} to {2 * DEPTH} blocks"
    return Result(name, f"{slopes[0]:.2f} and {slopes[1]:.2f}", "at most 0.6 and 1.0", holds, detail)


def extra_time(name: str) -> Result:
    model, x = Deep(DEPTH), torch.randn(TOKENS // 2, WIDTH)
    times: dict[str | None, list[float]] = {"segments": [], None: []}
    for round_ in range(8):
        for mode in list(times)[:: 1 if round_ % 2 else -1]:
            handle = None if mode is None else apply_activation_checkpointing(model, mode=mode)
            model(x).sum().backward()
            begin = time.perf_counter()
            model(x).sum().backward()
            times[mode].append(time.perf_counter() - begin)
            if handle is not None:
                handle.remove()
    ours, plain = (statistics.quantiles(one, n=4)[0] for one in times.values())
    value = ours / plain - 1
    return Result(name, f"{value:.0%}", "at most 35%", value <= 0.35, f"{1e3 * ours:.0f} ms / {1e3 * plain:.0f} ms")


def budgets(name: str) -> Result:
    """What is held of the budget, and the recomputation against the greedy choice on the same measurement."""
    x, found, holds = torch.randn(256, WIDTH), [], True
    for share in (0.75, 0.5, 0.25):
        model = Deep(DEPTH, expansions=(1, 2, 4))
        budget = apply_activation_checkpointing(model, with_budget=True).budget
        assert budget is not None
        measurement = budget.begin()
        with measurement.around():
            loss = model(x).sum()
        loss.backward()
        costs = measurement.costs()
        allowed = int(share * costs.total_bytes)
        chosen = costs.choose(allowed)
        assert chosen is not None
        budget.settle(chosen)
        bytes_held = held_bytes(model, x)
        greedy = greedy_choice(costs.freed_bytes, costs.seconds, costs.total_bytes - allowed)
        assert greedy is not None
        seconds = [sum(costs.seconds[costs.names.index(one)] for one in chosen), sum(costs.seconds[i] for i in greedy)]
        holds &= bytes_held <= allowed and bytes_held == costs.predicted(chosen) and seconds[0] <= seconds[1] + 1e-9
        found.append(f"{bytes_held / costs.total_bytes:.1%} ({seconds[0] / seconds[1]:.2f} of greedy)")
    return Result(name, ", ".join(found), "75%, 50%, 25%; 1.00", holds, f"{DEPTH} blocks of three sizes")


MODES: dict[str, Callable[[], list[pl.Callback]]] = {
    "none": lambda: [],
    '`"blocks"`': lambda: [lt.ActivationCheckpointing()],
    '`"blocks", every=2`': lambda: [lt.ActivationCheckpointing(every=2)],
    '`"segments"`': lambda: [lt.ActivationCheckpointing(mode="segments")],
    '`"selective"`': lambda: [lt.ActivationCheckpointing(mode="selective")],
    "`budget=0.5`": lambda: [lt.ActivationCheckpointing(budget=0.5)],
}


class Example(ByteGPT):
    """The model of the example, twelve layers deep, on the example's batch."""

    def __init__(self) -> None:
        super().__init__(layers=12)


def print_modes() -> None:
    text = torch.randint(256, (16, CONTEXT + 1))
    monitors = []
    for make in MODES.values():
        monitors.append(lt.ActivationMemoryMonitor())
        fit = trainer(*make(), monitors[-1], max_steps=4, max_epochs=-1)
        fit.fit(Example(), DataLoader(text.expand(4, *text.shape), batch_size=None))
    runs = [lambda make=make: (Example(), make(), {}) for make in MODES.values()]
    times = seconds_per_step(runs, text, steps=9, rounds=6)
    print("| mode | held for the backward pass | peak with what is recomputed | time of a step |")
    print("| --- | --- | --- | --- |")
    for name, monitor, seconds in zip(MODES, monitors, times, strict=True):
        saved = monitor.saved
        assert saved is not None
        sizes = f"{saved.num_bytes / 2**20:.1f} MiB | {saved.peak_bytes / 2**20:.1f} MiB"
        print(f"| {name} | {sizes} | {seconds / times[0]:.2f} |")


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        print_modes()
    print("\n".join(line for line in output.getvalue().splitlines() if line.startswith("|")))


if __name__ == "__main__":
    print_peak(sys.argv[2]) if sys.argv[1:2] == ["peak"] else main()
