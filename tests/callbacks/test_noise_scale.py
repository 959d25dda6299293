"""The monitor of the gradient noise scale."""

import pytest
import torch
from torch.utils.data import DataLoader

import lightning_tricks as lt
from tests.models import Net, fit, fp16
from tests.models import trainer as quiet_trainer
from tests.noise_cases import TRUE_SCALE, Linear, batches, scales


@pytest.mark.parametrize(
    ("options", "tolerance"), [({}, 1e-4), ({"plugins": lambda: fp16(2.0**8)}, 2e-2)], ids=["fp32", "fp16"]
)
def test_it_logs_what_the_formula_gives(options, tolerance: float) -> None:
    got, expected = scales("auto", **{key: value() for key, value in options.items()})
    assert got == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_micro_batches_of_all_ranks_are_compared(strategy: str, two_processes) -> None:
    for got, expected in two_processes.run(scales, strategy):
        assert got == pytest.approx(expected, rel=1e-4)


def test_it_finds_the_true_scale() -> None:
    trainer = quiet_trainer(lt.GradientAccumulation(8), lt.GradientNoiseScaleMonitor(decay=0.995))
    trainer.fit(Linear(), DataLoader(batches(2000, seed=3), batch_size=None))
    assert float(trainer.callback_metrics["noise/scale"]) == pytest.approx(TRUE_SCALE, rel=0.25)


def test_lightnings_own_windows_do_as_well() -> None:
    data = [torch.cat(batches(2, seed))[:2] for seed in range(40)]
    logged = []
    for tricks, options in (([lt.GradientAccumulation(4)], {}), ([], {"accumulate_grad_batches": 4})):
        run = quiet_trainer(lt.GradientNoiseScaleMonitor(), *tricks, **options)
        run.fit(Linear(), DataLoader(data, batch_size=None))
        logged.append(float(run.callback_metrics["noise/scale"]))
    assert logged[0] == pytest.approx(logged[1], rel=1e-5)


def test_batches_that_count_the_same_are_as_noisy_as_they_are() -> None:
    """A mean of means of unequal batches, in a short last window too, by Lightning and by ours."""
    data = batches(1602, seed=4)
    for tricks, options in (
        ([lt.GradientAccumulation(8, weigh_by="batches")], {}),
        ([], {"accumulate_grad_batches": 8}),
    ):
        run = quiet_trainer(lt.GradientNoiseScaleMonitor(decay=0.995), *tricks, **options)
        run.fit(Linear(), DataLoader(data, batch_size=None))
        assert float(run.callback_metrics["noise/scale"]) == pytest.approx(TRUE_SCALE, rel=0.25)


def test_windows_of_one_batch_give_nothing_and_it_says_so() -> None:
    with pytest.warns(UserWarning, match="finds nothing to compare.*GradientAccumulation"):
        trainer = fit(Net(), lt.GradientNoiseScaleMonitor())
    assert "noise/scale" not in trainer.callback_metrics
