"""The schedule in a Trainer: cases 7, 14, 15 and 17, the horizon, and who else may set the rate."""

from itertools import pairwise

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LearningRateMonitor,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, IterableDataset

import lightning_tricks as lt
from lightning_tricks.functional.schedules import (
    even_start_factor,
    warmup_cosine,
    warmup_cosine_restarts,
    warmup_inverse_sqrt,
    warmup_linear,
    warmup_polynomial,
    warmup_stable_decay,
)
from tests.models import FixedGradients, ManualNet, Net, TwoOptimizers, fit, fp16, loader, trainer

INF = float("inf")


class Rates(pl.Callback):
    """The rate that each step is taken with, by optimizer."""

    def __init__(self) -> None:
        self.seen: dict[int, list[float]] = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        index = next(i for i, one in enumerate(trainer.optimizers) if one is optimizer)
        self.seen.setdefault(index, []).append(float(optimizer.param_groups[0]["lr"]))


def curve(warmup: int, total: int, steps: int, lr: float = 0.01, floor: float = 0.1) -> list[float]:
    start = even_start_factor(warmup)
    return [
        lr * warmup_cosine(k, warmup_steps=warmup, total_steps=total, start_factor=start, min_ratio=floor)
        for k in range(steps)
    ]


@pytest.mark.parametrize("fused", [False, True])
def test_case_7_schedule_stands_on_applied_steps(fused: bool) -> None:
    """A scale of 2^16 and five batches of which three overflow: two real steps."""
    rates, after = Rates(), []
    module = FixedGradients([[INF]] * 3 + [[1.0]] * 2, lr=0.01, fused=fused)
    module.on_train_end = lambda: after.append(module.lr_schedulers().last_epoch)
    run = fit(module, lt.WarmupCosineScheduler(2), rates, plugins=fp16(2.0**16))
    assert run.global_step == 5
    assert lt.step_ledger(run)[0].applied == 2
    expected = curve(2, 5, 3)
    assert rates.seen[0] == pytest.approx([expected[0]] * 4 + [expected[1]])
    if not fused:  # a fused optimizer's last verdict is read before the next batch, and there is none
        assert after == [2]


def test_case_14_first_step_is_above_zero() -> None:
    rates = Rates()
    fit(Net(), lt.WarmupCosineScheduler(4), rates)
    assert rates.seen[0] == pytest.approx(curve(4, 7, 7))
    assert rates.seen[0][0] == pytest.approx(0.002)


@pytest.mark.parametrize("warmup", [3, 0.2])
def test_case_15_resume_with_a_longer_run(tmp_path, warmup) -> None:
    """From the resume on it is the longer run's curve: one move there, and after the warmup never a climb."""
    first = Rates()
    run = fit(Net(), lt.WarmupCosineScheduler(warmup), first, max_epochs=3)
    run.save_checkpoint(tmp_path / "short.ckpt")
    second = Rates()
    longer = trainer(lt.WarmupCosineScheduler(warmup), second, max_epochs=30)
    longer.fit(Net(), loader(), ckpt_path=tmp_path / "short.ckpt")
    warmup_steps = 3 if warmup == 3 else 4  # a fraction stays the number of steps that it was at first
    assert first.seen[0] == pytest.approx(curve(warmup_steps, 21, 21))
    assert second.seen[0] == pytest.approx(curve(warmup_steps, 210, 210)[21:])
    assert all(later <= earlier for earlier, later in zip(second.seen[0], second.seen[0][1:], strict=False))


def test_resume_with_a_shorter_run(tmp_path) -> None:
    run = fit(Net(), lt.WarmupCosineScheduler(0.5), max_epochs=10, max_steps=14)
    run.save_checkpoint(tmp_path / "long.ckpt")
    rates = Rates()
    shorter = trainer(lt.WarmupCosineScheduler(0.5), rates, max_epochs=3)
    shorter.fit(Net(), loader(), ckpt_path=tmp_path / "long.ckpt")
    assert rates.seen[0] == pytest.approx(curve(7, 21, 21)[14:])


class SchedulesByItself(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


def test_case_17_two_writers_are_an_error_naming_both() -> None:
    with pytest.raises(MisconfigurationException) as error:
        fit(SchedulesByItself(), lt.WarmupCosineScheduler(2))
    assert "WarmupCosineScheduler" in str(error.value)
    assert "CosineAnnealingLR" in str(error.value)
    assert "SchedulesByItself.configure_optimizers" in str(error.value)


def test_equals_torchs_schedulers_in_a_run() -> None:
    rates = Rates()
    schedule = lt.WarmupCosineScheduler(10, start_factor=0.01, min_lr=1e-6, total_steps=40)
    fit(Net(lr=1e-4), schedule, rates, max_epochs=6)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-4)
    parts = [
        torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=10),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30, eta_min=1e-6),
    ]
    reference = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[10])
    for step, rate in enumerate(rates.seen[0][:41]):
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=0, abs=1e-12), step
        optimizer.step()
        reference.step()
    assert rates.seen[0][41:] == [pytest.approx(1e-6)]  # past the end it stays


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(8), torch.zeros(1)


@pytest.mark.parametrize(
    ("options", "total"),
    [
        ({"max_epochs": 3}, 21),
        ({"max_epochs": 3, "max_steps": 10}, 10),
        ({"max_epochs": None, "max_steps": 5}, 5),
        ({"max_epochs": 3, "limit_train_batches": 5}, 15),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 9),
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, 6),
        ({"max_epochs": 3, "callbacks": {0: 1, 1: 2, 2: 4}}, 7 + 4 + 2),
    ],
)
def test_horizon_from_the_trainer(options: dict, total: int) -> None:
    rates = Rates()
    extra = [GradientAccumulationScheduler(options["callbacks"])] if "callbacks" in options else []
    options = {key: value for key, value in options.items() if key != "callbacks"}
    run = fit(Net(), lt.WarmupCosineScheduler(2), rates, *extra, **options)
    assert run.global_step == total
    assert rates.seen[0] == pytest.approx(curve(2, total, total))


def test_horizon_that_cannot_be_known_asks_for_total_steps() -> None:
    endless = DataLoader(Endless(), batch_size=4)
    with pytest.raises(MisconfigurationException, match="total_steps"):
        fit(Net(), lt.WarmupCosineScheduler(2), data=endless, max_epochs=1)
    rates = Rates()
    fit(Net(), lt.WarmupCosineScheduler(2, total_steps=6), rates, data=endless, max_epochs=1, max_steps=6)
    assert rates.seen[0] == pytest.approx(curve(2, 6, 6))


def test_manual_optimization_must_say_how_long() -> None:
    with pytest.raises(MisconfigurationException, match=r"ManualNet.*total_steps=\.\.\."):
        fit(ManualNet(), lt.WarmupCosineScheduler(2))
    rates = Rates()
    fit(ManualNet(), lt.WarmupCosineScheduler(2, total_steps=7), rates)
    assert rates.seen[0] == pytest.approx(curve(2, 7, 7))


class StepsSchedulersItself(ManualNet):
    def training_step(self, batch, batch_idx) -> None:
        super().training_step(batch, batch_idx)
        self.lr_schedulers().step()
        self.lr_schedulers().step()


def test_a_module_that_steps_the_scheduler_changes_nothing() -> None:
    rates = Rates()
    fit(StepsSchedulersItself(), lt.WarmupCosineScheduler(2, total_steps=7), rates)
    assert rates.seen[0] == pytest.approx(curve(2, 7, 7))


def test_several_optimizers_with_lengths_of_their_own() -> None:
    """The head steps with every second batch, so it has its own count of applied steps."""
    rates = Rates()
    fit(TwoOptimizers(), lt.WarmupCosineScheduler(2, total_steps={0: 7, 1: 4}), rates)
    assert rates.seen[0] == pytest.approx(curve(2, 7, 7))
    assert rates.seen[1] == pytest.approx(curve(2, 4, 4))

    rates = Rates()
    fit(TwoOptimizers(), lt.WarmupCosineScheduler(2, total_steps=4, optimizers=[1]), rates)
    assert rates.seen[0] == [0.01] * 7
    assert rates.seen[1] == pytest.approx(curve(2, 4, 4))


class TwoGroups(Net):
    def configure_optimizers(self):
        body = {"params": self.net[:-1].parameters(), "lr": 0.01}
        head = {"params": self.net[-1].parameters(), "lr": 0.1}
        frozen = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.0}
        return torch.optim.SGD([body, head, frozen], lr=1.0)


def test_parameter_groups_keep_their_ratios() -> None:
    seen = []

    class Probe(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            seen.append([group["lr"] for group in optimizer.param_groups])

    fit(TwoGroups(), lt.WarmupCosineScheduler(2), Probe())
    for rates, expected in zip(seen, curve(2, 7, 7), strict=True):
        assert rates == pytest.approx([expected, 10 * expected, 0.0])


class TensorRate(Net):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=torch.tensor(0.01), foreach=False)


def test_a_rate_that_is_a_tensor_is_written_in_place() -> None:
    rates = Rates()
    fit(TensorRate(), lt.WarmupCosineScheduler(2), rates)
    assert rates.seen[0] == pytest.approx(curve(2, 7, 7), rel=1e-6)


@pytest.mark.parametrize("first", ["monitor", "schedule"])
@pytest.mark.parametrize("way", [{}, {"fused": True}])
def test_learning_rate_monitor_shows_the_rate_of_the_step(tmp_path, first: str, way: dict) -> None:
    """Also under a fused optimizer with a scaler, where the verdict is read no earlier than before the next batch."""
    rates, logger = Rates(), CSVLogger(tmp_path)
    callbacks = [LearningRateMonitor(), lt.WarmupCosineScheduler(2)]
    shown = []

    class Probe(pl.Callback):
        def on_train_batch_end(self, trainer, *args) -> None:
            shown.append(float(trainer.callback_metrics["lr-SGD"]))

    module = FixedGradients([[1.0], [INF], [1.0], [1.0]], lr=0.01, **way)
    fit(module, *(callbacks if first == "monitor" else callbacks[::-1]), rates, Probe(), logger=logger, plugins=fp16())
    assert shown == pytest.approx(rates.seen[0])
    expected = curve(2, 4, 3)
    assert shown == pytest.approx([expected[0], expected[1], expected[1], expected[2]])


def test_a_group_added_while_training_follows_the_curve() -> None:
    class Unfreezes(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            if batch_idx == 3:
                extra = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.1}
                trainer.optimizers[0].add_param_group(extra)

    module = Net(optimizer="sgd")
    kept = []
    module.on_train_end = lambda: kept.extend(group["lr"] for group in module.optimizers().param_groups)
    fit(module, lt.WarmupCosineScheduler(0), Unfreezes())
    assert kept == pytest.approx([0.001, 0.01])


def test_nothing_of_ours_is_left_on_the_trainer() -> None:
    run = fit(Net(), lt.WarmupCosineScheduler(2))
    assert run.lr_scheduler_configs == []


def test_fast_dev_run_forgives_a_warmup_that_is_longer() -> None:
    fit(Net(), lt.WarmupCosineScheduler(1000), fast_dev_run=True)


@pytest.mark.parametrize("fused", [False, True])
def test_several_steps_in_one_batch_follow_the_curve(fused: bool) -> None:
    class FourSteps(ManualNet):
        def training_step(self, batch, batch_idx) -> None:
            for _ in range(4):
                super().training_step(batch, batch_idx)

    rates = Rates()
    schedule = lt.WarmupCosineScheduler(8, total_steps=28)
    fit(FourSteps(fused=fused), lt.GradientNormClipping(), schedule, rates)
    assert rates.seen[0] == pytest.approx(curve(8, 28, 28))


def test_checkpoint_from_before_training_keeps_the_warmup(tmp_path) -> None:
    """The lengths are not known yet when the sanity check fails."""

    class FailsAtOnce(Net):
        def validation_step(self, batch, batch_idx) -> None:
            raise RuntimeError("boom")

    saver = OnExceptionCheckpoint(tmp_path)
    run = trainer(lt.WarmupCosineScheduler(5), saver, enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="boom"):
        run.fit(FailsAtOnce(), loader(), loader())
    rates = Rates()
    resumed = trainer(lt.WarmupCosineScheduler(5), rates)
    resumed.fit(Net(), loader(), ckpt_path=tmp_path / "on_exception.ckpt")
    assert rates.seen[0] == pytest.approx(curve(5, 7, 7))


# Every schedule

SCHEDULES = {
    "WarmupCosineScheduler": (warmup_cosine, {}, {}),
    "WarmupLinearScheduler": (warmup_linear, {}, {}),
    "WarmupInverseSqrtScheduler": (warmup_inverse_sqrt, {}, {}),
    "WarmupCosineRestartsScheduler": (warmup_cosine_restarts, {"num_cycles": 2}, {"num_cycles": 2}),
    "WarmupPolynomialScheduler": (warmup_polynomial, {"power": 2.0}, {"power": 2.0}),
    "WarmupStableDecayScheduler": (
        warmup_stable_decay,
        {"decay": 5, "decay_shape": "cosine"},
        {"decay_steps": 5, "decay_shape": "cosine"},
    ),
}
schedules = pytest.mark.parametrize("name", SCHEDULES)


def schedule_of(name: str, warmup=3, **more):
    return getattr(lt, name)(warmup, **SCHEDULES[name][1], **more)


def rates_of(name: str, steps: int, total: int, warmup: int = 3, lr: float = 0.01) -> list[float]:
    function, _, own = SCHEDULES[name]
    start = even_start_factor(warmup)
    return [
        lr * function(k, warmup_steps=warmup, total_steps=total, start_factor=start, min_ratio=0.1, **own)
        for k in range(steps)
    ]


@schedules
def test_each_schedule_is_its_function_of_the_applied_step(name: str) -> None:
    rates = Rates()
    fit(Net(), schedule_of(name), rates, max_epochs=3)
    assert rates.seen[0] == pytest.approx(rates_of(name, 21, 21), rel=1e-12)


@schedules
def test_accumulation_1_and_4_have_the_same_curve(name: str) -> None:
    """At the same number of applied steps: 2 in an epoch of 7 batches with windows of 4, or of 2 batches without."""
    whole, windows = Rates(), Rates()
    fit(Net(), schedule_of(name), whole, max_epochs=6, limit_train_batches=2)
    fit(Net(), schedule_of(name), windows, max_epochs=6, accumulate_grad_batches=4)
    assert len(whole.seen[0]) == 12
    assert windows.seen[0] == whole.seen[0]


@schedules
@pytest.mark.parametrize("epochs", [2, 5])
@pytest.mark.parametrize("before", [True, False])
def test_resume_with_another_length_with_and_without_it(name: str, epochs: int, before: bool, tmp_path) -> None:
    """Of a run of 3 epochs, saved after the first: what is resumed is the new run's curve from there."""

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    fit(Net(), *([schedule_of(name)] if before else []), Save(), max_epochs=3)
    rates = Rates()
    run = trainer(schedule_of(name), rates, max_epochs=epochs)
    run.fit(Net(), loader(), ckpt_path=tmp_path / "a.ckpt")
    assert rates.seen[0] == pytest.approx(rates_of(name, 7 * epochs, 7 * epochs)[7:], rel=1e-12)


def test_a_warmup_and_a_decay_that_do_not_fit() -> None:
    with pytest.raises(
        ValueError, match=r"`warmup` and `decay` .*warmup=4 and decay=0.5, 4 and 3 steps, and total_ste"
    ):
        fit(Net(), lt.WarmupStableDecayScheduler(4, 0.5), max_steps=6)
    fit(Net(), lt.WarmupStableDecayScheduler(4, 0.5), fast_dev_run=True)


def test_a_warmup_and_a_decay_that_no_longer_fit_a_shorter_run(tmp_path) -> None:
    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module) -> None:
            trainer.save_checkpoint(tmp_path / "a.ckpt")

    run = trainer(lt.WarmupStableDecayScheduler(10, 10), Save(), max_epochs=3)
    module = Net()
    module.on_train_epoch_end = lambda: setattr(run, "should_stop", True)
    run.fit(module, loader())
    shorter = trainer(lt.WarmupStableDecayScheduler(10, 10), max_epochs=2)
    with pytest.raises(ValueError, match=r"warmup=10 and decay=10, 10 and 10 steps, and total_steps=14"):
        shorter.fit(Net(), loader(), ckpt_path=tmp_path / "a.ckpt")


def test_numbers_of_numpy_can_be_saved(tmp_path) -> None:
    tricks = lambda: [  # noqa: E731
        lt.WarmupCosineScheduler(np.float64(0.1), min_lr_ratio=np.float64(0.2)),
        lt.WeightDecayGroups(np.float64(0.1)),
        lt.LayerwiseLearningRateDecay(np.float64(0.75)),
    ]
    fit(Net(), *tricks()).save_checkpoint(tmp_path / "a.ckpt")
    trainer(*tricks(), max_epochs=2).fit(Net(), loader(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)


# By samples and tokens


def count_ones(batch) -> int:
    """As if a batch had 1 to 4 tokens: however many of its first features are positive, and one more."""
    return int((batch[0][:3, 0] > 0).sum()) + 1


def seen_before_each_step(weigh, windows: int) -> list[int]:
    batches = [batch for _ in range(3) for batch in loader()]
    weights = [weigh(batch) for batch in batches]
    steps = [sum(weights[k : k + windows]) for k in range(0, len(weights), windows)]
    return [sum(steps[:k]) for k in range(len(steps))]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("unit", "weigh_by", "weigh"), [("samples", "samples", lambda batch: 4), ("tokens", count_ones, count_ones)]
)
def test_durations_in_samples_and_tokens(unit: str, weigh_by, weigh, fused: bool) -> None:
    rates = Rates()
    schedule = lt.WarmupStableDecayScheduler(
        f"12 {unit}", f"1e1 {unit}", start_factor=0.5, min_lr_ratio=0.0, total_steps=f"40.0 {unit}"
    )
    accumulation = lt.GradientAccumulation(7 if unit == "samples" else 1, weigh_by=weigh_by)
    windows = accumulation.steps
    fit(Net(fused=fused), schedule, accumulation, lt.GradientNormClipping(), rates, max_epochs=3)
    expected = [
        0.01 * warmup_stable_decay(seen, warmup_steps=12, total_steps=40, decay_steps=10, start_factor=0.5)
        for seen in seen_before_each_step(weigh, windows)
    ]
    assert rates.seen[0] == pytest.approx(expected)
    assert len(set(expected)) > 2


def test_tokens_of_skipped_steps_do_not_count_and_a_resume_knows_them(tmp_path) -> None:
    def tricks() -> list[pl.Callback]:
        schedule = lt.WarmupLinearScheduler("20 tokens", total_steps="100 tokens", start_factor=0.0)
        return [lt.GradientAccumulation(1, weigh_by=count_ones), schedule]

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    options = {"max_epochs": 2, "plugins": fp16(2.0**18)}
    rates, applied = Rates(), []

    class Applied(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            applied.append(lt.step_ledger(trainer)[0].applied)

    fit(Net(), *tricks(), rates, Applied(), Save(), **options)
    weights = [count_ones(batch) for _ in range(2) for batch in loader()]
    moved = [later > earlier for earlier, later in pairwise(applied)]
    seen = [sum(w for w, one in zip(weights, moved[:k], strict=False) if one) for k in range(len(applied))]
    assert not all(moved)
    expected = [0.01 * warmup_linear(s, warmup_steps=20, total_steps=100, min_ratio=0.1) for s in seen]
    assert rates.seen[0] == pytest.approx(expected)

    resumed = Rates()
    run = trainer(*tricks(), resumed, max_epochs=2, plugins=fp16(2.0**18))
    run.fit(Net(), loader(), ckpt_path=tmp_path / "a.ckpt")
    assert resumed.seen[0] == rates.seen[0][7:]

    fit(Net()).save_checkpoint(tmp_path / "without.ckpt")
    with pytest.raises(MisconfigurationException, match=r"7 applied steps, but not how many tokens"):
        trainer(*tricks(), max_epochs=2).fit(Net(), loader(), ckpt_path=tmp_path / "without.ckpt")


def test_units_that_do_not_go_together() -> None:
    for arguments in (
        {"warmup": "5 tokens"},
        {"warmup": "5 tokens", "total_steps": 100},
        {"warmup": 5, "total_steps": "100 tokens"},
        {"warmup": "5 samples", "total_steps": "100 tokens"},
        {"warmup": 0.1, "total_steps": "100 tokens", "decay": 20},
    ):
        with pytest.raises(ValueError, match=r"all lengths of a curve in (tokens|samples).*got warmup="):
            lt.WarmupStableDecayScheduler(**arguments)
    assert lt.WarmupStableDecayScheduler(0.1, 0.2, total_steps="100 tokens").unit == "tokens"
    tokens = lt.WarmupLinearScheduler(0.1, total_steps="100 tokens")
    for counters in ([], [lt.GradientAccumulation(2)], [lt.GradientAccumulation(2, weigh_by="batches")]):
        with pytest.raises(
            MisconfigurationException, match=r"goes by tokens, which nobody counts.*a function that count"
        ):
            fit(Net(), tokens, *counters)
    with pytest.raises(ValueError, match="expected `schedule` to go by steps, got one of tokens"):
        lt.HyperparameterScheduler("optimizer.weight_decay", tokens)


def test_lightnings_weight_averaging_writes_the_rate_too() -> None:
    with pytest.raises(MisconfigurationException, match="WarmupCosineScheduler and StochasticWeightAveraging"):
        fit(Net(), lt.WarmupCosineScheduler(2), StochasticWeightAveraging(0.1))
