"""fp16 with a loss scaler: one update an iteration, options, a scale that collapses."""

import pickle

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

import lightning_tricks as lt
from tests.models import FixedGradients, ManualNet, Net, assert_same, fit, seeded, weights
from tests.models import trainer as quiet_trainer


def stock(**options) -> MixedPrecision:
    return MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", **options))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}])
@pytest.mark.parametrize("kind", [Net, ManualNet])
def test_with_one_optimizer_it_is_the_stock_plugin(kind, options: dict, fused: bool) -> None:
    if kind is ManualNet and options:
        options = {}
    settings = {"init_scale": 2.0**18, "growth_interval": 3}
    results = []
    for plugin in (lt.FP16Precision(**settings), stock(**settings)):
        module = seeded(lambda: kind(fused=fused))
        run = fit(module, plugins=[plugin], max_epochs=2, **options)
        results.append((weights(module), run.precision_plugin.scaler.get_scale()))
    assert_same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_trainer_knows_it_as_16_mixed_and_autocasts_to_fp16() -> None:
    seen = []

    class Seen(Net):
        def loss(self, batch):
            seen.append(self.net[0].linear(batch[0]).dtype)
            return super().loss(batch)

    run = fit(Seen(), plugins=[lt.FP16Precision()], max_steps=1)
    assert run.precision == "16-mixed"
    assert seen == [torch.float16]


class Gan(pl.LightningModule):
    """Two weights with an optimizer each; every gradient is known. `backwards` says whose loss comes when."""

    def __init__(self, first: list[float], second: list[float], *, fused: bool = False, critic_steps: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.gradients = first, second
        self.w = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1)) for _ in range(2)])
        self.fused, self.critic_steps = fused, critic_steps
        self.scales: list[float] = []

    def training_step(self, batch, batch_idx) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            for _ in range(self.critic_steps if number == 0 else 1):
                optimizer.zero_grad()
                self.manual_backward((self.w[number] * self.gradients[number][batch_idx]).sum())
                self.scales.append(self.trainer.precision_plugin.scaler.get_scale())
                optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD([one], lr=1.0, fused=self.fused) for one in self.w]

    def batches(self):
        return torch.utils.data.DataLoader(torch.zeros(len(self.gradients[0]), 1))


@pytest.mark.parametrize("fused", [False, True])
def test_one_update_an_iteration_for_two_optimizers(fused: bool) -> None:
    """The first optimizer overflows in the first iteration; stock halves the scale between the two."""
    module = Gan([1e30, 1.0, 1.0], [1.0, 1.0, 1.0], fused=fused)
    # A scale of 2**100 overflows with 1e30 alone.
    run = fit(
        module,
        lt.LossScaleMonitor(),
        data=module.batches(),
        plugins=[lt.FP16Precision(init_scale=2.0**100, growth_interval=2)],
    )
    assert [one / 2.0**100 for one in module.scales] == [1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    assert run.precision_plugin.scaler.get_scale() == 2.0**100
    assert [one.item() for one in module.w] == [-2.0, -3.0]
    assert [(one.applied, one.skipped_overflow) for one in lt.step_ledger(run)] == [(2, 1), (3, 0)]


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_may_step_several_times_an_iteration(fused: bool) -> None:
    module = Gan([1.0, 1e30, 1.0], [1.0, 1.0, 1.0], fused=fused, critic_steps=3)
    run = fit(module, data=module.batches(), plugins=[lt.FP16Precision(init_scale=2.0**100, growth_interval=1000)])
    assert [one / 2.0**100 for one in module.scales] == [1.0] * 8 + [0.5] * 4
    assert run.precision_plugin.scaler.get_scale() == 2.0**99
    assert [one.item() for one in module.w] == [-6.0, -3.0]


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_wait_are_brought_to_the_new_scale(fused: bool) -> None:
    """The second optimizer accumulates over two batches; the first one overflows in between."""

    class Waits(Gan):
        def training_step(self, batch, batch_idx) -> None:
            first, second = self.optimizers()
            self.manual_backward((self.w[1] * self.gradients[1][batch_idx]).sum())
            if batch_idx % 2:
                second.step()
                second.zero_grad()
            first.zero_grad()
            self.manual_backward((self.w[0] * self.gradients[0][batch_idx]).sum())
            first.step()

    module = Waits([1e30, 1.0, 1e30, 1.0], [1.0, 2.0, 3.0, 4.0], fused=fused)
    fit(module, data=module.batches(), plugins=[lt.FP16Precision(init_scale=2.0**100)])
    assert [one.item() for one in module.w] == [-2.0, -10.0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_before_the_backward_is_unscaled_by_what_its_loss_was_scaled_with(fused: bool) -> None:
    """The scale doubles at the end of each iteration, when the gradients of the next step are there already."""

    class StepFirst(Gan):
        def training_step(self, batch, batch_idx) -> None:
            first, _ = self.optimizers()
            if batch_idx:
                first.step()
                first.zero_grad()
            self.manual_backward((self.w[0] * self.gradients[0][batch_idx]).sum())

    module = StepFirst([1.0, 2.0, 3.0, 4.0], [1.0] * 4, fused=fused)
    fit(module, data=module.batches(), plugins=[lt.FP16Precision(init_scale=4.0, growth_interval=1)])
    assert module.w[0].item() == -6.0


@pytest.mark.parametrize("fused", [False, True])
def test_a_scale_that_collapses_is_an_error_not_an_endless_skip(fused: bool) -> None:
    module = FixedGradients([[1.0]] * 3 + [[float("nan")]] * 60, fused=fused)
    plugin = lt.FP16Precision(init_scale=2.0**10, min_scale=4.0)
    with pytest.raises(RuntimeError, match=r"at least min_scale=4.0, but it fell to 2.0: .*bf16-mixed"):
        fit(module, plugins=[plugin])
    assert module.weight.item() == -3.0


def test_min_scale_of_zero_lets_it_fall() -> None:
    run = fit(FixedGradients([[float("nan")]] * 30), plugins=[lt.FP16Precision(init_scale=1.0, min_scale=0)])
    assert run.precision_plugin.scaler.get_scale() == 2.0**-30


def test_the_scale_is_in_the_checkpoint(tmp_path) -> None:
    run = fit(seeded(Net), plugins=[lt.FP16Precision(init_scale=2.0**18)])
    scale = run.precision_plugin.scaler.get_scale()
    assert scale < 2.0**18
    run.save_checkpoint(tmp_path / "a.ckpt")
    plugin = lt.FP16Precision()
    again = quiet_trainer(plugins=[plugin], max_epochs=1)
    again.fit(Net(), torch.utils.data.DataLoader([]), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert plugin.scaler.get_scale() == scale


def test_a_checkpoint_of_16_mixed_goes_on_with_its_scale_and_the_options_given_here(tmp_path) -> None:
    run = fit(seeded(Net), plugins=[stock(init_scale=2.0**18)])
    run.save_checkpoint(tmp_path / "a.ckpt")
    plugin = lt.FP16Precision(growth_interval=7, growth_factor=4.0)
    again = quiet_trainer(plugins=[plugin], max_epochs=1)
    again.fit(Net(), torch.utils.data.DataLoader([]), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert plugin.scaler.get_scale() == run.precision_plugin.scaler.get_scale() < 2.0**18
    assert (plugin.scaler.get_growth_interval(), plugin.scaler.get_growth_factor()) == (7, 4.0)


def test_it_pickles() -> None:
    plugin = pickle.loads(pickle.dumps(lt.FP16Precision(init_scale=8.0)))
    assert fit(Net(), plugins=[plugin], max_steps=1).precision_plugin.scaler.get_scale() == 8.0


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"init_scale": 0}, ValueError, "`init_scale` to be above 0.0, got 0"),
        ({"init_scale": 0.5}, ValueError, "`init_scale` to be at least `min_scale`=1.0, got 0.5"),
        ({"growth_factor": 1.0}, ValueError, "`growth_factor` to be above 1.0, got 1.0"),
        ({"backoff_factor": 1.0}, ValueError, "`backoff_factor` to be below 1.0, got 1.0"),
        ({"backoff_factor": 0}, ValueError, "`backoff_factor` to be above 0.0 and at most 1.0, got 0"),
        ({"growth_interval": 0}, ValueError, "`growth_interval` to be at least 1, got 0"),
        ({"growth_interval": 1.5}, TypeError, "`growth_interval` to be an int, got 1.5"),
        ({"min_scale": -1}, ValueError, "`min_scale` to be at least 0.0, got -1"),
    ],
)
def test_wrong_arguments(arguments: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        lt.FP16Precision(**arguments)
