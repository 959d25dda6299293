"""The ledger: one verdict for every optimizer step, in every way of optimizing."""

import math

import lightning.pytorch as pl
import pytest
import torch

import lightning_tricks as lt
from tests.distributed_cases import ledger_runs
from tests.models import FixedGradients, ManualNet, Net, TwoOptimizers, assert_same, fit, fp16, loader, seeded, weights
from tests.models import trainer as quiet_trainer

NAN, INF = float("nan"), float("inf")


def counts(trainer: pl.Trainer, index: int = 0) -> tuple[int, int, int, int]:
    ledger = lt.step_ledger(trainer)[index]
    return ledger.applied, ledger.skipped_overflow, ledger.skipped_guard, ledger.skipped_empty


class VerdictLog(pl.Callback):
    """What a user's own callback reads after each batch."""

    def __init__(self) -> None:
        self.seen: list[str | None] = []

    def on_train_start(self, trainer, pl_module) -> None:
        self.seen.append(lt.step_ledger(trainer)[0].last)

    def on_train_batch_end(self, trainer, *args) -> None:
        self.seen.append(lt.step_ledger(trainer)[0].last)


@pytest.mark.parametrize("fused", [False, True])
def test_applied_and_vetoed_steps(fused: bool) -> None:
    log = VerdictLog()
    module = FixedGradients([[1.0, 0.0], [NAN, 0.0], [0.0, 1.0], [INF, 1.0]], fused=fused)
    trainer = fit(module, lt.GradientNormClipping(10.0), log)
    assert counts(trainer) == (2, 0, 2, 0)
    assert log.seen == [None, "applied", "skipped_guard", "applied", "skipped_guard"]
    assert module.weight.tolist() == [-1.0, -1.0]
    assert trainer.global_step == 4


@pytest.mark.parametrize("fused", [False, True])
def test_overflow_is_the_scalers_verdict_and_never_a_guards(fused: bool) -> None:
    log = VerdictLog()
    module = FixedGradients([[1.0], [INF], [1.0], [NAN]], fused=fused)
    trainer = fit(module, lt.GradientNormClipping(10.0, nonfinite="raise"), log, plugins=fp16(2.0**4))
    assert counts(trainer) == (2, 2, 0, 0)
    assert log.seen == [None, "applied", "skipped_overflow", "applied", "skipped_overflow"]
    assert module.weight.item() == -2.0


@pytest.mark.parametrize("build", [Net, ManualNet])
@pytest.mark.parametrize("fused", [False, True])
def test_automatic_and_manual_count_alike(build, fused: bool) -> None:
    trainer = fit(build(nan_at=(2, 5), fused=fused), lt.GradientNormClipping())
    assert counts(trainer) == (5, 0, 2, 0)


def test_two_optimizers_have_a_ledger_each() -> None:
    """The head steps with every second batch: 0, 2, 4, 6."""
    trainer = fit(TwoOptimizers(nan_at=(2, 5)), lt.GradientNormClipping())
    assert len(lt.step_ledger(trainer)) == 2
    assert counts(trainer, 0) == (5, 0, 2, 0)
    assert counts(trainer, 1) == (3, 0, 1, 0)
    assert trainer.callback_metrics["step/applied"] == 8
    assert trainer.callback_metrics["step/skipped"] == 3


def test_accumulation_has_one_verdict_a_window() -> None:
    """Windows of batches 0-2, 3-5, 6; one bad micro-batch spoils its window."""
    trainer = fit(Net(nan_at=(4,)), lt.GradientNormClipping(), accumulate_grad_batches=3)
    assert counts(trainer) == (2, 0, 1, 0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_step_without_a_loss_is_empty_and_moves_nothing(fused: bool, precision: str) -> None:
    plugins = fp16(2.0**4) if precision == "fp16" else None
    log = VerdictLog()
    trainer = fit(Net(none_at=(1, 4), fused=fused), lt.LossScaleMonitor(), log, plugins=plugins)
    assert counts(trainer) == (5, 0, 0, 2)
    assert log.seen[2] == log.seen[5] == "skipped_empty"


class KeepsGradients(Net):
    """Zeroes nothing by itself, as a module does that accumulates on its own: stale gradients stay."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer) -> None:
        if batch_idx not in self.none_at:
            optimizer.zero_grad()


def test_stale_gradients_are_not_stepped_on() -> None:
    module = seeded(lambda: KeepsGradients(none_at=(3,), optimizer="sgd"))
    before: dict[int, dict] = {}

    class Snapshots(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            before[batch_idx] = weights(pl_module)

    fit(module, lt.LossScaleMonitor(), Snapshots())
    assert_same(before[2], before[3])
    assert not torch.equal(before[3]["net.3.weight"], before[4]["net.3.weight"])


def test_window_whose_last_micro_batch_has_no_loss() -> None:
    """Lightning steps in fp32; under a scaler it leaves the step out, and the ledger says what happened."""
    trainer = fit(Net(none_at=(1, 5)), lt.LossScaleMonitor(), accumulate_grad_batches=2)
    assert counts(trainer) == (4, 0, 0, 0)
    trainer = fit(Net(none_at=(1, 5)), lt.LossScaleMonitor(), accumulate_grad_batches=2, plugins=fp16(2.0**4))
    assert counts(trainer) == (2, 0, 0, 2)


def test_fused_sgd_momentum_survives_a_first_step_that_is_skipped() -> None:
    """Skipped inside of its kernel, torch's fused SGD would keep uninitialised memory as its momentum."""
    rows = [[INF, 1.0], [1.0, 1.0], [1.0, 1.0]]

    def run(fused: bool, plugins) -> list[float]:
        module = FixedGradients(rows)
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9, fused=fused)
        fit(module, lt.GradientNormClipping(INF), plugins=plugins)
        return module.weight.tolist()

    for scaler in (False, True):
        fused, plain = (run(fused, fp16(2.0) if scaler else None) for fused in (True, False))
        assert fused == plain == pytest.approx([-2.9, -2.9])


def test_verdicts_are_the_same_on_every_rank(two_processes) -> None:
    first, second = two_processes.run(ledger_runs)
    assert first == second
    assert first["ddp", False] == first["ddp", True] == first["fsdp2", False] == first["fsdp2", True] == (3, 0, 1, 0)


def test_totals_are_logged_on_logged_steps_only() -> None:
    seen = {}

    class Probe(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            seen[batch_idx] = float(trainer.callback_metrics.get("step/applied", math.nan))

    fit(Net(nan_at=(0,)), lt.GradientNormClipping(), Probe(), log_every_n_steps=3)
    assert math.isnan(seen[0])
    assert math.isnan(seen[1])
    assert [seen[index] for index in (2, 3, 4, 5, 6)] == [2, 2, 2, 5, 5]


def test_ledger_survives_a_checkpoint(tmp_path) -> None:
    trainer = fit(Net(nan_at=(2,)), lt.GradientNormClipping(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resumed = quiet_trainer(lt.GradientNormClipping(), max_epochs=2)
    resumed.fit(Net(nan_at=(2,)), loader(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert counts(resumed) == (12, 0, 2, 0)


def test_checkpoint_of_a_run_without_tricks_counts_as_applied(tmp_path) -> None:
    plain = fit(Net())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    resumed = quiet_trainer(lt.WarmupCosineScheduler(2), max_epochs=2)
    resumed.fit(Net(), loader(), ckpt_path=tmp_path / "plain.ckpt")
    assert counts(resumed) == (14, 0, 0, 0)


def test_reading_needs_a_trick_and_a_fit() -> None:
    with pytest.raises(RuntimeError, match="list a callback of lightning_tricks"):
        lt.step_ledger(fit(Net()))
    with pytest.raises(RuntimeError, match="list a callback of lightning_tricks"):
        lt.step_ledger(quiet_trainer(lt.LossScaleMonitor()))


def test_resuming_with_another_number_of_optimizers_is_refused(tmp_path) -> None:
    ledger = lt.StepLedger()
    ledger.open(2)
    with pytest.raises(ValueError, match=r"1 optimizer\(s\), got one of 2"):
        ledger.open(1)
