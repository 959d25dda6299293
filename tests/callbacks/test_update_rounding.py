"""Updates that 16-bit weights are too coarse for, seen in a Trainer."""

import warnings

import lightning.pytorch as pl
import pytest
import torch

import lightning_tricks as lt
from tests.distributed_cases import vanished_shares
from tests.models import FixedGradients, Net, fit, fp16, seeded


class Probe(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float | None] = []

    def on_train_batch_end(self, trainer, *args) -> None:
        value = trainer.callback_metrics.get("update/vanished")
        self.seen.append(None if value is None else float(value))


class Ones(FixedGradients):
    def __init__(self, gradients, **options) -> None:
        super().__init__(gradients, **options)
        torch.nn.init.ones_(self.weight)


def test_the_textbooks_case_one_minus_a_billionth_in_fp16() -> None:
    module = Ones([[1e-9, 1.0]]).half()
    module.rows = torch.tensor([[1.0, 1e-7]])  # what is lost at a rate of 1e-4 and 1e-3
    run = fit(module, lt.VanishingUpdateMonitor())
    assert float(run.callback_metrics["update/vanished"]) == 0.5


@pytest.mark.parametrize("lr", [1e-6, 1e-1])
def test_bf16_weights_at_a_small_rate_stop_learning_and_it_says_so(lr: float) -> None:
    module = seeded(lambda: Net(optimizer="sgd", lr=lr))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = fit(module, lt.VanishingUpdateMonitor(every_n_steps=1), precision="bf16-true")
    share = float(run.callback_metrics["update/vanished"])
    told = [str(one.message) for one in caught if "VanishingUpdateMonitor" in str(one.message)]
    if lr == 1e-6:
        assert share > 0.9
        assert len(told) == 1
        assert "bfloat16" in told[0]
        assert 'precision="bf16-mixed"' in told[0]
    else:
        assert share < 0.5
        assert not told


def test_fp32_weights_lose_little() -> None:
    run = fit(seeded(Net), lt.VanishingUpdateMonitor(every_n_steps=1))
    assert float(run.callback_metrics["update/vanished"]) < 0.01


def test_a_rate_of_zero_is_no_rounding() -> None:
    run = fit(Net(lr=0.0, optimizer="sgd"), lt.VanishingUpdateMonitor(every_n_steps=1))
    assert "update/vanished" not in run.callback_metrics


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_is_no_rounding_and_the_next_is_looked_at(fused: bool) -> None:
    probe = Probe()
    module = Ones([[4.0]] * 6, fused=fused)
    run = fit(module, lt.VanishingUpdateMonitor(every_n_steps=100), probe, plugins=fp16(2.0**127))
    assert lt.step_ledger(run)[0].skipped_overflow == 2
    if fused:  # only the device knows then: nothing is shown
        assert probe.seen == [None] * 6
    else:
        assert probe.seen[:2] == [None, None]
        assert probe.seen[-1] == 0.0


def test_shown_at_the_next_logged_step() -> None:
    probe = Probe()
    fit(seeded(Net), lt.VanishingUpdateMonitor(every_n_steps=5), probe, log_every_n_steps=3)
    assert [one is None for one in probe.seen] == [True, True] + [False] * 5


def test_every_rank_and_strategy_sees_the_same(two_processes) -> None:
    expected = vanished_shares("one process", 0, 1)
    assert 0 < expected < 1
    for strategy in ("ddp", "zero1", "fsdp2"):
        for share in two_processes.run(vanished_shares, strategy):
            assert share == pytest.approx(expected, abs=0.02)
