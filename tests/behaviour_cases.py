"""What the tests of the strategies' behaviour run on each rank."""

import functools
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
import yaml
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LearningRateMonitor,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import lightning_tricks as lt
from tests import strategy_models as models
from tests.checkpoint_cases import world
from tests.models import ManualNet, Net, TwoOptimizers, assert_same, dataset, fp16, seeded, weights
from tests.strategy_cases import data_of, strategy_trainer


def both(kind: Callable[[], pl.LightningModule], strategy: Any = "fsdp2", *callbacks: Any, **options: Any) -> Any:
    """Weights of a run in one process, and of the same run under the strategy."""
    rank, world_size = world()
    single, module = seeded(kind), seeded(kind)
    strategy_trainer("one process", 1, *(make() for make in callbacks), **options).fit(single, data_of(single, 0, 1))
    run = strategy_trainer(strategy, world_size, *(make() for make in callbacks), **options)
    run.fit(module, data_of(module, rank, world_size))
    return weights(single), weights(module)


def check(kind: Callable[[], pl.LightningModule], strategy: Any = "fsdp2", *callbacks: Any, **options: Any) -> None:
    single, module = both(kind, strategy, *callbacks, **options)
    assert_same(module, single, rtol=0, atol=1e-6)


# Manual optimization


class Gan(pl.LightningModule):
    """Two networks, two optimizers; the generator's step runs the discriminator after it has moved."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.networks = nn.ModuleDict({"generator": mlp(4, 8), "discriminator": mlp(8, 1)})

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, _ = batch
        generator, discriminator = self.networks["generator"], self.networks["discriminator"]
        first, second = self.optimizers()
        fake = generator(x[:, :4])
        loss = discriminator(x).mean() - discriminator(fake.detach()).mean()
        first.zero_grad()
        self.manual_backward(loss + discriminator(x).square().mean())
        first.step()
        self.toggle_optimizer(second)
        second.zero_grad()
        self.manual_backward(discriminator(generator(x[:, :4])).mean())
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.networks[name].parameters(), lr=0.05, momentum=0.9)
            for name in ("discriminator", "generator")
        ]


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def manual_optimization(strategy: str) -> None:
    for kind in (lambda: ManualNet(optimizer="momentum"), lambda: TwoOptimizers(optimizer="momentum"), Gan):
        # Under DDP each of several backwards must say that it leaves parameters out.
        check(kind, lt.ZeRO1Strategy(find_unused_parameters=True) if strategy == "zero1" else strategy)


# Steps without a loss


class NoLoss(Net):
    """No loss at some batches; the window goes on."""

    def __init__(self, none_at: tuple[int, ...]) -> None:
        super().__init__(optimizer="momentum", none_at=none_at)


def no_loss_on_one_rank() -> None:
    """At the first, the middle and the last micro-batch of a window of 3. Lightning refuses that on several ranks."""
    for none_at in ((0,), (1,), (2,), (2, 5)):
        check(lambda none_at=none_at: NoLoss(none_at), "fsdp2", lt.GradientNormClipping, accumulate_grad_batches=3)


# Evaluation


def evaluation(strategy: str) -> None:
    """validate, fit, test, predict, fit again, on one Trainer each: as in one process."""
    results = {}
    rank, world_size = world()
    for name, rank_, size in (("one process", 0, 1), (strategy, rank, world_size)):
        module = seeded(lambda: Evaluated(optimizer="momentum"))
        data = data_of(module, rank_, size)
        run = strategy_trainer(name, size, max_epochs=1)
        scores = [run.validate(module, data, verbose=False)[0]["val_loss"]]
        run.fit(module, data, data)
        scores.append(run.test(module, data, verbose=False)[0]["test_loss"])
        predicted = torch.cat(run.predict(module, data))
        run.fit_loop.max_epochs = 2
        run.fit(module, data, data)
        scores.append(run.validate(module, data, verbose=False)[0]["val_loss"])
        results[name] = scores, predicted, weights(module)
    single, ours = results["one process"], results[strategy]
    assert ours[0] == torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(single[0])) or ours[0]
    mine = single[1].view(-1, world_size, 8 // world_size, 1)[:, rank].flatten(0, 1)
    torch.testing.assert_close(ours[1], mine, rtol=0, atol=1e-6)
    assert_same(ours[2], single[2], rtol=0, atol=1e-6)


class Evaluated(Net):
    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])


def inference_mode_before_fit() -> None:
    """Lightning evaluates under `torch.inference_mode` on NCCL, and under `torch.no_grad` on gloo alone."""
    import lightning.pytorch.loops.utilities as loops

    rank, world_size = world()
    seen = []

    class Watched(Evaluated):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            seen.append(torch.is_inference_mode_enabled())
            super().validation_step(batch, batch_idx)

    real = loops.dist
    loops.dist = SimpleNamespace(get_backend=lambda: "nccl")
    try:
        module, single = (seeded(lambda: Watched(optimizer="momentum")) for _ in range(2))
        run = strategy_trainer("fsdp2", world_size, max_epochs=1)
        data = data_of(module, rank, world_size)
        run.validate(module, data, verbose=False)
        run.fit(module, data, data)
        assert seen
        assert not any(seen)
        seen.clear()
        plain = strategy_trainer("one process", 1, max_epochs=1)
        plain.validate(single, data_of(single, 0, 1), verbose=False)
        assert all(seen)  # without the strategy it would be
        plain.fit(single, data_of(single, 0, 1))
    finally:
        loops.dist = real
    assert_same(weights(module), weights(single), rtol=0, atol=1e-6)


def weights_that_change_between_forwards(strategy: str) -> None:
    """A callback that swaps weights around a validation, as an average does: no gathered copy may be out of date."""

    class Swap(pl.Callback):
        def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            self.kept = [p.detach().clone() for p in module.parameters()]
            with torch.no_grad():
                torch._foreach_mul_(list(module.parameters()), 0.5)

        def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            with torch.no_grad():
                for parameter, kept in zip(module.parameters(), self.kept, strict=True):
                    parameter.copy_(kept)

    rank, world_size = world()
    results = []
    for name, rank_, size in (("one process", 0, 1), (strategy, rank, world_size)):
        module = seeded(lambda: Evaluated(optimizer="momentum"))
        data = data_of(module, rank_, size)
        run = strategy_trainer(name, size, Swap(), val_check_interval=3)
        run.fit(module, data, data)
        results.append((weights(module), float(run.callback_metrics["val_loss"])))
    assert_same(results[1][0], results[0][0], rtol=0, atol=1e-6)
    assert abs(results[1][1] - results[0][1]) < 1e-6


def case_27_average(strategy: str) -> None:
    """What an average of weights does: a shadow on each rank's shards, by foreach operations."""
    rank, world_size = world()
    results = []

    class Average(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            self.shadow = [p.detach().clone() for p in module.parameters()]

        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
            torch._foreach_lerp_(self.shadow, [p.detach() for p in module.parameters()], 0.1)

    for name, rank_, size in (("one process", 0, 1), (strategy, rank, world_size)):
        module, average = seeded(lambda: Net(optimizer="momentum")), Average()
        strategy_trainer(name, size, average).fit(module, data_of(module, rank_, size))
        results.append(
            {str(i): (p.full_tensor() if isinstance(p, DTensor) else p) for i, p in enumerate(average.shadow)}
        )
    assert_same(results[1], results[0], rtol=0, atol=1e-6)


# Logging and metrics


class Logs(Net):
    """Logs norms of its own weights, and metrics that are its children."""

    def __init__(self) -> None:
        super().__init__(optimizer="momentum")
        self.metric = torchmetrics.MeanSquaredError()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.metric(self.net(batch[0]), batch[1])
        self.log("error", self.metric, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        weight = self.net[0].linear.weight
        self.log("weight/norm", weight.detach().norm())
        self.log_dict({"weight/synced": weight.detach().abs().sum()}, sync_dist=True)


def logging_of_shards(strategy: str) -> None:
    rank, world_size = world()
    results = []
    for name, rank_, size in (("one process", 0, 1), (strategy, rank, world_size)):
        module = seeded(Logs)
        run = strategy_trainer(name, size, max_epochs=1)
        run.fit(module, data_of(module, rank_, size))
        results.append({key: float(value) for key, value in run.callback_metrics.items()})
        assert "log" not in vars(module)
        if name == strategy:
            tensor = next(module.parameters()).detach().norm()
            assert abs(float(run.strategy.reduce(tensor)) - results[0]["weight/norm"]) < 1e-5
    assert results[0].keys() == results[1].keys()
    for key in results[0]:
        assert abs(results[0][key] - results[1][key]) < 1e-5, key


# Initialization


def differently_seeded(strategy: Any) -> dict[str, Tensor]:
    """Case 25: what comes out where each rank begins with weights of its own."""
    rank, world_size = world()
    module = seeded(lambda: models.TiedModule(optimizer="momentum"), seed=rank)
    run = strategy_trainer(strategy, world_size, max_epochs=1)
    run.fit(module, data_of(module, rank, world_size))
    return weights(module)


class OnMeta(Net):
    """Builds its network in configure_model, on meta or not."""

    def __init__(self, on_meta: bool) -> None:
        super().__init__(optimizer="momentum", batchnorm=True)
        self.on_meta = on_meta
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta") if self.on_meta else torch.device("cpu"):
                self.net = Net(batchnorm=True).net


def meta_initialization() -> None:
    rank, world_size = world()
    results = []
    for strategy, rank_, size, on_meta in (("one process", 0, 1, False), ("fsdp2", rank, world_size, True)):
        module = OnMeta(on_meta)
        pl.seed_everything(3, verbose=False)
        run = strategy_trainer(strategy, size, Snapshot(), max_epochs=1)
        run.fit(module, data_of(module, rank_, size))
        results.append(run.callbacks[0].taken)
    assert_same(results[1], results[0])


class Snapshot(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.taken = weights(module)


class NoReset(OnMeta):
    def configure_model(self) -> None:
        super().configure_model()
        self.net.append(Scale())
        self.net.append(HalfReset())


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.sum()


class HalfReset(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1, device="meta")

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            nn.init.ones_(self.weight)


def weights_from_a_file(path: str) -> None:
    """A model on meta, some of it without a reset, from a file; also an empty model of Trainer.init_module."""
    rank, world_size = world()
    single = seeded(lambda: WithScale(on_meta=False))
    single.configure_model()
    if rank == 0:
        torch.save(single.state_dict(), path)
    torch.distributed.barrier()
    module = seeded(lambda: WithScale(on_meta=True), seed=8)
    strategy_trainer(lt.FSDP2Strategy(weights=path), world_size, max_epochs=1).fit(
        module, data_of(module, rank, world_size)
    )
    strategy_trainer("one process", 1, max_epochs=1).fit(single, data_of(single, 0, 1))
    assert_same(weights(module), weights(single), rtol=0, atol=1e-6)


class WithScale(OnMeta):
    def __init__(self, on_meta: bool) -> None:
        super().__init__(on_meta)
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta") if self.on_meta else torch.device("cpu"):
                self.net = Net().net
                self.net.append(ScaleOnDevice())


class ScaleOnDevice(Scale):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.scale = nn.Parameter(torch.ones(3))


def empty_init() -> None:
    rank, world_size = world()
    pl.seed_everything(3, verbose=False)
    run = strategy_trainer("fsdp2", world_size, Snapshot(), max_epochs=1)
    with run.init_module(empty_init=True):
        module = Net(optimizer="momentum")
    assert next(module.parameters()).is_meta
    pl.seed_everything(3, verbose=False)
    expected = Net().state_dict()
    run.fit(module, data_of(module, rank, world_size))
    assert_same(run.callbacks[0].taken, expected)


# Precision


def precisions() -> dict[str, dict[str, Tensor]]:
    """Weights by precision, in one process and under fsdp2."""
    found = {}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "autocast": (lambda: "fsdp2", {"precision": "bf16-mixed"}),
        "autocast by name": (lambda: lt.FSDP2Strategy(mp_policy="autocast"), {"precision": "bf16-mixed"}),
        "policy": (lambda: lt.FSDP2Strategy(mp_policy="fsdp"), {"precision": "bf16-mixed"}),
        "policy, BatchNorm": (lambda: lt.FSDP2Strategy(mp_policy="fsdp"), {"precision": "bf16-mixed"}),
        "true": (lambda: "fsdp2", {"precision": "bf16-true"}),
        "true, BatchNorm": (lambda: "fsdp2", {"precision": "bf16-true"}),
        "fp16 scaler": (lambda: lt.FSDP2Strategy(), {"plugins": fp16}),
    }
    rank, world_size = world()
    for name, (strategy, options) in cases.items():
        for label, rank_, size in (("one", 0, 1), ("ours", rank, world_size)):
            made = {key: value() if callable(value) else value for key, value in options.items()}
            module = seeded(functools.partial(Dtypes, optimizer="momentum", batchnorm="BatchNorm" in name))
            run = strategy_trainer(strategy() if label == "ours" else "auto", size, max_epochs=1, **made)
            run.fit(module, data_of(module, rank_, size))
            found[f"{name}, {label}"] = {**weights(module), "dtypes": module.dtypes, "losses": module.losses}
    return found


class Dtypes(Net):
    """Notes the dtypes in which its layers see their weights and their input."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.dtypes: dict[str, str] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        block = self.net[0]
        for name, one in (("linear", block.linear), ("norm", block.norm), ("head", self.net[-1])):
            one.register_forward_hook(lambda module, args, output, name=name: self.note(name, module, args))
        self.dtypes["batch"] = str(batch[1].dtype)
        return super().training_step(batch, batch_idx)

    def note(self, name: str, module: nn.Module, args: Any) -> None:
        self.dtypes[name] = str(module.weight.dtype)
        self.dtypes[f"{name} input"] = str(args[0].dtype)


# Refusals


def refusals(two: bool) -> dict[str, str]:
    """The errors of what cannot be supported."""
    rank, world_size = world()

    def error_of(module: pl.LightningModule, strategy: Any = "fsdp2", *callbacks: Any, **options: Any) -> str:
        try:
            run = strategy_trainer(strategy, world_size, *callbacks, **options)
            run.fit(module, data_of(module, rank, world_size))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    tied = models.TiedModule
    return {
        "tied": error_of(tied(), lt.FSDP2Strategy(["embedding", "Block"])),
        "tied by glob": error_of(tied(), lt.FSDP2Strategy(["model.embedding", "Block"])),
        "nothing matches": error_of(tied(), lt.FSDP2Strategy("encoder.*")),
        "copies": error_of(Net(), lt.FSDP2Strategy(replicate_size=3)),
        "groups": error_of(Net(), lt.FSDP2Strategy(reshard_after_forward=3)),
        "by hand": error_of(ByHand()),
        "ddp inside": error_of(Wrapped()),
        "double": error_of(Net(), "fsdp2", precision="64-true"),
        "double plugin": error_of(Net(), lt.FSDP2Strategy(), plugins=pl.plugins.DoublePrecision()),
        "scaler": error_of(tied(), lt.FSDP2Strategy(), plugins=fp16()),
        "ema": error_of(Net(), "fsdp2", EMAWeightAveraging()),
        "swa": error_of(Net(), "fsdp2", StochasticWeightAveraging(0.1)),
        "adafactor": error_of(WithOptimizer("Adafactor")),
        "rprop": error_of(WithOptimizer("Rprop")),
        "own parameter": error_of(OwnParameter()),
        "early optimizer": error_of(EarlyOptimizer()),
        "muon": error_of(WithOptimizer("Muon")),
        "lbfgs": error_of(WithOptimizer("LBFGS")),
        "lbfgs zero1": error_of(WithOptimizer("LBFGS"), "zero1"),
        "fused sgd": error_of(Net(optimizer="momentum", fused=True)),
        "no reset": error_of(NoReset(on_meta=True)),
        "policy": error_of(Net(), lt.FSDP2Strategy(mp_policy="fsdp")),
        "no file": error_of(Net(), lt.FSDP2Strategy(weights="nowhere.pt")),
        "dtypes": error_of(HalfLinear()),
        "sparse": error_of(SparseEmbedding()),
        "zero1 after fsdp2": error_of(already_trained(), "zero1"),
        "other mesh": error_of(already_trained(), lt.FSDP2Strategy(replicate_size=2)),
        "other settings": error_of(already_trained(), "zero2"),
        "other precision": error_of(already_trained(), lt.FSDP2Strategy(mp_policy="fsdp"), precision="bf16-mixed"),
        "built anew": error_of(already_trained(BuildsAnew)),
    }


class ByHand(Net):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Wrapped(Net):
    def configure_model(self) -> None:
        self.net = nn.parallel.DistributedDataParallel(self.net)


class OwnParameter(ManualNet):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


class EarlyOptimizer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.early


class WithOptimizer(Net):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_optimizers(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.parameters() if p.ndim == 2]
        return getattr(torch.optim, self.name)(matrices if self.name == "Muon" else self.parameters(), lr=0.01)


class BuildsAnew(Net):
    def configure_model(self) -> None:
        self.net = Net().net


def already_trained(kind: type[Net] = Net) -> Net:
    rank, world_size = world()
    module = kind()
    strategy_trainer("fsdp2", world_size, max_epochs=1).fit(module, data_of(module, rank, world_size))
    return module


def the_check_for_gpus() -> list[tuple[str, str, bool]]:
    from tests.benchmarks.gpu_check import run

    return run("cpu")


def run_code(code: str, folder: str) -> None:
    os.chdir(folder)
    exec(compile(code, "README.md", "exec"), {"module": Net(), "data": DataLoader(dataset(), batch_size=4)})


class CompiledBlocks(Net):
    """Its blocks are compiled one by one, as torchtitan does, in place or wrapped."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__(optimizer="momentum")
        self.wrapped = wrapped

    def configure_model(self) -> None:
        for index, block in enumerate(self.net[:-1]):
            if self.wrapped:
                self.net[index] = torch.compile(block, backend="eager")
            else:
                block.compile(backend="eager")


def compiled(strategy: str) -> None:
    for wrapped in (False, True):
        check(functools.partial(CompiledBlocks, wrapped), strategy)


class Mask(Net):
    """Buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__(optimizer="momentum")
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("positions", torch.arange(3, dtype=torch.int32))
        self.register_buffer("short", torch.ones(2, dtype=torch.bfloat16))
        self.net[0].linear.weight.data = self.net[0].linear.weight.data.t()  # not contiguous


def unusual_tensors(strategy: str) -> None:
    check(Mask, strategy)


def from_yaml(folder: str) -> str:
    rank, _ = world()
    config = {
        "trainer": {
            "strategy": {
                "class_path": "lightning_tricks.FSDP2Strategy",
                "init_args": {
                    "policy": {"class_path": "lightning_tricks.ShardingPolicy", "init_args": {"units": "net.1"}},
                    "reshard_after_forward": False,
                },
            },
            "accelerator": "cpu",
            "devices": 2,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
        }
    }
    path = Path(folder) / f"{rank}.yaml"
    path.write_text(yaml.safe_dump(config))
    cli = LightningCLI(WithData, args=["--config", str(path)], run=False, save_config_callback=None)
    cli.trainer.fit(cli.model)
    return str(cli.trainer.strategy.plan)


class WithData(Net):
    def __init__(self) -> None:
        super().__init__()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(dataset(), batch_size=4)


class Wide(OnMeta):
    """96 MB in 24 blocks."""

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta") if self.on_meta else torch.device("cpu"):
                self.net = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024, bias=False)) for _ in range(24)))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass  # the weights are loaded by now


def write_wide(path: str) -> None:
    module = Wide(on_meta=False)
    module.configure_model()
    torch.save(module.state_dict(), path)


def memory_of_loading(path: str) -> float:
    """The most memory of its own that a rank takes while it reads weights from a file, as a share of the model's."""
    rank, world_size = world()
    module = Wide(on_meta=True)
    run = strategy_trainer(lt.FSDP2Strategy(weights=path), world_size)
    with Memory() as memory:
        run.validate(module, data_of(module, rank, world_size), verbose=False)
    return memory.grown / (24 * 1024 * 1024 * 4)


class Memory:
    """Samples what is resident and not mapped from a file."""

    def __enter__(self) -> "Memory":
        self.before, self.grown, self.runs = self.anonymous(), 0, True
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def sample(self) -> None:
        while self.runs:
            self.grown = max(self.grown, self.anonymous() - self.before)
            time.sleep(0.0005)

    def anonymous(self) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    def __exit__(self, *args: Any) -> None:
        self.runs = False
        self.thread.join()


def crash(strategy: str, folder: str) -> None:
    """An error in training: nothing of the strategy is left on the module, and the exception checkpoint is right."""
    rank, world_size = world()
    for fault in ({"fail_at": 4}, {"fail_in_validation": True}):
        single, module = (seeded(functools.partial(Net, optimizer="momentum", **fault)) for _ in range(2))
        saved = []
        for name, one, rank_, size in (("one process", single, 0, 1), (strategy, module, rank, world_size)):
            place = f"{folder}/{name}-{len(fault)}-{next(iter(fault))}"
            place += f"-{rank}" if size == 1 else ""
            callbacks = [OnExceptionCheckpoint(place), lt.GradientNormClipping(0.1)]
            run = strategy_trainer(name, size, *callbacks, enable_checkpointing=True, val_check_interval=3)
            data = data_of(one, rank_, size)
            with pytest.raises(RuntimeError, match="boom"):
                run.fit(one, data, data)
            saved.append(torch.load(f"{place}/on_exception.ckpt", weights_only=True)["state_dict"])
        assert not {"log", *("training_step", "validation_step", "test_step", "predict_step")} & set(vars(module))
        assert_same(weights(module), weights(single), rtol=0, atol=1e-6)
        assert_same(saved[1], saved[0], rtol=0, atol=1e-6)


# What a review found


class Interrupted(Net):
    """Raises in the middle of an accumulation window, once."""

    def __init__(self) -> None:
        super().__init__(optimizer="momentum")
        self.armed = True

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 4 and self.armed:
            self.armed = False
            raise RuntimeError("boom")
        return super().training_step(batch, batch_idx)


def second_fit_after_an_open_window(strategy: str) -> None:
    rank, world_size = world()
    results = []
    for name, rank_, size in (("one process", 0, 1), (strategy, rank, world_size)):
        module = seeded(Interrupted)
        for _ in range(2):
            run = strategy_trainer(name, size, accumulate_grad_batches=3, max_epochs=1)
            try:
                run.fit(module, data_of(module, rank_, size))
            except RuntimeError as error:
                assert "boom" in str(error)  # noqa: PT017
        results.append(weights(module))
    assert_same(results[1], results[0], rtol=0, atol=1e-6)


class SometimesScaled(models.TiedModule):
    """Its parameter without a dimension takes part in the first micro-batch of each window only."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = batch
        logits = self.model.head(self.model.embedding(tokens[:, :-1]))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss + self.model.temperature * tokens.float().mean() if batch_idx % 3 == 0 else loss


class Unfreezes(Net):
    """A layer that is left out as frozen is trained from the second batch on."""

    def __init__(self) -> None:
        super().__init__(optimizer="momentum")
        self.scale = nn.Linear(1, 1)
        self.scale.requires_grad_(False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return (self.scale(self.net(batch[0])) - batch[1]).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.scale.requires_grad_(batch_idx > 1)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, foreach=False)


def kept_whole() -> None:
    check(SometimesScaled, "fsdp2", accumulate_grad_batches=3)
    check(Unfreezes, lt.FSDP2Strategy(lt.ShardingPolicy(ignore="scale")))


class CountsBatches(Net):
    """A buffer of its own that follows the batches."""

    def __init__(self) -> None:
        super().__init__(optimizer="momentum")
        self.register_buffer("seen", torch.zeros(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen += batch[0].sum()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.at_validation = float(self.seen)


def buffers_of_an_evaluation() -> float:
    rank, world_size = world()
    module = CountsBatches()
    data = data_of(module, rank, world_size)
    strategy_trainer("fsdp2", world_size, max_epochs=1).fit(module, data, data)
    return module.at_validation


class LogsFromACallback(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.log("norm", module.net[0].linear.weight.detach().norm())


class HooksItsOptimizer(Net):
    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *args: setattr(self, "steps", self.steps + 1))
        return optimizer


def odds_and_ends(strategy: str) -> None:
    rank, world_size = world()
    single, module = (seeded(lambda: HooksItsOptimizer(optimizer="momentum")) for _ in range(2))
    first = strategy_trainer("one process", 1, LogsFromACallback(), max_epochs=1)
    first.fit(single, data_of(single, 0, 1))
    second = strategy_trainer(strategy, world_size, LogsFromACallback(), max_epochs=1)
    second.fit(module, data_of(module, rank, world_size))
    assert module.steps == single.steps == 10
    assert abs(float(second.callback_metrics["norm"]) - float(first.callback_metrics["norm"])) < 1e-5
    with torch.no_grad():
        module(torch.zeros(1, 8))  # outside of any step: the root stays gathered
    second.validate(module, data_of(module, rank, world_size), verbose=False)


def forgotten_originals() -> int:
    """How many of the parameters that the module had before it was sharded are alive."""
    rank, world_size = world()
    module = Net(optimizer="momentum")
    originals = [weakref.ref(parameter) for parameter in module.parameters()]
    run = strategy_trainer("fsdp2", world_size, max_epochs=1)
    run.fit(module, data_of(module, rank, world_size))
    gc.collect()
    return sum(one() is not None for one in originals)


def asynchronous_plugin(strategy: str, folder: str) -> None:
    rank, world_size = world()
    module = Net(optimizer="momentum")
    run = strategy_trainer(strategy, world_size, max_epochs=1, plugins=AsyncCheckpointIO())
    run.fit(module, data_of(module, rank, world_size))
    run.save_checkpoint(f"{folder}/a.ckpt")
    run.strategy.checkpoint_io.teardown()
    torch.distributed.barrier()
    assert_same(torch.load(f"{folder}/a.ckpt", weights_only=True)["state_dict"], weights(module))


def places_and_kinds(folder: str) -> list[str]:
    """Errors of checkpoints in the wrong place or of the wrong kind."""
    rank, world_size = world()
    saving = lt.FSDP2Strategy(save_distributed_checkpoint=True)
    module = Net(optimizer="momentum")
    run = strategy_trainer(saving, world_size, max_epochs=1)
    run.fit(module, data_of(module, rank, world_size))
    errors = []
    for path in ("s3://bucket/a.ckpt", folder):
        try:
            run.save_checkpoint(path)
        except (ValueError, OSError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    run.save_checkpoint(f"{folder}/a.ckpt", weights_only=True)
    for strategy in ("zero1", "fsdp2"):
        try:
            other = Net(optimizer="momentum")
            again = strategy_trainer(strategy, world_size)
            again.fit(other, data_of(other, rank, world_size), ckpt_path=f"{folder}/a.ckpt")
        except (ValueError, KeyError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    initial = Net(optimizer="momentum")
    strategy = lt.FSDP2Strategy(weights=f"{folder}/a.ckpt")
    strategy_trainer(strategy, world_size).validate(initial, data_of(initial, rank, world_size), verbose=False)
    assert_same(weights(initial), weights(module))  # a folder gives initial weights too
    return errors


class BornHalf(Net):
    """Built in configure_model, under the precision's default dtype."""

    def __init__(self) -> None:
        super().__init__(optimizer="momentum")
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Net(batchnorm=True).net


def born_half() -> tuple[torch.dtype, torch.dtype]:
    rank, world_size = world()
    module = BornHalf()
    run = strategy_trainer("fsdp2", world_size, max_epochs=1, precision="bf16-true")
    run.fit(module, data_of(module, rank, world_size))
    return module.net[0].norm.running_mean.dtype, module.net[0].linear.weight.dtype


class HalfLinear(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].linear.bfloat16()


class SparseEmbedding(models.TiedModule):
    def __init__(self) -> None:
        super().__init__()
        self.model.embedding = nn.Embedding(models.VOCABULARY, 8, sparse=True)


class Step(nn.Module):
    """A block without a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def step(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class CalledOtherwise(Net):
    def __init__(self) -> None:
        super().__init__(optimizer="momentum")
        self.steps = nn.ModuleList(Step() for _ in range(3))

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        for one in self.steps:
            x = one.step(x)
        return (self.net(x) - y).square().mean()


def monitored_rates() -> list[str]:
    rank, world_size = world()

    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    module, monitor = Scheduled(optimizer="momentum"), LearningRateMonitor()
    run = strategy_trainer("zero1", world_size, monitor, max_epochs=1, logger=DummyLogger())
    run.fit(module, data_of(module, rank, world_size))
    return list(monitor.lrs)


class TiedByUse(models.TiedModule):
    """Its embedding's weight is used outside of the embedding, and is as large as a block."""

    def __init__(self) -> None:
        super().__init__()
        self.model.head = nn.Identity()

    def logits(self, tokens: Tensor) -> Tensor:
        return nn.functional.linear(self.model(tokens), self.model.embedding.weight)


class LogsNorms(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(pl.utilities.grad_norm(self, 2))


def notes_of_errors() -> list[str]:
    rank, world_size = world()
    notes = []
    for module in (TiedByUse(), LogsNorms()):
        run = strategy_trainer("fsdp2", world_size, max_epochs=1)
        with pytest.raises(RuntimeError) as caught:
            run.fit(module, data_of(module, rank, world_size))
        notes.append(" ".join(getattr(caught.value, "__notes__", [])))
    return notes
