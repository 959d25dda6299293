"""Clipping in a Trainer: cases 1 to 6 of the public bug reports, and what is logged."""

import math
import warnings

import lightning.pytorch as pl
import pytest
import torch

import lightning_tricks as lt
from tests.distributed_cases import BY_HAND, logged_norms
from tests.models import FixedGradients, Net, TwoOptimizers, assert_same, fit, fp16, seeded, weights
from tests.models import trainer as quiet_trainer
from tests.reads import count_reads

NAN, INF = float("nan"), float("inf")

WAYS = {
    "fp32": {},
    "bf16": {"precision": "bf16-mixed"},
    "fp16": {"plugins": lambda: fp16(2.0**10)},
    "accumulation": {"accumulate_grad_batches": 2},
}


def made(options: dict) -> dict:
    return {key: value() if callable(value) else value for key, value in options.items()}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_case_1_applied_gradient_and_logged_norm(way: str, fused: bool) -> None:
    """[3, 4] at a threshold of 1; with accumulation the window's two micro-batches average to it."""
    rows = [[2.0, 4.0], [4.0, 4.0]] if way == "accumulation" else [[3.0, 4.0]]
    module = FixedGradients(rows, fused=fused)
    trainer = fit(module, lt.GradientNormClipping(1.0), **made(WAYS[way]))
    assert module.applied[0].tolist() == pytest.approx([0.6, 0.8], abs=2e-3 if way == "bf16" else 1e-5)
    assert module.weight.tolist() == pytest.approx([-0.6, -0.8], abs=2e-3 if way == "bf16" else 1e-5)
    assert float(trainer.callback_metrics["grad/norm"]) == pytest.approx(5.0)
    assert float(trainer.callback_metrics["grad/clip_coefficient"]) == pytest.approx(0.2)
    assert float(trainer.callback_metrics["grad/clip_rate"]) == 1.0


class OneBadParameter(FixedGradients):
    """A second parameter beside, whose gradient is always finite."""

    def __init__(self, gradients, **options) -> None:
        super().__init__(gradients, **options)
        self.healthy = torch.nn.Parameter(torch.zeros(2))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.healthy.sum()


def test_case_2_refused_step_names_the_parameter() -> None:
    module = OneBadParameter([[INF, 1.0], [1.0, 1.0]])
    with pytest.warns(UserWarning, match="not finite in: weight") as caught:
        trainer = fit(module, lt.GradientNormClipping(1.0))
    assert not any("healthy" in str(one.message) for one in caught)
    assert lt.step_ledger(trainer)[0].skipped_guard == 1
    assert len(module.applied) == 1
    assert module.healthy.tolist() == pytest.approx([-0.5, -0.5], abs=1e-5)  # the second step alone, clipped

    raising = OneBadParameter([[INF, 1.0]])
    with pytest.raises(RuntimeError, match=r"got inf; not finite in: weight\. The weights are as before"):
        fit(raising, lt.GradientNormClipping(1.0, nonfinite="raise"))
    assert raising.weight.tolist() == raising.healthy.tolist() == [0.0, 0.0]


def test_ignoring_steps_on_what_is_there() -> None:
    module = FixedGradients([[NAN]])
    fit(module, lt.GradientNormClipping(1.0, nonfinite="ignore"))
    assert math.isnan(module.weight.item())


@pytest.mark.parametrize("clipper", [lt.GradientNormClipping(), lt.GradientValueClipping(1.0)])
def test_case_3_a_flag_beside_a_clipper_names_both(clipper) -> None:
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException) as error:
        fit(Net(), clipper, gradient_clip_val=1)
    assert "Trainer(gradient_clip_val=1)" in str(error.value)
    assert type(clipper).__name__ in str(error.value)


def test_case_4_optimizers_with_thresholds_of_their_own() -> None:
    seen: dict[int, list[float]] = {0: [], 1: []}

    class Norms(TwoOptimizers):
        def on_before_optimizer_step(self, optimizer) -> None:
            index = next(i for i, one in enumerate(self.trainer.optimizers) if one is optimizer)
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
            seen[index].append(float(torch.stack([g.norm() for g in gradients]).norm()))

    trainer = fit(Norms(lr=0.0), lt.GradientNormClipping({0: 0.01, 1: 0.02}))
    assert seen[0] == pytest.approx([0.01] * 7, rel=1e-3)
    assert seen[1] == pytest.approx([0.02] * 4, rel=1e-3)
    assert {"grad/norm", "grad/norm/1", "grad/clip_rate/1"} <= trainer.callback_metrics.keys()

    seen[0].clear(), seen[1].clear()
    trainer = fit(Norms(lr=0.0), lt.GradientNormClipping({1: 0.02}))
    assert min(seen[0]) > 0.1  # left alone
    assert seen[1] == pytest.approx([0.02] * 4, rel=1e-3)
    assert "grad/norm" not in trainer.callback_metrics


def test_two_clippers_on_different_optimizers_are_no_conflict(tmp_path) -> None:
    trainer = fit(TwoOptimizers(), lt.GradientNormClipping({0: 0.1}), lt.GradientNormClipping({1: 0.2}))
    trainer.save_checkpoint(tmp_path / "both.ckpt")
    saved = torch.load(tmp_path / "both.ckpt", weights_only=True)["callbacks"]
    assert sum("GradientNormClipping" in key for key in saved) == 2


def test_case_5_the_norm_is_global_and_the_same_on_every_rank(two_processes) -> None:
    expected = logged_norms("one process", 0, 1)
    for strategy in ("ddp", "zero1", "fsdp2", BY_HAND):
        first, second = two_processes.run(logged_norms, strategy)
        assert first == second
        assert first == pytest.approx(expected, rel=1e-5)


def test_case_6_one_nan_loss_in_twenty_steps() -> None:
    module = seeded(lambda: Net(nan_at=(3,)))
    trainer = fit(module, lt.GradientNormClipping(1.0), max_epochs=2, max_steps=20)
    assert all(torch.isfinite(value).all() for value in weights(module).values())
    assert lt.step_ledger(trainer)[0].skipped_guard == 2  # batch 3 of both epochs

    with pytest.raises(RuntimeError, match="got nan"):
        fit(Net(nan_at=(3,)), lt.GradientNormClipping(1.0, nonfinite="raise"))


def test_a_skip_warns_once_and_an_overflow_never() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(FixedGradients([[NAN]] * 4), lt.GradientNormClipping())
    assert sum("finite gradient norm" in str(one.message) for one in caught) == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(FixedGradients([[NAN]] * 4), lt.GradientNormClipping(), plugins=fp16())
    assert sum("finite gradient norm" in str(one.message) for one in caught) == 0


def test_a_fused_skip_is_told_at_the_next_logged_step() -> None:
    with pytest.warns(UserWarning, match="the fused optimizer left the step out"):
        fit(FixedGradients([[NAN], [1.0], [1.0]], fused=True), lt.GradientNormClipping(), log_every_n_steps=3)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", ["fp32", "fp16"])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_clip_rate_is_the_share_of_applied_steps(way: str, fused: bool, bad: float) -> None:
    """Two of three applied steps are clipped; the one that is left out counts neither way."""
    rates = []

    class Probe(pl.Callback):
        def on_train_batch_end(self, trainer, *args) -> None:
            rates.append(float(trainer.callback_metrics.get("grad/clip_rate", NAN)))

    rows = [[3.0], [bad], [0.5], [2.0]]
    fit(FixedGradients(rows, fused=fused), lt.GradientNormClipping(1.0), Probe(), **made(WAYS[way]))
    assert rates[0] == 1.0
    assert rates[2:] == pytest.approx([1 / 2, 2 / 3])


@pytest.mark.parametrize("every", [1, 3, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_clip_rate_counts_steps_that_are_not_logged(every: int, fused: bool) -> None:
    rows = [[3.0], [0.5], [2.0], [2.0]] * 3
    trainer = fit(FixedGradients(rows, fused=fused), lt.GradientNormClipping(1.0), log_every_n_steps=every)
    assert float(trainer.callback_metrics["grad/clip_rate"]) == pytest.approx(9 / 12)


def test_a_resumed_clip_rate_is_the_whole_runs(tmp_path) -> None:
    rows = [[3.0], [0.5], [2.0], [2.0]]
    first = fit(FixedGradients(rows), lt.GradientNormClipping(1.0), log_every_n_steps=4)
    first.save_checkpoint(tmp_path / "a.ckpt")
    again = quiet_trainer(lt.GradientNormClipping(2.5), max_epochs=2, log_every_n_steps=4)
    again.fit(FixedGradients(rows), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert float(again.callback_metrics["grad/clip_rate"]) == pytest.approx((3 + 1) / 8)


def test_lbfgs_cannot_leave_a_step_out() -> None:
    class Lbfgs(Net):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    with pytest.raises(ValueError, match="LBFGS"):
        fit(Lbfgs(), lt.GradientNormClipping())
    trainer = fit(Lbfgs(), lt.GradientNormClipping(nonfinite="raise"))
    assert lt.step_ledger(trainer)[0].applied == 7


def test_sparse_embeddings_are_refused_at_the_start() -> None:
    class Sparse(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(3, 2, sparse=True)

    with pytest.raises(ValueError, match=r"Embedding\(sparse=True\) at 'table'"):
        fit(Sparse(), lt.GradientNormClipping())


def test_complex_parameters() -> None:
    class Complex(Net):
        def __init__(self) -> None:
            super().__init__(optimizer="sgd")
            self.phase = torch.nn.Parameter(torch.ones(8, dtype=torch.cfloat))

        def loss(self, batch):
            return super().loss(batch) + (self.phase * batch[0]).abs().square().mean()

    results = []
    for callbacks, options in (([lt.GradientNormClipping(0.1)], {}), ([], {"gradient_clip_val": 0.1})):
        module = seeded(Complex)
        fit(module, *callbacks, **options)
        results.append(weights(module))
    assert_same(*results, rtol=1e-5, atol=1e-6)


def test_value_clipping_clamps_counts_and_skips() -> None:
    counted = []

    class Probe(pl.Callback):
        def on_train_batch_end(self, trainer, *args) -> None:
            counted.append(float(trainer.callback_metrics["grad/clipped_elements"]))

    module = FixedGradients([[3.0, -0.5, -2.0], [0.1, 0.2, 0.3]])
    trainer = fit(module, lt.GradientValueClipping(1.0), Probe())
    assert module.applied[0].tolist() == [1.0, -0.5, -1.0]
    assert counted == [2.0, 0.0]
    assert "grad/norm" in trainer.callback_metrics

    hidden = FixedGradients([[INF, 1.0]])
    trainer = fit(hidden, lt.GradientValueClipping(1.0))
    assert hidden.weight.tolist() == [0.0, 0.0]
    assert lt.step_ledger(trainer)[0].skipped_guard == 1


def test_infinite_threshold_logs_and_leaves_gradients_alone() -> None:
    module = FixedGradients([[3.0, 4.0]])
    trainer = fit(module, lt.GradientNormClipping(INF))
    assert module.applied[0].tolist() == [3.0, 4.0]
    assert trainer.callback_metrics["grad/clip_coefficient"] == 1.0


def test_other_norms() -> None:
    module = FixedGradients([[3.0, 4.0]])
    trainer = fit(module, lt.GradientNormClipping(1.0, norm_type=INF))
    assert trainer.callback_metrics["grad/norm"] == 4.0
    assert module.applied[0].tolist() == pytest.approx([0.75, 1.0], abs=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_fused_and_unfused_give_the_same_weights(fused: bool) -> None:
    """In the hooks a fused optimizer has scaled gradients: clipped as they are they would all be clipped."""
    results = []
    for scaler in (False, True):
        module = seeded(lambda: FixedGradients([[0.3, 0.4], [3.0, 4.0]], fused=fused))
        fit(module, lt.GradientNormClipping(1.0), **({"plugins": fp16(2.0**10)} if scaler else {}))
        results.append(module.weight.tolist())
    assert results[0] == pytest.approx(results[1], abs=1e-6)
    assert results[0] == pytest.approx([-0.9, -1.2], abs=1e-5)


def test_no_sync_where_none_is_promised(monkeypatch) -> None:
    """Between logged steps nothing reads a tensor's value, but for the one scalar of a veto on a plain optimizer."""
    reads = count_reads(monkeypatch)

    def reads_of_a_run(*callbacks, fused: bool = False, plugins=None) -> int:
        module = FixedGradients([[3.0]] * 8, fused=fused)
        reads.clear()
        fit(module, *callbacks, plugins=plugins() if plugins else None, log_every_n_steps=100)
        return len(reads)

    for fused in (False, True):
        for plugins in (None, fp16):
            plain = reads_of_a_run(fused=fused, plugins=plugins)
            ignoring = reads_of_a_run(
                lt.GradientNormClipping(nonfinite="ignore"), lt.LossScaleMonitor(), fused=fused, plugins=plugins
            )
            at_start = ignoring - plain  # the table shows the scale once
            assert at_start <= 1
            skipping = reads_of_a_run(lt.GradientNormClipping(), lt.LossScaleMonitor(), fused=fused, plugins=plugins)
            assert skipping - ignoring == (0 if fused else 8)
            for follower in (
                lt.WarmupCosineScheduler(0, total_steps=8),
                lt.LearningRateWarmup(3),
                lt.HyperparameterScheduler("optimizer.weight_decay", lambda k: 0.0),
                lt.ExponentialMovingAverage(),
                lt.StochasticWeightAverage(2),
            ):
                following = reads_of_a_run(
                    lt.GradientNormClipping(), lt.LossScaleMonitor(), follower, fused=fused, plugins=plugins
                )
                # A fused optimizer's verdict is on the device: one read a step, before the next one or at the end.
                assert following - skipping == (8 if fused else 0), follower
