"""Layer 0 functions of a few lines: patching, random states, overflow streaks, saved activations."""

import pickle
import random

import numpy
import pytest
import torch
from torch import nn

from lightning_tricks.functional.activation_memory import measure_saved_activations
from lightning_tricks.functional.loss_scale import OverflowStreak
from lightning_tricks.functional.patching import patch_
from lightning_tricks.functional.random_state import capture_random_state, restore_random_state_


class Thing:
    def name(self) -> str:
        return "thing"


def test_patches_nest_and_leave_no_trace() -> None:
    thing = Thing()
    thing.name = lambda: "theirs"
    ours = patch_(thing, "name", lambda: "ours")
    assert thing.name() == "ours"
    ours.remove()
    assert thing.name() == "theirs"
    ours.remove()
    assert thing.name() == "theirs"
    other = Thing()
    patch_(other, "name", lambda: "ours").remove()
    assert vars(other) == {}


def draws() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(numpy.random.randn()), float(torch.rand(()))]


def test_random_states_come_back_through_a_checkpoint(tmp_path) -> None:
    draws()  # a cached second normal draw is part of NumPy's state
    torch.save(capture_random_state(), tmp_path / "state.pt")
    expected = draws()
    assert draws() != expected
    restore_random_state_(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draws() == expected


@pytest.mark.parametrize("on_device", [False, True])
def test_overflow_streak(on_device: bool) -> None:
    streak = OverflowStreak()
    for overflowed in (1, 1, 1, 0, 1, 1, 0, 0):
        streak.step(torch.tensor(overflowed) if on_device else bool(overflowed))
    assert (int(streak.current), int(streak.longest)) == (0, 3)
    assert isinstance(streak.longest, torch.Tensor) == on_device
    assert pickle.loads(pickle.dumps(streak)) == streak


def test_saved_activations_are_counted_once_and_without_parameters() -> None:
    layer = nn.Linear(4, 4, bias=False)
    x = torch.ones(8, 4, requires_grad=True)
    with measure_saved_activations(leave_out=[layer.weight]) as saved:
        y = layer(x)  # saves x and the weight
        y * y  # saves y twice
    assert saved.num_bytes == 2 * x.nbytes
