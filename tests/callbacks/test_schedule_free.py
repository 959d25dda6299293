"""Schedule-free optimizers: the weights that they mean are seen, saved and kept, the others trained on."""

import lightning.pytorch as pl
import pytest
import schedulefree
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_tricks as lt
from tests.models import Net, assert_same, fit, loader, seeded, trainer, weights


class Free(Net):
    """With the optimizers as their package makes them: in no mode yet."""

    kind = "AdamWScheduleFree"

    def configure_optimizers(self):
        return getattr(schedulefree, self.kind)(self.parameters(), lr=0.02)


class FreeSGD(Free):
    kind = "SGDScheduleFree"


class FreeRAdam(Free):
    kind = "RAdamScheduleFree"


def by_hand(kind: type[Free], epochs: int = 2) -> tuple[Free, dict, list[float]]:
    """A loop as the package's documentation has it; the weights after, those that steps are taken on, and scores."""
    module = seeded(kind)
    optimizer, scores = module.configure_optimizers(), []
    for _ in range(epochs):
        optimizer.train()
        for batch in loader():
            module.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        raw = {name: one.clone() for name, one in weights(module).items()}
        optimizer.eval()
        with torch.no_grad():
            scores.append(sum(module.loss(batch).item() for batch in loader()) / len(loader()))
    return module, raw, scores


@pytest.mark.parametrize("kind", [Free, FreeSGD, FreeRAdam])
def test_equals_the_loop_of_the_package(kind: type[Free]) -> None:
    scores = []

    class Scores(pl.Callback):
        def on_validation_end(self, trainer, pl_module) -> None:
            scores.append(float(trainer.callback_metrics["val_loss"]))

    module = seeded(kind)
    run = trainer(lt.ScheduleFree(), Scores(), max_epochs=2, num_sanity_val_steps=0)
    run.fit(module, loader(), loader())
    expected, _, expected_scores = by_hand(kind)
    assert_same(weights(module), weights(expected), rtol=0, atol=1e-6)
    assert scores == pytest.approx(expected_scores, rel=1e-5)
    assert not run.optimizers[0].param_groups[0]["train_mode"]


def test_looks_leave_no_trace() -> None:
    """Validation and saving in the middle do not change a bit of what training does."""
    seen = []
    for interval in (7, 1):
        module = seeded(Free)
        run = trainer(lt.ScheduleFree(), val_check_interval=interval, num_sanity_val_steps=0)
        run.fit(module, loader(), loader())
        seen.append(weights(module))
    assert_same(seen[0], seen[1])


def test_checkpoints_hold_what_was_scored(tmp_path) -> None:
    saver = ModelCheckpoint(tmp_path / "full", monitor="val_loss")
    alone = ModelCheckpoint(tmp_path / "alone", monitor="val_loss", mode="max", save_weights_only=True)
    held = {}

    class Look(pl.Callback):
        def on_validation_epoch_end(self, trainer, pl_module) -> None:
            held["scored"] = weights(pl_module)

        def on_train_epoch_end(self, trainer, pl_module) -> None:
            held["live"] = weights(pl_module)

    run = trainer(lt.ScheduleFree(), Look(), saver, alone, enable_checkpointing=True, num_sanity_val_steps=0)
    run.fit(seeded(Free), loader(), loader())
    full, only = (torch.load(one.best_model_path, weights_only=True) for one in (saver, alone))
    assert_same(full["state_dict"], held["scored"])
    assert_same(only["state_dict"], held["scored"])
    assert_same(full["callbacks"]["ScheduleFree"]["raw"], held["live"])
    assert full["optimizer_states"][0]["param_groups"][0]["train_mode"] is False
    other = Free()
    lt.load_averaged_weights(other, saver.best_model_path)
    assert_same(weights(other), held["scored"])


def test_a_checkpoint_after_fit_resumes_bit_for_bit(tmp_path) -> None:
    whole, resumed = seeded(Free), Free()
    fit(whole, lt.ScheduleFree(), max_epochs=2)
    run = fit(seeded(Free), lt.ScheduleFree(), max_epochs=1)
    run.save_checkpoint(tmp_path / "a.ckpt")
    trainer(lt.ScheduleFree(), max_epochs=2).fit(resumed, loader(), ckpt_path=tmp_path / "a.ckpt")
    assert_same(weights(whole), weights(resumed))


@pytest.mark.parametrize("hook", ["on_validation_epoch_start", "validation_step", "on_validation_epoch_end"])
def test_interrupted_in_validation_the_weights_of_training_come_back(hook: str) -> None:
    before = []

    def fail(*args) -> None:
        raise RuntimeError("boom")

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args) -> None:
            before.append(weights(pl_module))

    module = seeded(Free)
    setattr(module, hook, fail)
    run = trainer(lt.ScheduleFree(), Watch(), val_check_interval=3, num_sanity_val_steps=0)
    with pytest.raises(RuntimeError, match="boom"):
        run.fit(module, loader(), loader())
    assert_same(weights(module), before[-1])
    assert run.optimizers[0].param_groups[0]["train_mode"]


def test_without_such_an_optimizer_it_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"SingleDeviceStrategy, got SGD: return schedulefree.AdamW"):
        fit(Net(optimizer="sgd"), lt.ScheduleFree())


@pytest.mark.parametrize("hook", ["on_before_zero_grad", "on_before_backward", "on_after_backward"])
def test_saving_in_the_middle_of_a_step_changes_nothing(hook: str, tmp_path) -> None:
    found = []
    for saves in (False, True):
        saver = pl.Callback()
        if saves:
            setattr(saver, hook, lambda trainer, *args: trainer.save_checkpoint(tmp_path / "a.ckpt"))
        module = seeded(Free)
        fit(module, lt.ScheduleFree(), saver)
        found.append(weights(module))
    assert_same(found[0], found[1])


def test_after_an_exception_a_checkpoint_resumes_bit_for_bit_on_the_same_trainer(tmp_path) -> None:
    whole = seeded(Free)
    fit(whole, lt.ScheduleFree(), max_epochs=2)
    module = seeded(lambda: Free())
    fit(module, lt.ScheduleFree(), max_epochs=1).save_checkpoint(tmp_path / "a.ckpt")
    run, other = trainer(lt.ScheduleFree(), max_epochs=2), Free(fail_at=3)
    with pytest.raises(RuntimeError, match="boom"):
        run.fit(other, loader())
    resumed = Free()
    run.fit(resumed, loader(), ckpt_path=tmp_path / "a.ckpt")
    assert_same(weights(resumed), weights(whole))
