"""The schedule against torch's own, and the promises of its shape."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from lightning_tricks.functional.schedules import even_start_factor, resolve_duration, warmup_cosine


@pytest.mark.parametrize(("warmup", "total"), [(1000, 10000), (1, 50), (7, 8)])
def test_equals_torchs_sequence_of_schedulers_at_every_step(warmup: int, total: int) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1e-4)
    reference = SequentialLR(
        optimizer,
        [
            LinearLR(optimizer, start_factor=0.01, total_iters=warmup),
            CosineAnnealingLR(optimizer, T_max=total - warmup, eta_min=1e-6),
        ],
        milestones=[warmup],
    )
    for step in range(total + 1):
        ours = 1e-4 * warmup_cosine(
            step, warmup_steps=warmup, total_steps=total, start_factor=0.01, min_ratio=1e-6 / 1e-4
        )
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=0, abs=1e-12), step
        optimizer.step()
        reference.step()


@settings(max_examples=100, deadline=None)
@given(data=st.data(), total=st.integers(1, 300), start=st.floats(0, 1), floor=st.floats(0, 1))
def test_rises_then_never_climbs(data, total: int, start: float, floor: float) -> None:
    warmup = data.draw(st.integers(0, total))
    curve = [
        warmup_cosine(step, warmup_steps=warmup, total_steps=total, start_factor=start, min_ratio=floor)
        for step in range(total + 20)
    ]
    assert all(math.isfinite(value) and -1e-12 <= value <= 1 + 1e-12 for value in curve)
    rise = curve[: warmup + 1] if warmup < total else curve[:warmup]  # without a decay it falls to the floor at once
    assert all(later >= earlier - 1e-12 for earlier, later in pairwise(rise))
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(curve[warmup:]))
    assert curve[total:] == [floor] * 20


def test_even_warmup_starts_above_zero_and_ends_at_the_top() -> None:
    start = even_start_factor(4)
    curve = [warmup_cosine(k, warmup_steps=4, total_steps=9, start_factor=start) for k in range(5)]
    assert curve == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_durations() -> None:
    assert resolve_duration(12, 100) == 12
    assert resolve_duration(0.5, 101) == 50
    assert resolve_duration(0.0, 101) == 0
