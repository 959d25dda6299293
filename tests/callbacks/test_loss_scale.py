"""The loss-scale monitor: case 8 of the public bug reports, and when it raises the alarm."""

import warnings

import lightning.pytorch as pl
import pytest

import lightning_tricks as lt
from tests.models import FixedGradients, ManualNet, Net, fit, fp16

INF = float("inf")


def alarms(*callbacks, rows, fused=False, plugins=None, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(FixedGradients(rows, fused=fused), *callbacks, plugins=plugins, **options)
    return [str(one.message) for one in caught if "LossScaleMonitor" in str(one.message)]


@pytest.mark.parametrize("fused", [False, True])
def test_case_8_scale_skips_and_rate_are_logged(fused: bool) -> None:
    seen = []

    class Probe(pl.Callback):
        def on_train_batch_end(self, trainer, *args) -> None:
            metrics = trainer.callback_metrics
            seen.append([float(metrics[key]) for key in ("amp/scale", "amp/skipped", "amp/skip_rate")])

    rows = [[1.0], [INF], [1.0], [INF]]
    fit(FixedGradients(rows, fused=fused), lt.LossScaleMonitor(), Probe(), plugins=fp16(2.0**10))
    assert seen == [
        [2.0**10, 0, 0],
        [2.0**9, 1, 1 / 2],
        [2.0**9, 1, pytest.approx(1 / 3)],
        [2.0**8, 2, 1 / 2],
    ]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("log_every_n_steps", [1, 4])
def test_alarm_on_a_long_streak_once(fused: bool, log_every_n_steps: int) -> None:
    """The streak ends before the logged step: it is remembered."""
    rows = [[INF]] * 3 + [[1.0]] + [[INF]] * 4
    found = alarms(
        lt.LossScaleMonitor(alarm_after_skips=3),
        rows=rows,
        fused=fused,
        plugins=fp16(2.0**20),
        log_every_n_steps=log_every_n_steps,
    )
    assert len(found) == 1
    assert "3 steps in a row" in found[0]
    assert "learning rate" in found[0]


def test_no_alarm_below_the_threshold() -> None:
    rows = [[INF]] * 2 + [[1.0]] + [[INF]] * 2
    assert alarms(lt.LossScaleMonitor(alarm_after_skips=3), rows=rows, plugins=fp16(2.0**20)) == []


def test_alarm_on_a_collapsing_scale_without_a_streak() -> None:
    rows = [[INF], [1.0]] * 3
    found = alarms(lt.LossScaleMonitor(), rows=rows, plugins=fp16(4.0))
    assert len(found) == 1
    assert "fell to 0.5" in found[0]


def test_says_so_where_there_is_no_scaler() -> None:
    for options in ({}, {"precision": "bf16-mixed"}):
        with pytest.warns(UserWarning, match="has no loss scaler"):
            trainer = fit(Net(), lt.LossScaleMonitor(), **options)
        assert "amp/scale" not in trainer.callback_metrics


def test_streak_goes_on_after_a_resume() -> None:
    monitor = lt.LossScaleMonitor(alarm_after_skips=3)
    alarms(monitor, rows=[[INF]] * 2, plugins=fp16(2.0**20))
    resumed = lt.LossScaleMonitor(alarm_after_skips=3)
    resumed.load_state_dict(monitor.state_dict())
    assert int(resumed._streaks[0].current) == 2


def test_manual_optimization() -> None:
    trainer = fit(ManualNet(nan_at=(1,)), lt.LossScaleMonitor(), plugins=fp16(2.0**4))
    assert trainer.callback_metrics["amp/skipped"] == 1
    assert trainer.callback_metrics["amp/scale"] == 8
