"""The ring of snapshots: what comes back, what it allocates, and a ring that does not fit."""

import copy

import pytest
import torch
from torch import nn

from lightning_tricks.functional import snapshots
from lightning_tricks.functional.snapshots import SnapshotRing, expected_state_bytes, num_bytes, training_tensors

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return module, OPTIMIZERS[name](module.parameters())


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(5, 3, generator=generator)).square().mean().backward()
        optimizer.step()


def everything(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    groups = [torch.as_tensor(group["lr"]) for group in optimizer.param_groups]
    return [*(one.clone() for one in training_tensors(module, [optimizer]).values()), *groups]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_the_run_after_a_restore_is_the_run_after_the_snapshot(name: str, steps_before: int) -> None:
    module, optimizer = build(name)
    train(module, optimizer, steps_before)
    ring = SnapshotRing(1)
    ring.take(module, [optimizer], {"a": [1]})
    train(module, optimizer, 2, seed=1)
    expected = everything(module, optimizer)

    train(module, optimizer, 3, seed=2)
    optimizer.param_groups[0]["lr"] *= 10
    for _ in range(2):  # it stays in the ring
        assert ring.restore_(module, [optimizer]) == {"a": [1]}
        train(module, optimizer, 2, seed=1)
        assert all(map(torch.equal, everything(module, optimizer), expected))


def test_the_newest_comes_back_and_the_oldest_makes_room() -> None:
    module, optimizer = build("adamw")
    ring = SnapshotRing(2)
    for number in range(5):
        train(module, optimizer, 1)
        ring.take(module, [optimizer], number)
    assert len(ring) == 2
    assert ring.restore_(module, [optimizer]) == 4
    ring.drop_newest()
    assert ring.restore_(module, [optimizer]) == 3
    ring.drop_newest()  # never the last one
    assert ring.restore_(module, [optimizer]) == 3


def test_memory_is_allocated_once() -> None:
    module, optimizer = build("adamw")
    train(module, optimizer, 1)
    ring = SnapshotRing(2)
    pointers = []
    for _ in range(6):
        train(module, optimizer, 1)
        ring.take(module, [optimizer])
        pointers.append({one.data_ptr() for one in ring._snapshots[-1].tensors.values() if one.numel()})
    assert pointers[0] == pointers[2] == pointers[4]
    assert ring.bytes_of_one == num_bytes(training_tensors(module, [optimizer]))


def test_a_snapshot_is_a_copy() -> None:
    module, optimizer = build("momentum")
    train(module, optimizer, 1)
    ring, before, values = SnapshotRing(1), copy.deepcopy(module.state_dict()), {"a": [1]}
    ring.take(module, [optimizer], values)
    train(module, optimizer, 1)
    values["a"].append(2)
    assert ring.restore_(module, [optimizer]) == {"a": [1]}
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_ring_that_does_not_fit_says_both_figures_and_copies_nothing(monkeypatch) -> None:
    module, optimizer = build("adamw")
    train(module, optimizer, 1)
    needed = 3 * num_bytes(training_tensors(module, [optimizer]))
    monkeypatch.setattr(snapshots, "free_bytes", lambda device: needed - 1)
    ring = SnapshotRing(3)
    with pytest.raises(MemoryError, match=rf"need {needed:,} bytes more and {needed - 1:,} are free"):
        ring.take(module, [optimizer])
    assert len(ring) == 0
    monkeypatch.setattr(snapshots, "free_bytes", lambda device: needed)
    ring.take(module, [optimizer])


def test_state_that_is_not_there_yet_is_counted(monkeypatch) -> None:
    """Else a run would begin, and end when the optimizer has made its state."""
    module, optimizer = build("adamw")
    weights = num_bytes(dict(module.named_parameters()))
    buffers = num_bytes(dict(module.named_buffers()))
    needed = 2 * (3 * weights + buffers)
    ring = SnapshotRing(2)
    monkeypatch.setattr(snapshots, "free_bytes", lambda device: needed - 1)
    assert f"need {needed:,} bytes" in ring.shortage(module, [optimizer])
    monkeypatch.setattr(snapshots, "free_bytes", lambda device: needed)
    assert ring.shortage(module, [optimizer]) == ""
    assert ring.bytes_of_one == 3 * weights + buffers
    assert [expected_state_bytes([build(name)[1]]) // weights for name in OPTIMIZERS] == [2, 2, 1, 0, 0]
    train(module, optimizer, 1)
    assert expected_state_bytes([optimizer]) == 0


def test_nothing_to_restore() -> None:
    module, optimizer = build("sgd")
    with pytest.raises(RuntimeError, match="call take first"):
        SnapshotRing(1).restore_(module, [optimizer])
