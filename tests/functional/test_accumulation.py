"""Window sizes by step and epoch, and gradients that are scaled or discarded on their way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_tricks.functional.accumulation import (
    AccumulationSchedule,
    batchnorm_layers,
    discard_gradient_of,
    scale_gradient_of,
)

schedules = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=4).map(
    lambda pairs: {0: pairs[0][1]} | dict(zip(sorted({key for key, _ in pairs}), (k for _, k in pairs), strict=False))
)


def slow_windows(schedule: AccumulationSchedule, batches: int, epochs: int, carry_over: bool) -> int:
    """One batch at a time."""
    done = held = size = 0
    for epoch in range(epochs):
        for index in range(batches):
            size = schedule.at(done, epoch) if held == 0 else size
            held += 1
            if held == size or (index == batches - 1 and not carry_over):
                done, held = done + 1, 0
    return done + (held > 0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    mapping=schedules,
    by_epoch=st.booleans(),
    batches=st.integers(1, 30),
    epochs=st.integers(1, 6),
    carry_over=st.booleans(),
)
def test_windows_are_counted_as_one_by_one(mapping, by_epoch, batches, epochs, carry_over) -> None:
    schedule = AccumulationSchedule.parse({"epoch": mapping} if by_epoch else mapping)
    counted = schedule.num_windows(batches, epochs, carry_over=carry_over)
    assert counted == slow_windows(schedule, batches, epochs, carry_over)


def test_a_long_run_is_counted_at_once() -> None:
    assert AccumulationSchedule.parse({0: 1, 10: 4}).num_windows(10**12, 3) == 3 * 10**12 // 4 + 8


def test_keys_of_yaml_may_be_strings() -> None:
    assert AccumulationSchedule.parse({"0": 1, "5": 2}).steps == {0: 1, 5: 2}


class Poisons(torch.autograd.Function):
    """Gives nan to all that comes before it, whatever it gets."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, float("nan"))


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_discarding_stops_what_is_born_inside_of_the_graph(reentrant: bool | None) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    x = torch.randn(2, 3, requires_grad=True)
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    out = layers(x) if reentrant is None else torch.utils.checkpoint.checkpoint(layers, x, use_reentrant=reentrant)
    loss = Poisons.apply(out).sum() / torch.zeros(())
    handles = discard_gradient_of(loss)
    loss.backward()
    for parameter in layers.parameters():
        assert torch.equal(parameter.grad, torch.ones_like(parameter))
    for handle in handles:
        handle.remove()
    layers(x).sum().backward()
    assert not torch.equal(layers[2].bias.grad, torch.ones(1))


def test_scaling_leaves_the_loss_and_multiplies_its_gradient() -> None:
    x = torch.ones(2, requires_grad=True, dtype=torch.float64)
    loss = (3 * x).sum()
    scale_gradient_of(loss, 1 / 3)
    loss.backward()
    assert loss.item() == 6.0
    assert x.grad.tolist() == pytest.approx([1.0, 1.0], rel=1e-15)


def test_batchnorm_of_every_kind_is_found() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.LayerNorm(2), nn.SyncBatchNorm(2), nn.InstanceNorm1d(2))
    assert batchnorm_layers(module) == ["0", "2"]
