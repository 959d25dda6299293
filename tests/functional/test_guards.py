"""The robust window, held to a slow one of lists."""

import math
import statistics

import pytest
import torch

from lightning_tricks.functional.guards import SpikeWindow

INF, NAN = math.inf, math.nan


def slow_threshold(values: list[float], z: float, window: int, delay: int, warmup: int) -> float:
    if len(values) < warmup:
        return INF
    compared = values[: len(values) - delay][-window:]
    centre = statistics.median_low(compared)
    spread = 1.4826 * statistics.median_low([abs(one - centre) for one in compared])
    return centre + z * max(spread, 0.01 * abs(centre))


@pytest.mark.parametrize(("window", "warmup", "delay"), [(16, 8, 2), (128, 32, 16), (4, 2, 0), (32, 2, 1)])
def test_equals_lists(window: int, warmup: int, delay: int) -> None:
    fast = SpikeWindow(6.0, window, warmup)
    assert fast.delay_steps == delay
    seen: list[list[float]] = [[], []]
    for values in torch.rand(3 * window, 2, dtype=torch.float64).exp():
        expected = [slow_threshold(one, 6.0, window, delay, warmup) for one in seen]
        assert fast.thresholds(values).tolist() == pytest.approx(expected)
        fast.step(values)
        for one, value in zip(seen, values.tolist(), strict=True):
            one.append(value)


@pytest.mark.parametrize("device_knows", [False, True])
def test_what_was_not_applied_or_is_not_finite_never_enters(device_knows: bool) -> None:
    window = SpikeWindow(6.0, 8, 4)
    for i in range(20):
        window.step(torch.tensor([1.0 + i % 2, 1.0]), torch.tensor(1.0) if device_knows else True)
        window.step(torch.tensor([1e9, 1e9]), torch.tensor(0.0) if device_knows else False)
        window.step(torch.tensor([INF, NAN]))
    assert window.values.max() == 2.0
    assert not window.values.isnan().any()


def test_one_quantity_enters_without_the_other() -> None:
    window = SpikeWindow(6.0, 4, 2)
    for _ in range(6):
        window.step(torch.tensor([NAN, 3.0]))
    thresholds = window.thresholds(torch.tensor([1.0, 1.0]))
    assert thresholds[0] == INF
    assert thresholds[1] == pytest.approx(3.0 + 6 * 0.03)
    assert not window.exceeds(torch.tensor([NAN, 3.0]))


def test_a_cluster_of_spikes_does_not_raise_the_threshold() -> None:
    """Applied all the same, as with the action "warn": the newest values are not compared with."""
    window = SpikeWindow(6.0, 16, 8)
    for i in range(40):
        window.step(torch.tensor([1.0 + 0.1 * (i % 3)]))
    before = window.thresholds(torch.tensor([1.0]))
    for _ in range(2):
        assert window.exceeds(torch.tensor([50.0]))
        window.step(torch.tensor([50.0]))
    assert window.thresholds(torch.tensor([1.0])) == pytest.approx(before)


def test_state_goes_on_and_into_another_size() -> None:
    first = SpikeWindow(6.0, 16, 4)
    for i in range(12):
        first.step(torch.tensor([float(i)]))
    second, smaller = SpikeWindow(6.0, 16, 4), SpikeWindow(6.0, 4, 2)
    for one in (second, smaller):
        one.load_state_dict(first.state_dict(), torch.device("cpu"))
    assert torch.equal(first.thresholds(torch.zeros(1)), second.thresholds(torch.zeros(1)))
    assert smaller.values[0].tolist() == [8.0, 9.0, 10.0, 11.0]
