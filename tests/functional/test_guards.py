"""The robust window, held to a slow one of lists."""

import math
import statistics

import pytest
import torch

from lightning_tricks.functional.guards import SpikeWindow

INF, NAN, LARGEST = math.inf, math.nan, torch.finfo(torch.float64).max


def slow_limit(values: list[float], z: float, window: int, delay: int, warmup: int) -> float:
    """From all values so far: taken in by `delay` at a time, and never the newest `delay`."""
    count = max(len(values) // delay - 1, 0) * delay
    if len(values) >= warmup:  # when the warmup ends, all but the newest `delay`
        count = warmup - delay + max((len(values) - warmup) // delay, 0) * delay
    taken_in = values[:count]
    if len(taken_in) < warmup - delay:
        return LARGEST
    compared = taken_in[-window:]
    centre = statistics.median_low(compared)
    factor = min(math.exp(z * deviation([math.log(one) for one in compared])), 100.0)
    return max(centre + z * max(deviation(compared), 0.01 * abs(centre)), centre * factor)


def deviation(values: list[float]) -> float:
    centre = statistics.median_low(values)
    return 1.4826 * statistics.median_low([abs(one - centre) for one in values])


@pytest.mark.parametrize(("window", "warmup", "delay"), [(16, 8, 2), (128, 32, 16), (4, 2, 1), (64, 64, 8)])
def test_equals_lists(window: int, warmup: int, delay: int) -> None:
    fast = SpikeWindow(6.0, window, warmup)
    assert fast.delay_steps == delay
    seen: list[list[float]] = [[], []]
    for values in torch.rand(3 * window, 2, dtype=torch.float64).exp():
        expected = [slow_limit(one, 6.0, window, delay, warmup) for one in seen]
        assert fast.limits(values).tolist() == pytest.approx(expected)
        fast.step(values)
        for one, value in zip(seen, values.tolist(), strict=True):
            one.append(value)


@pytest.mark.parametrize("warmup", [2, 5, 32, 50, 100])
def test_it_judges_from_the_warmup_on(warmup: int) -> None:
    window = SpikeWindow(6.0, 128, warmup)
    judged = []
    for i in range(warmup + 8):
        judged.append(bool(window.exceeds(torch.tensor([1e9]))))
        window.step(torch.tensor([1.0 + 0.01 * (i % 5)]))
    assert judged == [False] * warmup + [True] * 8


def test_a_negative_quantity_is_judged_on_a_linear_scale_alone() -> None:
    window = SpikeWindow(6.0, 16, 8)
    for i in range(40):
        window.step(torch.tensor([-3.0 + 0.1 * (i % 3)]))
    assert not window.exceeds(torch.tensor([-2.5]))
    assert window.exceeds(torch.tensor([-1.0]))
    assert window.exceeds(torch.tensor([5.0]))


def test_what_varies_by_factors_needs_a_large_one_to_be_a_spike() -> None:
    """A loss near zero, whose values are as often ten times smaller as larger."""
    generator = torch.Generator().manual_seed(0)
    window = SpikeWindow(6.0, 128, 32)
    found = 0
    for value in (0.01 * torch.randn(600, generator=generator).exp()).tolist():
        found += bool(window.exceeds(torch.tensor([value])))
        window.step(torch.tensor([value]))
    assert found == 0
    assert window.exceeds(torch.tensor([2.0]))


def test_a_loss_that_is_mostly_zero_has_no_spikes() -> None:
    """As a hinge loss has: a median and a deviation of zero say nothing."""
    window = SpikeWindow(6.0, 16, 8)
    for i in range(40):
        window.step(torch.tensor([0.3 if i % 3 == 0 else 0.0]))
    assert not window.exceeds(torch.tensor([0.3]))
    assert window.exceeds(torch.tensor([NAN]))


@pytest.mark.parametrize("value", [INF, NAN])
def test_what_is_not_finite_exceeds_also_in_the_warmup(value: float) -> None:
    window = SpikeWindow(6.0, 16, 8)
    assert window.exceeds(torch.tensor([1.0, value]))
    assert not window.exceeds(torch.tensor([-INF, 1.0]))  # there is no loss


@pytest.mark.parametrize("device_knows", [False, True])
def test_what_was_not_applied_or_is_not_finite_never_enters(device_knows: bool) -> None:
    window = SpikeWindow(6.0, 8, 4)
    for i in range(20):
        window.step(torch.tensor([1.0 + i % 2, 1.0]), torch.tensor(1.0) if device_knows else True)
        window.step(torch.tensor([1e9, 1e9]), torch.tensor(0.0) if device_knows else False)
        window.step(torch.tensor([INF, NAN]))
    assert window.values.max() == 2.0
    assert not window.values.isnan().any()
    assert window.values[0, -3:].tolist() in ([1.0, 2.0, 1.0], [2.0, 1.0, 2.0])  # in their order


def test_it_does_not_matter_who_knows_that_a_step_was_left_out() -> None:
    """The host, the device, or another guard before."""
    windows = [SpikeWindow(6.0, 16, 8) for _ in range(3)]
    for i in range(60):
        left_out = i % 5 == 3
        values = torch.tensor([1.0 + i % 7])
        windows[0].step(values, not left_out)
        windows[1].step(values, torch.tensor(float(not left_out)))
        windows[2].step(None if left_out else values, not left_out)
        limits = [one.limits(values) for one in windows]
        assert limits[0] == limits[1] == limits[2]
    assert float(limits[0]) < 1e6


def test_one_quantity_enters_without_the_other() -> None:
    window = SpikeWindow(6.0, 4, 2)
    for _ in range(6):
        window.step(torch.tensor([-INF, 3.0]))
    limits = window.limits(torch.tensor([1.0, 1.0]))
    assert limits[0] == torch.finfo(torch.float32).max
    assert limits[1] == pytest.approx(3.0 + 6 * 0.03)
    assert not window.exceeds(torch.tensor([-INF, 3.0]))


def test_a_cluster_of_spikes_does_not_raise_the_threshold() -> None:
    """Applied all the same, as with the action "warn": the newest values are not compared with."""
    window = SpikeWindow(6.0, 64, 32)
    for i in range(80):
        window.step(torch.tensor([1.0 + 0.1 * (i % 3)]))
    for _ in range(window.delay_steps):
        assert window.exceeds(torch.tensor([50.0]))
        assert float(window.limits(torch.tensor([1.0]))) < 5.0
        window.step(torch.tensor([50.0]))


@pytest.mark.parametrize("steps", [0, 3, 12, 50])
def test_state_goes_on(steps: int) -> None:
    first = SpikeWindow(6.0, 32, 8)
    for i in range(steps):
        first.step(torch.tensor([float(i % 7)]), torch.tensor(float(i % 3 > 0)))
        if i % 4 == 0:
            first.step(None, False)
    second = SpikeWindow(6.0, 32, 8)
    second.load_state_dict(first.state_dict(), torch.device("cpu"))
    for i in range(20):
        for one in (first, second):
            one.step(torch.tensor([float(i % 5)]))
        assert torch.equal(first.limits(torch.zeros(1)), second.limits(torch.zeros(1)))


def test_state_goes_into_a_smaller_window() -> None:
    first, smaller = SpikeWindow(6.0, 16, 4), SpikeWindow(6.0, 4, 2)
    for i in range(12):
        first.step(torch.tensor([float(i)]))
    smaller.load_state_dict(first.state_dict(), torch.device("cpu"))
    assert smaller.values[0].tolist() == [7.0, 8.0, 9.0, 10.0]
