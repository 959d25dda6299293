"""Learned thresholds in a Trainer: what is logged, what is learned from, and what a checkpoint keeps."""

import math

import lightning.pytorch as pl
import pytest

import lightning_tricks as lt
from tests.functional.test_learned_clipping import SlowZClip
from tests.models import FixedGradients, fit, fp16
from tests.models import trainer as quiet_trainer

NAN, INF = math.nan, math.inf
NORMS = [1.0, 1.2, 0.9, 1.1, 50.0, 1.0, 1.3, 0.8, 20.0, 1.0]


class Probe(pl.Callback):
    """What is logged after each step."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, *args) -> None:
        self.logged.append({key: float(value) for key, value in trainer.callback_metrics.items()})

    def __getitem__(self, key: str) -> list[float]:
        return [one[key] for one in self.logged]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaler", [False, True])
def test_zscore_equals_the_papers_algorithm_in_a_trainer(scaler: bool, fused: bool) -> None:
    module, probe = FixedGradients([[one] for one in NORMS], fused=fused), Probe()
    options = {"plugins": fp16(2.0**8)} if scaler else {}
    fit(module, lt.ZScoreGradientClipping(2.0, decay=0.9, warmup_steps=4), probe, **options)
    slow = SlowZClip(2.0, 0.9, 4)
    expected = [slow.clip(one) for one in NORMS]
    assert [abs(float(one)) for one in module.applied] == pytest.approx(expected, rel=1e-5)
    assert probe["grad/norm"] == pytest.approx(NORMS)
    assert probe["grad/threshold"][:4] == [INF] * 4
    assert 1.0 < probe["grad/threshold"][4] < 2.0 < probe["grad/zscore"][4]
    assert probe["grad/clip_rate"][-1] == pytest.approx(sum(a < b for a, b in zip(expected, NORMS, strict=True)) / 10)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [
    lambda: lt.ZScoreGradientClipping(2.0, decay=0.9, warmup_steps=3),
    lambda: lt.PercentileGradientClipping(50, warmup_steps=3),
])  # fmt: skip
def test_skipped_steps_teach_nothing(make, fused: bool) -> None:
    probes = []
    for norms in (NORMS, [1.0, NAN, 1.2, 0.9, INF, 1.1, *NORMS[4:]]):
        probe = Probe()
        run = fit(FixedGradients([[one] for one in norms], fused=fused), make(), probe)
        probes.append(probe)
    assert lt.step_ledger(run)[0].skipped_guard == 2
    for key in ("grad/threshold", "grad/clip_coefficient", "grad/clip_rate"):
        assert probes[1][key][-6:] == pytest.approx(probes[0][key][-6:])


def test_max_norm_caps_also_the_warmup() -> None:
    module = FixedGradients([[5.0], [1.0], [1.0]])
    fit(module, lt.ZScoreGradientClipping(max_norm=2.0))
    assert [float(one) for one in module.applied] == pytest.approx([2.0, 1.0, 1.0], rel=1e-5)


def test_percentile_clips_to_the_last_norms() -> None:
    module, probe = FixedGradients([[one] for one in NORMS]), Probe()
    fit(module, lt.PercentileGradientClipping(50, history_steps=3, warmup_steps=3), probe)
    medians = [INF] * 3 + [sorted(NORMS[i - 3 : i])[1] for i in range(3, 10)]
    assert probe["grad/threshold"] == pytest.approx(medians)
    assert [float(one) for one in module.applied] == pytest.approx(list(map(min, NORMS, medians)), rel=1e-5)


@pytest.mark.parametrize("make", [
    lambda: lt.ZScoreGradientClipping(2.0, decay=0.9, warmup_steps=3),
    lambda: lt.PercentileGradientClipping(50, history_steps=4, warmup_steps=3),
])  # fmt: skip
def test_what_was_learned_is_in_the_checkpoint(make, tmp_path) -> None:
    whole = Probe()
    fit(FixedGradients([[one] for one in NORMS]), make(), whole, max_epochs=2)
    first = fit(FixedGradients([[one] for one in NORMS]), make())
    first.save_checkpoint(tmp_path / "a.ckpt")
    rest = Probe()
    again = quiet_trainer(make(), rest, max_epochs=2)
    again.fit(FixedGradients([[one] for one in NORMS]), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert rest.logged == whole.logged[10:]


def test_an_infinite_norm_that_is_ignored_in_the_warmup_makes_no_other_weight_nan() -> None:
    module = FixedGradients([[INF, 1.0]])
    fit(module, lt.ZScoreGradientClipping(nonfinite="ignore"))
    assert module.weight.tolist() == [-INF, -1.0]


@pytest.mark.parametrize("make", [
    lambda: lt.ZScoreGradientClipping(warmup_steps=3),
    lambda: lt.PercentileGradientClipping(warmup_steps=3),
])  # fmt: skip
def test_steps_without_a_gradient_do_not_freeze_the_run(make) -> None:
    """As batches that are masked out, or a hinge loss that is satisfied, have none."""
    module = FixedGradients([[0.0]] * 6 + [[1.0]] * 10)
    fit(module, make())
    assert module.weight.item() < -9.0
