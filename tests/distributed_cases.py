"""What the two-process tests run on each rank. Imported by the processes of the pool, so nothing here knows pytest."""

import copy
import functools
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import lightning_tricks as lt
from lightning_tricks.functional.adaptive_clipping import clip_unitwise_
from lightning_tricks.functional.clipping import clip_by_norm_, count_exceeding, gradient_norm, nonfinite_names
from tests.contract_table import ROWS
from tests.guard_models import Poisoned, steady_data
from tests.models import Net, RankBatches, TwoOptimizers, dataset, fit, fp16, rank_loader, seeded, weights
from tests.models import trainer as quiet_trainer


class ShardedNet(Net):
    """FSDP2 as Lightning wants it written by hand."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.net[:-1]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


BY_HAND = "fsdp2 by hand"  # stock Lightning's ModelParallelStrategy


def strategy_of(name: str, world_size: int) -> Any:
    if name == BY_HAND:
        return ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    return "auto" if name == "one process" else name


def trained(
    callbacks: list[pl.Callback], strategy: str, rank: int, world_size: int, *, net: dict[str, Any], **options: Any
) -> tuple[pl.Trainer, dict[str, torch.Tensor]]:
    """Train on this rank's part of every global batch; return the Trainer and the full weights."""
    kind = ShardedNet if strategy == BY_HAND else Net
    module = seeded(lambda: kind(**net))
    trainer = fit(
        module,
        *callbacks,
        data=rank_loader(rank, world_size),
        strategy=strategy_of(strategy, world_size),
        devices=world_size,
        use_distributed_sampler=False,
        **options,
    )
    return trainer, weights(module)


def contract_runs(strategy: str, rank: int | None = None, world_size: int = 2) -> dict[str, Any]:
    """Every row of the contract, acting, by turns with either optimizer; weights and logs by row."""
    rank = torch.distributed.get_rank() if rank is None else rank
    results = {}
    for number, row in enumerate(ROWS):
        if not row.runs_under(strategy):
            continue
        trainer, result = trained(
            [row.build("acting")],
            strategy,
            rank,
            world_size,
            net={"optimizer": ("momentum", "adamw")[number % 2], **row.module},
            accumulate_grad_batches=1 if row.accumulates > 1 else 3,
            max_epochs=2,
        )
        logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        results[row.name] = result, logged
    return results


# How the runs of the contract differ under a strategy. fp16 begins with a scale that overflows.
STRATEGY_MODES: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "fp16 accumulation 3": (Net, {"accumulate_grad_batches": 3, "plugins": lambda: fp16(2.0**18)}),
    "two optimizers fp16": (TwoOptimizers, {"plugins": lambda: lt.FP16Precision(init_scale=2.0**18)}),
}


def run_mode(
    strategy: str,
    mode: str,
    callbacks: list[pl.Callback],
    *,
    seed: int = 0,
    ckpt_path: Any = None,
    accumulates: bool = True,
    **net: Any,
) -> tuple[pl.Trainer, Net]:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    kind, options = STRATEGY_MODES[mode]
    made = {key: value() if callable(value) else value for key, value in options.items()}
    if not accumulates:
        made.pop("accumulate_grad_batches", None)
    module = seeded(lambda: kind(**{"dropout": 0.2, "batchnorm": True, "optimizer": "momentum", **net}), seed)
    sampler = DistributedSampler(dataset(), world_size, rank, shuffle=True)
    data = StatefulDataLoader(dataset(), batch_size=2, sampler=sampler)
    run = quiet_trainer(
        *callbacks, strategy=strategy, devices=world_size, use_distributed_sampler=False, max_epochs=2, **made
    )
    run.fit(module, data, ckpt_path=ckpt_path, weights_only=True)
    return run, module


@functools.cache
def plain_run(strategy: str, mode: str, **net: Any) -> tuple[pl.Trainer, Net]:
    return run_mode(strategy, mode, [], **net)


class SaveAt(pl.Callback):
    def __init__(self, batches: int, path: str) -> None:
        self.batches, self.path = batches, path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batches:
            trainer.save_checkpoint(self.path)


def contract_under(strategy: str, folder: str) -> list[str]:
    """Each row: resumed equals uninterrupted bit for bit, and neutral equals none. What went wrong.

    The rows take the two modes by turns, and the strategies the other one each.
    """
    faults = []
    for number, mode in enumerate(STRATEGY_MODES):
        manual = STRATEGY_MODES[mode][0] is not Net
        for place, row in enumerate(ROWS):
            options = {**row.module, "accumulates": row.accumulates == 1}
            turn = 0 if row.refuses("manual") else (place + (strategy == "zero1")) % len(STRATEGY_MODES)
            if turn != number or not (row.refuses(strategy) or row.runs_under(strategy)):
                continue
            if row.refuses(strategy):
                faults += check_refused(strategy, mode, row, options)
                continue
            if row.neutral is not None:
                _, module = run_mode(strategy, mode, [row.build("neutral", manual=manual)], **options)
                _, plain = plain_run(strategy, mode, **options)
                if not same(weights(module), weights(plain)) or module.losses != plain.losses:
                    faults.append(f"{row.name}, {mode}: neutral settings change the run")

            def callbacks(row: Any = row, manual: bool = manual) -> list[pl.Callback]:
                own = [] if row.name == "ExactResume" else [row.build("acting", manual=manual)]
                return [*own, lt.ExactResume()]

            path = f"{folder}/{row.name}-{mode}.ckpt"
            whole, module = run_mode(strategy, mode, [*callbacks(), SaveAt(10, path)], **options)
            torch.rand(7)  # the resumed run knows nothing of the first one's random state
            again, resumed = run_mode(strategy, mode, callbacks(), seed=9, ckpt_path=path, **options)
            if not same(shared_weights(resumed), shared_weights(module)):
                faults.append(f"{row.name}, {mode}: the resumed run has other weights")
            if [one.state_dict() for one in lt.step_ledger(again)] != [
                one.state_dict() for one in lt.step_ledger(whole)
            ]:
                faults.append(f"{row.name}, {mode}: the resumed run has another ledger")
            if any("log" in vars(one) or "training_step" in vars(one) for one in (module, resumed)):
                faults.append(f"{row.name}, {mode}: the module is left edited")
    return faults


def check_refused(strategy: str, mode: str, row: Any, options: dict[str, Any]) -> list[str]:
    try:
        run_mode(strategy, mode, [row.build("acting")], **options)
    except MisconfigurationException as error:
        return [] if row.name in str(error) and strategy in str(error) else [f"{row.name}: {error}"]
    return [f"{row.name} is not refused under {strategy}"]


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def shared_weights(module: Net) -> dict[str, torch.Tensor]:
    """Without what differs between ranks, of which a checkpoint holds rank 0's: running statistics."""
    first = torch.distributed.get_rank() == 0
    return {name: value for name, value in weights(module).items() if first or "running" not in name}


class OneRankIsPoisoned(Net):
    """The loss is nan at batch 1, on rank 1 alone."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 1 and self.global_rank == 1 else loss


class ShardedAndPoisoned(OneRankIsPoisoned, ShardedNet):
    pass


def ledger_runs() -> dict[tuple[str, bool], tuple[int, int, int, int]]:
    """Verdict counts of runs in which one rank of two has a bad batch, by strategy and fused optimizer."""
    found = {}
    kinds = dict.fromkeys(("ddp", "zero1", "fsdp2"), OneRankIsPoisoned) | {BY_HAND: ShardedAndPoisoned}
    for strategy, kind in kinds.items():
        for fused in (False, True):
            trainer = fit(
                kind(fused=fused),
                lt.GradientNormClipping(),
                data=rank_loader(torch.distributed.get_rank(), 2),
                strategy=strategy_of(strategy, 2),
                devices=2,
                use_distributed_sampler=False,
            )
            ledger = lt.step_ledger(trainer)[0]
            found[strategy, fused] = (
                ledger.applied,
                ledger.skipped_overflow,
                ledger.skipped_guard,
                ledger.skipped_empty,
            )
    return found


def sharded_gradient_norms() -> dict[str, Any]:
    """Norms, clipping and counts of gradients on two meshes, replicated, unevenly sharded, partial, and plain."""
    torch.manual_seed(0)
    line, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    whole = [torch.randn(shape) for shape in ((5, 3), (4,), (1, 2), (2, 2), (6,), (3,))]
    gradients: list[torch.Tensor] = [
        distribute_tensor(whole[0], line, [Shard(0)]),
        distribute_tensor(whole[1], line, [Replicate()]),
        distribute_tensor(whole[2], line, [Shard(0)]),  # one rank holds nothing of it
        distribute_tensor(whole[3], grid, [Replicate(), Shard(1)]),
        DTensor.from_local(whole[4] / 2, line, [Partial("sum")]),
        whole[5].clone(),
    ]
    norms = {p: (float(gradient_norm(gradients, p)), slow_norm(whole, p)) for p in (1.0, 2.0, 3.0, math.inf)}
    exceeding = int(count_exceeding(gradients, 0.5))
    expected_exceeding = sum(int((one.abs() > 0.5).sum()) for one in whole)
    clip_by_norm_(gradients[:4] + gradients[5:], 1.0, gradient_norm(gradients[:4] + gradients[5:]))
    clipped = float(gradient_norm(gradients[:4] + gradients[5:]))
    bad = whole[0].clone()
    bad[-1, -1] = float("nan")  # on rank 1 alone
    poisoned = [distribute_tensor(bad, line, [Shard(0)]), whole[5]]
    return {
        "norms": norms,
        "clipped": clipped,
        "exceeding": exceeding,
        "expected_exceeding": expected_exceeding,
        "nan_norms": {p: math.isfinite(float(gradient_norm(poisoned, p))) for p in (1.0, 2.0, math.inf)},
        "culprits": nonfinite_names([("sharded", poisoned[0]), ("plain", poisoned[1])]),
    }


def slow_norm(tensors: list[torch.Tensor], p: float) -> float:
    elements = torch.cat([one.double().flatten() for one in tensors]).abs()
    return float(elements.max()) if math.isinf(p) else float((elements**p).sum() ** (1 / p))


def logged_norms(strategy: str, rank: int | None = None, world_size: int = 2) -> list[float]:
    """What stands in `callback_metrics` as the norm after each of a run's steps."""
    rank = torch.distributed.get_rank() if rank is None else rank
    norms: list[float] = []

    class Probe(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            norms.append(float(trainer.callback_metrics["grad/norm"]))

    trained([lt.GradientNormClipping(0.1), Probe()], strategy, rank, world_size, net={"optimizer": "momentum"})
    return norms


class UnusedParameter(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.unused = torch.nn.Linear(2, 2)


def checkpointed_under_ddp() -> dict[str, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Weights after training with and without checkpointing, under DDP's variants, and fsdp2, in every mode."""
    ddp, unused = DDPStrategy(), DDPStrategy(find_unused_parameters=True)
    ways: dict[str, dict[str, Any]] = {
        "segments": {"mode": "segments", "segment_length": 2},
        "selective": {"mode": "selective"},
        "budget": {"budget": 0.8},
    }
    variants: dict[str, tuple[type[Net], Any, dict[str, Any], dict[str, Any]]] = {
        "plain": (Net, ddp, {}, {}),
        "accumulation": (Net, ddp, {"accumulate_grad_batches": 3}, {}),
        "unused": (UnusedParameter, unused, {}, {}),
        "static graph": (Net, DDPStrategy(static_graph=True), {}, {}),
        "bucket view": (Net, DDPStrategy(gradient_as_bucket_view=True), {}, {}),
        **{f"{way}, plain": (Net, ddp, {}, options) for way, options in ways.items()},
        **{f"{way}, unused": (UnusedParameter, unused, {}, options) for way, options in ways.items()},
        **{f"{way}, fsdp2": (Net, "fsdp2", {}, options) for way, options in ways.items()},
    }
    found = {}
    for name, (kind, strategy, options, way) in variants.items():
        pair = []
        for callbacks in ([], [lt.ActivationCheckpointing(**way)]):
            module = seeded(lambda kind=kind: kind(dropout=0.3, batchnorm=True))
            fit(
                module,
                *callbacks,
                data=rank_loader(torch.distributed.get_rank(), 2),
                strategy=copy.deepcopy(strategy),
                devices=2,
                use_distributed_sampler=False,
                **options,
            )
            pair.append(weights(module))
        found[name] = (pair[0], pair[1])
    return found


def resumed_on_two_ranks(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    """Weights of an uninterrupted and of a resumed DDP run with dropout; and a draw of this rank after each."""
    rank = torch.distributed.get_rank()
    path = Path(folder) / "a.ckpt"

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

    results, draws = [], []
    for seed, checkpoint in ((0, None), (5, path)):
        module = seeded(lambda: Net(dropout=0.3))
        torch.manual_seed(seed + rank)
        run = quiet_trainer(
            lt.ExactResume(), Save(), strategy="ddp", devices=2, use_distributed_sampler=False, max_epochs=3
        )
        run.fit(module, rank_loader(rank, 2), ckpt_path=checkpoint, weights_only=True)
        results.append(weights(module))
        draws.append(float(torch.rand(())))
    return results[0], results[1], draws


def unitwise_on_shards() -> list[str]:
    """Unit-wise clipping of DTensors against that of the whole tensors. What went wrong."""
    torch.manual_seed(0)
    line, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    cases = [
        ((5, 3), line, [Shard(0)]),  # rows lie on one rank, unevenly
        ((5, 4), line, [Shard(1)]),  # rows span both
        ((5,), line, [Shard(0)]),  # a vector is one unit
        ((1,), line, [Shard(0)]),  # a rank holds nothing of it
        ((4, 2, 3), grid, [Replicate(), Shard(1)]),
        ((4, 2), line, [Replicate()]),
    ]
    weights_, gradients, expected = [], [], []
    for shape, mesh, placements in cases:
        weight, gradient = torch.randn(shape), torch.randn(shape)
        weights_.append(distribute_tensor(weight, mesh, placements))
        gradients.append(distribute_tensor(gradient, mesh, placements))
        clip_unitwise_([weight], [gradient])
        expected.append(gradient)
    clip_unitwise_(weights_, gradients)
    return [
        f"{shape} {placements}: {gradient.full_tensor()} instead of {right}"
        for (shape, _, placements), gradient, right in zip(cases, gradients, expected, strict=True)
        if not torch.allclose(gradient.full_tensor(), right, rtol=1e-5, atol=1e-8)
    ]


def guard_runs() -> dict[tuple[str, str, bool], dict[str, Any]]:
    """What guards made of runs in which one rank of two has bad batches, by strategy, guard and fused optimizer."""
    quick = {"z_threshold": 50.0, "window_steps": 16, "warmup_steps": 8}
    guards = {
        "NonFiniteGuard": (lt.NonFiniteGuard, {3: "nan"}, (19, 0, 1, 0)),
        "skip": (lambda: lt.LossSpikeGuard(**quick), {3: "nan", 12: "spike"}, (18, 0, 2, 0)),
        "rollback": (
            lambda: lt.LossSpikeGuard("rollback", snapshot_every_steps=5, **quick),
            {12: "spike"},
            (17, 0, 0, 1),
        ),
    }
    rank = torch.distributed.get_rank()
    found = {}
    with TemporaryDirectory() as folder:
        for strategy in ("ddp", "zero1", "fsdp2"):
            for name, (guard, poison, expected) in guards.items():
                for fused in (False, True):
                    module = seeded(lambda poison=poison, fused=fused: Poisoned(poison, rank=1, fused=fused))
                    whole = steady_data(20).dataset
                    trainer = fit(
                        module,
                        guard(),
                        data=DataLoader(whole, batch_sampler=RankBatches(160, 8, rank, 2)),
                        strategy=strategy,
                        devices=2,
                        use_distributed_sampler=False,
                        default_root_dir=folder,
                    )
                    ledger = lt.step_ledger(trainer)[0]
                    found[strategy, name, fused] = {
                        "counts": (ledger.applied, ledger.skipped_overflow, ledger.skipped_guard, ledger.rolled_back),
                        "expected": expected,
                        "finite": all(bool(torch.isfinite(one).all()) for one in weights(module).values()),
                        "sum": float(sum(one.double().sum() for one in weights(module).values())),
                    }
    return found


def monitor_looks(strategy: str, rank: int | None = None, world_size: int = 2) -> list[list[float]]:
    """What the gradient monitor measured of each block, in two steps."""
    rank = torch.distributed.get_rank() if rank is None else rank
    monitor = lt.GradientMonitor(every_n_steps=3)
    trained([monitor], strategy, rank, world_size, net={"optimizer": "momentum"})
    return [
        [one.gradient_norm, one.update_ratio, one.zero_share, one.nonfinite_share]
        for look in monitor.history
        for one in look.blocks
    ]


def vanished_shares(strategy: str, rank: int | None = None, world_size: int = 2) -> float:
    """The share of updates that fp32 rounds away at a tiny learning rate."""
    rank = torch.distributed.get_rank() if rank is None else rank
    net = {"optimizer": "sgd", "lr": 1e-6}
    trainer, _ = trained([lt.VanishingUpdateMonitor(every_n_steps=3)], strategy, rank, world_size, net=net)
    return float(trainer.callback_metrics["update/vanished"])


def float8_beside_checkpointing() -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Weights under fsdp2 without and with activation checkpointing: of plain training, then of fp8."""
    found = []
    for callbacks in ([], [lt.Float8Training(emulate=True)]):
        pair = [
            trained(
                [*callbacks, *more],
                "fsdp2",
                torch.distributed.get_rank(),
                2,
                net={"width": 16, "optimizer": "momentum", "dropout": 0.2},
            )[1]
            for more in ([], [lt.ActivationCheckpointing()])
        ]
        found.append((pair[0], pair[1]))
    return found
