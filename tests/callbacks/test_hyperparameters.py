"""Hyperparameters on schedules in a Trainer: what each step sees, what is left after, and what a checkpoint holds."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import lr_scheduler

import lightning_tricks as lt
from lightning_tricks.functional.schedules import warmup_cosine, warmup_linear
from tests.models import FixedGradients, ManualNet, Net, TwoOptimizers, fit, fp16, loader, trainer

INF = float("inf")


class Probe(pl.Callback):
    """What `look` returns, before each step, with the applied steps until then."""

    def __init__(self, look, index: int = 0) -> None:
        self.look, self.index = look, index
        self.seen: list = []
        self.applied: list[int] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if optimizer is trainer.optimizers[self.index]:
            self.seen.append(self.look(pl_module, optimizer))
            self.applied.append(lt.step_ledger(trainer)[self.index].applied)


def setting(name: str):
    return lambda module, optimizer: [group[name] for group in optimizer.param_groups]


def halves(step: int) -> float:
    return 0.5**step


def test_a_function_of_the_applied_step() -> None:
    probe = Probe(setting("weight_decay"))
    run = fit(Net(), lt.HyperparameterScheduler("optimizer.weight_decay", halves), probe)
    assert probe.seen == [[0.5**k] for k in range(7)]
    assert float(run.callback_metrics["hyperparameter/optimizer.weight_decay"]) == 0.5**7
    assert setting("weight_decay")(None, run.optimizers[0]) == [0.01]  # put back


def test_a_schedule_multiplies_the_own_value() -> None:
    probe = Probe(setting("betas"))
    schedule = lt.WarmupLinearScheduler(2, start_factor=0.5, min_lr_ratio=0.0)
    fit(Net(), lt.HyperparameterScheduler("optimizer.betas[0]", schedule), probe)
    expected = [0.9 * warmup_linear(k, warmup_steps=2, total_steps=7, start_factor=0.5) for k in range(7)]
    assert [betas[0][0] for betas in probe.seen] == pytest.approx(expected)
    assert {betas[0][1] for betas in probe.seen} == {0.999}


def test_numbers_of_the_module_by_glob() -> None:
    look = lambda module, _: [block.dropout.p for block in module.net[:3]]  # noqa: E731
    probe, module = Probe(look), Net(dropout=0.4)
    fit(module, lt.HyperparameterScheduler("net.[01].dropout.p", lambda k: 0.1 * k), probe)
    assert probe.seen == [[0.1 * k, 0.1 * k, 0.4] for k in range(7)]
    assert look(module, None) == [0.4] * 3


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_steps_do_not_move_it(fused: bool) -> None:
    probe = Probe(setting("weight_decay"))
    module = FixedGradients([[INF], [1.0], [INF], [1.0], [1.0]], fused=fused)
    fit(module, lt.HyperparameterScheduler("optimizer.weight_decay", halves), probe, plugins=fp16())
    assert probe.seen == [[0.5**k] for k in (0, 0, 1, 1, 2)]


def test_each_optimizers_groups_by_its_own_steps() -> None:
    body, head = (Probe(setting("weight_decay"), index) for index in range(2))
    fit(TwoOptimizers(), lt.HyperparameterScheduler("optimizer.weight_decay", halves), body, head)
    assert body.seen == [[0.5**k] for k in range(7)]
    assert head.seen == [[0.5**k] for k in range(4)]
    body, head = (Probe(setting("weight_decay"), index) for index in range(2))
    fit(TwoOptimizers(), lt.HyperparameterScheduler("optimizer.weight_decay", halves, optimizers=[1]), body, head)
    assert body.seen == [[0.01]] * 7
    assert head.seen == [[0.5**k] for k in range(4)]


def test_groups_without_weight_decay_are_left_alone() -> None:
    probe = Probe(setting("weight_decay"))
    schedule = lt.HyperparameterScheduler("optimizer.weight_decay", halves)
    fit(Net(), lt.WeightDecayGroups(), schedule, probe)
    assert probe.seen == [[0.5**k, 0.0] for k in range(7)]


class OneCycle(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        cycle = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=30)
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


def test_two_writers_are_refused() -> None:
    for target, other in (("optimizer.lr", "lr of"), ("optimizer.betas[0]", r"betas\[0\] of")):
        with pytest.raises(MisconfigurationException, match=rf"OneCycleLR, which OneCycle.*'{target[:9]}.*{other}"):
            fit(OneCycle(), lt.HyperparameterScheduler(target, halves))
    fit(OneCycle(), lt.HyperparameterScheduler("optimizer.betas[1]", lambda k: 0.99))
    with pytest.raises(MisconfigurationException, match="both set the learning rate"):
        fit(Net(), lt.HyperparameterScheduler("optimizer.lr", halves), lt.WarmupCosineScheduler(2))


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_resumed_with_and_without_it(before: bool, after: bool, tmp_path) -> None:
    """A longer run follows its own curve from there; the warmup stays as long as it was at first."""

    def tricks(listed: bool) -> list:
        schedule = lt.WarmupCosineScheduler(0.5, start_factor=0.0)
        monitor = lt.LossScaleMonitor()  # keeps a ledger, and changes nothing
        return [lt.HyperparameterScheduler("optimizer.weight_decay", schedule)] if listed else [monitor]

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, *args) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    fit(Net(), *tricks(before), Save(), max_epochs=1)
    probe = Probe(setting("weight_decay"))
    run = trainer(*tricks(after), probe, max_epochs=4)
    run.fit(Net(), loader(), ckpt_path=tmp_path / "a.ckpt")
    warmup = 3 if before else 14
    expected = [0.01 * warmup_cosine(k, warmup_steps=warmup, total_steps=28, min_ratio=0.1) for k in range(2, 28)]
    assert [one[0] for one in probe.seen] == pytest.approx(expected if after else [0.01] * 26)


def test_a_rollback_takes_it_back() -> None:
    probe = Probe(setting("weight_decay"))
    guard = lt.LossSpikeGuard("rollback", snapshot_every_steps=3, warmup_steps=2, window_steps=4, z_threshold=1e9)
    run = fit(
        Net(nan_at=(5,)), guard, lt.HyperparameterScheduler("optimizer.weight_decay", halves), probe, max_epochs=2
    )
    assert lt.step_ledger(run)[0].rolled_back == 2
    assert probe.seen == [[0.5**k] for k in probe.applied]


def test_dropout_early_and_late() -> None:
    look = lambda module, _: module.net[0].dropout.p  # noqa: E731
    for mode, expected in (("early", [0.4] * 3 + [0.0] * 4), ("late", [0.0] * 3 + [0.4] * 4), ("constant", [0.4] * 7)):
        probe, module = Probe(look), Net(dropout=0.4)
        run = fit(module, lt.DropoutScheduler(mode, steps=3), probe)
        assert probe.seen == expected
        assert module.net[0].dropout.p == 0.4
        assert float(run.callback_metrics["dropout/rate"]) == pytest.approx(expected[-1])
    probe = Probe(look)
    fit(Net(dropout=0.4), lt.DropoutScheduler(steps=0.5), probe)
    assert probe.seen == [0.4] * 3 + [0.0] * 4


def test_a_module_whose_dropout_is_zero_is_told() -> None:
    with pytest.warns(UserWarning, match=r"DropoutScheduler changed nothing: every rate of dropout is 0"):
        fit(Net(), lt.DropoutScheduler(steps=2))


class TensorRate(Net):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=torch.tensor(0.01), foreach=False)


def test_saving_does_not_write_to_a_rate_that_is_a_tensor(tmp_path) -> None:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, *args) -> None:
            trainer.save_checkpoint(tmp_path / "a.ckpt")

    probe = Probe(lambda module, optimizer: float(optimizer.param_groups[0]["lr"]))
    fit(TensorRate(), lt.HyperparameterScheduler("optimizer.lr", lambda k: 0.01 * halves(k)), probe, Save())
    assert probe.seen == pytest.approx([0.01 * halves(k) for k in range(7)])
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"][0]["lr"]
    assert float(saved) == pytest.approx(0.01)


class Tempered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.tensor(1.0))
        self.top_k = 3

    @property
    def fixed(self) -> float:
        return 1.0


def test_a_buffer_keeps_its_own_value_over_a_resume(tmp_path) -> None:
    def trick() -> lt.HyperparameterScheduler:
        return lt.HyperparameterScheduler("temperature", lt.WarmupLinearScheduler(0, min_lr_ratio=0.0, total_steps=20))

    look = lambda module, _: round(module.temperature.item(), 4)  # noqa: E731
    module, probe = Tempered(), Probe(look)
    run = fit(module, trick(), max_epochs=1)
    assert module.temperature.item() == 1.0
    other = trainer(trick(), probe, max_epochs=2)

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module) -> None:
            trainer.save_checkpoint(tmp_path / "a.ckpt")
            trainer.save_checkpoint(tmp_path / "alone.ckpt", weights_only=True)

    run = fit(Tempered(), trick(), Save(), max_epochs=1)
    assert torch.load(tmp_path / "alone.ckpt", weights_only=True)["state_dict"]["temperature"] == 1.0
    other.fit(Tempered(), loader(), ckpt_path=tmp_path / "a.ckpt")
    assert run.global_step == 7
    assert probe.seen == pytest.approx([1 - k / 20 for k in range(7, 14)])


def test_an_int_stays_one() -> None:
    module, probe = Tempered(), Probe(lambda module, _: module.top_k)
    fit(module, lt.HyperparameterScheduler("top_k", lambda k: 5 - k // 2), probe)
    assert probe.seen == [5, 5, 4, 4, 3, 3, 2]
    assert all(type(one) is int for one in probe.seen)
    assert module.top_k == 3


def test_what_cannot_be_set_or_is_no_number() -> None:
    with pytest.raises(ValueError, match="none with a number fixed"):
        fit(Tempered(), lt.HyperparameterScheduler("fixed", halves))
    for value in (None, "a", float("nan"), True):
        schedule = lt.HyperparameterScheduler("top_k", lambda k, value=value: value if k == 2 else 1)
        module = Tempered()
        with pytest.raises(ValueError, match=rf"'top_k'\) to return a number, got {value!r} at applied step 2"):
            fit(module, schedule)
        assert module.top_k == 3


def test_one_element_under_two_indices_is_one_number() -> None:
    tricks = [lt.HyperparameterScheduler(f"optimizer.betas[{index}]", lambda k: 0.9) for index in (0, -2)]
    with pytest.raises(MisconfigurationException, match=r"betas\[0\].*betas\[-2\].*both set betas"):
        fit(Net(), *tricks)


def test_beside_lightnings_weight_averaging_the_rate_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="HyperparameterScheduler and StochasticWeightAveraging"):
        fit(Net(), lt.HyperparameterScheduler("optimizer.lr", halves), StochasticWeightAveraging(0.1))


def test_a_rollback_takes_numbers_of_the_module_back() -> None:
    probe = Probe(lambda module, _: module.net[0].dropout.p)
    guard = lt.LossSpikeGuard("rollback", snapshot_every_steps=3, warmup_steps=2, window_steps=4, z_threshold=1e9)
    schedule = lt.HyperparameterScheduler("net.*.dropout.p", lambda k: 0.01 * k)
    run = fit(Net(nan_at=(5,)), guard, schedule, probe, max_epochs=2)
    assert lt.step_ledger(run)[0].rolled_back == 2
    assert probe.seen == pytest.approx([0.01 * k for k in probe.applied])


def test_early_dropout_does_not_come_again_in_a_longer_run(tmp_path) -> None:
    fit(Net(dropout=0.3), lt.DropoutScheduler(steps=0.5), max_epochs=2).save_checkpoint(tmp_path / "a.ckpt")
    probe = Probe(lambda module, _: module.net[0].dropout.p)
    run = trainer(lt.DropoutScheduler(steps=0.5), probe, max_epochs=20)
    run.fit(Net(dropout=0.3), loader(), ckpt_path=tmp_path / "a.ckpt")
    assert set(probe.seen) == {0.0}


def test_a_module_without_optimizers_is_refused() -> None:
    class Without(ManualNet):
        def configure_optimizers(self) -> list:
            return []

    with pytest.raises(MisconfigurationException, match="DropoutScheduler counts the steps of an optimizer, but With"):
        fit(Without(dropout=0.2), lt.DropoutScheduler(steps=2))
