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


@pytest.mark.parametrize("fused", [False, True])
def test_window_whose_last_micro_batch_has_no_loss(fused: bool) -> None:
    """Under a scaler Lightning leaves the step out, whatever the others gave, with gradients that are still scaled."""
    norms: list[float] = []

    class Norms(pl.Callback):
        def on_train_batch_end(self, trainer, *args) -> None:
            norms.append(float(trainer.callback_metrics.get("grad/norm", 0.0)))

    def run(plugins) -> pl.Trainer:
        module = seeded(lambda: Net(none_at=(1, 5), fused=fused))
        return fit(module, lt.GradientNormClipping(), Norms(), accumulate_grad_batches=2, plugins=plugins)

    assert counts(run(None)) == (4, 0, 0, 0)
    expected = norms.copy()
    norms.clear()
    assert counts(run(fp16(2.0**8))) == (4, 0, 0, 0)
    assert norms == pytest.approx(expected, rel=2e-2)


def test_fused_sgd_momentum_survives_a_first_step_that_is_skipped() -> None:
    """Skipped inside of its kernel, torch's fused SGD would keep uninitialised memory as its momentum."""
    rows = [[INF, 1.0], [1.0, 1.0], [1.0, 1.0]]

    first_momentum, verdicts = [], []

    class AfterFirst(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if batch_idx == 0:
                first_momentum.append(trainer.optimizers[0].state[pl_module.weight].get("momentum_buffer"))
                verdicts.append(lt.step_ledger(trainer)[0].last)

    def run(fused: bool, plugins) -> list[float]:
        module = FixedGradients(rows)
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9, fused=fused)
        fit(module, lt.GradientNormClipping(INF), AfterFirst(), plugins=plugins)
        return module.weight.tolist()

    for scaler in (False, True):
        fused, plain = (run(fused, fp16(2.0) if scaler else None) for fused in (True, False))
        assert fused == plain == pytest.approx([-2.9, -2.9])
    assert first_momentum == [None] * 4  # chance may fill memory with zeros, so look before it is read
    assert verdicts == ["skipped_guard", "skipped_guard", "skipped_overflow", "skipped_overflow"]


def test_fused_sgd_momentum_survives_a_first_overflow_with_no_clipper() -> None:
    first = []
    module = FixedGradients([[INF, 1.0], [1.0, 1.0]])
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9, fused=True)

    class AfterFirst(pl.Callback):
        def on_train_batch_end(self, trainer, *args) -> None:
            first.append(trainer.optimizers[0].state[module.weight].get("momentum_buffer"))

    trainer = fit(module, lt.LossScaleMonitor(), AfterFirst(), plugins=fp16(2.0))
    assert first[0] is None
    assert counts(trainer) == (1, 1, 0, 0)
    assert module.weight.tolist() == [-1.0, -1.0]


def test_verdicts_are_the_same_on_every_rank(two_processes) -> None:
    first, second = two_processes.run(ledger_runs)
    assert first == second
    assert len(first) == 8
    assert set(first.values()) == {(3, 0, 1, 0)}


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
    fit(TwoOptimizers(), lt.LossScaleMonitor()).save_checkpoint(tmp_path / "two.ckpt")
    with pytest.raises(ValueError, match=r"1 optimizer\(s\), got one of 2"):
        quiet_trainer(lt.LossScaleMonitor(), max_epochs=2).fit(ManualNet(), loader(), ckpt_path=tmp_path / "two.ckpt")


class VetoesBy(lt.Trick):
    touches = lt.Touches.STEP

    def __init__(self, flag) -> None:
        self.flag = flag

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step == 1:
            lt.current_step(trainer, optimizer).veto(self.flag)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("flag", [True, torch.tensor(True), torch.tensor(3.0), torch.tensor(1)])
@pytest.mark.parametrize("scaler", [False, True])
def test_a_veto_leaves_the_moments_and_their_count_alone(fused: bool, flag, scaler: bool) -> None:
    counted = []
    module = Net(fused=fused)
    module.on_train_end = lambda: counted.append(float(module.optimizers().state[module.net[3].weight]["step"]))
    assert counts(fit(module, VetoesBy(flag), plugins=fp16(2.0**4) if scaler else None)) == (6, 0, 1, 0)
    assert counted == [6.0]


def test_watching_adds_nothing_to_the_optimizers_state() -> None:
    def state_keys(*callbacks) -> list[int]:
        found = []
        module = Net(optimizer="momentum", fused=True)
        module.net[0].requires_grad_(False)
        module.on_train_end = lambda: found.extend(module.optimizers().state_dict()["state"])
        fit(module, *callbacks)
        return found

    assert state_keys(lt.GradientNormClipping()) == state_keys()


class LooksTwice(torch.optim.SGD):
    """Evaluates its closure twice a step, as SAM does."""

    def step(self, closure):
        with torch.enable_grad():
            closure()
            loss = closure()
        super().step()
        return loss


class NanAtFirstLook(Net):
    looks = 0

    def training_step(self, batch, batch_idx):
        self.looks += 1
        loss = self.loss(batch) * 1000
        return loss * NAN if self.looks == 1 else loss

    def configure_optimizers(self):
        return LooksTwice(self.parameters(), lr=1.0)


def test_the_last_look_at_the_gradients_decides() -> None:
    module = seeded(NanAtFirstLook)
    before = weights(module)
    trainer = fit(module, lt.GradientNormClipping(0.1), limit_train_batches=1)
    assert counts(trainer) == (1, 0, 0, 0)
    moved = torch.stack([(weights(module)[name] - before[name]).norm() for name in before]).norm()
    assert float(moved) == pytest.approx(0.1, rel=1e-4)


class StepsPastTheTrainer(ManualNet):
    def training_step(self, batch, batch_idx) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def test_steps_past_the_trainer_are_told() -> None:
    with pytest.warns(UserWarning, match="went past the Trainer"):
        trainer = fit(StepsPastTheTrainer(), lt.LossScaleMonitor())
    assert counts(trainer) == (0, 0, 0, 0)


def test_replaced_optimizers_are_refused() -> None:
    class Replaces(Net):
        def on_train_batch_start(self, batch, batch_idx) -> None:
            if batch_idx == 3:
                self.trainer.optimizers = [torch.optim.SGD(self.parameters())]

    with pytest.raises(RuntimeError, match="the optimizers that training began with"):
        fit(Replaces(), lt.LossScaleMonitor())


def test_an_exception_that_the_module_catches_leaves_no_step_open() -> None:
    class Retries(ManualNet):
        def training_step(self, batch, batch_idx) -> None:
            try:
                super().training_step(batch, batch_idx)
            except MemoryError:
                super().training_step(batch, batch_idx)

    class RunsOutOnce(lt.Trick):
        ran_out = False

        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            if not self.ran_out:
                self.ran_out = True
                lt.current_step(trainer, optimizer).veto(torch.tensor(True))
                raise MemoryError

    for fused in (False, True):
        moved = []
        module = Retries(fused=fused)
        module.on_train_end = lambda module=module, moved=moved: moved.append(
            float(module.optimizers().state[module.net[3].weight]["step"])
        )
        assert counts(fit(module, RunsOutOnce())) == (7, 0, 0, 0)
        assert moved == [7.0]  # no flag of the veto is left on the optimizer


def test_manual_steps_between_logged_batches_are_logged() -> None:
    """The head steps at even batches, the Trainer logs odd ones."""
    trainer = fit(TwoOptimizers(), lt.GradientNormClipping(), log_every_n_steps=2)
    assert {"grad/norm", "grad/norm/1", "grad/clip_rate/1", "step/applied"} <= trainer.callback_metrics.keys()
