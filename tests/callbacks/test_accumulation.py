"""Accumulation that equals the large batch."""

import csv
import pickle
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

import lightning_tricks as lt
from tests import accumulation_cases as cases
from tests.accumulation_cases import Transformer, large_batch_run, largest_relative_error, run, token_batches, tokens
from tests.contract_table import LbfgsNet
from tests.models import FixedGradients, Net, assert_same, fit, fp16, loader, seeded, weights
from tests.models import trainer as quiet_trainer
from tests.reads import count_reads

LIMITS = {torch.float64: 1e-12, torch.float32: 5e-7}


# Exactness


def test_each_step_equals_the_large_batch() -> None:
    for (_, dtype, *how), error in cases.errors_under(["auto"]).items():
        assert error <= LIMITS[dtype], (dtype, how)


def test_each_step_equals_the_large_batch_of_all_ranks(two_processes) -> None:
    for errors in two_processes.run(cases.errors_under, ["ddp", "fsdp2", "zero1"]):
        for (strategy, dtype, *how), error in errors.items():
            assert error <= LIMITS[dtype], (strategy, dtype, how)


@pytest.mark.parametrize(
    ("options", "limit"),
    [({"plugins": lambda: fp16(2.0**10)}, 2e-2), ({"precision": "bf16-mixed"}, 6e-2)],
    ids=["fp16", "bf16"],
)
def test_in_16_bits_it_is_as_close_as_they_are(options, limit: float) -> None:
    data = token_batches(6)
    made = {key: value() if callable(value) else value for key, value in options.items()}
    _, module = run(data, tokens(), module=seeded(lambda: Transformer(lr=1e-3)), **made)
    reference = seeded(lambda: Transformer(lr=1e-3))
    reference = large_batch_run([data[:4], data[4:]], dtype=torch.float32, lr=1e-3)
    assert largest_relative_error(module, reference) < limit


def test_lightning_itself_is_far_from_it() -> None:
    """What the tests above would say if the weights were left out."""
    data = token_batches(6)
    _, module = run(data, accumulate_grad_batches=4, dtype=torch.float64)
    reference = large_batch_run([data[:4], data[4:]], dtype=torch.float64)
    assert largest_relative_error(module, reference) > 0.1


def test_windows_of_one_batch_are_the_plain_run_bit_for_bit() -> None:
    ours, plain = seeded(Net), seeded(Net)
    fit(ours, lt.GradientAccumulation(1), data=loader(26))  # the last batch is smaller
    fit(plain, data=loader(26))
    assert_same(weights(ours), weights(plain))


def test_equal_batches_in_full_windows_are_lightnings_bit_for_bit() -> None:
    ours, stock = (seeded(Net) for _ in range(2))
    fit(ours, lt.GradientAccumulation(7), max_epochs=2)
    fit(stock, accumulate_grad_batches=7, max_epochs=2)
    assert_same(weights(ours), weights(stock))


@pytest.mark.parametrize("none_at", [{0}, {1}, {3}, {4, 5}, {5}])
@pytest.mark.parametrize("scaled", [False, True])
def test_micro_batches_without_a_loss_count_nothing(none_at: set[int], scaled: bool) -> None:
    data = token_batches(6)
    module = seeded(Transformer)
    module.none_at = none_at
    trainer, _ = run(data, tokens(), module=module, plugins=[fp16()] if scaled else [])
    windows = [[data[i] for i in window if i not in none_at] for window in ([0, 1, 2, 3], [4, 5])]
    reference = large_batch_run([window for window in windows if window], dtype=torch.float32)
    assert largest_relative_error(module, reference) < (2e-2 if scaled else 5e-7)
    assert lt.step_ledger(trainer)[0].skipped_empty == sum(not window for window in windows)


# The cases


def steps_of(module: FixedGradients, *callbacks: pl.Callback, **options) -> list[list[float]]:
    fit(module, *callbacks, **options)
    return [step.tolist() for step in module.applied]


def test_case_9_a_short_last_window_has_its_full_weight() -> None:
    assert steps_of(FixedGradients([[1.0]] * 6), lt.GradientAccumulation(4)) == [[1.0], [1.0]]


def test_case_10_token_counts_weigh_micro_batches() -> None:
    module = FixedGradients([[1.0, 0.0], [0.0, 1.0]])
    data = DataLoader([torch.ones(1), torch.ones(9)], batch_size=None)
    (step,) = steps_of(module, lt.GradientAccumulation(2, weigh_by=torch.sum), data=data)
    assert step == pytest.approx([0.1, 0.9], rel=1e-6)


def test_case_11_an_epoch_shorter_than_a_window_warns_or_is_carried_over() -> None:
    with pytest.warns(UserWarning, match=r"an epoch has 2 batch\(es\), fewer than the 4 of a window.*carry_over"):
        assert len(steps_of(FixedGradients([[1.0]] * 2), lt.GradientAccumulation(4), max_epochs=4)) == 4
    module = FixedGradients([[1.0], [3.0]])
    assert steps_of(module, lt.GradientAccumulation(4, carry_over=True), max_epochs=5) == [[2.0]] * 3


def test_case_12_a_new_size_begins_at_a_window_edge() -> None:
    rows = [[float(i)] for i in range(11)]
    steps = steps_of(FixedGradients(rows), lt.GradientAccumulation({0: 2, 2: 4}), max_epochs=1)
    assert steps == [[0.5], [2.5], [5.5], [9.0]]  # 0 1 | 2 3 | 4 5 6 7 | 8 9 10


def test_a_size_by_epoch() -> None:
    rows = [[float(i)] for i in range(4)]
    steps = steps_of(FixedGradients(rows), lt.GradientAccumulation({"epoch": {0: 1, 1: 4}}), max_epochs=3)
    assert steps == [[0.0], [1.0], [2.0], [3.0], [1.5], [1.5]]


def test_case_13_the_loss_of_a_window_is_one_point_a_step(tmp_path) -> None:
    class Logs(Transformer):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("mine", loss, batch_size=1)
            self.own.append(loss.item())
            return loss

    module, data = seeded(Logs), token_batches(100)
    module.own = []
    logger = pl.loggers.CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    trainer, _ = run(data, tokens(50), module=module, logger=logger, log_every_n_steps=1)
    rows = list(csv.DictReader(Path(trainer.logger.log_dir, "metrics.csv").read_text().splitlines()))
    points = [float(row["accumulation/loss"]) for row in rows if row["accumulation/loss"]]
    counts = [float(cases.count_tokens(batch)) for batch in data]
    expected = [
        sum(n * loss for n, loss in zip(counts[part], module.own[part], strict=True)) / sum(counts[part])
        for part in (slice(0, 50), slice(50, 100))
    ]
    assert points == pytest.approx(expected, rel=1e-5)
    assert [float(row["mine"]) for row in rows if row["mine"]] == pytest.approx([module.own[49], module.own[99]])


# Checkpoints, and the end of fit


@pytest.mark.parametrize("scaled", [False, True])
def test_a_checkpoint_inside_of_a_window_resumes_bit_for_bit(scaled: bool, tmp_path) -> None:
    result = cases.resumed_inside_of_a_window("auto", str(tmp_path / "open.ckpt"), scaled=scaled)
    assert result == (0.0, 0.0, len(list(Transformer().parameters())), False)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1", "bucket view", "unused", "zero2", "fsdp2_offload"])
def test_it_does_so_to_rounding_on_two_ranks(strategy: str, two_processes, tmp_path) -> None:
    for difference, loss, gradients, changed in two_processes.run(
        cases.resumed_inside_of_a_window, strategy, str(tmp_path / "open.ckpt")
    ):
        assert difference < 1e-6
        assert loss < 1e-6
        assert gradients == len(list(Transformer().parameters()))
        assert not changed


def test_a_checkpoint_after_an_error_in_a_window_resumes_in_it(tmp_path) -> None:
    """What came before the batch that failed is kept. The loader has given that one away: it is lost, as ever."""

    class Fails(Transformer):
        fail_at = 2

        def training_step(self, batch, batch_idx):
            if batch_idx == self.fail_at:
                raise RuntimeError("boom")
            return super().training_step(batch, batch_idx)

    data = token_batches(4)
    with pytest.raises(RuntimeError, match="boom"):
        run(data, tokens(), OnExceptionCheckpoint(tmp_path), module=seeded(Fails), enable_checkpointing=True)
    _, resumed = run(data, tokens(), module=seeded(Transformer, 9), ckpt_path=next(tmp_path.glob("*.ckpt")))
    reference = large_batch_run([[data[0], data[1], data[3]]], dtype=torch.float32)
    assert largest_relative_error(resumed, reference) < 5e-7


def test_a_checkpoint_in_the_middle_of_a_batch_says_what_it_lacks(tmp_path) -> None:
    class Saves(pl.Callback):
        def on_after_backward(self, trainer, pl_module) -> None:
            if trainer.fit_loop.total_batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    with pytest.warns(UserWarning, match=r"lacks the gradients of the 2 micro-batch"):
        run(token_batches(4), tokens(), Saves())
    assert "window" not in torch.load(tmp_path / "middle.ckpt")["callbacks"]["GradientAccumulation"]


def test_a_fit_that_is_stopped_steps_with_what_it_has() -> None:
    assert cases.errors_when_stopped(["auto"])["auto"] == (pytest.approx(0.0, abs=1e-12), 2)


def test_a_fit_that_is_stopped_steps_with_what_all_ranks_have(two_processes) -> None:
    for found in two_processes.run(cases.errors_when_stopped, ["ddp", "fsdp2", "zero1"]):
        assert len(found) == 3
        for strategy, result in found.items():
            assert result == (pytest.approx(0.0, abs=1e-12), 2), strategy


def test_epochs_that_end_with_none_end_their_windows_on_all_ranks(two_processes) -> None:
    for found in two_processes.run(cases.errors_when_epochs_end_with_none, ["ddp", "fsdp2"]):
        assert found == {"ddp": pytest.approx(0.0, abs=1e-12), "fsdp2": pytest.approx(0.0, abs=1e-12)}


def test_the_step_of_a_stopped_fit_is_logged(tmp_path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path)
    trainer, _ = run(token_batches(8), tokens(), cases.Stop(after=6), logger=logger)
    assert "accumulation/loss" in Path(trainer.logger.log_dir, "metrics.csv").read_text()


# Weights


def test_windows_without_a_valid_token_are_left_out(two_processes) -> None:
    expected = [{"applied": 2, "skipped_empty": 1, "skipped_guard": 0, "skipped_overflow": 0, "last": "applied"}]
    for found in [cases.empty_windows(["auto"]), *two_processes.run(cases.empty_windows, ["ddp", "fsdp2"])]:
        for ledgers in found.values():
            assert [{k: v for k, v in one.items() if k != "rolled_back"} for one in ledgers] == expected


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), torch.tensor(-2)])
def test_a_weight_that_is_none_is_an_error(weight) -> None:
    with pytest.raises(ValueError, match="a number from 0 on, got"):
        run(token_batches(2), lt.GradientAccumulation(2, weigh_by=lambda batch: weight))


def test_a_guard_does_not_see_the_nan_of_what_counts_nothing() -> None:
    data = token_batches(4, empty=(1,))
    trainer, _ = run(data, tokens(), lt.NonFiniteGuard(), lt.LossSpikeGuard("warn"))
    assert lt.step_ledger(trainer)[0].applied == 1
    assert [one.num_events for one in trainer.callbacks if isinstance(one, lt.NonFiniteGuard)] == [0]
    assert torch.isfinite(trainer.callback_metrics["accumulation/loss"])


def test_what_a_hook_changes_on_the_device_is_weighed_after_it() -> None:
    class Masks(Transformer):
        """Half of each batch's labels are dropped once it is on the device."""

        def on_after_batch_transfer(self, batch, dataloader_idx):
            labels = batch["labels"].clone()
            labels[:, : cases.LENGTH // 2] = cases.IGNORED
            return {**batch, "labels": labels}

    data = token_batches(4)
    masked = [Transformer.on_after_batch_transfer(Transformer(), batch, 0) for batch in data]
    masked = [Masks.on_after_batch_transfer(None, batch, 0) for batch in masked]
    _, module = run(data, tokens(), module=seeded(Masks).double())
    assert largest_relative_error(module, large_batch_run([masked], dtype=torch.float64)) < 1e-12


def test_no_batch_is_weighed_twice_and_none_of_validation() -> None:
    seen = []

    def count(batch) -> int:
        seen.append(len(batch[0]))
        return len(batch[0])

    quiet_trainer(lt.GradientAccumulation(2, weigh_by=count), num_sanity_val_steps=2).fit(Net(), loader(), loader())
    assert seen == [4] * 7


# The Trainer's own numbers


class Asks(Net):
    def configure_optimizers(self):
        self.estimate = self.trainer.estimated_stepping_batches
        self.micro_batches = self.trainer.accumulate_grad_batches
        return super().configure_optimizers()


@pytest.mark.parametrize(
    ("steps", "options", "expected"),
    [
        (3, {}, 9),
        (3, {"carry_over": True}, 7),
        ({0: 1, 2: 5}, {"carry_over": True}, 6),
        ({0: 1, 2: 5}, {}, 7),
        ({"epoch": {0: 7, 2: 1}}, {}, 9),
    ],
)
def test_the_estimated_steps_are_those_that_are_taken(steps, options, expected: int) -> None:
    module = Asks()
    schedule = lt.WarmupCosineScheduler(0)
    trainer = fit(module, lt.GradientAccumulation(steps, **options), schedule, max_epochs=3)
    assert module.estimate == trainer.global_step == lt.step_ledger(trainer)[0].applied == expected
    assert float(trainer.optimizers[0].param_groups[0]["lr"]) == pytest.approx(0.1 * 0.01)  # the curve's end
    assert module.micro_batches == (steps if isinstance(steps, int) else steps.get("epoch", steps)[0])


def test_the_trainer_is_its_own_again_after_a_fit_and_an_error() -> None:
    for module in (Net(), Net(fail_at=3)):
        trainer = quiet_trainer(lt.GradientAccumulation(2))
        if module.fail_at is None:
            trainer.fit(module, loader())
        else:
            with pytest.raises(RuntimeError, match="boom"):
                trainer.fit(module, loader())
        assert type(trainer) is pl.Trainer
        assert trainer.accumulate_grad_batches == 1
        assert "_should_accumulate" not in vars(trainer.fit_loop.epoch_loop)
        assert "batch_to_device" not in vars(trainer.strategy)


class Pickles(pl.Callback):
    def on_train_batch_end(self, trainer, *args) -> None:
        self.kind = type(pickle.loads(pickle.dumps(trainer)))


def test_the_trainer_pickles_within_a_fit() -> None:
    callback = Pickles()
    quiet_trainer(lt.GradientAccumulation(2), callback).fit(Net(), loader())
    assert callback.kind is pl.Trainer


def test_batchnorm_is_named() -> None:
    with pytest.warns(UserWarning, match=r"3 BatchNorm layer\(s\) see micro-batches.*net\.0\.norm.*GroupNorm"):
        fit(Net(batchnorm=True), lt.GradientAccumulation(2))


def test_static_graph_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="static_graph=True"):
        fit(Net(), lt.GradientAccumulation(2), strategy=DDPStrategy(static_graph=True, process_group_backend="gloo"))


def test_ddp_reduces_once_a_window(two_processes) -> None:
    for reductions in two_processes.run(cases.reductions_under_ddp):
        assert reductions == [0, 0, 1, 0, 0, 1]


def test_an_import_path_that_leads_nowhere_says_so() -> None:
    with pytest.raises(ValueError, match=r"import path of one.*no_such_package"):
        lt.GradientAccumulation(weigh_by="no_such_package.count")
    with pytest.raises(TypeError, match="which is a int"):
        lt.GradientAccumulation(weigh_by="tests.accumulation_cases.LENGTH")


@pytest.mark.parametrize("ended", ["stopped", "failed"])
def test_nothing_of_an_open_window_reaches_a_later_fit(ended: str, two_processes) -> None:
    for error in two_processes.run(cases.error_of_a_fit_after_one_that, ended):
        assert error < 1e-12


def test_the_same_trainer_begins_a_new_window_after_a_fit_that_failed() -> None:
    data = token_batches(6)
    module = seeded(cases.Ends).double()
    module.ends = "failed"
    trainer = quiet_trainer(tokens(3))
    with pytest.raises(RuntimeError, match="boom"):
        trainer.fit(module, DataLoader(data, batch_size=None))
    module.ends, module.seen = "never", []
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit_loop.epoch_loop.batch_progress.reset()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.fit(module, DataLoader(data, batch_size=None))
    reference = Transformer().double()
    reference.load_state_dict(before)
    optimizer = reference.configure_optimizers()
    reference.loss(cases.union(data[:3])).backward()
    reference.on_before_optimizer_step(optimizer)
    module.seen = module.seen[:1]
    assert largest_relative_error(module, reference) < 1e-12


def test_the_last_epochs_end_is_a_step_before_checkpoints_are_written() -> None:
    class Steps(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module) -> None:
            self.steps = trainer.global_step

    callback = Steps()
    run(token_batches(6), tokens(4, carry_over=True), callback, max_epochs=3)
    assert callback.steps == 5


def test_a_batch_that_is_tried_again_counts_once() -> None:
    """By a module that catches an error after its backward."""

    class TriesAgain(FixedGradients):
        failed = False

        def on_after_backward(self) -> None:
            if not self.failed:
                self.failed = True
                raise RuntimeError("boom")

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None) -> None:
            try:
                super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            except RuntimeError:
                super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    assert steps_of(TriesAgain([[1.0], [2.0]]), lt.GradientAccumulation(1)) == [[1.0], [2.0]]


def test_an_optimizer_that_evaluates_its_closure_again_counts_a_batch_once() -> None:
    ours, plain = seeded(LbfgsNet), seeded(LbfgsNet)
    fit(ours, lt.GradientAccumulation(1), data=loader(26))  # the last batch is smaller
    fit(plain, data=loader(26))
    assert_same(weights(ours), weights(plain), rtol=0, atol=1e-5)


def test_a_fit_after_one_that_failed_begins_a_new_window() -> None:
    class FailsOnce(Transformer):
        failed = False

        def training_step(self, batch, batch_idx):
            if batch_idx == 2 and not self.failed:
                self.failed = True
                raise RuntimeError("boom")
            return super().training_step(batch, batch_idx)

    data = token_batches(4)
    module = seeded(FailsOnce).double()
    accumulation = tokens()
    with pytest.raises(RuntimeError, match="boom"):
        run(data, accumulation, module=module)
    run(data, accumulation, module=module)
    assert largest_relative_error(module, large_batch_run([data], dtype=torch.float64)) < 1e-12


class WithTokens(Transformer):
    def __init__(self) -> None:
        super().__init__()

    def train_dataloader(self):
        return DataLoader(token_batches(6), batch_size=None)


def test_a_mapping_and_an_import_path_come_from_yaml(tmp_path) -> None:
    arguments = {"steps": {0: 1, 1: 5}, "weigh_by": "tests.accumulation_cases.count_tokens"}
    config = {
        "callbacks": [{"class_path": "lightning_tricks.GradientAccumulation", "init_args": arguments}],
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "default_root_dir": str(tmp_path),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"trainer": config}))
    cli = LightningCLI(
        WithTokens, args=["--config", str(tmp_path / "run.yaml")], run=False, save_config_callback=None,
        seed_everything_default=0,
    )  # fmt: skip
    reference = Transformer()
    reference.load_state_dict(cli.model.state_dict())
    cli.trainer.fit(cli.model)
    data = token_batches(6)
    optimizer = reference.configure_optimizers()
    for window in (data[:1], data[1:]):
        optimizer.zero_grad()
        reference.loss(cases.union(window)).backward()
        optimizer.step()
    assert_same(weights(cli.model), weights(reference), rtol=0, atol=1e-6)


# What a loader, a module or a schedule may do


class Numbers(FixedGradients):
    """The gradient of a batch is the batch."""

    def __init__(self) -> None:
        super().__init__([[0.0]])

    def training_step(self, batch, batch_idx):
        return (self.weight * batch).sum()

    def validation_step(self, batch, batch_idx) -> None:
        pass


def numbers(*values: float | None) -> DataLoader:
    data = [None if value is None else torch.tensor([value]) for value in values]
    return DataLoader(data, batch_size=None, collate_fn=lambda one: one)


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("carry_over", [False, True])
def test_an_epoch_that_ends_with_none_ends_its_window(carry_over: bool, validates: bool) -> None:
    module = Numbers()
    trainer = quiet_trainer(lt.GradientAccumulation(4, carry_over=carry_over), max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, numbers(1.0, 4.0, None), numbers(1.0) if validates else None)
    assert [step.tolist() for step in module.applied] == ([[2.5]] if carry_over else [[2.5], [2.5]])


def test_an_epoch_that_a_hook_cuts_short_ends_its_window() -> None:
    class Skips(Numbers):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 else None

    module = Skips()
    fit(module, lt.GradientAccumulation(2), data=numbers(1.0, 2.0, 3.0, 4.0, 5.0), max_epochs=2)
    assert [step.item() for step in module.applied] == [1.5, 3.0, 1.5, 3.0]


def test_a_scheduler_does_not_move_on_a_batch_that_is_none() -> None:
    class Schedules(Numbers):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
            return [optimizer], [{"scheduler": self.schedule, "interval": "step"}]

    module = Schedules()
    fit(module, lt.GradientAccumulation(2), data=numbers(1.0, 2.0, None, 3.0, 4.0))
    assert [step.item() for step in module.applied] == [1.5, 3.5]
    assert module.schedule.last_epoch == 2


def test_a_length_that_is_too_long_does_not_join_epochs() -> None:
    class Promises(torch.utils.data.IterableDataset):
        def __len__(self) -> int:
            return 4

        def __iter__(self):
            return iter([torch.ones(1), torch.ones(1) * 3])

    module = Numbers()
    fit(module, lt.GradientAccumulation(4), data=DataLoader(Promises(), batch_size=None), max_epochs=2)
    assert [step.item() for step in module.applied] == [2.0, 2.0]


def test_a_loss_inside_of_a_reentrant_checkpoint_poisons_nothing() -> None:
    class Reentrant(Numbers):
        def training_step(self, batch, batch_idx):
            mean = lambda x: (x * self.weight * batch).sum() / batch.sum()  # noqa: E731
            return torch.utils.checkpoint.checkpoint(mean, torch.ones(1, requires_grad=True), use_reentrant=True)

    module = Reentrant()
    fit(module, lt.GradientAccumulation(2, weigh_by=torch.sum), data=numbers(3.0, 0.0))
    assert [step.item() for step in module.applied] == [1.0]


@pytest.mark.parametrize(("steps", "save_at"), [({0: 1, 2: 4}, 4), ({"epoch": {0: 2, 1: 4}}, 9), (4, 5)])
def test_a_window_of_a_schedule_resumes_with_its_own_size(steps, save_at: int, tmp_path) -> None:
    data, how = token_batches(7), {"max_epochs": 2}
    path = tmp_path / "open.ckpt"
    _, whole = run(data, tokens(steps), cases.Save(save_at, path), **how)
    _, resumed = run(data, tokens(steps), module=seeded(Transformer, 9), ckpt_path=path, **how)
    assert_same(weights(resumed), weights(whole))


def test_a_window_keeps_its_size_where_a_resumed_run_has_another(tmp_path) -> None:
    data, path = token_batches(6), tmp_path / "open.ckpt"
    run(data, tokens(4), cases.Save(2, path), dtype=torch.float64)
    _, resumed = run(data, tokens(2), module=seeded(Transformer, 9).double(), ckpt_path=path)
    reference = large_batch_run([data[:4], data[4:]], dtype=torch.float64)
    assert largest_relative_error(resumed, reference) < 1e-12


def test_an_error_in_the_last_step_leaves_nothing_behind() -> None:
    class FailsAtTheEnd(Numbers):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None) -> None:
            if len(self.applied) == 1:
                raise RuntimeError("boom")
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    accumulation = lt.GradientAccumulation(2)
    with pytest.raises(RuntimeError, match="boom"):
        fit(FailsAtTheEnd(), accumulation, cases.Stop(3), data=numbers(1.0, 2.0, 3.0, 4.0))
    module = Numbers()
    fit(module, accumulation, data=numbers(1.0, 2.0, 3.0, 4.0))
    assert [step.item() for step in module.applied] == [1.5, 3.5]


def test_a_rollback_begins_a_new_window() -> None:
    """The spike is in the second window; its own micro-batches and those of the next one are weighed apart."""
    values = [1.0] * 40
    values[33] = 1e6
    module = Numbers()
    guard = lt.LossSpikeGuard("rollback", warmup_steps=4, window_steps=8, snapshot_every_steps=2)
    trainer = fit(module, lt.GradientAccumulation(2), guard, data=numbers(*values, 1.0))
    assert lt.step_ledger(trainer)[0].rolled_back == 1
    assert [step.item() for step in module.applied if step.item() < 10] == [1.0] * len(module.applied)
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == trainer.global_step


def test_no_value_is_read_on_ordinary_steps(monkeypatch) -> None:
    data = token_batches(12)
    tricks = [
        lt.GradientAccumulation(3),
        lt.EarlyGradientRelease(),
        lt.GradientNoiseScaleMonitor(),
        lt.MicroBatching(2),
    ]
    reads = count_reads(monkeypatch)
    run(data, log_every_n_steps=1000, module=seeded(Transformer))
    of_lightning = len(reads)
    reads.clear()
    run(data, *tricks, log_every_n_steps=1000, module=seeded(Transformer))
    assert len(reads) == of_lightning


def test_a_weight_of_numpy_counts() -> None:
    module = Numbers()
    fit(module, lt.GradientAccumulation(2, weigh_by=lambda batch: np.int64(batch.item())), data=numbers(1.0, 3.0))
    assert [step.item() for step in module.applied] == [2.5]


def test_a_run_of_many_epochs_is_estimated_at_once() -> None:
    module = Asks()
    fit(module, lt.GradientAccumulation({0: 1, 3: 4}), max_epochs=10**12, max_steps=2)
    assert module.estimate == 2
