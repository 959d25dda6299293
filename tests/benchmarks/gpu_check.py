"""Check strategies, guards and precision on one GPU, in at most 4 minutes: ``python -m tests.benchmarks.gpu_check``.

Exits with 1 on a fault. What CPUs and gloo cannot show: NCCL, CUDA's kernels under bf16, `torch.inference_mode` before
training, peak memory, waits for the device, fp8. With ``--accelerator cpu`` it runs small on a CPU, to see that the
script itself is sound.
"""

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader

import lightning_tricks as lt
from tests.benchmarks.side_by_side import Stack
from tests.models import seeded, trainer, weights

FIXED = {"use_distributed_sampler": False}  # Lightning's would shuffle


class Net(Stack):
    """Blocks of a width that fills a GPU, or a small one on a CPU."""

    def __init__(self, width: int, depth: int, batchnorm: bool = False, fused: bool = False) -> None:
        super().__init__(width, depth)
        self.fused = fused
        if batchnorm:
            self.blocks.append(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)))

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), eps=1e-3, fused=self.fused)


class Check:
    """Runs fits and keeps what was found.

    Args:
        accelerator: ``"cuda"`` or ``"cpu"``.
    """

    def __init__(self, accelerator: str) -> None:
        self.accelerator = accelerator
        self.cuda = accelerator == "cuda"
        self.size = (4096, 12) if self.cuda else (16, 3)
        self.rows: list[tuple[str, str, bool]] = []

    def found(self, what: str, value: str, holds: bool) -> None:
        """Keep one result."""
        self.rows.append((what, value, holds))
        print(f"{'ok  ' if holds else 'FAIL'} {what}: {value}", flush=True)

    def fit(
        self,
        strategy: Any,
        *callbacks: pl.Callback,
        validate: bool = False,
        batchnorm: bool = False,
        fused: bool = False,
        **options: Any,
    ) -> tuple[dict[str, torch.Tensor], float, pl.Trainer]:
        """Weights, peak bytes and Trainer of a short run."""
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        module = seeded(lambda: Net(*self.size, batchnorm=batchnorm, fused=fused))
        data = DataLoader(torch.randn(6, 64, self.size[0], generator=torch.Generator().manual_seed(1)), batch_size=None)
        run = trainer(*callbacks, **{"accelerator": self.accelerator, "strategy": strategy, **FIXED, **options})
        if validate:
            run.validate(module, data, verbose=False)
        run.fit(module, data, data)
        peak = torch.cuda.max_memory_allocated() if self.cuda else 0
        return {name: value.cpu() for name, value in weights(module).items()}, peak, run

    def equal(self, what: str, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], limit: float) -> None:
        """Compare two runs' weights."""
        difference = max(float((first[name].float() - second[name].float()).abs().max()) for name in second)
        self.found(what, f"largest difference {difference:.1e}, at most {limit:.0e}", difference <= limit)


def run(accelerator: str) -> list[tuple[str, str, bool]]:
    check = Check(accelerator)
    plain, plain_peak, _ = check.fit("auto")
    ours, peak, fitted = check.fit("fsdp2")
    backend = torch.distributed.get_backend()
    check.found("the backend", backend, backend == ("nccl" if check.cuda else "gloo"))
    check.equal("fsdp2 against one device, fp32", ours, plain, 1e-5)
    validated, _, _ = check.fit("fsdp2", validate=True)
    check.equal("validate then fit against fit", validated, ours, 0.0)
    check.equal("zero1 against one device, fp32", check.fit("zero1")[0], plain, 1e-5)
    mixed, _, _ = check.fit("auto", precision="bf16-mixed")
    check.equal("bf16-mixed, autocast", check.fit("fsdp2", precision="bf16-mixed")[0], mixed, 1e-4)
    policy = lt.FSDP2Strategy(mp_policy="fsdp")
    check.equal("bf16-mixed, FSDP2's policy", check.fit(policy, precision="bf16-mixed")[0], mixed, 2e-3)
    for name, options in {"bf16-mixed": {"mp_policy": "fsdp"}, "bf16-true": {}}.items():
        found, _, _ = check.fit(lt.FSDP2Strategy(**options), precision=name, batchnorm=True)  # type: ignore[arg-type]
        finite = all(bool(value.isfinite().all()) for value in found.values())
        statistics = found[f"blocks.{check.size[1]}.1.running_mean"].dtype
        check.found(
            f"{name} with BatchNorm", f"finite, statistics {statistics}", finite and statistics == torch.float32
        )
    if check.cuda:
        scaled, _, _ = check.fit("fsdp2", lt.LossScaleMonitor(), precision="16-mixed")
        check.found("fp16 with a scaler", "finite", all(bool(value.isfinite().all()) for value in scaled.values()))
        kept = check.fit("zero2")[1]
        check.found("peak, zero2 over fsdp2", f"{kept / peak:.2f}", kept > peak)
        offloaded = check.fit("fsdp2_offload")[1]
        check.found("peak, offload over fsdp2", f"{offloaded / peak:.2f}", offloaded < peak)
        check.found("peak, fsdp2 over one device", f"{peak / plain_peak:.2f} (one rank: nothing is divided)", True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.ckpt"
        saving = lt.FSDP2Strategy(save_distributed_checkpoint=True, async_checkpoint=True)
        saved, _, fitted = check.fit(saving, max_epochs=1)
        fitted.save_checkpoint(path)
        module = Net(*check.size)
        again = trainer(accelerator=accelerator, strategy=lt.FSDP2Strategy(), max_epochs=1)
        again.validate(
            module, DataLoader(torch.randn(1, 4, check.size[0]), batch_size=None), ckpt_path=path, verbose=False
        )
        check.equal("an asynchronous folder, loaded", {k: v.cpu() for k, v in weights(module).items()}, saved, 0.0)
    guards_and_precision(check)
    return check.rows


class Bad(pl.Callback):
    """Makes one batch nan, and counts the warnings of waits for the device in the steps after the first two."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.waits = 0
        self._caught: Any = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.at:
            batch.mul_(torch.nan)
        if batch.is_cuda and batch_idx > 1:
            self._caught = warnings.catch_warnings(record=True)
            self._warnings = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, *args: Any) -> None:
        if self._caught is not None:
            torch.cuda.set_sync_debug_mode("default")
            self._caught.__exit__(None, None, None)
            self.waits += sum("synchroniz" in str(one.message) for one in self._warnings)
            self._caught = None


def guards_and_precision(check: Check) -> None:
    def tricks() -> list[lt.Trick]:
        small = lt.LossSpikeGuard(window_steps=4, warmup_steps=2, z_threshold=1e3)
        return [lt.NonFiniteGuard(), small, lt.ZScoreGradientClipping(), lt.GradientMonitor()]

    waits = []
    for callbacks in ([], tricks()):
        bad = Bad(at=3 if callbacks else -1)
        found, _, fitted = check.fit("auto", *callbacks, bad, fused=True, log_every_n_steps=50)
        waits.append(bad.waits)
    ledger = lt.step_ledger(fitted)[0]
    finite = all(bool(value.isfinite().all()) for value in found.values())
    counts = f"{ledger.applied} applied, {ledger.skipped_guard} left out"
    check.found("a fused optimizer, one batch of nan", counts, finite and ledger.skipped_guard == 1)
    check.found(
        "waits for the device that guards, clipper and monitor add", str(waits[1] - waits[0]), waits[0] == waits[1]
    )
    _, _, fitted = check.fit("auto", lt.LossSpikeGuard("rollback"), Bad(at=3), max_epochs=1)
    check.found("a rollback", f"{lt.step_ledger(fitted)[0].rolled_back}", lt.step_ledger(fitted)[0].rolled_back == 1)
    _, _, fitted = check.fit("auto", lt.LossScaleMonitor(), plugins=[lt.FP16Precision()])
    check.found("FP16Precision", f"{lt.step_ledger(fitted)[0].applied} applied", lt.step_ledger(fitted)[0].applied > 0)
    mixed, _, _ = check.fit("auto", precision="bf16-mixed")
    for recipe in ("tensorwise", "rowwise"):
        fp8 = lt.Float8Training(recipe, emulate=not check.cuda)  # type: ignore[arg-type]
        eight, _, _ = check.fit("fsdp2", fp8, lt.ActivationCheckpointing(), precision="bf16-mixed")
        check.equal(f"fp8, {recipe}, under fsdp2 with checkpointing, against bf16", eight, mixed, 2e-2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accelerator", choices=("cuda", "cpu"), default="cuda")
    accelerator = parser.parse_args().accelerator
    if accelerator == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing was checked")
        return 2
    rows = run(accelerator)
    table = Table("what", "found", "holds")
    for what, value, holds in rows:
        table.add_row(what, value, "yes" if holds else "NO")
    Console(width=120).print(table)
    return 0 if all(holds for *_, holds in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
