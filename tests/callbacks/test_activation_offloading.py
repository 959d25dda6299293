"""Offloading under a Trainer: the run is the same, alone and with what else looks at saved tensors."""

import pytest
import torch

import lightning_tricks as lt
from lightning_tricks.functional.activation_offloading import OffloadedActivations
from lightning_tricks.functional.saved_tensors import StorageKey
from tests.models import ManualNet, Net, assert_same, fit, fp16, seeded, weights


@pytest.fixture
def moved(monkeypatch) -> list[tuple[StorageKey, int]]:
    """Each storage that is moved, and its bytes."""
    seen: list[tuple[StorageKey, int]] = []
    move = OffloadedActivations.move

    def watched(self, tensor):
        before = self.num_bytes
        view = move(self, tensor)
        if self.num_bytes > before:
            seen.append((StorageKey(tensor.untyped_storage()), self.num_bytes - before))
        return view

    monkeypatch.setattr(OffloadedActivations, "move", watched)
    return seen


@pytest.mark.parametrize(
    "options", [{}, {"plugins": True}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 3}]
)
def test_the_run_is_the_same(options: dict, moved) -> None:
    results = []
    for callbacks in ([], [lt.ActivationOffloading(min_bytes=1)]):
        module = seeded(lambda: Net(dropout=0.3, batchnorm=True))
        extra = {**options, "plugins": fp16()} if "plugins" in options else options
        fit(module, *callbacks, **extra)
        results.append(weights(module))
        assert "training_step" not in vars(module)
    assert_same(*results)
    assert moved


@pytest.mark.parametrize("mode", ["blocks", "segments", "selective"])
def test_offloading_goes_with_checkpointing(mode: str, moved) -> None:
    results, num_bytes = [], []
    for checkpointing in ([], [lt.ActivationCheckpointing(mode=mode)]):
        for offloading in ([], [lt.ActivationOffloading(min_bytes=1)]):
            moved.clear()
            module = seeded(lambda: Net(dropout=0.3))
            fit(module, *offloading, *checkpointing)
            results.append(weights(module))
        num_bytes.append(sum(size for _, size in moved))
    for result in results[1:]:
        assert_same(results[0], result)
    assert 0 < num_bytes[1] < num_bytes[0]


def test_offloading_goes_with_a_budget_and_the_monitor(moved) -> None:
    def run(*more):
        module, checkpointing, monitor = (
            seeded(Net),
            lt.ActivationCheckpointing(budget=0.8),
            lt.ActivationMemoryMonitor(),
        )
        fit(module, checkpointing, monitor, *more)
        return weights(module), checkpointing.choice, monitor.saved.num_bytes

    plain = run()
    offloaded = run(lt.ActivationOffloading(min_bytes=1))
    assert_same(plain[0], offloaded[0])
    assert plain[1].predicted == offloaded[1].predicted == offloaded[1].measured == plain[2] == offloaded[2]
    assert moved


def test_micro_batches_and_manual_optimization(moved) -> None:
    for make, more in ((Net, [lt.MicroBatching(2)]), (ManualNet, [])):
        moved.clear()
        results = []
        for offloading in ([], [lt.ActivationOffloading(min_bytes=1)]):
            module = seeded(make)
            fit(module, *offloading, *more)
            results.append(weights(module))
        assert_same(*results)
        assert moved


class Scaled(Net):
    """Saves the batch, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4, 8), 2.0))

    def loss(self, batch):
        x = batch[0]
        self.batch_storage = StorageKey(x.untyped_storage())
        return (self.net[0](x) * self.scale[: len(x)] * x).square().sum() * 1e-3 + super().loss(batch)


def test_the_batch_and_buffers_stay(moved) -> None:
    module = Scaled()
    fit(module, lt.ActivationOffloading(min_bytes=1), limit_train_batches=1)
    keys = {key for key, _ in moved}
    assert keys
    assert module.batch_storage not in keys
    assert StorageKey(module.scale.untyped_storage()) not in keys


def test_nothing_large_enough_is_said(recwarn) -> None:
    fit(Net(), lt.ActivationOffloading())
    said = [str(one.message) for one in recwarn if "ActivationOffloading moved nothing" in str(one.message)]
    assert len(said) == 1
    assert "bytes, less than min_bytes=4194304" in said[0]


def test_a_module_compiled_as_a_whole(moved) -> None:
    results = []
    for offloading in ([], [lt.ActivationOffloading(min_bytes=1)]):
        module = seeded(Net)
        fit(torch.compile(module, backend="aot_eager"), *offloading)
        results.append(weights(module))
    assert_same(*results)
    assert moved
