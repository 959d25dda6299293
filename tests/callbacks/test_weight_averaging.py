"""Averages of weights in a Trainer: when they move, who sees them, and what a checkpoint holds."""

import pickle

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

import lightning_tricks as lt
from tests.averaging_cases import averaged, averaged_under, averages_of_shards
from tests.distributed_cases import BY_HAND
from tests.models import FixedGradients, Net, TwoOptimizers, assert_same, fit, fp16, loader, seeded, trainer, weights

INF = float("inf")


def parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in module.named_parameters()}


class Raw(pl.Callback):
    """The weights after each applied step of optimizer 0, the first entry being those before training."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_train_start(self, trainer, pl_module) -> None:
        self.seen.append(parameters(pl_module))

    def on_train_batch_end(self, trainer, pl_module, *args) -> None:
        if lt.step_ledger(trainer)[0].applied == len(self.seen):
            self.seen.append(parameters(pl_module))


def slow_average(seen: list[dict[str, torch.Tensor]], decay: float, *, warmup: bool = True) -> dict[str, torch.Tensor]:
    average = {name: one.double() for name, one in seen[0].items()}
    for n, raw in enumerate(seen[1:]):
        d = min(decay, (1 + n) / (10 + n)) if warmup else decay
        average = {name: d * average[name] + (1 - d) * raw[name].double() for name in average}
    return {name: one.float() for name, one in average.items()}


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"precision": "bf16-mixed"}])
@pytest.mark.parametrize("warmup", [True, False])
def test_after_fit_the_module_holds_the_average(options: dict, warmup: bool) -> None:
    raw, module = Raw(), seeded(Net)
    fit(module, lt.ExponentialMovingAverage(0.7, decay_warmup=warmup), raw, max_epochs=2, **options)
    assert_same(parameters(module), slow_average(raw.seen, 0.7, warmup=warmup), rtol=0, atol=1e-6)


def test_half_life_and_start_step() -> None:
    raw, module = Raw(), seeded(Net)
    fit(module, lt.ExponentialMovingAverage(half_life_steps=2, start_step=3, decay_warmup=False), raw)
    assert_same(parameters(module), slow_average(raw.seen[3:], 0.5**0.5, warmup=False), rtol=0, atol=1e-6)


def test_case_26_an_average_that_never_starts_leaves_the_trained_weights() -> None:
    """Start at step 1000 in a run of 10."""
    seen, scored = [], {}
    for callbacks in ([], [lt.ExponentialMovingAverage(start_step=1000)]):
        module = seeded(Net)
        run = trainer(*callbacks, max_steps=10, max_epochs=2)
        run.fit(module, loader(), loader())
        seen.append(weights(module))
        scored[len(callbacks)] = float(run.callback_metrics["val_loss"])
    assert_same(seen[0], seen[1])
    assert scored[0] == scored[1]


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_steps_do_not_move_it(fused: bool) -> None:
    raw = Raw()
    module = FixedGradients([[1.0], [INF], [INF], [2.0], [INF], [3.0]], lr=1.0, fused=fused)
    run = fit(module, lt.ExponentialMovingAverage(0.5, decay_warmup=False), plugins=fp16(2.0**4))
    assert lt.step_ledger(run)[0].applied == 3
    assert raw.seen == []
    assert module.weight.item() == pytest.approx(-(0.5 * 6 + 0.25 * 3 + 0.125 * 1))


def test_each_optimizers_parameters_by_its_own_steps() -> None:
    """The head steps with every second batch."""
    module, raw = seeded(TwoOptimizers), Raw()
    fit(module, lt.ExponentialMovingAverage(0.5, decay_warmup=False), raw)
    heads = [raw.seen[0], *raw.seen[1::2]]
    found, body = parameters(module), slow_average(raw.seen, 0.5, warmup=False)
    head = slow_average(heads, 0.5, warmup=False)
    assert_same(found, {name: (head if "net.3" in name else body)[name] for name in found}, rtol=0, atol=1e-6)


def test_accumulation_1_and_4_have_the_same_curve() -> None:
    """At the same number of applied steps the decays are the same ones."""

    def decays(**options) -> list[float]:
        seen = []

        class Probe(pl.Callback):
            def on_train_batch_end(self, trainer, *args) -> None:
                if lt.step_ledger(trainer)[0].applied > len(seen):
                    seen.append(float(trainer.callback_metrics["ema/decay"]))

        fit(Net(), lt.ExponentialMovingAverage(0.3), Probe(), **options)
        return seen

    whole = decays()
    assert decays(accumulate_grad_batches=4, max_epochs=3) == whole[:6]
    assert whole == pytest.approx([min(0.3, (1 + n) / (10 + n)) for n in range(7)])


def test_distance_is_logged() -> None:
    module = FixedGradients([[3.0, 4.0]], lr=1.0)
    run = fit(module, lt.ExponentialMovingAverage(0.8, decay_warmup=False))
    assert float(run.callback_metrics["ema/distance"]) == pytest.approx(0.8 * 5)


# Validation


class Sees(pl.Callback):
    """The weights in each hook of validation, and in training after it."""

    HOOKS = (
        "on_validation_start",
        "on_validation_epoch_start",
        "on_validation_batch_start",
        "on_validation_batch_end",
        "on_validation_epoch_end",
    )

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, torch.Tensor]] = {}
        self.training: list[dict[str, torch.Tensor]] = []
        for hook in self.HOOKS:
            setattr(self, hook, lambda trainer, module, *args, hook=hook: self.see(hook, module))

    def see(self, hook: str, module: nn.Module) -> None:
        self.seen[hook] = parameters(module)

    def on_train_batch_start(self, trainer, pl_module, *args) -> None:
        self.training.append(parameters(pl_module))


@pytest.mark.parametrize("validates", [True, False])
def test_validation_sees_the_average_and_training_does_not(validates: bool) -> None:
    raw, sees = Raw(), Sees()
    average = lt.ExponentialMovingAverage(0.5, validate_with_average=validates)
    run = trainer(average, raw, sees, max_epochs=2, num_sanity_val_steps=2)
    run.fit(seeded(Net), loader(), loader())
    expected = slow_average(raw.seen, 0.5) if validates else raw.seen[-1]
    assert set(sees.seen) == set(Sees.HOOKS)
    for seen in sees.seen.values():
        assert_same(seen, expected, rtol=0, atol=1e-6)
    assert len(sees.training) == 14
    for seen, expected in zip(sees.training, raw.seen, strict=False):
        assert_same(seen, expected)


PLACES = [
    *(("callback", hook) for hook in (*Sees.HOOKS, "on_validation_end")),
    *(("module", hook) for hook in (*Sees.HOOKS, "on_validation_end", "validation_step", "on_validation_model_train")),
]


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(("where", "hook"), PLACES)
def test_interrupted_in_validation_the_raw_weights_come_back(where: str, hook: str, kind: type, tmp_path) -> None:
    raw, module = Raw(), seeded(Net)

    def fail(*args, **kwargs):
        if lt.step_ledger(run)[0].applied == 3:
            raise kind("boom")

    faulty = pl.Callback()
    setattr(faulty if where == "callback" else module, hook, fail)
    average = lt.ExponentialMovingAverage(0.5)
    run = trainer(average, raw, faulty, val_check_interval=3, num_sanity_val_steps=0)
    with pytest.raises((kind, SystemExit)):
        run.fit(module, loader(), loader())
    assert len(raw.seen) == 4
    assert_same(parameters(module), raw.seen[-1])
    run.save_checkpoint(tmp_path / "after.ckpt")
    checkpoint = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert_same(checkpoint["callbacks"]["ExponentialMovingAverage"]["raw"], raw.seen[-1])
    assert_same(checkpoint["state_dict"], slow_average(raw.seen, 0.5), rtol=0, atol=1e-6)


# Checkpoints


class Holds(pl.Callback):
    """What validation saw last, to hold checkpoints against."""

    def on_validation_epoch_end(self, trainer, pl_module) -> None:
        self.scored = weights(pl_module)


def test_every_kind_of_checkpoint_holds_what_was_scored(tmp_path) -> None:
    raw, holds = Raw(), Holds()
    full = ModelCheckpoint(tmp_path / "full", monitor="val_loss", save_top_k=-1)
    alone = ModelCheckpoint(tmp_path / "alone", mode="max", monitor="val_loss", save_top_k=-1, save_weights_only=True)
    saved = {}

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            if trainer.current_epoch == 1 and batch_idx == 0:
                for one in (full, alone):
                    path = next(iter(one.best_k_models))
                    saved[one.save_weights_only] = torch.load(path, weights_only=True), holds.scored, raw.seen[-1]

    module = seeded(lambda: Net(batchnorm=True))
    run = trainer(
        lt.ExponentialMovingAverage(0.5, average_buffers=True),
        *(raw, holds, full, alone, Look()),
        max_epochs=2,
        enable_checkpointing=True,
        num_sanity_val_steps=0,
    )
    run.fit(module, loader(), loader())
    for checkpoint, scored, live in saved.values():
        assert_same(checkpoint["state_dict"], scored)
        assert not torch.equal(live["net.0.linear.weight"], scored["net.0.linear.weight"])
    checkpoint, _, live = saved[False]
    entry = checkpoint["callbacks"]["ExponentialMovingAverage"]
    assert entry["average"] == {}  # nothing twice
    assert {name for name in entry["raw"] if "running" in name} == {
        f"net.{i}.norm.running_{s}" for i in range(3) for s in ("mean", "var")
    }
    assert_same({name: entry["raw"][name] for name in live}, live)
    assert "callbacks" not in saved[True][0]

    for one in (full, alone):
        other = Net(batchnorm=True)
        lt.load_averaged_weights(other, one.best_model_path)
        assert_same(weights(other), torch.load(one.best_model_path, weights_only=True)["state_dict"])
    score = trainer().validate(other, loader(), verbose=False)[0]["val_loss"]
    assert score == pytest.approx(float(alone.best_model_score))


def test_a_file_without_an_average_is_refused(tmp_path) -> None:
    fit(Net()).save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match=r"plain.ckpt has none: it was written without Exponential"):
        lt.load_averaged_weights(Net(), tmp_path / "plain.ckpt")
    fit(Net(), lt.ExponentialMovingAverage(start_step=100)).save_checkpoint(tmp_path / "early.ckpt")
    with pytest.raises(ValueError, match="before the average began"):
        lt.load_averaged_weights(Net(), tmp_path / "early.ckpt")
    torch.save(Net().state_dict(), tmp_path / "bare.pt")
    with pytest.raises(ValueError, match=r'with "state_dict", got .*bare.pt'):
        lt.load_averaged_weights(Net(), tmp_path / "bare.pt")
    with pytest.raises(TypeError, match=r"`module` to be a torch.nn.Module, got None"):
        lt.load_averaged_weights(None, tmp_path / "bare.pt")
    fit(Net(), lt.ExponentialMovingAverage()).save_checkpoint(tmp_path / "average.ckpt")
    with pytest.raises(RuntimeError, match=r"size mismatch|Missing"):
        lt.load_averaged_weights(Net(width=16), tmp_path / "average.ckpt")


def test_a_checkpoint_whose_parameters_no_longer_match(tmp_path) -> None:
    class Other(Net):
        strict_loading = False

        def __init__(self) -> None:
            super().__init__()
            self.net[0].linear = nn.Sequential(self.net[0].linear)

    run = fit(Net(), lt.ExponentialMovingAverage(), max_epochs=1)
    run.save_checkpoint(tmp_path / "a.ckpt")
    other = trainer(lt.ExponentialMovingAverage(), max_epochs=2)
    with pytest.raises(
        ValueError, match=r"(?s)parameters of Other.*got 2 that are not: net.0.linear.bias, net.0.linear"
    ):
        other.fit(Other(), loader(), ckpt_path=tmp_path / "a.ckpt")


class BFloat(Net):
    def loss(self, batch):
        return super().loss([one.bfloat16() for one in batch])


def test_sixteen_bit_weights_resume_exactly(tmp_path) -> None:
    """The checkpoint's state dict has the average in 16 bits; its own lie beside."""

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, *args) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    options = {"max_epochs": 3, "precision": "bf16-true"}
    averages = [lt.ExponentialMovingAverage(0.99) for _ in range(2)]
    module = seeded(BFloat)
    fit(module, averages[0], Save(), **options)
    resumed = trainer(averages[1], **options)
    other = BFloat()
    resumed.fit(other, loader(), ckpt_path=tmp_path / "a.ckpt")
    assert_same(weights(module), weights(other))
    assert {one.dtype for one in averages[1].averages().values()} == {torch.float32}
    assert_same(averages[0].averages(), averages[1].averages())


def test_resumed_from_a_run_without_it_and_the_other_way_round(tmp_path) -> None:
    fit(seeded(Net), max_epochs=1).save_checkpoint(tmp_path / "plain.ckpt")
    raw, module = Raw(), Net()
    run = trainer(lt.ExponentialMovingAverage(0.5), raw, max_epochs=2)

    class Whole(Raw):  # the ledger begins at 7
        def on_train_batch_end(self, trainer, pl_module, *args) -> None:
            self.seen.append(parameters(pl_module))

    whole = Whole()
    run = trainer(lt.ExponentialMovingAverage(0.5), whole, max_epochs=2)
    run.fit(module, loader(), ckpt_path=tmp_path / "plain.ckpt")
    assert_same(parameters(module), slow_average(whole.seen, 0.5), rtol=0, atol=1e-6)
    run.save_checkpoint(tmp_path / "average.ckpt")
    other = Net()
    trainer(max_epochs=2).fit(other, loader(), ckpt_path=tmp_path / "average.ckpt")
    assert_same(weights(other), weights(module))


# The end, and after


def test_a_fit_that_goes_on_goes_on_with_the_raw_weights() -> None:
    whole, parts = (seeded(lambda: Net(optimizer="sgd")) for _ in range(2))
    fit(whole, lt.ExponentialMovingAverage(0.5), max_epochs=2)
    run = fit(parts, lt.ExponentialMovingAverage(0.5), max_epochs=1)
    run.fit_loop.max_epochs = 2
    run.fit(parts, loader())
    assert_same(weights(parts), weights(whole))


def test_a_fit_that_goes_on_with_other_weights_begins_with_these() -> None:
    module = seeded(Net)
    run = fit(module, lt.ExponentialMovingAverage(0.5), max_epochs=1)
    fresh = seeded(Net, 5)
    module.load_state_dict(fresh.state_dict())
    raw = Raw()
    run.callbacks.append(raw)
    run.fit_loop.max_epochs = 2
    run.fit(module, loader())
    assert_same(raw.seen[0], parameters(fresh))


def test_weights_that_become_trainable_join_with_their_value() -> None:
    class Unfreeze(pl.Callback):
        def on_fit_start(self, trainer, pl_module) -> None:
            pl_module.net[0].requires_grad_(False)

        def on_train_epoch_start(self, trainer, pl_module) -> None:
            pl_module.net[0].requires_grad_(trainer.current_epoch >= 1)

    raw, module = Raw(), seeded(lambda: Net(optimizer="sgd"))
    fit(module, lt.ExponentialMovingAverage(0.5, decay_warmup=False), raw, Unfreeze(), max_epochs=2)
    assert torch.equal(raw.seen[0]["net.0.linear.weight"], raw.seen[7]["net.0.linear.weight"])
    assert_same(parameters(module), slow_average(raw.seen, 0.5, warmup=False), rtol=0, atol=1e-6)


def test_a_rollback_takes_the_average_back() -> None:
    """The steps that were undone leave no trace in it."""
    raw = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args) -> None:
            applied = lt.step_ledger(trainer)[0].applied
            del raw[applied + 1 :]
            if applied == len(raw):
                raw.append(parameters(pl_module))

        def on_train_start(self, trainer, pl_module) -> None:
            raw.append(parameters(pl_module))

    module = seeded(lambda: Net(nan_at=(5,)))
    guard = lt.LossSpikeGuard("rollback", snapshot_every_steps=3, warmup_steps=2, window_steps=4, z_threshold=1e9)
    run = fit(module, guard, lt.ExponentialMovingAverage(0.6), Watch(), max_epochs=2)
    assert lt.step_ledger(run)[0].rolled_back == 2
    assert len(raw) == lt.step_ledger(run)[0].applied + 1
    assert_same(parameters(module), slow_average(raw, 0.6), rtol=0, atol=1e-6)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.net[1].linear.weight = self.net[0].linear.weight


def test_shared_weights_are_averaged_once_and_saved_under_both_names(tmp_path) -> None:
    raw, module = Raw(), seeded(Tied)
    average = lt.ExponentialMovingAverage(0.5)
    saved = {}

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module) -> None:
            trainer.save_checkpoint(tmp_path / "a.ckpt")
            saved.update(torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"])

    fit(module, average, raw, Save())
    assert "net.1.linear.weight" not in average.averages()
    assert torch.equal(saved["net.1.linear.weight"], saved["net.0.linear.weight"])
    torch.testing.assert_close(saved["net.0.linear.weight"], slow_average(raw.seen, 0.5)["net.0.linear.weight"])
    other = Tied()
    average.copy_to(other)
    assert_same(weights(other), weights(module))


def test_an_average_beside_the_weights_is_read_under_both_names_of_a_shared_one(tmp_path) -> None:
    """The state dict holds the weights of training there, under either name."""
    average = lt.StochasticWeightAverage(2)
    held = {}

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(tmp_path / "a.ckpt")
                held.update({name: one.clone() for name, one in average.averages().items()})

    fit(seeded(Tied), average, Save())
    other = Tied()
    lt.load_averaged_weights(other, tmp_path / "a.ckpt")
    assert_same(parameters(other), held)


def test_copy_to_another_module() -> None:
    average = lt.ExponentialMovingAverage(0.5, start_step=2)
    with pytest.raises(RuntimeError, match="expected an average that has begun"):
        average.copy_to(Net())
    copies = []

    class Copies(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, batch, outputs, batch_idx) -> None:
            if batch_idx == 6:
                average.copy_to(copies[0])

    copies.append(Net(batchnorm=True))
    module = seeded(lambda: Net(batchnorm=True))
    fit(module, average, Copies())
    assert_same(weights(copies[0]), weights(module))
    with pytest.raises(ValueError, match=r"averaged parameters of Net, but Linear lacks net\.0"):
        average.copy_to(nn.Linear(2, 2))
    again = pickle.loads(pickle.dumps(average))
    again.copy_to(module)
    assert_same(weights(copies[0]), weights(module))


def test_the_average_on_another_device() -> None:
    """As if the weights were elsewhere: through the buffer, which the CPU has no need of."""
    raw, module = Raw(), seeded(Net)
    average = lt.ExponentialMovingAverage(0.5, device="cpu")
    fit(module, average, raw)
    assert {one.device.type for one in averages_of(average)} == {"cpu"}
    assert_same(parameters(module), slow_average(raw.seen, 0.5), rtol=0, atol=1e-6)


def averages_of(average) -> list[torch.Tensor]:
    return list(average.averages().values())


def test_beside_lightnings_own_it_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="ExponentialMovingAverage and EMAWeightAveraging would both"):
        fit(Net(), lt.ExponentialMovingAverage(), EMAWeightAveraging())


# Stochastic weight averaging


def test_swa_is_the_mean_of_the_last_part() -> None:
    raw, module = Raw(), seeded(Net)
    run = fit(module, lt.StochasticWeightAverage(0.5, every_n_steps=3), raw, max_epochs=2)
    picked = raw.seen[7::3]
    assert len(picked) == 3
    assert_same(
        parameters(module),
        {name: torch.stack([one[name] for one in picked]).mean(0) for name in picked[0]},
        rtol=1e-5,
        atol=1e-6,
    )
    assert float(run.callback_metrics["swa/num_averaged"]) == 3


def test_swa_takes_the_statistics_of_batchnorm_anew() -> None:
    """Those of the average on the whole data, without logging, stepping or drawing random numbers that stay."""

    class Logs(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss)
            return loss

    module = seeded(lambda: Logs(batchnorm=True, dropout=0.2))
    after = []
    module.on_train_end = lambda: after.append(torch.rand(()))
    run = fit(module, lt.StochasticWeightAverage(3))
    reference = Net(batchnorm=True)
    reference.load_state_dict(module.state_dict())
    reference.net[0].dropout.p = reference.net[1].dropout.p = reference.net[2].dropout.p = 0.0
    torch.optim.swa_utils.update_bn(loader(), reference.net)
    found, expected = module.net[0].norm, reference.net[0].norm  # before any dropout
    torch.testing.assert_close(found.running_mean, expected.running_mean)
    torch.testing.assert_close(found.running_var, expected.running_var)
    assert found.num_batches_tracked == 7
    assert found.momentum == 0.1
    assert run.global_step == 7
    plain = seeded(lambda: Logs(batchnorm=True, dropout=0.2))
    plain.on_train_end = lambda: after.append(torch.rand(()))
    fit(plain, lt.StochasticWeightAverage(3, update_batchnorm=False))
    assert after[0] == after[1]


def test_swa_in_the_middle_is_part_of_a_checkpoint_but_not_its_weights(tmp_path) -> None:
    saved = {}

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(tmp_path / "a.ckpt")
                saved["live"] = weights(pl_module)

    fit(seeded(Net), lt.StochasticWeightAverage(2), Save())
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert_same(checkpoint["state_dict"], saved["live"])
    other = Net()
    lt.load_averaged_weights(other, tmp_path / "a.ckpt")
    assert_same(weights(other), checkpoint["callbacks"]["StochasticWeightAverage"]["average"])


class Own(lt.ExponentialMovingAverage):
    """The user's own class, whose name is another."""


class WithClass(Net):
    def __init__(self, activation: type = nn.GELU) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_files_with_objects_and_averages_of_other_names_are_read(tmp_path) -> None:
    module = WithClass()
    fit(module, Own(0.5)).save_checkpoint(tmp_path / "a.ckpt")
    other = WithClass()
    lt.load_averaged_weights(other, tmp_path / "a.ckpt", weights_only=False)
    assert_same(weights(other), weights(module))


KINDS_OF_AVERAGE = {
    "scored": lambda: lt.ExponentialMovingAverage(0.6),
    "beside": lambda: lt.ExponentialMovingAverage(0.6, validate_with_average=False),
    "equal": lambda: lt.StochasticWeightAverage(2),
}


@pytest.mark.parametrize("kind", KINDS_OF_AVERAGE)
@pytest.mark.parametrize("callback_first", [True, False])
def test_a_checkpoint_where_only_the_device_knows_has_the_last_step(kind: str, callback_first: bool, tmp_path) -> None:
    """A fused optimizer under a scaler: the verdict is read late, but before it is saved."""

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module) -> None:
            pass

        def on_train_batch_end(self, trainer, pl_module, *args) -> None:
            if trainer.fit_loop.total_batch_idx == 6:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    options = {"max_epochs": 2, "plugins": fp16(2.0**18)}
    whole, resumed = seeded(lambda: Net(fused=True)), Net(fused=True)
    callbacks = [KINDS_OF_AVERAGE[kind](), Save()]
    fit(whole, *(callbacks if callback_first else callbacks[::-1]), **options)
    run = trainer(KINDS_OF_AVERAGE[kind](), max_epochs=2, plugins=fp16(2.0**18))
    run.fit(resumed, loader(), ckpt_path=tmp_path / "a.ckpt")
    assert_same(weights(resumed), weights(whole))


def test_the_step_of_a_window_that_training_ends_in_counts() -> None:
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, batch, outputs, batch_idx) -> None:
            trainer.should_stop = batch_idx == 4

    found = []
    for fused in (False, True):
        module = seeded(lambda fused=fused: Net(fused=fused))
        tricks = [lt.GradientAccumulation(3, carry_over=True), lt.ExponentialMovingAverage(0.6)]
        run = fit(module, *tricks, Stop(), plugins=fp16(), max_epochs=3)
        assert lt.step_ledger(run)[0].applied == 2
        found.append(weights(module))
    assert_same(found[0], found[1], rtol=0, atol=1e-6)


def test_a_buffer_that_the_module_replaces_is_followed() -> None:
    class Center(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(1))

        def training_step(self, batch, batch_idx):
            self.center = self.center * 0.5 + 1.0
            return super().training_step(batch, batch_idx)

    module = seeded(Center)
    fit(module, lt.ExponentialMovingAverage(0.5, decay_warmup=False, average_buffers=True))
    live, average = 0.0, 0.0
    for _ in range(7):
        live = live * 0.5 + 1.0
        average = 0.5 * average + 0.5 * live
    assert module.center.item() == pytest.approx(average)


def test_weights_unfrozen_within_an_epoch_join_with_their_value() -> None:
    class Unfreeze(pl.Callback):
        def on_fit_start(self, trainer, pl_module) -> None:
            pl_module.net[0].requires_grad_(False)

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            pl_module.net[0].requires_grad_(batch_idx >= 2)

    raw, module = Raw(), seeded(lambda: Net(optimizer="sgd"))
    fit(module, lt.ExponentialMovingAverage(0.5, decay_warmup=False), raw, Unfreeze())
    assert_same(parameters(module), slow_average(raw.seen, 0.5, warmup=False), rtol=0, atol=1e-6)


class Frozen(Net):
    """BatchNorm that training keeps in evaluation mode."""

    def __init__(self) -> None:
        super().__init__(batchnorm=True)
        for block in self.net[:2]:
            nn.init.constant_(block.norm.running_mean, 3.0)

    def train(self, mode: bool = True):
        super().train(mode)
        for block in self.net[:2]:
            block.norm.eval()
        return self


def test_swa_leaves_frozen_batchnorm_alone() -> None:
    module = seeded(Frozen).train()
    fit(module, lt.StochasticWeightAverage(3))
    assert torch.equal(module.net[0].norm.running_mean, torch.full((8,), 3.0))
    assert module.net[0].norm.num_batches_tracked == 0
    assert module.net[2].norm.num_batches_tracked == 7


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield from (loader().dataset[i] for i in range(28))


def test_swa_with_batchnorm_on_an_endless_loader_takes_as_many_batches_as_the_run() -> None:
    module = seeded(lambda: Net(batchnorm=True))
    data = torch.utils.data.DataLoader(Stream(), batch_size=4)
    fit(module, lt.StochasticWeightAverage(2), data=data, max_steps=5, max_epochs=-1)
    assert module.net[0].norm.num_batches_tracked == 5


def test_swa_from_a_step_needs_no_length_of_the_run() -> None:
    module, raw = seeded(Net), Raw()

    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module) -> None:
            trainer.should_stop = True

    fit(module, lt.StochasticWeightAverage(3), raw, Stop(), max_epochs=-1)
    mean = {name: torch.stack([one[name] for one in raw.seen[3:]]).mean(0) for name in raw.seen[0]}
    assert_same(parameters(module), mean, rtol=1e-5, atol=1e-6)


def test_swa_with_batchnorm_goes_on_exactly_after_its_end(tmp_path) -> None:
    """With the statistics of training, which those of the average took the place of."""
    build = lambda: Net(batchnorm=True, optimizer="sgd")  # noqa: E731
    whole, parts, resumed = seeded(build), seeded(build), build()
    fit(whole, lt.StochasticWeightAverage(3), max_epochs=2)
    run = fit(parts, lt.StochasticWeightAverage(3), max_epochs=1)
    run.save_checkpoint(tmp_path / "a.ckpt")
    run.fit_loop.max_epochs = 2
    begun = []
    parts.on_train_start = lambda: begun.append(weights(parts))
    run.fit(parts, loader())
    assert_same(weights(parts), weights(whole))
    plain = seeded(build)
    fit(plain, max_epochs=1)
    assert_same(begun[0], weights(plain))
    trainer(lt.StochasticWeightAverage(3), max_epochs=2).fit(resumed, loader(), ckpt_path=tmp_path / "a.ckpt")
    assert_same(weights(resumed), weights(whole))


def test_an_unpickled_average_says_what_it_cannot_copy() -> None:
    average = lt.ExponentialMovingAverage(0.5)
    fit(seeded(lambda: Net(batchnorm=True)), average)
    again = pickle.loads(pickle.dumps(average))
    with pytest.warns(UserWarning, match=r"was unpickled.*such as buffers, stays as Net has it"):
        again.copy_to(Net(batchnorm=True))


def test_after_an_exception_weights_that_somebody_replaced_begin_anew() -> None:
    module = seeded(lambda: Net(optimizer="sgd", fail_at=4))
    run = trainer(lt.ExponentialMovingAverage(0.99, decay_warmup=False))
    with pytest.raises(RuntimeError, match="boom"):
        run.fit(module, loader())
    module.fail_at = None
    fresh = seeded(Net, 5)
    module.load_state_dict(fresh.state_dict())
    raw = Raw()
    run.callbacks.append(raw)
    run.fit(module, loader())
    assert_same(raw.seen[0], parameters(fresh))
    (average,) = (one for one in run.callbacks if isinstance(one, lt.ExponentialMovingAverage))
    for name, one in average.averages().items():  # seven steps or less from where it began
        assert (one - parameters(fresh)[name]).abs().max() < 0.05, name


def test_a_rollback_takes_back_the_average_of_what_was_unfrozen_since() -> None:
    class Unfreeze(pl.Callback):
        def on_fit_start(self, trainer, pl_module) -> None:
            pl_module.net[0].requires_grad_(False)

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            pl_module.net[0].requires_grad_(trainer.current_epoch > 0 or batch_idx >= 4)

    seen = []
    average = lt.ExponentialMovingAverage(0.9, decay_warmup=False)

    class Watch(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            if lt.step_ledger(trainer)[0].rolled_back and not seen:
                held = {name: one.clone() for name, one in average.averages().items()}
                seen.append((pl_module.net[0].linear.weight.detach().clone(), held))

    guard = lt.LossSpikeGuard("rollback", snapshot_every_steps=3, warmup_steps=2, window_steps=4, z_threshold=1e9)
    fit(seeded(lambda: Net(nan_at=(5,), optimizer="sgd")), guard, average, Unfreeze(), Watch())
    live, averages = seen[0]
    assert torch.equal(averages["net.0.linear.weight"], live)


# Under strategies


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *(("ema", strategy) for strategy in ("ddp", "zero1", "fsdp2", "fsdp2_offload", BY_HAND)),
        *(("swa", strategy) for strategy in ("ddp", "fsdp2")),
    ],
)
def test_case_27_the_average_under_a_strategy_equals_one_process(kind, strategy, two_processes, tmp_path) -> None:
    """Weights, scores and checkpoints; each resumes from the files of the other."""
    reference = str(tmp_path / "one.ckpt")
    one = averaged(kind, "one process", save=reference, rank=0, world_size=1)
    close = {"rtol": 0, "atol": 1e-6}
    for whole, resumed, from_folder in two_processes.run(averaged_under, kind, strategy, str(tmp_path), reference):
        for result in (whole, resumed, from_folder or resumed):
            assert_same(result["weights"], one["weights"], **close)
            assert_same(result["copy"], one["weights"], **close)
            assert result["losses"] == pytest.approx(one["losses"][-len(result["losses"]) :], abs=1e-6)
        assert len(whole["losses"]) == 4
    file, own = (torch.load(path, weights_only=True) for path in (tmp_path / f"{kind}-{strategy}.ckpt", reference))
    assert_same(file["state_dict"], own["state_dict"], **close)
    name = "ExponentialMovingAverage" if kind == "ema" else "StochasticWeightAverage"
    for key, held in own["callbacks"][name].items():
        if key in ("raw", "average") and held:
            assert_same(file["callbacks"][name][key], held, **close)
    again = averaged(kind, "one process", resume=str(tmp_path / f"{kind}-{strategy}.ckpt"), rank=0, world_size=1)
    assert_same(again["weights"], one["weights"], **close)
    if strategy == "fsdp2":
        loaded, expected = Net(), Net()
        lt.load_averaged_weights(loaded, tmp_path / f"{kind}-folder.ckpt")
        lt.load_averaged_weights(expected, reference)
        assert_same(weights(loaded), weights(expected), **close)


def test_shards_of_any_placement_are_averaged_where_they_lie(two_processes) -> None:
    for faults in two_processes.run(averages_of_shards):
        assert faults == []
