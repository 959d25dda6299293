"""The average against a slow one, over many steps, and the swap of weights."""

import pytest
import torch

from lightning_tricks.functional import weight_averaging
from lightning_tricks.functional.weight_averaging import (
    WeightAverage,
    decay_of_half_life,
    put_back_,
    show_,
    warmed_decay,
)


class SlowAverage:
    """One tensor after another, in double precision."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.average = {name: one.double().clone() for name, one in tensors.items()}

    def update(self, tensors: dict[str, torch.Tensor], decay: float) -> None:
        for name, one in tensors.items():
            self.average[name] = decay * self.average[name] + (1 - decay) * one.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("decay", [0.9, 0.999])
def test_equals_a_slow_average_over_ten_thousand_steps(dtype: torch.dtype, decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight": (4, 3), "bias": (3,), "scale": ()}
    target = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    live = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    fast, slow = WeightAverage(live), SlowAverage(live)
    for step in range(10_000):
        for name, one in live.items():  # a walk towards a target, with noise
            noise = torch.randn(one.shape, generator=generator) * 0.1
            one.copy_(target[name] * min(step / 5000, 1.0) + noise)
        rate = warmed_decay(decay, step)
        fast.update_(list(live.values()), share=1 - rate)
        slow.update(live, rate)
        if step % 1000 == 999:
            for name, average in fast.tensors.items():
                assert average.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                assert (average.double() - slow.average[name]).abs().max() < 1e-5, (step, name)


def test_sixteen_bits_stall_where_the_average_does_not() -> None:
    """What is left of an average of ones begun at zero after 1000 steps of 0.001: bf16 stands still long before."""
    live = torch.ones(1, dtype=torch.bfloat16)
    average, stalled = WeightAverage({"w": torch.zeros(1, dtype=torch.bfloat16)}), torch.zeros(1, dtype=torch.bfloat16)
    for _ in range(1000):
        average.update_([live], share=0.001)
        stalled.lerp_(live, 0.001)
    assert average.local[0].item() == pytest.approx(1 - 0.999**1000, abs=1e-4)
    assert stalled.item() < 0.3


def test_many_tensors_go_through_buffers_of_a_bounded_size(monkeypatch) -> None:
    monkeypatch.setattr(weight_averaging, "_STAGED_ELEMENTS", 10)
    live = {str(n): torch.full((n,), float(n), dtype=torch.bfloat16) for n in (1, 4, 6, 30, 2, 8)}
    live["plain"] = torch.ones(2)
    average = WeightAverage({name: torch.zeros_like(one) for name, one in live.items()})
    assert [[average.local[i].numel() for i in chunk] for chunk in average._staged] == [[1, 4], [6], [30], [2, 8]]
    average.add({"late": torch.zeros(3, dtype=torch.bfloat16), "late plain": torch.zeros(1)})
    live |= {"late": torch.full((3,), 2.0, dtype=torch.bfloat16), "late plain": torch.ones(1)}
    average.update_(list(live.values()), share=0.5)
    for name, one in average.tensors.items():
        assert torch.equal(one, live[name].float() / 2)


def test_weights_of_equal_share_are_the_mean() -> None:
    values = torch.randn(50, 4)
    average = WeightAverage({"w": values[0]})
    for n, value in enumerate(values[1:], start=1):
        average.update_([value], share=1 / (n + 1))
    torch.testing.assert_close(average.local[0], values.mean(dim=0))


def test_complex_and_double_tensors_keep_their_precision() -> None:
    live = {"c": torch.tensor([1 + 2j]), "d": torch.tensor([1.0], dtype=torch.float64)}
    average = WeightAverage(live)
    average.update_([torch.tensor([3 + 0j]), torch.tensor([2.0], dtype=torch.float64)], share=0.5)
    assert average.local[0].item() == 2 + 1j
    assert average.local[1].dtype == torch.float64
    assert average.local[1].item() == 1.5


def test_distance() -> None:
    live = [torch.nn.Parameter(torch.zeros(2)), torch.zeros(1, dtype=torch.bfloat16)]
    average = WeightAverage({"a": live[0], "b": live[1]})
    live[0].data += torch.tensor([3.0, 0.0])
    live[1] += 4.0
    assert average.distance(live).item() == 5.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shown_and_put_back(dtype: torch.dtype) -> None:
    parameters = [torch.nn.Parameter(torch.randn(3, dtype=dtype)) for _ in range(2)]
    before, memory = [one.detach().clone() for one in parameters], [one.data_ptr() for one in parameters]
    average = WeightAverage({str(i): torch.randn(3) for i in range(2)})
    held = show_(parameters, average.local)
    for parameter, one in zip(parameters, average.local, strict=True):
        assert parameter.dtype == dtype
        assert torch.equal(parameter, one.to(dtype))
    put_back_(parameters, held)
    own = WeightAverage({str(i): torch.nn.Parameter(one + 1) for i, one in enumerate(before)})
    held = own.show_(parameters)
    assert all(torch.equal(one, was + 1) for one, was in zip(parameters, before, strict=True))
    put_back_(parameters, held)
    assert all(torch.equal(one, was) for one, was in zip(parameters, before, strict=True))
    assert [one.data_ptr() for one in parameters] == memory


def test_half_life() -> None:
    decay = decay_of_half_life(100)
    assert decay**100 == pytest.approx(0.5)


def test_a_swap_that_fails_halfway_changes_nothing() -> None:
    """As where the memory for a cast is not to be had."""
    parameters = [torch.nn.Parameter(torch.randn(3, dtype=torch.bfloat16)) for _ in range(3)]
    before = [one.detach().clone() for one in parameters]
    averages = [torch.randn(3), torch.empty(3, device="meta"), torch.randn(3)]  # which cannot be copied from
    with pytest.raises(NotImplementedError):
        show_(parameters, averages)
    assert all(torch.equal(one, was) for one, was in zip(parameters, before, strict=True))
