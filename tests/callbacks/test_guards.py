"""Guards in a Trainer: what they leave out, what they write down, and how a run goes back."""

import json
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import lightning_tricks as lt
from lightning_tricks._rollback import lower_rates, restore_rates_
from lightning_tricks.functional import snapshots
from tests.distributed_cases import guard_runs
from tests.guard_models import Poisoned, Watch, steady_data
from tests.models import (
    FixedGradients,
    Net,
    TwoOptimizers,
    assert_same,
    fit,
    fp16,
    largest_difference,
    seeded,
    weights,
)
from tests.models import trainer as quiet_trainer
from tests.reads import count_reads

# A guard that judges after few steps, so it had better not be strict.
QUICK = {"z_threshold": 50.0, "window_steps": 16, "warmup_steps": 8}


def counts(run: pl.Trainer, index: int = 0) -> tuple[int, int, int, int]:
    ledger = lt.step_ledger(run)[index]
    return ledger.applied, ledger.skipped_overflow, ledger.skipped_guard, ledger.rolled_back


def run(module: pl.LightningModule, *callbacks: pl.Callback, folder=None, batches: int = 20, **options) -> pl.Trainer:
    options = {"default_root_dir": folder, "data": steady_data(batches)} | options
    return fit(module, *callbacks, **options)


# What is left out


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["nan", "inf"])
@pytest.mark.parametrize("make", [lt.NonFiniteGuard, lt.LossSpikeGuard])
def test_a_step_that_is_not_finite_is_as_if_it_had_not_been(make, kind: str, fused: bool, tmp_path) -> None:
    module = seeded(lambda: Poisoned({3: kind, 9: kind}, fused=fused))
    trainer = run(module, make(), folder=tmp_path)
    assert counts(trainer) == (18, 0, 2, 0)
    without = seeded(lambda: Net(none_at=(3, 9), fused=fused))
    run(without, lt.NonFiniteGuard(), folder=tmp_path)
    assert_same(weights(module), weights(without))


@pytest.mark.parametrize("fused", [False, True])
def test_a_spike_is_left_out_after_the_warmup(fused: bool, tmp_path) -> None:
    module = seeded(lambda: Poisoned({1: "spike", 12: "spike", 15: "spike"}, fused=fused))
    trainer = run(module, lt.LossSpikeGuard(**QUICK), folder=tmp_path)
    assert counts(trainer) == (18, 0, 2, 0)
    assert float(trainer.callback_metrics["guard/spikes"]) == 2
    events = [json.loads(line) for line in (tmp_path / "guard_events.jsonl").read_text().splitlines()]
    assert [event["batch_idx"] for event in events] == [12, 15]
    assert events[0].keys() == {
        "run", "guard", "optimizer", "step", "epoch", "batch_idx", "step_in_batch",
        "loss", "norm", "threshold", "exceeded", "verdict", "action",
    }  # fmt: skip
    assert events[0]["step"] == 12
    assert events[0]["exceeded"] == "loss"
    assert events[0]["verdict"] == "skipped_guard"
    assert events[0]["loss"] > events[0]["threshold"] > 0


def test_the_loss_of_a_window_is_its_mean_and_unscaled(tmp_path) -> None:
    """Otherwise the thresholds of accumulation and fp16 would not be those of plain training."""
    logged, same = [], DataLoader(list(steady_data(1)) * 24, batch_size=None)
    for options in ({}, {"accumulate_grad_batches": 2}, {"plugins": fp16(2.0**8)}):
        module = seeded(lambda: Net(lr=0.0))
        watch = Watch()
        run(module, lt.LossSpikeGuard(**QUICK), watch, folder=tmp_path, data=same, **options)
        logged.append(watch.logged[-1]["guard/loss_threshold"])
    assert logged[1:] == pytest.approx([logged[0]] * 2, rel=1e-2)


@pytest.mark.parametrize("make", [lt.NonFiniteGuard, lambda: lt.LossSpikeGuard(**QUICK)])
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_is_the_scalers(make, fused: bool, tmp_path) -> None:
    """The scale of 2**24 overflows more often in a row than a guard would bear."""
    module = seeded(lambda: Poisoned({25: "nan"}, fused=fused))
    trainer = run(module, make(), folder=tmp_path, batches=40, plugins=fp16(2.0**28))
    applied, overflowed, guarded, _ = counts(trainer)
    assert overflowed >= 12
    assert guarded == 0
    assert applied == 40 - overflowed


def test_an_infinite_loss_with_finite_gradients_is_the_guards_also_under_a_scaler(tmp_path) -> None:
    class Offset(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss + torch.inf if batch_idx == 3 else loss

    for options in ({}, {"plugins": fp16(2.0**8)}):
        assert counts(run(Offset(), lt.NonFiniteGuard(), folder=tmp_path, **options))[2] == 1


@pytest.mark.parametrize(("bad_step", "left_out"), [(7, [0, 1]), (8, [1, 0])])
def test_manual_optimization_judges_each_optimizer(bad_step: int, left_out: list[int], tmp_path) -> None:
    """The body steps with every batch, the head with every second: step 7 is the head's, step 8 the body's."""

    class Bad(TwoOptimizers):
        def loss(self, batch):
            loss = super().loss(batch)
            return loss * torch.nan if self.trainer.global_step == bad_step else loss

    trainer = run(seeded(Bad), lt.NonFiniteGuard(), folder=tmp_path)
    assert [counts(trainer, index)[2] for index in (0, 1)] == left_out


# Actions


def test_raise_names_the_parameters_and_keeps_the_weights(tmp_path) -> None:
    module = seeded(lambda: Poisoned({3: "nan"}, fused=True))
    watch = Watch()
    with pytest.raises(RuntimeError, match=r"got nan and nan at epoch 0, batch 3; .* net\.0\.linear\.weight"):
        run(module, lt.NonFiniteGuard("raise"), watch, folder=tmp_path)
    assert_same(weights(module), watch.weights[-1])


@pytest.mark.parametrize("make", [lambda: lt.NonFiniteGuard("stop"), lambda: lt.LossSpikeGuard("stop")])
def test_stop_leaves_the_step_out_and_ends_the_fit(make, tmp_path) -> None:
    with pytest.warns(UserWarning, match="The step is left out, and the fit ends"):
        trainer = run(Poisoned({5: "inf"}), make(), folder=tmp_path)
    assert counts(trainer) == (5, 0, 1, 0)
    assert trainer.fit_loop.total_batch_idx == 5


@pytest.mark.parametrize("fused", [False, True])
def test_warn_steps_all_the_same(fused: bool, tmp_path) -> None:
    module, plain = (seeded(lambda: Poisoned({12: "spike"}, fused=fused)) for _ in range(2))
    with pytest.warns(UserWarning, match=r"step 12 \(epoch 0, batch 12, optimizer 0\): loss .* above loss"):
        trainer = run(module, lt.LossSpikeGuard("warn", **QUICK), folder=tmp_path)
    run(plain, folder=tmp_path)
    assert counts(trainer) == (20, 0, 0, 0)
    assert_same(weights(module), weights(plain))
    assert json.loads((tmp_path / "guard_events.jsonl").read_text())["verdict"] == "applied"


@pytest.mark.parametrize("fused", [False, True])
def test_a_guard_that_would_veto_for_ever_stops_with_a_report(fused: bool, tmp_path) -> None:
    module = seeded(lambda: Poisoned(dict.fromkeys(range(5, 40), "nan"), fused=fused))
    with pytest.raises(
        RuntimeError,
        match=r"(?s)4 steps in a row were bad.*None of them changed.*step 8 \(epoch 0, batch 8.*guard_events",
    ):
        run(module, lt.NonFiniteGuard(max_consecutive=3), folder=tmp_path, batches=40)
    assert all(torch.isfinite(value).all() for value in weights(module).values())


def test_as_many_as_allowed_are_fine(tmp_path) -> None:
    module = Poisoned(dict.fromkeys((3, 4, 5, 8, 9, 10), "nan"))
    assert counts(run(module, lt.NonFiniteGuard(max_consecutive=3), folder=tmp_path))[2] == 6


@pytest.mark.parametrize("make", [lt.NonFiniteGuard, lambda: lt.LossSpikeGuard(**QUICK)])
@pytest.mark.parametrize("scaler", [False, True])
def test_a_fused_optimizer_is_vetoed_without_waiting(make, scaler: bool, monkeypatch, tmp_path) -> None:
    """A plain one costs one scalar read a step. The log of a fused one's events is read once, at the end."""
    reads = count_reads(monkeypatch)

    def reads_of_a_run(*guards, fused: bool) -> int:
        reads.clear()
        module = FixedGradients([[3.0]] * 20, fused=fused)
        options = {"plugins": fp16(1.0)} if scaler else {}
        fit(module, *guards, log_every_n_steps=100, default_root_dir=tmp_path, **options)
        return len(reads)

    assert reads_of_a_run(make(), fused=True) - reads_of_a_run(fused=True) == 1
    assert reads_of_a_run(make(), fused=False) - reads_of_a_run(fused=False) == 20


# Beside others


def test_beside_a_clipper_the_guard_owns_the_verdict(tmp_path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for fused in (False, True):
            trainer = run(
                Poisoned({3: "nan"}, fused=fused),
                lt.GradientNormClipping(nonfinite="raise"),
                lt.NonFiniteGuard(),
                folder=tmp_path,
            )
            assert counts(trainer) == (19, 0, 1, 0)
    told = [str(one.message) for one in caught if "finite" in str(one.message) or "Guard" in str(one.message)]
    assert len(told) == 2
    assert all(one.startswith("NonFiniteGuard") for one in told)


def test_two_guards_of_two_kinds_give_one_account(tmp_path) -> None:
    trainer = run(Poisoned({3: "nan", 12: "spike"}), lt.LossSpikeGuard(**QUICK), lt.NonFiniteGuard(), folder=tmp_path)
    assert counts(trainer) == (18, 0, 2, 0)
    events = [json.loads(line) for line in (tmp_path / "guard_events.jsonl").read_text().splitlines()]
    assert [(one["guard"], one["batch_idx"]) for one in events] == [("NonFiniteGuard", 3), ("LossSpikeGuard", 12)]


@pytest.mark.parametrize("kind", [lt.NonFiniteGuard, lt.LossSpikeGuard])
def test_two_of_a_kind_are_an_error(kind) -> None:
    with pytest.raises((RuntimeError, MisconfigurationException), match=kind.__name__):
        fit(Net(), kind("skip"), kind("stop"))


def test_the_schedule_stands_on_applied_steps(tmp_path) -> None:
    watch, plain = Watch(), Watch()
    run(Poisoned({3: "nan", 4: "nan"}), lt.NonFiniteGuard(), lt.WarmupCosineScheduler(5), watch, folder=tmp_path)
    run(Net(), lt.WarmupCosineScheduler(5), plain, folder=tmp_path)
    assert watch.rates[5:] == pytest.approx(plain.rates[3:18])


def test_lbfgs_is_refused() -> None:
    class Lbfgs(Net):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    with pytest.raises(ValueError, match="LBFGS, got 'skip'"):
        fit(Lbfgs(), lt.NonFiniteGuard())
    fit(Lbfgs(), lt.NonFiniteGuard("raise"))


# Resume


def poisoned_resume(make, folder, *, poison_again: bool) -> tuple[pl.Trainer, Poisoned, Poisoned, pl.Trainer]:
    """A run with bad batches, and one resumed from before them."""

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, *args) -> None:
            if trainer.fit_loop.total_batch_idx == 9 and not (folder / "a.ckpt").exists():
                trainer.save_checkpoint(folder / "a.ckpt")

    data = lambda: StatefulDataLoader(steady_data(20).dataset, batch_size=8)  # noqa: E731
    poison = {5: "nan", 12: "spike", 14: "inf"}
    module = seeded(lambda: Poisoned(poison))
    whole = run(module, make(), lt.ExactResume(), Save(), folder=folder, data=data())
    resumed = Poisoned(poison if poison_again else {})
    again = quiet_trainer(make(), lt.ExactResume(), default_root_dir=folder)
    again.fit(resumed, data(), ckpt_path=folder / "a.ckpt", weights_only=True)
    return whole, module, resumed, again


@pytest.mark.parametrize("poison_again", [True, False])
def test_case_29_a_guard_with_state_resumes_and_skips_what_it_skipped(poison_again: bool, tmp_path) -> None:
    """Also where the batches are not bad any more: the log names them."""
    whole, module, resumed, again = poisoned_resume(
        lambda: lt.LossSpikeGuard(**QUICK), tmp_path, poison_again=poison_again
    )
    assert_same(weights(resumed), weights(module))
    assert counts(again) == counts(whole) == (17, 0, 3, 0)
    events = (tmp_path / "guard_events.jsonl").read_text().splitlines()
    assert len(events) == 3  # the resumed run does not tell of them again


def test_another_runs_log_in_the_same_folder_names_nothing(tmp_path) -> None:
    run(Poisoned({5: "nan"}), lt.NonFiniteGuard(), folder=tmp_path)
    trainer = run(Net(), lt.NonFiniteGuard(), folder=tmp_path)
    assert counts(trainer) == (20, 0, 0, 0)


def test_the_log_of_the_first_run_is_found_from_another_folder(tmp_path) -> None:
    _, module, _, _ = poisoned_resume(lambda: lt.LossSpikeGuard(**QUICK), tmp_path, poison_again=False)
    other = tmp_path / "elsewhere"
    resumed = Poisoned()
    again = quiet_trainer(lt.LossSpikeGuard(**QUICK), lt.ExactResume(), default_root_dir=other)
    data = StatefulDataLoader(steady_data(20).dataset, batch_size=8)
    again.fit(resumed, data, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert_same(weights(resumed), weights(module))


def test_events_path_that_cannot_be_written_is_refused_at_the_start(monkeypatch, tmp_path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path, words in ((tmp_path, "it is a folder"), (file / "a" / "b.jsonl", "file' is no folder")):
        with pytest.raises(ValueError, match=words):
            fit(Net(fail_at=0), lt.LossSpikeGuard(events_path=str(path)))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ValueError, match="is read-only"):
        fit(Net(fail_at=0), lt.LossSpikeGuard(events_path=str(tmp_path / "c" / "d.jsonl")))
    assert list(tmp_path.iterdir()) == [file]


# Rollback


def rollback(**options) -> lt.LossSpikeGuard:
    return lt.LossSpikeGuard("rollback", **{**QUICK, "snapshot_every_steps": 5, **options})


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", ["fp32", "fp16", "momentum"])
def test_a_rollback_brings_everything_back_but_the_data(way: str, fused: bool, tmp_path) -> None:
    """Snapshots after 5 and 10 steps; the spike at batch 12 goes back to the second."""
    options = {"plugins": fp16(1.0)} if way == "fp16" else {}
    kind = "momentum" if way == "momentum" else "adamw"
    poisoned = seeded(lambda: Poisoned({12: "spike"}, dropout=0.2, batchnorm=True, fused=fused, optimizer=kind))
    watch = Watch()
    trainer = run(poisoned, rollback(), lt.WarmupCosineScheduler(3, total_steps=30), watch, folder=tmp_path, **options)
    assert_same(watch.weights[12], watch.weights[9])
    assert largest_difference(watch.weights[11], watch.weights[9]) > 0
    assert watch.rates[13] == watch.rates[10] != watch.rates[12]
    assert counts(trainer) == (17, 0, 0, 1)  # 10, and the 7 after the rollback
    assert trainer.global_step == 20

    # From there on it is a run that had not seen batches 10 to 12.
    batches = list(steady_data(20))
    other = seeded(lambda: Net(dropout=0.2, batchnorm=True, fused=fused, optimizer=kind))
    run(
        other,
        lt.LossSpikeGuard(**QUICK),
        lt.WarmupCosineScheduler(3, total_steps=30),
        folder=tmp_path,
        data=DataLoader(batches[:10] + batches[13:], batch_size=None),
        **({"plugins": fp16(1.0)} if way == "fp16" else {}),
    )
    assert_same(weights(poisoned), weights(other))


def test_a_second_rollback_goes_further_back(tmp_path) -> None:
    watch = Watch()
    run(Poisoned({12: "spike", 13: "spike", 14: "spike"}), rollback(), watch, folder=tmp_path)
    assert_same(watch.weights[12], watch.weights[9])
    assert_same(watch.weights[13], watch.weights[4])
    assert_same(watch.weights[14], watch.weights[4])  # the oldest there is


def test_rollbacks_that_lead_nowhere_end_with_a_report(tmp_path) -> None:
    module = Poisoned(dict.fromkeys(range(10, 90, 3), "nan"))
    with pytest.raises(RuntimeError, match="went back 11 times without getting on"):
        run(module, rollback(snapshot_every_steps=9), folder=tmp_path, batches=90)


def test_the_rate_is_lowered_for_a_while_and_given_back(tmp_path) -> None:
    seen = []

    class Rates(Poisoned):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            def closure():
                output = optimizer_closure()
                return output

            super().optimizer_step(epoch, batch_idx, optimizer, closure)

        def on_before_optimizer_step(self, optimizer) -> None:
            seen.append(optimizer.param_groups[0]["lr"])

    watch = Watch()
    run(Rates({12: "nan"}, lr=0.01), rollback(lr_factor=0.1, snapshot_every_steps=4), watch, folder=tmp_path)
    assert seen == pytest.approx([0.01] * 13 + [0.001] * 4 + [0.01] * 3)
    assert watch.rates == pytest.approx([0.01] * 20)  # between steps the rate is the user's


def test_a_ring_that_does_not_fit_is_refused_before_anything_is_copied(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(snapshots, "free_bytes", lambda device: 1000)
    with pytest.raises(MemoryError, match=r"need [\d,]+ bytes more and 1,000 are free"):
        run(Net(), rollback(), folder=tmp_path)


def test_the_size_of_the_ring_is_printed(capsys, tmp_path) -> None:
    module = Net()
    run(module, rollback(), folder=tmp_path)
    weights_and_state = 3 * sum(4 * one.numel() for one in module.parameters())
    assert f"2 snapshot(s) of {weights_and_state:,} bytes on cpu" in capsys.readouterr().out


def test_a_rollback_right_after_a_resume_goes_back_to_the_checkpoint(tmp_path) -> None:
    first = run(seeded(Net), rollback(), folder=tmp_path)
    first.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    module, watch = Poisoned({22: "nan"}), Watch()
    again = quiet_trainer(rollback(), watch, max_epochs=2, default_root_dir=tmp_path)
    again.fit(module, steady_data(20), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert_same(watch.weights[2], saved)
    assert largest_difference(watch.weights[1], saved) > 0


# Several ranks


def test_one_bad_rank_is_enough_on_every_strategy(two_processes) -> None:
    """One of two ranks has a nan at batch 3 and a spike at batch 12: the verdict is the same on both."""
    results = two_processes.run(guard_runs)
    assert results[0] == results[1]
    for (strategy, guard, fused), found in results[0].items():
        assert found["counts"] == ((19, 0, 1, 0) if guard == "NonFiniteGuard" else found["expected"]), (
            strategy, guard, fused, found,
        )  # fmt: skip
        assert found["finite"], (strategy, guard, fused)


# A whole run


def final_loss(poison: dict[int, str], *callbacks: pl.Callback, folder) -> float:
    """The loss over all data after 400 steps."""
    data = steady_data(400)
    module = seeded(lambda: Poisoned(poison))
    run(module, lt.WarmupCosineScheduler(20), *callbacks, folder=folder, data=data)
    x, y = data.dataset.tensors
    with torch.no_grad():
        return float((module.net(x) - y).square().mean())


def test_one_bad_batch_in_fifty_costs_nothing_under_the_guard(tmp_path) -> None:
    """With its own defaults, and never before they judge: 32 applied steps."""
    poison = {50 * i + 33 + 7 * i % 17: ("inf", "nan", "spike")[i % 3] for i in range(8)}
    clean = final_loss({}, folder=tmp_path)
    assert final_loss(poison, lt.LossSpikeGuard(), folder=tmp_path) == pytest.approx(clean, rel=0.02)
    assert final_loss({}, lt.LossSpikeGuard(), folder=tmp_path) == pytest.approx(clean, rel=0.02)
    assert final_loss(poison, folder=tmp_path) != pytest.approx(clean, rel=0.02)
    spikes = {batch: kind for batch, kind in poison.items() if kind == "spike"}
    assert final_loss(spikes, folder=tmp_path) != pytest.approx(clean, rel=0.02)
    assert final_loss(spikes, lt.LossSpikeGuard("rollback", snapshot_every_steps=5), folder=tmp_path) == pytest.approx(
        clean, rel=0.02
    )


# What a review found


def test_after_a_report_an_earlier_checkpoint_can_be_resumed(tmp_path) -> None:
    save = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    bad = Poisoned(dict.fromkeys(range(5, 20), "nan"))
    with pytest.raises(RuntimeError, match="4 steps in a row were bad"):
        run(bad, lt.NonFiniteGuard(max_consecutive=3), save, folder=tmp_path, enable_checkpointing=True)
    again = quiet_trainer(lt.NonFiniteGuard(max_consecutive=3), default_root_dir=tmp_path)
    again.fit(Net(), steady_data(20), ckpt_path=tmp_path / "step=4.ckpt", weights_only=True)
    assert counts(again)[2] == 4  # the named ones


def test_a_fused_streak_that_is_over_is_told_all_the_same(tmp_path) -> None:
    module = Poisoned(dict.fromkeys(range(5, 12), "nan"), fused=True)
    with pytest.raises(RuntimeError, match="7 steps in a row were bad"):
        run(module, lt.NonFiniteGuard(max_consecutive=3), folder=tmp_path, log_every_n_steps=100)


def test_warn_neither_vetoes_what_is_named_nor_claims_what_a_clipper_did(tmp_path) -> None:
    module = Poisoned({5: "nan"})
    trainer = run(module, lt.LossSpikeGuard("warn", **QUICK), lt.GradientNormClipping(), folder=tmp_path)
    event = json.loads((tmp_path / "guard_events.jsonl").read_text())
    assert counts(trainer)[2] == 1
    assert event["verdict"] == "skipped_guard"
    assert event["exceeded"] == "nonfinite"
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = quiet_trainer(lt.LossSpikeGuard("warn", **QUICK), max_epochs=2, default_root_dir=tmp_path)
    again.fit(Net(), steady_data(20), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert counts(again)[2] == 1


def test_only_the_named_step_of_a_batch_is_left_out(tmp_path) -> None:
    class Critic(Net):
        """Three steps a batch, of which one is bad in one batch."""

        def __init__(self, bad: bool = True) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.bad = bad

        def training_step(self, batch, batch_idx) -> None:
            for turn in range(3):
                self.optimizers().zero_grad()
                factor = torch.nan if self.bad and (batch_idx, turn) == (6, 1) else 1.0
                self.manual_backward(self.loss(batch) * factor)
                self.optimizers().step()

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if batch_idx == 3 and not (tmp_path / "a.ckpt").exists():
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    data = lambda: StatefulDataLoader(steady_data(10).dataset, batch_size=8)  # noqa: E731
    module, resumed = seeded(Critic), Critic(bad=False)
    whole = run(module, lt.NonFiniteGuard(), lt.ExactResume(), Save(), folder=tmp_path, data=data())
    again = quiet_trainer(lt.NonFiniteGuard(), lt.ExactResume(), default_root_dir=tmp_path)
    again.fit(resumed, data(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert counts(again) == counts(whole) == (29, 0, 1, 0)
    assert_same(weights(resumed), weights(module))


def test_raise_writes_its_event_first(tmp_path) -> None:
    with pytest.raises(RuntimeError, match="got nan and nan"):
        run(Poisoned({3: "nan"}), lt.NonFiniteGuard("raise"), folder=tmp_path)
    assert json.loads((tmp_path / "guard_events.jsonl").read_text())["verdict"] == "raised"


def test_the_loss_of_a_short_window_is_its_mean_too(tmp_path) -> None:
    seen = []

    class Look(lt.Trick):
        reads_loss = True
        touches = lt.Touches.GRADIENTS_READ

        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            seen.append(float(lt.current_step(trainer, optimizer).loss))

    same = DataLoader(list(steady_data(1)) * 7, batch_size=None)
    run(Net(lr=0.0), Look(), folder=tmp_path, data=same, accumulate_grad_batches=3)
    assert seen == pytest.approx([seen[0]] * 3)


def test_a_rollback_to_the_start_begins_the_schedule_anew(tmp_path) -> None:
    watch = Watch()
    guard = rollback(snapshot_every_steps=100)
    run(Poisoned({12: "nan"}), guard, lt.WarmupCosineScheduler(10, total_steps=30), watch, folder=tmp_path)
    assert watch.rates[13:] == pytest.approx(watch.rates[:7])


def test_three_snapshots_are_used_one_after_the_other(tmp_path) -> None:
    watch = Watch()
    run(Poisoned(dict.fromkeys((16, 17, 18, 19), "nan")), rollback(num_snapshots=3), watch, folder=tmp_path)
    for batch, snapshot in ((16, 14), (17, 9), (18, 4), (19, 4)):
        assert_same(watch.weights[batch], watch.weights[snapshot])


def test_snapshots_count_the_steps_of_one_optimizer(tmp_path) -> None:
    """The second one steps with every second batch."""
    watch = Watch()

    class Bad(TwoOptimizers):
        def loss(self, batch):
            loss = super().loss(batch)
            return loss * torch.nan if self.trainer.fit_loop.total_batch_idx == 11 else loss

    run(seeded(Bad), rollback(snapshot_every_steps=6), watch, folder=tmp_path)
    assert_same(watch.weights[11], watch.weights[5])


def test_a_rollback_over_an_epochs_edge_does_not_repeat_its_order(tmp_path) -> None:
    orders: dict[int, list[float]] = {0: [], 1: [], 2: []}

    class Order(Poisoned):
        def training_step(self, batch, batch_idx):
            orders[self.current_epoch].append(float(batch[0][0, 0]))
            return super().training_step(batch, batch_idx)

    data = DataLoader(steady_data(10).dataset, batch_size=8, shuffle=True)
    run(Order({12: "nan"}), rollback(snapshot_every_steps=100), folder=tmp_path, data=data, max_epochs=3)
    assert orders[1] != orders[2]


def test_rates_are_lowered_also_inside_of_an_optimizer_that_wraps_one() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    outer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    outer.optim = inner
    rates = lower_rates(outer, 0.1)
    assert [one.param_groups[0]["lr"] for one in (outer, inner)] == [0.05, 0.05]
    restore_rates_(rates)
    assert [one.param_groups[0]["lr"] for one in (outer, inner)] == [0.5, 0.5]


def test_a_kind_of_batch_that_is_always_left_out_ends_with_a_report(tmp_path) -> None:
    module = Poisoned(dict.fromkeys(range(0, 200, 4), "nan"))
    with pytest.raises(RuntimeError, match=r"\d+ of 10\d steps were bad"):
        run(module, lt.NonFiniteGuard(), folder=tmp_path, batches=200)


def test_a_second_fit_leaves_nothing_out_by_name(tmp_path) -> None:
    module = Poisoned({2: "nan"}, fail_at=5)
    trainer = quiet_trainer(lt.NonFiniteGuard(), default_root_dir=tmp_path)
    with pytest.raises(RuntimeError, match="boom"):
        trainer.fit(module, steady_data(10))
    module.poison, module.fail_at = {}, None
    trainer.fit(module, steady_data(10))
    assert counts(trainer)[2] == 1


@pytest.mark.parametrize("fused", [False, True])
def test_the_account_is_in_a_checkpoint_between_logged_steps(fused: bool, tmp_path) -> None:
    guard = lt.NonFiniteGuard()
    run(
        Poisoned({2: "nan", 4: "nan"}, fused=fused),
        guard,
        SaveAfter(6, tmp_path),
        folder=tmp_path,
        log_every_n_steps=50,
    )
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"]["NonFiniteGuard"]
    assert saved["num_events"] == 2


class SaveAfter(pl.Callback):
    def __init__(self, batches: int, folder) -> None:
        self.batches, self.folder = batches, folder

    def on_train_batch_end(self, trainer, *args) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batches:
            trainer.save_checkpoint(self.folder / "a.ckpt")


def test_a_log_that_cannot_be_written_any_more_does_not_end_the_run(tmp_path) -> None:
    with pytest.warns(UserWarning, match="cannot write its log of events any more"):
        trainer = run(Poisoned({12: "nan"}), lt.LossSpikeGuard(events_path="/dev/full"), folder=tmp_path)
    assert counts(trainer) == (19, 0, 1, 0)


def test_a_parameter_that_came_after_the_snapshot_stays(tmp_path) -> None:
    class Grows(Poisoned):
        def on_train_batch_start(self, batch, batch_idx) -> None:
            if batch_idx == 8:
                self.extra = torch.nn.Parameter(torch.ones(1))
                self.trainer.optimizers[0].add_param_group({"params": [self.extra]})
                self.register_buffer("late", torch.ones(2))

    module = Grows({12: "nan"})
    trainer = run(module, rollback(snapshot_every_steps=100), folder=tmp_path)
    assert counts(trainer)[3] == 1
    assert module.late.tolist() == [1.0, 1.0]
