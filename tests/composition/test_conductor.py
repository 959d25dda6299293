"""Order, conflicts, undo, the table, and a trick written by a user."""

import copy
import io
import pickle
import sys
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console

import lightning_tricks as lt
from lightning_tricks._lightning import unsupported_strategy
from lightning_tricks.composition.report import print_table
from tests.models import FixedGradients, Net, assert_same, fit, fp16, loader, seeded, trainer, weights


class Recorder(lt.Trick):
    """A user's trick: notes when it is called, and changes nothing."""

    order: list[str] = []  # noqa: RUF012

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.order.append(type(self).__name__)


class Reweighs(Recorder):
    touches = lt.Touches.GRADIENT_WEIGHTS


class Measures(Recorder):
    touches = lt.Touches.GRADIENTS_READ


class Guards(Recorder):
    touches = lt.Touches.STEP


class Clips(Recorder):
    touches = lt.Touches.GRADIENTS


class UsersOwn(pl.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        Recorder.order.append("UsersOwn")


def test_order_in_the_list_does_not_matter() -> None:
    for callbacks in ([Clips(), Guards(), Measures(), Reweighs()], [Guards(), Reweighs(), Clips(), Measures()]):
        Recorder.order.clear()
        fit(Net(), *callbacks, limit_train_batches=1)
        assert Recorder.order == ["Reweighs", "Measures", "Guards", "Clips"]


def test_other_callbacks_keep_their_places() -> None:
    Recorder.order.clear()
    run = fit(Net(), UsersOwn(), Clips(), Measures(), limit_train_batches=1)
    assert Recorder.order == ["UsersOwn", "Measures", "Clips"]
    assert [type(callback).__name__ for callback in run.callbacks] == ["Conductor", "UsersOwn", "Measures", "Clips"]


def test_a_veto_reaches_later_tricks_as_no_gradients() -> None:
    class Vetoes(lt.Trick):
        touches = lt.Touches.STEP

        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            step = lt.current_step(trainer, optimizer)
            if trainer.global_step == 1:
                assert step.veto(True)
                assert step.parameters() == []

    module = FixedGradients([[1.0], [1.0], [1.0]])
    run = fit(module, Vetoes(), lt.GradientNormClipping(10.0))
    assert module.weight.item() == -2.0
    assert lt.step_ledger(run)[0].skipped_guard == 1


class Around(Recorder):
    def run_training_step(self, trainer, module, step, *args, **kwargs):
        self.order.append(f"enter {type(self).__name__}")
        output = step(*args, **kwargs)
        self.order.append(f"leave {type(self).__name__}")
        return output


class AroundOutside(Around):
    touches = lt.Touches.RANDOM_STATE


class CopiesItself(Net):
    def on_train_batch_start(self, batch, batch_idx) -> None:
        Recorder.order.append("copy")
        for copied in (copy.deepcopy(self), pickle.loads(pickle.dumps(self))):
            copied.training_step(batch, batch_idx)


def test_tricks_around_a_training_step_lie_in_each_other_and_leave_nothing() -> None:
    Recorder.order.clear()
    module = seeded(CopiesItself)
    fit(module, AroundOutside(), Around(), limit_train_batches=1)
    steps = ["enter AroundOutside", "enter Around", "leave Around", "leave AroundOutside"]
    assert Recorder.order == ["copy", *steps, *["Around", "AroundOutside"]]  # at last the optimizer's step
    assert "training_step" not in vars(module)
    for callbacks in ([Around()], [AroundOutside(), Around()]):
        module = Net(fail_at=0)
        with pytest.raises(RuntimeError, match="boom"):
            fit(module, *callbacks)
        assert "training_step" not in vars(module)


def test_current_step_is_known_in_its_hook_only() -> None:
    run = fit(Net(), lt.LossScaleMonitor())
    with pytest.raises(RuntimeError, match="on_before_optimizer_step"):
        lt.current_step(run, torch.optim.SGD(Net().parameters()))


def test_two_of_a_job_are_refused_naming_both() -> None:
    with pytest.raises(MisconfigurationException, match="GradientValueClipping and GradientNormClipping would"):
        fit(Net(), lt.GradientValueClipping(1.0), lt.GradientNormClipping())


def test_nothing_is_changed_by_a_refusal() -> None:
    module = seeded(Net)
    before = weights(module)
    run = trainer(lt.ActivationCheckpointing(), lt.GradientNormClipping(), lt.GradientValueClipping(1.0))
    with pytest.raises(MisconfigurationException):
        run.fit(module, loader())
    assert not {"setup", "configure_model", "forward"} & vars(module).keys()
    assert all("forward" not in vars(part) for part in module.modules())
    assert "optimizer_step" not in vars(run.strategy)
    assert_same(weights(module), before)


def test_strategies_that_cannot_be_right_are_refused_with_a_reason() -> None:
    """FSDP1 does not start on CPU, so its strategy is only shown to the function that judges it."""
    fsdp = SimpleNamespace(strategy=FSDPStrategy.__new__(FSDPStrategy))
    assert "PL#19235" in unsupported_strategy(fsdp)
    assert unsupported_strategy(trainer()) is None


def test_another_packages_trainer_is_named() -> None:
    run = pytorch_lightning.Trainer(
        callbacks=[lt.GradientNormClipping()],
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters())

    with pytest.raises(TypeError, match=r"import lightning\.pytorch as pl"):
        run.fit(Module(), loader())


def test_table_says_what_was_found(monkeypatch) -> None:
    found = {}

    class Prints(pl.Callback):
        def on_train_batch_start(self, trainer, *args) -> None:
            console = Console(file=io.StringIO(), width=200)
            tricks = [callback for callback in trainer.callbacks if isinstance(callback, lt.Trick)]
            print_table(trainer, tricks, console)
            found["text"] = console.file.getvalue()

    callbacks = [
        lt.ExactResume(),
        lt.WarmupCosineScheduler(2),
        lt.GradientNormClipping(0.5),
        lt.ActivationCheckpointing(),
        lt.LossScaleMonitor(),
    ]
    fit(Net(), *callbacks, Prints(), plugins=fp16(2.0**8))
    text = found["text"]
    for words in ("3 blocks: net.0, net.1, net.2", "norm at most 0.5", "2 steps of warmup, 7 in all", "loss scale 256"):
        assert words in text
    rows = [line for line in text.splitlines() if "│" in line]
    assert "ActivationCheckpointing" in rows[0]  # in the order in which they run
    assert "ExactResume" in rows[-1]


def test_table_is_printed_once_at_the_start_on_rank_zero(capsys) -> None:
    fit(Net(), lt.WarmupCosineScheduler(2), lt.GradientNormClipping())
    printed = capsys.readouterr().out
    assert printed.count("norm at most 1.0") == 1
    assert "optimizer 0: 2 steps of" in printed  # resolved, although the conductor comes before the schedule


def test_undo_also_after_keyboard_interrupt(monkeypatch) -> None:
    module = seeded(Net)

    def interrupt(*args) -> None:
        raise KeyboardInterrupt

    module.on_train_batch_end = interrupt
    run = trainer(lt.ActivationCheckpointing(), lt.WarmupCosineScheduler(2))
    monkeypatch.setattr(sys, "exit", lambda code: None)
    run.fit(module, loader())
    assert "forward" not in vars(module.net[0])
    assert "optimizer_step" not in vars(run.strategy)
    assert run.lr_scheduler_configs == []


def test_learning_rate_finder_leaves_no_trace() -> None:
    module = seeded(lambda: Net(lr=0.01))
    module.lr = 0.01
    run = trainer(lt.GradientNormClipping(), lt.LossScaleMonitor(), max_epochs=1)
    Tuner(run).lr_find(module, loader(), num_training=5, update_attr=False)
    run.fit(module, loader())
    assert lt.step_ledger(run)[0].total == 7


def test_learning_rate_finder_as_a_callback_leaves_no_trace() -> None:
    """It runs its trial steps in the middle of the start of fit, with callbacks of its own."""

    class Told(lt.Trick):
        steps = 0

        def after_step(self, trainer, module, step) -> None:
            self.steps += 1

    tried, told = [], Told()
    for tricks in ([], [told, lt.GradientNormClipping(), lt.WarmupCosineScheduler(2)]):
        module = seeded(lambda: Net(optimizer="sgd"))
        module.lr = 0.01
        finder = LearningRateFinder(num_training_steps=5, update_attr=False)
        run = trainer(*tricks, finder, max_epochs=1)
        run.fit(module, loader())
        tried.append((finder.optimal_lr.results["lr"], finder.optimal_lr.results["loss"]))
    assert tried[0] == tried[1]  # at the finder's rates, not at the schedule's
    assert told.steps == 7
    assert lt.step_ledger(run)[0].total == 7


def test_module_may_bring_tricks_itself() -> None:
    class Brings(Net):
        def configure_callbacks(self):
            return [lt.GradientNormClipping(0.1)]

    run = fit(Brings(), lt.LossScaleMonitor())
    assert "grad/norm" in run.callback_metrics
    assert [type(callback).__name__ for callback in run.callbacks][:3] == [
        "Conductor",
        "GradientNormClipping",
        "LossScaleMonitor",
    ]


def test_loggers_receive_the_keys_on_logged_steps_only(tmp_path) -> None:
    logged = []

    class Logger(pl.loggers.CSVLogger):
        def log_metrics(self, metrics, step=None) -> None:
            if "grad/norm" in metrics:
                logged.append((step, sorted(key for key in metrics if "/" in key)))

    fit(Net(), lt.GradientNormClipping(), logger=Logger(tmp_path), log_every_n_steps=3, max_epochs=2)
    keys = ["grad/clip_coefficient", "grad/clip_rate", "grad/norm", "step/applied", "step/skipped"]
    assert logged == [(step, keys) for step in (2, 5, 8, 11)]
