"""Exact resume: wherever a checkpoint is saved, the resumed run is the uninterrupted one."""

import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import lightning_tricks as lt
from tests.distributed_cases import resumed_on_two_ranks
from tests.models import Net, assert_same, dataset, fit, largest_difference, loader, trainer, weights


class SaveOnce(pl.Callback):
    """Saves the first time that a hook comes at or after a number of steps."""

    def __init__(self, hook: str, at: int, path: Path) -> None:
        self.at, self.path = at, path
        setattr(self, hook, self.save)

    def save(self, trainer: pl.Trainer, *args) -> None:
        if trainer.global_step >= self.at and not self.path.exists():
            trainer.save_checkpoint(self.path)


def stateful() -> DataLoader:
    return StatefulDataLoader(dataset(), batch_size=4, shuffle=True)


def plain() -> DataLoader:
    return DataLoader(dataset(), batch_size=4, shuffle=True)


def runs(make_loader, hook: str, at: int, path: Path, *, resume_with: type[Net] = Net, **options) -> tuple[dict, dict]:
    """Weights of the uninterrupted and of the resumed run, three epochs of seven batches, with dropout."""
    validation = loader() if "validation" in hook else None
    torch.manual_seed(0)
    whole = resume_with(dropout=0.3)
    trainer(lt.ExactResume(), SaveOnce(hook, at, path), max_epochs=3, **options).fit(whole, make_loader(), validation)
    torch.manual_seed(77)
    resumed = resume_with(dropout=0.3)
    torch.rand(5)
    again = trainer(lt.ExactResume(), SaveOnce(hook, at, path), max_epochs=3, **options)
    again.fit(resumed, make_loader(), validation, ckpt_path=path, weights_only=True)
    assert again.global_step == 21
    return weights(whole), weights(resumed)


@pytest.mark.parametrize(
    ("hook", "at", "options"),
    [
        ("on_train_batch_end", 3, {}),
        ("on_train_batch_end", 7, {}),
        ("on_train_batch_end", 10, {}),
        ("on_train_batch_end", 14, {}),
        ("on_train_epoch_end", 7, {}),
        ("on_train_epoch_end", 14, {}),
        ("on_validation_end", 7, {}),
        ("on_validation_end", 3, {"val_check_interval": 3}),
    ],
)
def test_stateful_loader_at_any_moment(tmp_path, hook: str, at: int, options: dict) -> None:
    for number, make_loader in enumerate((stateful, with_epochs)):
        whole, resumed = runs(make_loader, hook, at, tmp_path / f"{number}.ckpt", **options)
        assert_same(resumed, whole)


def with_epochs() -> StatefulDataLoader:
    """Its sampler shuffles by the number of the epoch, as the one does that Lightning puts in under DDP."""
    data = dataset()
    return StatefulDataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=1, rank=0))


@pytest.mark.parametrize(
    ("hook", "at"),
    [("on_train_batch_end", 7), ("on_train_epoch_end", 7), ("on_train_epoch_end", 14), ("on_validation_end", 7)],
)
def test_any_loader_at_an_epochs_edge(tmp_path, hook: str, at: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ExactResume")
        whole, resumed = runs(plain, hook, at, tmp_path / "a.ckpt")
    assert_same(resumed, whole)


def own_generator() -> DataLoader:
    return DataLoader(dataset(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(("hook", "at"), [("on_train_batch_end", 7), ("on_train_epoch_end", 7)])
def test_loader_with_a_generator_of_its_own(tmp_path, hook: str, at: int) -> None:
    whole, resumed = runs(own_generator, hook, at, tmp_path / "a.ckpt")
    assert_same(resumed, whole)


def test_persistent_workers_are_told(tmp_path) -> None:
    def workers() -> DataLoader:
        return DataLoader(dataset(), batch_size=4, num_workers=1, persistent_workers=True)

    with pytest.warns(UserWarning, match="persistent workers"):
        runs(workers, "on_train_epoch_end", 7, tmp_path / "a.ckpt")


def test_checkpoint_without_random_states_is_told(tmp_path) -> None:
    path = tmp_path / "plain.ckpt"
    fit(Net(), SaveOnce("on_train_batch_end", 3, path), data=plain())
    with pytest.warns(UserWarning, match="holds no random states"):
        trainer(lt.ExactResume()).fit(Net(), plain(), ckpt_path=path)


def test_plain_loader_inside_of_an_epoch_warns(tmp_path) -> None:
    with pytest.warns(UserWarning, match="StatefulDataLoader"):
        whole, resumed = runs(plain, "on_train_batch_end", 3, tmp_path / "a.ckpt")
    assert largest_difference(whole, resumed) > 0


class AsksEarly(Net):
    """Lightning then sets the data up before it reads the checkpoint, and would forget the loader's position."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == 21
        return super().configure_optimizers()


@pytest.mark.parametrize("at", [3, 7, 10])
def test_module_that_asks_for_the_number_of_steps(tmp_path, at: int) -> None:
    whole, resumed = runs(stateful, "on_train_batch_end", at, tmp_path / "a.ckpt", resume_with=AsksEarly)
    assert_same(resumed, whole)


def test_without_it_a_resumed_run_differs(tmp_path) -> None:
    """What the callback is for: the same runs without it."""
    path = tmp_path / "a.ckpt"
    torch.manual_seed(0)
    whole = Net(dropout=0.3)
    fit(whole, SaveOnce("on_train_batch_end", 3, path), data=stateful(), max_epochs=3)
    torch.manual_seed(77)
    resumed = Net(dropout=0.3)
    trainer(max_epochs=3).fit(resumed, stateful(), ckpt_path=path)
    assert largest_difference(weights(whole), weights(resumed)) > 0


def test_every_rank_gets_its_own_state_back(two_processes, tmp_path) -> None:
    first, second = two_processes.run(resumed_on_two_ranks, str(tmp_path))
    for whole, resumed, draws in (first, second):
        assert_same(resumed, whole)
        assert draws[0] == draws[1]
    assert first[2] != second[2]


def test_another_number_of_processes_is_told(tmp_path) -> None:
    run = fit(Net(), lt.ExactResume())
    run.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    checkpoint["lightning_tricks.ExactResume"] *= 3
    torch.save(checkpoint, tmp_path / "three.ckpt")
    with pytest.warns(UserWarning, match=r"random states of 3 process\(es\), this run has 1"):
        trainer(lt.ExactResume(), max_epochs=2).fit(Net(), loader(), ckpt_path=tmp_path / "three.ckpt")
