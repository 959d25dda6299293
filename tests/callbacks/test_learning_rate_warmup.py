"""A warmup in front of the module's own schedulers: their rate, undelayed, times the factor of the applied step."""

from itertools import pairwise

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import lr_scheduler

import lightning_tricks as lt
from tests.callbacks.test_schedules import Rates
from tests.models import FixedGradients, ManualNet, Net, TwoOptimizers, fit, fp16, loader, trainer

INF = float("inf")


def plateau(optimizer, **options):
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    return {"scheduler": scheduler, "monitor": "metric", **options}


def of_step(scheduler, **options):
    return {"scheduler": scheduler, "interval": "step", **options}


# What the module returns beside its optimizer.
SCHEDULERS = {
    "none": lambda o: [],
    "StepLR": lambda o: [lr_scheduler.StepLR(o, 1, gamma=0.5)],
    "StepLR by step": lambda o: [of_step(lr_scheduler.StepLR(o, 2, gamma=0.5))],
    "by every second batch": lambda o: [of_step(lr_scheduler.ExponentialLR(o, 0.8), frequency=2)],
    "exponential": lambda o: [of_step(lr_scheduler.ExponentialLR(o, 0.9))],
    "multiplicative": lambda o: [of_step(lr_scheduler.MultiplicativeLR(o, lambda k: 0.9))],
    "cosine": lambda o: [of_step(lr_scheduler.CosineAnnealingLR(o, 20))],
    "lambda": lambda o: [of_step(lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k)))],
    "one cycle": lambda o: [of_step(lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=30))],
    "cyclic": lambda o: [of_step(lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3))],
    "restarts": lambda o: [of_step(lr_scheduler.CosineAnnealingWarmRestarts(o, 5))],
    "sequential": lambda o: [
        of_step(
            lr_scheduler.SequentialLR(
                o, [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[4]
            )
        )
    ],
    "chained": lambda o: [
        of_step(lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 3)]))
    ],
    "plateau": lambda o: [plateau(o)],
    "plateau by step": lambda o: [plateau(o, interval="step")],
    "two of them": lambda o: [of_step(lr_scheduler.ExponentialLR(o, 0.9)), plateau(o)],
}


class Scheduled(Net):
    """A net with schedulers, and a metric that never gets better."""

    def __init__(self, schedulers: str, **options) -> None:
        super().__init__(optimizer="momentum", **options)
        self.schedulers = schedulers

    def training_step(self, batch, batch_idx):
        self.log("metric", 1.0)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], SCHEDULERS[self.schedulers](optimizer)


def factor(k: int, warmup: int, start: float | None = None) -> float:
    start = 1 / (warmup + 1) if start is None else start
    return start + (1 - start) * min(1.0, k / warmup)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("start", [None, 0.3])
def test_the_rate_is_the_schedulers_own_times_the_factor(name: str, start: float | None) -> None:
    own, shown = Rates(), Rates()
    fit(Scheduled(name), own, max_epochs=3)
    fit(Scheduled(name), lt.LearningRateWarmup(5, start_factor=start), shown, max_epochs=3)
    assert len(own.seen[0]) == 21
    assert shown.seen[0] == pytest.approx([rate * factor(k, 5, start) for k, rate in enumerate(own.seen[0])], rel=1e-12)


def test_case_16_warmup_then_plateau() -> None:
    """A warmup of 10 steps before ReduceLROnPlateau, whose metric never gets better: halved after each epoch but the
    first, from its own rate and not from that of the warmup."""
    rates = Rates()
    fit(Scheduled("plateau"), lt.LearningRateWarmup(10, start_factor=0.1), rates, max_epochs=4)
    own = [0.01] * 14 + [0.005] * 7 + [0.0025] * 7
    assert rates.seen[0] == pytest.approx([rate * factor(k, 10, 0.1) for k, rate in enumerate(own)])


OVERFLOWS = [[INF], [1.0], [INF], [1.0], [1.0], [INF], [1.0]]


class Skips(FixedGradients):
    """Three of seven steps overflow; the rate falls by 0.9 with each that does not."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [of_step(lr_scheduler.ExponentialLR(optimizer, 0.9))]


@pytest.mark.parametrize("fused", [False, True])
def test_schedulers_that_go_by_the_step_are_held_on_skipped_steps(fused: bool) -> None:
    rates = Rates()
    fit(Skips(OVERFLOWS, lr=0.1, fused=fused), lt.LearningRateWarmup(3, start_factor=0.5), rates, plugins=fp16())
    applied = [0, 0, 1, 1, 2, 3, 3]
    assert rates.seen[0] == pytest.approx([0.1 * 0.9**k * factor(k, 3, 0.5) for k in applied], rel=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_schedulers_that_go_by_the_epoch_are_not_held(fused: bool) -> None:
    class ByEpoch(FixedGradients):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [lr_scheduler.ExponentialLR(optimizer, 0.5)]

    rates = Rates()
    fit(ByEpoch([[INF]], lr=0.1, fused=fused), lt.LearningRateWarmup(2), rates, plugins=fp16(2.0**8), max_epochs=3)
    assert rates.seen[0] == pytest.approx([0.1 / 3, 0.05 / 3, 0.025 / 3], rel=1e-6)


class StepsItself(ManualNet):
    def training_step(self, batch, batch_idx) -> None:
        super().training_step(batch, batch_idx)
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [lr_scheduler.ExponentialLR(optimizer, 0.9)]


class RatesByApplied(pl.Callback):
    """The rate that each step is taken with, and how many were applied before it."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.seen.append((lt.step_ledger(trainer)[0].applied, float(optimizer.param_groups[0]["lr"])))


def test_manual_optimization_holds_what_the_module_steps() -> None:
    probe = RatesByApplied()
    run = fit(StepsItself(optimizer="sgd"), lt.LearningRateWarmup(3), probe, plugins=fp16(2.0**18), max_epochs=2)
    assert lt.step_ledger(run)[0].skipped_overflow > 0
    assert [rate for _, rate in probe.seen] == pytest.approx([0.01 * 0.9**k * factor(k, 3) for k, _ in probe.seen])


def test_two_optimizers_each_by_its_own_steps() -> None:
    rates = Rates()
    fit(TwoOptimizers(), lt.LearningRateWarmup(2), rates)
    assert rates.seen[0] == pytest.approx([0.01 * factor(k, 2) for k in range(7)])
    assert rates.seen[1] == pytest.approx([0.01 * factor(k, 2) for k in range(4)])
    rates = Rates()
    fit(TwoOptimizers(), lt.LearningRateWarmup(2, optimizers=[1]), rates)
    assert rates.seen[0] == [0.01] * 7
    assert rates.seen[1] == pytest.approx([0.01 * factor(k, 2) for k in range(4)])


WAYS = ["StepLR by step", "exponential", "plateau", "one cycle", "two of them"]


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_resumed_with_and_without_the_warmup(name: str, before: bool, after: bool, tmp_path) -> None:
    """From the middle of the warmup and of an epoch: the rates of a resume without it in either run, times the factor.

    (Lightning itself does not step epoch-wise schedulers at the end of an epoch that it resumed in the middle of.)
    """

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, *args) -> None:
            if trainer.fit_loop.total_batch_idx == 9:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    def resumed_rates(before: bool, after: bool) -> list[float]:
        rates = Rates()
        warmups = [[lt.LearningRateWarmup(15)] if listed else [] for listed in (before, after)]
        fit(Scheduled(name), *warmups[0], Save(), max_epochs=3)
        resumed = trainer(*warmups[1], rates, max_epochs=3)
        resumed.fit(Scheduled(name), loader(), ckpt_path=tmp_path / "middle.ckpt")
        return rates.seen[0]

    own = resumed_rates(False, False)
    expected = [rate * (factor(k, 15) if after else 1.0) for k, rate in enumerate(own, start=10)]
    assert resumed_rates(before, after) == pytest.approx(expected, rel=1e-9)


def test_a_rollback_brings_the_schedulers_rate_back() -> None:
    probe = RatesByApplied()
    guard = lt.LossSpikeGuard("rollback", snapshot_every_steps=3, warmup_steps=2, window_steps=4, z_threshold=1e9)
    module = Scheduled("exponential", nan_at=(5,))
    run = fit(module, guard, lt.LearningRateWarmup(12, start_factor=0.5), probe, max_epochs=2)
    assert lt.step_ledger(run)[0].rolled_back == 2
    assert any(later < earlier for (earlier, _), (later, _) in pairwise(probe.seen))
    expected = [0.01 * 0.9**k * factor(k, 12, 0.5) for k, _ in probe.seen]
    assert [rate for _, rate in probe.seen] == pytest.approx(expected)


def test_a_fraction_of_the_run_and_its_length() -> None:
    rates = Rates()
    fit(Net(), lt.LearningRateWarmup(0.5), rates, max_epochs=2)
    assert rates.seen[0] == pytest.approx([0.01 * factor(k, 7) for k in range(14)])
    with pytest.raises(ValueError, match="warmup=100 and total_steps=7"):
        fit(Net(), lt.LearningRateWarmup(100))
    fit(Net(), lt.LearningRateWarmup(100), fast_dev_run=True)
    fit(ManualNet(), lt.LearningRateWarmup(100))  # nobody knows how long it is
    with pytest.raises(MisconfigurationException, match=r"ManualNet.*warmup=0.5.*total_steps=\.\.\."):
        fit(ManualNet(), lt.LearningRateWarmup(0.5))


def test_a_rate_that_somebody_else_writes_is_the_new_own() -> None:
    class Writes(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            if batch_idx == 3:
                trainer.optimizers[0].param_groups[0]["lr"] = 0.5

    rates = Rates()
    fit(Net(), lt.LearningRateWarmup(6), Writes(), rates)
    expected = [(0.01 if k < 3 else 0.5) * factor(k, 6) for k in range(7)]
    assert rates.seen[0] == pytest.approx(expected)


def test_a_rate_that_is_a_tensor() -> None:
    class TensorRate(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=torch.tensor(0.01), foreach=False)
            return [optimizer], [of_step(lr_scheduler.ExponentialLR(optimizer, 0.9))]

    rates = Rates()
    fit(TensorRate(), lt.LearningRateWarmup(4), rates)
    assert rates.seen[0] == pytest.approx([0.01 * 0.9**k * factor(k, 4) for k in range(7)], rel=1e-5)


def test_schedulers_are_their_own_again_after_fit() -> None:
    module = Scheduled("exponential")
    kept = []
    module.on_train_start = lambda: kept.append(module.lr_schedulers())
    fit(module, lt.LearningRateWarmup(4))
    assert type(kept[0]) is lr_scheduler.ExponentialLR
    assert "step" not in vars(kept[0])


def test_beside_a_whole_schedule_it_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="WarmupLinearScheduler and LearningRateWarmup"):
        fit(Net(), lt.WarmupLinearScheduler(2), lt.LearningRateWarmup(2))


def test_a_rate_that_the_module_sets_in_its_own_hook_is_warmed_up() -> None:
    """As schedulers that are no torch ones do, which go by another method than `step`."""

    class SetsItself(Scheduled):
        def lr_scheduler_step(self, scheduler, metric) -> None:
            self.optimizers().param_groups[0]["lr"] = 0.01 * 0.9**self.trainer.global_step

    rates = Rates()
    fit(SetsItself("exponential"), lt.LearningRateWarmup(4), rates)
    assert rates.seen[0] == pytest.approx([0.01 * 0.9**k * factor(k, 4) for k in range(7)])


def test_a_fraction_stays_the_number_of_steps_that_it_was(tmp_path) -> None:
    """Resumed with ten times the length, at the end of the warmup: it does not come again."""
    fit(Net(), lt.LearningRateWarmup(0.5), max_epochs=2).save_checkpoint(tmp_path / "a.ckpt")
    rates = Rates()
    run = trainer(lt.LearningRateWarmup(0.5), rates, max_epochs=20)
    run.fit(Net(), loader(), ckpt_path=tmp_path / "a.ckpt")
    assert rates.seen[0] == [0.01] * 126


def test_a_guard_that_lowers_the_rate_for_a_step_leaves_the_warmup_alone() -> None:
    found, within = [], []

    class Watch(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            within.append(float(optimizer.param_groups[0]["lr"]))

        def on_train_batch_end(self, trainer, *args) -> None:
            found.append((lt.step_ledger(trainer)[0].applied, float(trainer.optimizers[0].param_groups[0]["lr"])))

    options = {"snapshot_every_steps": 3, "warmup_steps": 2, "window_steps": 4, "z_threshold": 1e9}
    guard = lt.LossSpikeGuard("rollback", lr_factor=0.5, **options)
    run = fit(Net(nan_at=(5,)), guard, lt.LearningRateWarmup(12), Watch(), max_epochs=2)
    assert lt.step_ledger(run)[0].rolled_back == 2
    assert [rate for _, rate in found] == pytest.approx([0.01 * factor(k, 12) for k, _ in found])
    shown = [0.01 * factor(0, 12), *(rate for _, rate in found)]
    assert all(any(rate == pytest.approx(share * one) for one in shown for share in (0.5, 1.0)) for rate in within)
    assert any(all(rate != pytest.approx(one) for one in shown) for rate in within)
